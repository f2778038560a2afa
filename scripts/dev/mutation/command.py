"""The command line: `scripts/dev/mutants --seed 1 --sample 100 pdproxy/admission`."""

from __future__ import annotations

import ast
import json
import queue
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mutation.changes import Change, find_changes, lines_of
from mutation.index import Index, ReachingTest, collect
from mutation.trial import Ending, run_pytest
from mutation.workshop import Workshop, digest, workshops
from pdproxy.config.options import FILES, Json, Seed, argument, option
from transfer.command_line.commands import Command, exit_status
from transfer.command_line.json_file import console_beside, write_json

app = typer.Typer(add_completion=False, rich_markup_mode=None)
CHANGES = "The changes"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run. `say` prints a line for people."""

    paths: Sequence[Path]
    seed: int | None
    sample: int
    tests: Sequence[str]
    jobs: int
    most: int
    limit: float | None
    json: Path | None
    root: Path
    cache: Path
    say: Callable[[str], None]


class Mutants(Command):
    """`Mutants` is a command whose ``--tests`` takes all words up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        is_test = False
        for word in args:
            is_test = word == "--tests" if word.startswith("-") else is_test
            words += ["--tests", word] if is_test and word != "--tests" else [] if is_test else [word]
        # Without a word of its own it is left there, to be complained of.
        return super().parse_args(ctx, [*words, "--tests"] if args[-1:] == ["--tests"] else words)


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(app, "scripts/dev/mutants", arguments)


@app.command(cls=Mutants)
def mutants(
    paths: Annotated[list[Path], argument("PATH", "Source files, or folders of them", CHANGES)],
    seed: Seed = None,
    sample: Annotated[int, option("N", "Number of changes to try", min=1)] = 100,
    tests: Annotated[
        list[str] | None, option("PATH", "Tests to run; repeatable [default: tests/pdproxy]", group="The tests")
    ] = None,
    most: Annotated[int, option("N", "Most tests per change", min=1)] = 40,
    limit: Annotated[float | None, option("SECONDS", "Longest time per change [default: by the tests' own]")] = None,
    jobs: Annotated[int, option("N", "Number of processes at a time", min=1)] = 1,
    root: Annotated[Path, option("FOLDER", "Folder of the tree", group=FILES)] = Path(),
    cache: Annotated[
        Path | None,
        option("FOLDER", "Folder that keeps which lines tests go through [default: in the tree's .pytest_cache]"),
    ] = None,
    json_file: Json = None,
) -> None:
    """Change source files in small ways, one at a time, and run the tests that go through the changed line.

    This happens in a copy of the tree. A change that no test notices is printed.
    """
    console = console_beside(json_file)
    options = Options(
        paths=paths,
        seed=seed,
        sample=sample,
        tests=tests or ["tests/pdproxy"],
        jobs=jobs,
        most=most,
        limit=limit,
        json=json_file,
        root=root,
        cache=cache or root / ".pytest_cache" / "mutants",
        say=lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
    )
    _run(options)


def _run(options: Options) -> None:
    root = options.root.resolve()
    files = _source_files(root, options.paths)
    sources = {file: (root / file).read_bytes() for file in files}
    seed = random.randrange(2**32) if options.seed is None else options.seed
    changes = [change for file in files for change in find_changes(file, sources[file])]
    chosen = random.Random(seed).sample(changes, min(options.sample, len(changes)))
    options.say(f"seed {seed}: {len(chosen)} of {len(changes)} changes to {len(files)} files")
    with workshops(root, options.jobs) as shops:
        index = _index(options, root, files, shops)
        outcomes = _try_all(chosen, sources, index, shops, options)
    num_noticed = sum(outcome.is_noticed for outcome in outcomes)
    options.say(f"noticed {num_noticed} of {len(outcomes)}")
    report = {"seed": seed, "noticed": num_noticed, "mutants": [outcome.facts() for outcome in outcomes]}
    write_json(options.json, report)


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


def _index(options: Options, root: Path, files: Sequence[str], shops: Sequence[Workshop]) -> Index:
    """Returns the index, from the cache where the tree is the one that was looked at."""
    kept = options.cache / f"{digest(root, *files, '', *options.tests)}.json"
    if kept.exists():
        return Index(files, json.loads(kept.read_text()))
    options.say("looking which tests go through which lines")
    started = time.monotonic()
    told = collect(shops, files, options.tests)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(told))
    options.say(f"{len(told)} tests go through the files ({time.monotonic() - started:.0f} s)")
    return Index(files, told)


def _try_all(
    changes: Sequence[Change],
    sources: dict[str, bytes],
    index: Index,
    shops: Sequence[Workshop],
    options: Options,
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
            options.say(str(outcome))
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
