"""What a serving process does with its memory, seen in a process of its own."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pdproxy.server.process_memory import allowed_bytes

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


def machine_bytes() -> int:
    return allowed_bytes(Path("/nowhere"), Path("/nowhere"))


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"memory.max": "4096\n"}, 4096),
        ("0::/", {"memory.max": "max\n"}, None),
        ("0::/a/b", {"a/memory.max": "8192\n", "a/b/memory.max": "max\n"}, 8192),
        ("0::/a/b", {"memory.max": "4096\n", "a/b/memory.max": "8192\n"}, 4096),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "4096\n"}, 4096),
        ("4:memory:/seen/from/outside", {"memory/memory.limit_in_bytes": "4096\n"}, 4096),
        ("4:memory:/", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, None),
        ("3:cpu:/a", {"a/memory.max": "4096\n"}, None),
        ("", {}, None),
    ],
)
def test_what_a_process_may_have(tmp_path: Path, groups: str, limits: dict[str, str], expected: int | None) -> None:
    """None: no group says less than the machine has."""
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(groups)
    assert allowed_bytes(tmp_path, tmp_path / "own") == (expected or machine_bytes())


def test_a_machine_has_more_than_this_process_needs() -> None:
    assert 1 << 28 < allowed_bytes() <= machine_bytes()
