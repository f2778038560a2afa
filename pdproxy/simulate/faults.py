"""The module says what goes wrong, and when: ``30 kill decode-0; 60 start decode-0; 40 freeze prefill-0 for 5``.

Behind several proxies it may be a front (``front-0``), its link (``20 cut front-0 for 3``), or the ``leader``.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pdproxy.loadtest.fault_schedule import Fault, FaultError, Grammar, check_names
from pdproxy.simulate.engines import Engine
from pdproxy.simulate.errors import SimulationError

GRAMMAR = Grammar(("kill", "start", "freeze", "thaw", "slow", "cut", "mend"), ("kill", "freeze", "slow", "cut"))
_STRAGGLERS = re.compile(r"(?P<share>0?\.\d+|1(?:\.0*)?|0)x(?P<by>\d+(?:\.\d+)?)")


def read_faults(text: str) -> list[Fault]:
    """Returns the faults of a text, in the order of their times, each with the one that ends it. Raises
    `FaultError`."""
    faults = [part for fault in GRAMMAR.parse(text) for part in fault.in_parts()]
    return sorted(faults, key=lambda fault: fault.at_s)


def check_faults(faults: Sequence[Fault], targets: Mapping[str, Any]) -> None:
    """Raises `FaultError` for a fault of nobody, or of somebody to whom it cannot be done."""
    check_names(faults, targets)
    for fault in faults:
        target = targets[fault.whom]
        if not hasattr(target, fault.what):
            can = ", ".join(verb for verb in GRAMMAR.verbs if hasattr(target, verb))
            raise FaultError(f"{fault}: that cannot be done to {fault.whom}, but {can}")


async def do_faults(faults: Sequence[Fault], targets: Mapping[str, Any]) -> None:
    """Does each fault at its time. A verb is the name of what its target does."""
    loop = asyncio.get_running_loop()
    for fault in faults:
        await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
        do = getattr(targets[fault.whom], fault.what)
        if fault.what == "slow":
            do(fault.slowness)
        else:
            do()


def slow_some(text: str, engines: Mapping[str, Engine], seed: int) -> list[str]:
    """Makes a share of the instances, drawn by chance, slow, and returns their names: ``0.05x3`` means that a twentieth
    of them takes three times as long for everything. Raises `SimulationError`."""
    if not text:
        return []
    found = _STRAGGLERS.fullmatch(text)
    if found is None or float(found["by"]) <= 0.0:
        raise SimulationError(f"stragglers: {text!r} is not SHAREx FACTOR, as 0.05x3")
    num = round(float(found["share"]) * len(engines))
    drawn = sorted(random.Random(f"{seed} stragglers").sample(range(len(engines)), num))
    names = list(engines)
    slowed = [names[index] for index in drawn]
    for name in slowed:
        engines[name].slow(float(found["by"]))
    return slowed
