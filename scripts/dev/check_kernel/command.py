"""`scripts/check_kernel`: searches the worlds, prints figures and the shortest story of a violation."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.dev.check_kernel.faults import FAULTS, Fault
from scripts.dev.check_kernel.model import Model
from scripts.dev.check_kernel.plans import DEEP, SMALL
from scripts.dev.check_kernel.search import Result, search
from scripts.dev.check_kernel.stories import story


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/check_kernel", description=__doc__)
    made.add_argument("--deep", action="store_true", help="search larger worlds as well; takes much longer")
    made.add_argument("--planted", action="store_true", help="plant known faults one at a time; each must be found")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    made.add_argument("--world", metavar="NAME", help="search only worlds whose name contains this")
    return made


def find_planted(fault: Fault) -> Result:
    """Returns the result of a search of the world with `fault` in it."""
    with fault.planted() as model:
        return search(model)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where no world has a violation and every planted fault was found."""
    options = parser().parse_args(words)
    started, cpu = time.monotonic(), time.process_time()
    found: dict[str, Any] = {}
    is_good = True
    if options.planted:
        lengths: dict[str, int | None] = {}
        for fault in FAULTS:
            result = find_planted(fault)
            lengths[fault.name] = len(result.trace) if result.violation else None
            told = f"found in {len(result.trace)} steps: {result.violation}" if result.violation else "NOT FOUND"
            print(f"{fault.name}: {told}", flush=True)
        num_found = sum(length is not None for length in lengths.values())
        print(f"{num_found} of {len(FAULTS)} planted faults found")
        found |= {"planted": len(FAULTS), "found": num_found, "stories": lengths}
        is_good = num_found == len(FAULTS)
    else:
        plans = [plan for plan in (*SMALL, *(DEEP if options.deep else ())) if (options.world or "") in plan.name]
        results = []
        for plan in plans:
            model = Model(plan)
            result = search(model)
            results.append(result)
            print(_figures(result), flush=True)
            if result.violation:
                with_story = story(model, result)
                print(with_story, flush=True)
        found |= {
            "states": sum(result.states for result in results),
            "transitions": sum(result.transitions for result in results),
            "depth": max((result.depth for result in results), default=0),
            "violations": sum(result.violation is not None for result in results),
            "worlds": [{**vars(result), "trace": len(result.trace)} for result in results],
        }
        is_good = found["violations"] == 0 and all(result.is_complete for result in results)
    found |= {"wall_s": time.monotonic() - started, "cpu_s": time.process_time() - cpu}
    if not options.planted:
        print(
            f"{found['states']:,} states, {found['transitions']:,} transitions, depth {found['depth']}, "
            f"{found['violations']} violations, {found['wall_s']:.0f} s ({found['cpu_s']:.0f} s of one core)"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if is_good else 1


def _figures(result: Result) -> str:
    verdict = "VIOLATION" if result.violation else "nothing wrong" if result.is_complete else "NOT SEARCHED TO ITS END"
    return (
        f"{result.world}: {result.states:,} states, {result.transitions:,} transitions, depth {result.depth}, "
        f"{result.wall_s:.0f} s: {verdict}"
    )
