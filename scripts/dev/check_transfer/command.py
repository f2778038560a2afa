"""`scripts/check_transfer`: searches the worlds, prints figures and the shortest story of a violation."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.dev.check_transfer.faults import FAULTS, Fault
from scripts.dev.check_transfer.plans import DEEP, SMALL, WALKS
from scripts.dev.check_transfer.search import Result, search, walk
from scripts.dev.check_transfer.stories import story


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/check_transfer", description=__doc__)
    made.add_argument("--deep", action="store_true", help="search larger worlds as well; takes much longer")
    made.add_argument("--planted", action="store_true", help="plant known faults one at a time; each must be found")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    made.add_argument("--world", metavar="NAME", help="search only worlds whose name contains this")
    made.add_argument("--walks", type=int, default=0, metavar="N", help="walk N random paths with more faults instead")
    made.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the random paths (default: 1)")
    return made


def find_planted(fault: Fault) -> Result:
    """Returns the result of a search of the world with `fault` in it."""
    with fault.planted() as plan:
        return search(plan)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where no world has a violation and every planted fault was found."""
    options = parser().parse_args(words)
    started, cpu = time.monotonic(), time.process_time()
    found, is_good = _planted() if options.planted else _worlds(options)
    found |= {"wall_s": time.monotonic() - started, "cpu_s": time.process_time() - cpu}
    if not options.planted:
        print(
            f"{found['states']:,} states, {found['transitions']:,} transitions, depth {found['depth']}, "
            f"{found['paths']:,} paths, {found['violations']} violations, {found['wall_s']:.0f} s "
            f"({found['cpu_s']:.0f} s of one core)"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if is_good else 1


def _planted() -> tuple[dict[str, Any], bool]:
    lengths: dict[str, int | None] = {}
    for fault in FAULTS:
        with fault.planted() as plan:
            result = search(plan)
            lengths[fault.name] = len(result.trace) if result.violation else None
            told = f"found in {len(result.trace)} steps" if result.violation else "NOT FOUND"
            print(f"{fault.name}: {told}", flush=True)
            if result.violation:
                print(story(plan, result), flush=True)
    num_found = sum(length is not None for length in lengths.values())
    print(f"{num_found} of {len(FAULTS)} planted faults found")
    return {"planted": len(FAULTS), "found": num_found, "stories": lengths}, num_found == len(FAULTS)


def _worlds(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    plans = [plan for plan in (*SMALL, *(DEEP if options.deep else ())) if (options.world or "") in plan.name]
    results = []
    for plan in WALKS if options.walks else plans:
        result = walk(plan, options.walks, options.seed) if options.walks else search(plan)
        results.append(result)
        print(_figures(result), flush=True)
        if result.violation:
            print(story(plan, result), flush=True)
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
