"""The command line: `scripts/dev/mutants --seed 1 --sample 100 pdproxy/admission`."""

from __future__ import annotations

import argparse
import ast
import json
import queue
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutation.changes import Change, find_changes, lines_of
from mutation.index import Index, ReachingTest, collect
from mutation.trial import Ending, run_pytest
from mutation.workshop import Workshop, digest, workshops

START_S = 20.0
"""The seconds for pytest itself to start and to import what it tests, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An `Outcome` tells what became of a change. `word` is ``failed``, ``hung`` or ``broken`` where the tests noticed
    it, else ``survived`` or ``unreached``."""

    change: Change
    word: str
    before: str
    after: str
    num_tests: int
    seconds: float

    @property
    def is_noticed(self) -> bool:
        return self.word not in ("survived", "unreached")

    def __str__(self) -> str:
        why = "  (no test goes through it)" if self.word == "unreached" else ""
        return f"{self.change.path}:{self.change.line}: -{self.before} +{self.after}{why}"

    def facts(self) -> dict[str, Any]:
        return {
            "path": self.change.path,
            "line": self.change.line,
            "kind": self.change.kind,
            "before": self.before,
            "after": self.after,
            "outcome": self.word,
            "num_tests": self.num_tests,
            "seconds": round(self.seconds, 2),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    root = options.root.resolve()
    files = _source_files(root, options.paths)
    sources = {file: (root / file).read_bytes() for file in files}
    seed = random.randrange(2**32) if options.seed is None else options.seed
    changes = [change for file in files for change in find_changes(file, sources[file])]
    chosen = random.Random(seed).sample(changes, min(options.sample, len(changes)))
    print(f"seed {seed}: {len(chosen)} of {len(changes)} changes to {len(files)} files", flush=True)
    with workshops(root, options.jobs) as shops:
        index = _index(options, root, files, shops)
        outcomes = _try_all(chosen, sources, index, shops, options)
    num_noticed = sum(outcome.is_noticed for outcome in outcomes)
    print(f"noticed {num_noticed} of {len(outcomes)}")
    if options.json is not None:
        report = {"seed": seed, "noticed": num_noticed, "mutants": [outcome.facts() for outcome in outcomes]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/dev/mutants",
        description="Changes source files in small ways, one at a time, in a copy of the tree, and runs the tests that "
        "go through the changed line. A change that no test notices is printed.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="source files, or folders of them")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the random choice (default: a new one)")
    parser.add_argument("--sample", type=_positive, default=100, metavar="N", help="changes to try (default: 100)")
    parser.add_argument(
        "--tests",
        nargs="+",
        default=["tests/pdproxy"],
        metavar="PATH",
        help="tests to run, named last (default: tests/pdproxy)",
    )
    parser.add_argument("--jobs", type=_positive, default=1, metavar="N", help="processes at a time (default: 1)")
    parser.add_argument("--most", type=_positive, default=40, metavar="N", help="tests per change (default: 40)")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds per change (default: by the tests' own time)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    parser.add_argument("--root", type=Path, default=Path(), metavar="DIR", help="the tree (default: this one)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where the lines that tests go through are kept")
    options = parser.parse_args(arguments)
    if options.cache is None:
        options.cache = options.root / ".pytest_cache" / "mutants"
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _source_files(root: Path, paths: Sequence[Path]) -> list[str]:
    """Returns the source files under these paths, relative to `root`."""
    found: dict[str, None] = {}
    for path in paths:
        place = root / path
        if not place.exists():
            raise SystemExit(f"mutants: there is no {path}")
        inside = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        found |= dict.fromkeys(str(one.relative_to(root)) for one in inside)
    return list(found)


def _index(options: argparse.Namespace, root: Path, files: Sequence[str], shops: Sequence[Workshop]) -> Index:
    """Returns the index, from the cache where the tree is the one that was looked at."""
    kept = options.cache / f"{digest(root, *files, '', *options.tests)}.json"
    if kept.exists():
        return Index(files, json.loads(kept.read_text()))
    print("looking which tests go through which lines", flush=True)
    started = time.monotonic()
    told = collect(shops, files, options.tests)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(told))
    print(f"{len(told)} tests go through the files ({time.monotonic() - started:.0f} s)", flush=True)
    return Index(files, told)


def _try_all(
    changes: Sequence[Change],
    sources: dict[str, bytes],
    index: Index,
    shops: Sequence[Workshop],
    options: argparse.Namespace,
) -> list[Outcome]:
    """Returns the outcomes in the order of `changes`; survivors are printed as they are found."""
    inside = {file: _lines_in_functions(source) for file, source in sources.items()}
    work = []
    for change in changes:
        is_at_import = change.line not in inside[change.path]
        work.append((change, index.tests(change, most=options.most, is_at_import=is_at_import)))
    _check_control([tests for _, tests in work if tests], shops[0])
    free: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
    for shop in shops:
        free.put(shop)

    def try_one(item: tuple[Change, list[ReachingTest]]) -> Outcome:
        shop = free.get()
        try:
            outcome = _try(item[0], sources[item[0].path], item[1], shop, options.limit)
        finally:
            free.put(shop)
        if not outcome.is_noticed:
            print(outcome, flush=True)
        return outcome

    with ThreadPoolExecutor(len(shops)) as pool:
        return list(pool.map(try_one, work))


def _check_control(selections: Sequence[list[ReachingTest]], shop: Workshop) -> None:
    """Ends the run unless the tests pass without any change: otherwise nothing that follows means anything."""
    names = list(dict.fromkeys(tests[0].name for tests in selections))[:40]
    if names and not (ending := run_pytest(shop.folder, names, limit_s=None)).has_passed:
        raise SystemExit(f"mutants: these tests fail without any change:\n{ending.output}")


def _try(change: Change, source: bytes, tests: Sequence[ReachingTest], shop: Workshop, limit: float | None) -> Outcome:
    before, after = lines_of(change, source)
    if not tests:
        return Outcome(change, "unreached", before, after, 0, 0.0)
    limit_s = limit or START_S + 2 * sum(test.seconds for test in tests)
    with shop.changed(change.path, change.apply(source)):
        ending = run_pytest(shop.folder, ["-x", *(test.name for test in tests)], limit_s=limit_s)
    return Outcome(change, _word(ending), before, after, len(tests), ending.seconds)


def _word(ending: Ending) -> str:
    if ending.has_passed:
        return "survived"
    if ending.status is None:
        return "hung"
    return "failed" if ending.status == 1 else "broken"  # not even collected: the import fails, or a test has gone


def _lines_in_functions(source: bytes) -> set[int]:
    """Returns the lines that run when a function is called. All others run when the file is imported."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            lines |= set(range(node.body[0].lineno, node.end_lineno + 1))
    return lines


if __name__ == "__main__":
    sys.exit(main())
