"""What a serving process does with its memory, seen in a process of its own."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

REUSED = """
import resource
from pdproxy.server.process_memory import settle

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
from pdproxy.server.process_memory import THRESHOLDS, settle

settle()
assert gc.get_freeze_count() > 1000
assert gc.get_threshold() == THRESHOLDS
kept = len(gc.get_objects())
print(kept)
"""

LARGE = """
from pdproxy.server.process_memory import use_large_pages

def in_large_pages():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

some = [[index] for index in range(500_000)]
before = in_large_pages()
use_large_pages()
assert [one[0] for one in some] == list(range(500_000))
print(in_large_pages() - before)
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")
def test_what_is_there_is_put_into_large_pages_and_stays_what_it_was() -> None:
    moved_kib = run(LARGE)
    if tuple(map(int, platform.release().split(".")[:2])) >= (6, 1):
        assert moved_kib >= 16 << 10
    else:
        assert moved_kib == 0
