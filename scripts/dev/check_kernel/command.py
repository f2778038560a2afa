"""`scripts/check_kernel`: searches the worlds, prints figures and the shortest story of a violation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from pdproxy.config.options import Json, option
from scripts.dev.check_kernel.faults import FAULTS, Fault
from scripts.dev.check_kernel.fleet import faults as fleet_faults
from scripts.dev.check_kernel.fleet import stories as fleet_stories
from scripts.dev.check_kernel.fleet import walk
from scripts.dev.check_kernel.fleet.plans import PLANS as FLEETS
from scripts.dev.check_kernel.model import Model
from scripts.dev.check_kernel.plans import DEEP, SMALL
from scripts.dev.check_kernel.search import Result, search
from scripts.dev.check_kernel.stories import story
from scripts.dev.common.outcome import show
from transfer.command_line.commands import Command, exit_status
from transfer.command_line.json_file import console_beside, write_json

app = typer.Typer(add_completion=False, rich_markup_mode=None)
WORLDS = "The worlds"
WALK_STEPS = 80
NUM_WALKS = 250
NUM_WALKS_DEEP = 20_000
NUM_WALKS_PLANTED = 2000
"""The walks through one fleet, at most, and the steps of each."""


def find_planted(fault: Fault) -> Result:
    """Returns the result of a search of the world with `fault` in it."""
    with fault.planted() as model:
        return search(model)


def find_planted_in_fleet(fault: fleet_faults.Fault, seed: int = 1) -> walk.Result:
    """Returns the result of walks through the fleet with `fault` in it."""
    with fault.planted() as plan:
        return walk.search(plan, seed=fault.seed + seed - 1, num_walks=NUM_WALKS_PLANTED, length=WALK_STEPS // 2)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where no world has a violation and every planted fault was found."""
    return exit_status(app, "scripts/check_kernel", words)


@app.command(cls=Command)
def check(
    deep: Annotated[
        bool, option(None, "Search larger worlds as well, for much longer", "--deep", group=WORLDS)
    ] = False,
    world: Annotated[str, option("NAME", "Search only worlds whose name contains this")] = "",
    seed: Annotated[int, option("NUMBER", "Begin with this number for what is drawn by chance")] = 1,
    planted: Annotated[bool, option(None, "Plant known faults one at a time; each must be found", "--planted")] = False,
    json_file: Json = None,
) -> None:
    """Search every order of events in small worlds of engines for one in which admission goes wrong.

    Fleets of several fronts, whose leaders follow one another, are walked through at random instead.
    The shortest story of a violation is printed. Exit status 1: there is one, or a planted fault was not found.
    """
    say = partial(show, console_beside(json_file))
    started, cpu = time.monotonic(), time.process_time()
    found: dict[str, Any] = {}
    is_good = True
    if planted:
        lengths: dict[str, int | None] = {}
        for fault in FAULTS:
            result = find_planted(fault)
            lengths[fault.name] = len(result.trace) if result.violation else None
            told = f"found in {len(result.trace)} steps: {result.violation}" if result.violation else "NOT FOUND"
            say([f"{fault.name}: {told}"])
        for wrong in fleet_faults.FAULTS:
            walks = find_planted_in_fleet(wrong, seed)
            lengths[wrong.name] = len(walks.story) if walks.violation else None
            told = f"found in {len(walks.story)} steps: {walks.violation}" if walks.violation else "NOT FOUND"
            say([f"{wrong.name}: {told}"])
        num_found = sum(length is not None for length in lengths.values())
        say([f"{num_found} of {len(lengths)} planted faults found"])
        found |= {"planted": len(lengths), "found": num_found, "stories": lengths}
        is_good = num_found == len(lengths)
    else:
        plans = [plan for plan in (*SMALL, *(DEEP if deep else ())) if world in plan.name]
        results = []
        for plan in plans:
            model = Model(plan)
            result = search(model)
            results.append(result)
            say([_figures(result)])
            if result.violation:
                say([story(model, result)])
        fleets = []
        for fleet in (fleet for fleet in FLEETS if world in fleet.name):
            walked = walk.search(fleet, seed=seed, num_walks=NUM_WALKS_DEEP if deep else NUM_WALKS, length=WALK_STEPS)
            fleets.append(walked)
            say([_figures_of_walks(walked)])
            if walked.violation:
                say([fleet_stories.story(fleet, walked)])
        found_wrong = [*(result.violation for result in results), *(walked.violation for walked in fleets)]
        found |= {
            "states": sum(result.states for result in results),
            "transitions": sum(result.transitions for result in results),
            "depth": max((result.depth for result in results), default=0),
            "violations": sum(violation is not None for violation in found_wrong),
            "worlds": [{**vars(result), "trace": len(result.trace)} for result in results],
            "fleets": [{**vars(one), "story": len(one.story)} for one in fleets],
        }
        is_good = found["violations"] == 0 and all(result.is_complete for result in results)
    found |= {"wall_s": time.monotonic() - started, "cpu_s": time.process_time() - cpu}
    if not planted:
        summary = (
            f"{found['states']:,} states, {found['transitions']:,} transitions, depth {found['depth']}, "
            f"{found['violations']} violations, {found['wall_s']:.0f} s ({found['cpu_s']:.0f} s of one core)"
        )
        say([summary])
    write_json(json_file, found)
    raise typer.Exit(0 if is_good else 1)


def _figures_of_walks(result: walk.Result) -> str:
    verdict = "VIOLATION" if result.violation else "nothing wrong"
    return (
        f"{result.name}: {result.num_stories:,} walks, {result.num_events:,} events, {result.wall_s:.0f} s: {verdict}"
    )


def _figures(result: Result) -> str:
    verdict = "VIOLATION" if result.violation else "nothing wrong" if result.is_complete else "NOT SEARCHED TO ITS END"
    return (
        f"{result.world}: {result.states:,} states, {result.transitions:,} transitions, depth {result.depth}, "
        f"{result.wall_s:.0f} s: {verdict}"
    )
