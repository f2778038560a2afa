"""`scripts/check_transfer`: searches the worlds, prints figures and the shortest story of a violation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from pdproxy.config.options import Json, option
from scripts.dev.check_transfer.faults import FAULTS, Fault
from scripts.dev.check_transfer.plans import DEEP, SMALL, WALKS
from scripts.dev.check_transfer.search import Result, search, walk
from scripts.dev.check_transfer.stories import story
from scripts.dev.check_transfer.world import Plan
from scripts.dev.common.outcome import show
from transfer.command_line.commands import Command, exit_status
from transfer.command_line.json_file import console_beside, write_json

app = typer.Typer(add_completion=False, rich_markup_mode=None)
WORLDS = "The worlds"
Say = Callable[[list[str]], None]


def find_planted(fault: Fault) -> Result:
    """Returns the result of a search of the world with `fault` in it."""
    with fault.planted() as plan:
        return search(plan)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where no world has a violation and every planted fault was found."""
    return exit_status(app, "scripts/check_transfer", words)


@app.command(cls=Command)
def check(
    deep: Annotated[
        bool, option(None, "Search larger worlds as well, for much longer", "--deep", group=WORLDS)
    ] = False,
    world: Annotated[str, option("NAME", "Search only worlds whose name contains this")] = "",
    planted: Annotated[bool, option(None, "Plant known faults one at a time; each must be found", "--planted")] = False,
    walks: Annotated[int, option("N", "Number of random paths with more faults to walk instead; 0 for none")] = 0,
    seed: Annotated[int, option("N", "Seed of the random paths")] = 1,
    json_file: Json = None,
) -> None:
    """Search the orders of events between one receiver and its senders for one in which pages go wrong.

    The shortest story of a violation is printed. Exit status 1: there is one, or a planted fault was not found.
    """
    say = partial(show, console_beside(json_file))
    started, cpu = time.monotonic(), time.process_time()
    plans = [plan for plan in (*SMALL, *(DEEP if deep else ())) if world in plan.name]
    if planted:
        found, is_good = _planted(say)
    elif walks:
        found, is_good = _worlds(((plan, walk(plan, walks, seed)) for plan in WALKS), say)
    else:
        found, is_good = _worlds(((plan, search(plan)) for plan in plans), say)
    found |= {"wall_s": time.monotonic() - started, "cpu_s": time.process_time() - cpu}
    if not planted:
        summary = (
            f"{found['states']:,} states, {found['transitions']:,} transitions, depth {found['depth']}, "
            f"{found['paths']:,} paths, {found['violations']} violations, {found['wall_s']:.0f} s "
            f"({found['cpu_s']:.0f} s of one core)"
        )
        say([summary])
    write_json(json_file, found)
    raise typer.Exit(0 if is_good else 1)


def _planted(say: Say) -> tuple[dict[str, Any], bool]:
    lengths: dict[str, int | None] = {}
    for fault in FAULTS:
        with fault.planted() as plan:
            result = search(plan)
            lengths[fault.name] = len(result.trace) if result.violation else None
            told = f"found in {len(result.trace)} steps" if result.violation else "NOT FOUND"
            say([f"{fault.name}: {told}", *([story(plan, result)] if result.violation else [])])
    num_found = sum(length is not None for length in lengths.values())
    say([f"{num_found} of {len(FAULTS)} planted faults found"])
    return {"planted": len(FAULTS), "found": num_found, "stories": lengths}, num_found == len(FAULTS)


def _worlds(searched: Iterable[tuple[Plan, Result]], say: Say) -> tuple[dict[str, Any], bool]:
    """Returns what was found. Each result is told as soon as it is there."""
    results = []
    for plan, result in searched:
        results.append(result)
        say([_figures(result), *([story(plan, result)] if result.violation else [])])
    found = {
        "states": sum(result.states for result in results),
        "transitions": sum(result.transitions for result in results),
        "depth": max((result.depth for result in results), default=0),
        "paths": sum(result.paths for result in results),
        "violations": sum(result.violation is not None for result in results),
        "worlds": [{**vars(result), "trace": len(result.trace)} for result in results],
    }
    return found, found["violations"] == 0


def _figures(result: Result) -> str:
    verdict = "VIOLATION" if result.violation else "nothing wrong"
    bound = "" if result.violation or result.is_complete else f", searched to depth {result.depth} only"
    return (
        f"{result.world}: {result.states:,} states, {result.transitions:,} transitions, depth {result.depth}, "
        f"{result.paths:,} paths, {result.wall_s:.0f} s: {verdict}{bound}"
    )
