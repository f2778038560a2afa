"""What a serving process does with its memory, seen in a process of its own."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

REUSED = """
import resource
from pdproxy.memory import settle

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        blocks = [b"x" * (512 << 10) for _ in range(3)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

settle()
faults()
print(faults())
"""
SPARED = """
import gc
from pdproxy.memory import THRESHOLDS, settle

settle()
assert gc.get_freeze_count() > 1000
assert gc.get_threshold() == THRESHOLDS
kept = len(gc.get_objects())
print(kept)
"""


def run(script: str) -> int:
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library keeps its memory as it likes")
def test_large_blocks_come_from_memory_that_is_there() -> None:
    assert run(REUSED) < 50, "it would be 19200 with a page fault for each page of each block"


def test_the_collector_looks_only_at_what_came_since() -> None:
    assert run(SPARED) < 1000
