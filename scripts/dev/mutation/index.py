"""Finds which tests go through which lines. It collects them once per tree, and looks them up for every change."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutation.changes import Change
from mutation.reach import FILES, OUTPUT
from mutation.trial import run_pytest
from mutation.workshop import Workshop

PATTERNS = ("test_*.py", "*_test.py")
RAN = (0, 1)
"""The exit codes of pytest after which what it found can be used: all passed, or some failed."""


@dataclass(frozen=True, slots=True)
class ReachingTest:
    name: str
    num_files: int
    """The number of files that the test goes through: the fewer, the more it is about those."""
    seconds: float


class Index:
    """An `Index` knows which tests go through which lines. It is made of what `collect` returns."""

    def __init__(self, files: Sequence[str], told: Mapping[str, Mapping[str, Any]]) -> None:
        self._by_line: dict[tuple[str, int], list[ReachingTest]] = defaultdict(list)
        self._by_file: dict[str, set[ReachingTest]] = defaultdict(set)
        self.num_tests = len(told)
        for name, about in told.items():
            test = ReachingTest(name, about["num_files"], about["seconds"])
            for number, line in about["lines"]:
                self._by_line[files[number], line].append(test)
                self._by_file[files[number]].add(test)

    def tests(self, change: Change, *, most: int, is_at_import: bool) -> list[ReachingTest]:
        """Returns the tests that go through the changed lines, `most` at most, the most specific first. What runs when
        a file is imported is seen by every test of that file."""
        if is_at_import:
            found = set(self._by_file[change.path])
        else:
            found = {test for line in change.statement for test in self._by_line.get((change.path, line), ())}
        return sorted(found, key=lambda test: (test.num_files, test.seconds, test.name))[:most]


def collect(shops: Sequence[Workshop], files: Sequence[str], tests: Sequence[str]) -> dict[str, Any]:
    """Runs all of `tests` once, in as many processes as there are `shops`."""
    test_files = _test_files(shops[0].folder, tests)
    shards = [test_files[index :: len(shops)] for index in range(len(shops))]
    with ThreadPoolExecutor(len(shops)) as pool:
        parts = pool.map(lambda shop, shard: _collect_shard(shop, files, shard), shops, shards)
        return {name: about for part in parts for name, about in part.items()}


def _collect_shard(shop: Workshop, files: Sequence[str], tests: Sequence[str]) -> dict[str, Any]:
    if not tests:
        return {}
    output = shop.folder / "reach.json"
    named = [str(shop.folder / file) for file in files]
    environment = {FILES: ":".join(named), OUTPUT: str(output)}
    ending = run_pytest(shop.folder, ["-p", "mutation.reach", *tests], limit_s=None, environment=environment)
    if not output.exists() or ending.status not in RAN:
        raise SystemExit(f"mutants: the tests cannot be run:\n{ending.output}")
    told: dict[str, Any] = json.loads(output.read_text())
    output.unlink()
    return told


def _test_files(folder: Path, tests: Sequence[str]) -> list[str]:
    """Returns the files under the named paths. What names a single test stays as it is."""
    found: dict[str, None] = {}
    for name in tests:
        path = folder / name
        inside = sorted({str(one) for pattern in PATTERNS for one in path.rglob(pattern)}) if path.is_dir() else [name]
        found |= dict.fromkeys(inside)
    return list(found)
