"""The module does things to the instances behind a target while it is asked, at set times: ``30 kill decode-0; 60
start decode-0``.

Times are seconds since the run began, the warm-up included.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdproxy.launch.errors import LaunchError
from pdproxy.loadtest.errors import LoadTestError
from pdproxy.loadtest.event_log import Alongside, EventLog

START_TIMEOUT_S = 120.0
"""The seconds that an instance that is started again has to answer."""
VERBS = ("kill", "stop", "start", "restart", "freeze", "thaw")
"""The verbs of a fault. ``stop`` asks an instance to end (SIGTERM), and ``kill`` does not ask; ``restart`` is ``stop``
and ``start``."""
_FAULT = re.compile(r"(\d+(?:\.\d+)?)\s+(\w+)\s+([\w.-]+)(?:\s+for\s+(\d+(?:\.\d+)?))?")


class FaultError(LoadTestError):
    """FaultError means that a schedule cannot be kept; the message says where and why."""


class FaultTargets(Protocol):
    """FaultTargets are the instances to which faults are done; a `LocalCluster` is one. Names are those of its
    instances."""

    def kill(self, name: str) -> None: ...

    def terminate(self, name: str) -> None: ...

    def freeze(self, name: str) -> None: ...

    def thaw(self, name: str) -> None: ...

    async def until_gone(self, name: str) -> None:
        """Waits until the instance has ended, however long that takes."""

    def start(self, name: str) -> None:
        """Starts the instance on the same ports, once it is gone."""

    async def until_healthy(self, name: str, timeout_s: float) -> None:
        """Waits until the instance answers. Raises `LaunchError` where it does not answer within that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    what: str
    """Holds the verb, which is one of `VERBS`."""
    whom: str
    for_s: float | None = None
    """Holds the seconds after which a frozen instance is thawed; only ``freeze`` has it."""

    def __str__(self) -> str:
        return f"{self.at_s:g} {self.what} {self.whom}" + ("" if self.for_s is None else f" for {self.for_s:g}")


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Returns the faults of a schedule, in the order of their times. Raises `FaultError`."""
    parts = [part.strip() for part in re.split(r"[;\n]", text)]
    return tuple(sorted((_fault(part) for part in parts if part), key=lambda fault: fault.at_s))


def _fault(part: str) -> Fault:
    found = _FAULT.fullmatch(part)
    if found is None or found[2] not in VERBS or (found[4] is not None and found[2] != "freeze"):
        raise FaultError(
            f"{part!r} is no fault; one is SECONDS {'|'.join(VERBS)} INSTANCE, as 30 kill decode-0, or "
            "40 freeze prefill-0 for 5"
        )
    for_s = None if found[4] is None else float(found[4])
    return Fault(at_s=float(found[1]), what=found[2], whom=found[3], for_s=for_s)


def check_faults(faults: Sequence[Fault], names: Collection[str]) -> None:
    """Checks that every named instance exists, and is running or not as its fault needs it. Raises `FaultError`."""
    down: set[str] = set()
    for fault in faults:
        if fault.whom not in names:
            raise FaultError(f"{fault}: there is no {fault.whom}; there are {', '.join(sorted(names))}")
        if (fault.whom in down) != (fault.what == "start"):
            raise FaultError(f"{fault}: {fault.whom} {'is not running then' if fault.whom in down else 'runs then'}")
        if fault.what in ("kill", "stop"):
            down.add(fault.whom)
        down -= {fault.whom} if fault.what == "start" else set()


def inflict(faults: Sequence[Fault], targets: FaultTargets) -> Alongside:
    """Returns a function that does each fault at its time, whether or not the faults before it have run their
    course."""

    async def keep_schedule(log: EventLog) -> None:
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await log.clock.sleep_until(fault.at_s)
                tasks.create_task(_inflict(fault, targets, log))

    return keep_schedule


async def _inflict(fault: Fault, targets: FaultTargets, log: EventLog) -> None:
    name = fault.whom
    match fault.what:
        case "kill":
            targets.kill(name)
            log.note("kill", name)
        case "stop":
            targets.terminate(name)
            log.note("stop", name)
        case "start":
            await _start(name, targets, log)
        case "restart":
            targets.terminate(name)
            log.note("stop", name)
            await _start(name, targets, log)
        case "freeze":
            await _freeze(name, fault.for_s, targets, log)
        case "thaw":
            targets.thaw(name)
            log.note("thaw", name)


async def _start(name: str, targets: FaultTargets, log: EventLog) -> None:
    """Starts an instance, and notes both when it was started and when it answered. An instance that does not come back
    is no reason to end the run: the run is there to show it."""
    await targets.until_gone(name)
    targets.start(name)
    log.note("start", name)
    try:
        await targets.until_healthy(name, START_TIMEOUT_S)
    except LaunchError as error:
        log.note("lost", name, str(error).splitlines()[0])
    else:
        log.note("up", name)


async def _freeze(name: str, for_s: float | None, targets: FaultTargets, log: EventLog) -> None:
    """Freezes an instance. With `for_s`, it thaws the instance after this many seconds, or at once if the run ends
    before: a frozen process does not end when it is asked to."""
    targets.freeze(name)
    log.note("freeze", name)
    if for_s is None:
        return
    try:
        await log.clock.sleep_until(log.clock.now_s() + for_s)
    finally:
        targets.thaw(name)
        log.note("thaw", name)
