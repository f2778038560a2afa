"""The module says what goes wrong, and when: ``30 kill decode-0; 60 start decode-0; 40 freeze prefill-0 for 5``."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence

from pdproxy.loadtest.fault_schedule import Fault, Grammar
from pdproxy.simulate.engines import Engine
from pdproxy.simulate.errors import SimulationError

GRAMMAR = Grammar(("kill", "start", "freeze", "thaw", "slow"), ("kill", "freeze", "slow"))
_STRAGGLERS = re.compile(r"(?P<share>0?\.\d+|1(?:\.0*)?|0)x(?P<by>\d+(?:\.\d+)?)")


def read_faults(text: str) -> list[Fault]:
    """Returns the faults of a text, in the order of their times, each with the one that ends it. Raises
    `FaultError`."""
    faults = [part for fault in GRAMMAR.parse(text) for part in fault.in_parts()]
    return sorted(faults, key=lambda fault: fault.at_s)


async def do_faults(faults: Sequence[Fault], engines: Mapping[str, Engine]) -> None:
    """Does each fault at its time."""
    loop = asyncio.get_running_loop()
    for fault in faults:
        await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
        _do(fault, engines[fault.whom])


def _do(fault: Fault, engine: Engine) -> None:
    match fault.what:
        case "kill":
            engine.kill()
        case "start":
            engine.start()
        case "freeze":
            engine.freeze()
        case "thaw":
            engine.thaw()
        case "slow":
            engine.slow(fault.slowness)


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
