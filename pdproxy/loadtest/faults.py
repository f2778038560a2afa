"""The module does things to the instances behind a target while it is asked, at set times: ``30 kill decode-0; 60
start decode-0``.

Times are seconds since the run began, the warm-up included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from pdproxy.launch.errors import LaunchError
from pdproxy.loadtest.event_log import Alongside, EventLog
from pdproxy.loadtest.fault_schedule import Fault, FaultError, Grammar, check_names

START_TIMEOUT_S = 120.0
"""The seconds that an instance that is started again has to answer."""
GRAMMAR = Grammar(("kill", "stop", "start", "restart", "freeze", "thaw"), ("freeze",))
"""The faults of a load test. ``stop`` asks an instance to end (SIGTERM), and ``kill`` does not ask; ``restart`` is
``stop`` and ``start``."""


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


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Returns the faults of a schedule, in the order of their times. Raises `FaultError`."""
    return GRAMMAR.parse(text)


def check_faults(faults: Sequence[Fault], names: Collection[str]) -> None:
    """Checks that every named instance exists, and is running or not as its fault needs it. Raises `FaultError`."""
    check_names(faults, names)
    down: set[str] = set()
    for fault in faults:
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
