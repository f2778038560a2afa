"""The module says what goes wrong, and when: ``30 kill decode-0; 60 start decode-0; 40 freeze prefill-0 for 5``."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdproxy.simulate.engines import Engine
from pdproxy.simulate.errors import SimulationError

_FAULT = re.compile(
    r"(?P<at>\d+(?:\.\d+)?)s?\s+(?P<what>kill|start|freeze|thaw|slow)\s+(?P<whom>\S+)"
    r"(?:\s+by\s+(?P<by>\d+(?:\.\d+)?))?(?:\s+for\s+(?P<for>\d+(?:\.\d+)?)s?)?"
)
_ENDS = {"kill": "start", "freeze": "thaw", "slow": "slow"}
"""The fault that ends a fault, for each fault that can last for a while."""
_STRAGGLERS = re.compile(r"(?P<share>0?\.\d+|1(?:\.0*)?|0)x(?P<by>\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault is done to the engine `whom` at `at_s` seconds. Only ``slow`` uses `slowness`."""

    at_s: float
    what: str
    whom: str
    slowness: float = 1.0

    def do(self, engine: Engine) -> None:
        match self.what:
            case "kill":
                engine.kill()
            case "start":
                engine.start()
            case "freeze":
                engine.freeze()
            case "thaw":
                engine.thaw()
            case "slow":
                engine.slow(self.slowness)


def read_faults(text: str) -> list[Fault]:
    """Returns the faults of a text, in the order of their times. Raises `SimulationError`."""
    faults: list[Fault] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        found = _FAULT.fullmatch(part)
        if found is None or (found["what"] == "slow") != (found["by"] is not None):
            raise SimulationError(
                f"faults: {part!r} is none; one is SECONDS kill|start|freeze|thaw NAME or SECONDS slow NAME by FACTOR, "
                "each with `for SECONDS` if it is to end by itself"
            )
        at_s, what, whom = float(found["at"]), found["what"], found["whom"]
        slowness = float(found["by"] or 1.0)
        if slowness <= 0.0:
            raise SimulationError(f"faults: {part!r}: a factor is above 0")
        faults.append(Fault(at_s, what, whom, slowness))
        if found["for"] is not None:
            if what not in _ENDS:
                raise SimulationError(f"faults: {part!r}: {what} has no end")
            faults.append(Fault(at_s + float(found["for"]), _ENDS[what], whom))
    return sorted(faults, key=lambda fault: fault.at_s)


def check_names(faults: Sequence[Fault], names: Mapping[str, object]) -> None:
    """Raises `SimulationError` if a fault names an engine that does not exist."""
    for fault in faults:
        if fault.whom not in names:
            raise SimulationError(f"faults: there is no {fault.whom!r}; there are {next(iter(names))} and so on")


async def do_faults(faults: Sequence[Fault], engines: Mapping[str, Engine]) -> None:
    """Does each fault at its time."""
    loop = asyncio.get_running_loop()
    for fault in faults:
        await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
        fault.do(engines[fault.whom])


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
