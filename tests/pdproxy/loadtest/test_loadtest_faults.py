"""Fault schedules: how they are written, what is refused, and that each is done at its time, whatever the others do."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.launch.errors import LaunchError
from pdproxy.loadtest.clock import TIMER_S, Clock
from pdproxy.loadtest.event_log import EventLog
from pdproxy.loadtest.fault_schedule import Fault, FaultError
from pdproxy.loadtest.faults import check_faults, inflict, parse_faults
from pdproxy.simulate import loop as virtual

NAMES = ("prefill-0", "decode-0", "decode-1")


def test_what_can_be_written() -> None:
    assert parse_faults("60 start decode-0; 30 kill decode-0;\n 40.5 freeze prefill-0 for 5") == (
        Fault(at_s=30, what="kill", whom="decode-0"),
        Fault(at_s=40.5, what="freeze", whom="prefill-0", for_s=5),
        Fault(at_s=60, what="start", whom="decode-0"),
    )
    assert parse_faults(" ; ") == ()
    assert str(parse_faults("40 freeze prefill-0 for 2.5")[0]) == "40 freeze prefill-0 for 2.5"


@pytest.mark.parametrize("text", ["kill decode-0", "30 maim decode-0", "30 kill", "30 kill decode-0 for 5", "x kill y"])
def test_what_cannot(text: str) -> None:
    with pytest.raises(FaultError, match=r"is no fault; one is SECONDS kill\|stop\|start"):
        parse_faults(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("30 kill decode-9", "there is no decode-9; there are decode-0, decode-1, prefill-0"),
        ("30 start decode-0", "decode-0 runs then"),
        ("30 kill decode-0; 40 freeze decode-0 for 2", "decode-0 is not running then"),
        ("30 kill decode-0; 40 start decode-0; 50 start decode-0", "decode-0 runs then"),
    ],
)
def test_who_is_not_there(text: str, why: str) -> None:
    with pytest.raises(FaultError, match=why):
        check_faults(parse_faults(text), NAMES)


def test_a_schedule_that_can_be_kept() -> None:
    check_faults(parse_faults("10 kill decode-0; 20 start decode-0; 30 restart decode-0; 40 stop decode-0"), NAMES)


class Patients:
    """Implements `FaultTargets`: notes what is done. `gates` hold up whoever waits for them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.gone = asyncio.Event()
        self.killed = asyncio.Event()
        self.healthy = asyncio.Event()
        self.error: LaunchError | None = None

    def kill(self, name: str) -> None:
        self.killed.set()
        self.done.append(f"kill {name}")

    def terminate(self, name: str) -> None:
        self.done.append(f"terminate {name}")

    def freeze(self, name: str) -> None:
        self.done.append(f"freeze {name}")

    def thaw(self, name: str) -> None:
        self.done.append(f"thaw {name}")

    async def until_gone(self, name: str) -> None:
        await self.gone.wait()

    def start(self, name: str) -> None:
        self.done.append(f"start {name}")

    async def until_healthy(self, name: str, timeout_s: float) -> None:
        await self.healthy.wait()
        if self.error is not None:
            raise self.error


def told(log: EventLog) -> list[tuple[str, str]]:
    return [(event.what, event.whom) for event in log.events]


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_start_is_told_when_it_begins_and_when_the_instance_answers() -> None:
    patients, log = Patients(), EventLog(Clock())
    keeping = asyncio.ensure_future(inflict(parse_faults("0 restart decode-0"), patients)(log))
    await settle()
    assert told(log) == [("stop", "decode-0")]
    patients.gone.set()
    await settle()
    assert told(log) == [("stop", "decode-0"), ("start", "decode-0")]
    patients.healthy.set()
    await keeping
    assert told(log)[-1] == ("up", "decode-0")
    assert patients.done == ["terminate decode-0", "start decode-0"]


async def test_one_that_does_not_come_back_is_told_and_does_not_end_the_run() -> None:
    patients, log = Patients(), EventLog(Clock())
    patients.gone.set()
    patients.healthy.set()
    patients.error = LaunchError("decode-0 ended before it answered:\n  its last line")
    await inflict(parse_faults("0 start decode-0"), patients)(log)
    assert told(log) == [("start", "decode-0"), ("lost", "decode-0")]
    assert log.events[-1].note == "decode-0 ended before it answered:"


async def test_one_that_takes_long_does_not_hold_up_the_next() -> None:
    patients, log = Patients(), EventLog(Clock())
    keeping = asyncio.ensure_future(inflict(parse_faults("0 start decode-0; 0.01 kill decode-1"), patients)(log))
    async with asyncio.timeout(5):
        await patients.killed.wait()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert patients.done == ["kill decode-1"]


def test_faults_come_at_their_times() -> None:
    """On the clock of a loop that no other process can hold up. A wait may end early by what a timer is exact to."""

    async def scenario() -> EventLog:
        patients, log = Patients(), EventLog(Clock(asyncio.get_running_loop().time))
        log.clock.start()
        await inflict(parse_faults("2 kill decode-0; 5 freeze decode-1 for 3"), patients)(log)
        return log

    log = virtual.run(scenario())
    assert told(log) == [("kill", "decode-0"), ("freeze", "decode-1"), ("thaw", "decode-1")]
    assert [event.at_s for event in log.events] == pytest.approx([2.0, 5.0, 8.0], abs=2 * TIMER_S)


async def test_who_was_to_be_thawed_is_thawed_when_the_run_ends_before() -> None:
    patients, log = Patients(), EventLog(Clock())
    keeping = asyncio.ensure_future(inflict(parse_faults("0 freeze decode-0 for 100"), patients)(log))
    await settle()
    assert patients.done == ["freeze decode-0"]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert patients.done == ["freeze decode-0", "thaw decode-0"]
