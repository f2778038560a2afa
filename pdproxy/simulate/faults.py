"""The module says what goes wrong, and when: ``30 kill decode-0; 60 start decode-0; 40 freeze prefill-0 for 5``.

Where there are several proxies, ``front-0`` may be killed, and the links of one or those of the ``leader`` stand still.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pdproxy.loadtest.fault_schedule import Fault, Grammar, check_names
from pdproxy.simulate.engines import Engine
from pdproxy.simulate.errors import SimulationError

GRAMMAR = Grammar(("kill", "start", "freeze", "thaw", "slow"), ("kill", "freeze", "slow"))
_STRAGGLERS = re.compile(r"(?P<share>0?\.\d+|1(?:\.0*)?|0)x(?P<by>\d+(?:\.\d+)?)")


def read_faults(text: str) -> list[Fault]:
    """Returns the faults of a text, in the order of their times, each with the one that ends it. Raises
    `FaultError`."""
    faults = [part for fault in GRAMMAR.parse(text) for part in fault.in_parts()]
    return sorted(faults, key=lambda fault: fault.at_s)


def check_faults(faults: Sequence[Fault], whom: Mapping[str, Any]) -> None:
    """Raises `FaultError` for somebody who does not exist, and `SimulationError` for what cannot happen to one."""
    check_names(faults, whom)
    for fault in faults:
        if not hasattr(whom[fault.whom], fault.what):
            raise SimulationError(f"faults: {fault.what} cannot happen to {fault.whom}")


async def do_faults(faults: Sequence[Fault], whom: Mapping[str, Any]) -> None:
    """Does each fault at its time, to the one of its name."""
    loop = asyncio.get_running_loop()
    for fault in faults:
        await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
        do = getattr(whom[fault.whom], fault.what)
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
