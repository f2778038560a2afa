"""Coroutines under simulated time behave as under asyncio: the same scenario runs in both, and tells the same story."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from pdproxy.aio.callback_event import CallbackEvent
from pdproxy.aio.deadline import Deadline
from pdproxy.aio.race import cancel_when, run_alongside
from pdproxy.errors import QueueTimeout
from pdproxy.simulate.errors import StuckError
from pdproxy.simulate.loop import VirtualLoop, run
from tests.fakes.fleet import Held, make_admission, make_instance, make_ready

Told = list[str]
Scenario = Callable[[Told], Awaitable[None]]


@pytest.fixture(params=[VirtualLoop, asyncio.SelectorEventLoop], ids=["virtual", "asyncio"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop = request.param()
    yield loop
    loop.close()


# ── scenarios ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def tasks_take_turns(told: Told) -> None:
    async def count(name: str) -> None:
        for number in range(3):
            told.append(f"{name}{number}")
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(count(name))


async def timers_go_off_in_order(told: Told) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.call_later(0.03, ended.set_result, None)
    loop.call_later(0.02, told.append, "late")
    loop.call_later(0.01, told.append, "early")
    loop.call_later(0.015, told.append, "never").cancel()
    loop.call_soon(told.append, "soon")
    await ended


async def what_becomes_ready_waits_for_the_next_turn(told: Told) -> None:
    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: (told.append("first"), loop.call_soon(told.append, "third")))
    loop.call_soon(told.append, "second")
    await asyncio.sleep(0.001)


async def cancelling_reaches_the_inmost(told: Told) -> None:
    async def inner() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            told.append(f"inner {error}")
            raise
        finally:
            await asyncio.sleep(0)
            told.append("cleaned up")

    task = asyncio.create_task(inner())
    await asyncio.sleep(0)
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError):
        await task
    told.append(f"{task.cancelled()} {task.cancelling()}")


async def a_group_fails_as_one(told: Told) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.005)
        raise ValueError("no")

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            told.append("taken along")
            raise

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait())
            group.create_task(fail())
    except* ValueError as failed:
        told.append(repr(failed.exceptions))


async def a_timeout_ends_a_block(told: Told) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)
    async with asyncio.timeout(0.01) as limit:
        limit.reschedule(None)
        await asyncio.sleep(0.02)
    told.append(f"expired {limit.expired()}")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.get_running_loop().create_future(), 0.01)
    told.append("waited for")


async def a_limit_ends_a_block(told: Told) -> None:
    for seconds in (0.01, 1.01):
        with pytest.raises(KeyError), Deadline(seconds, KeyError(seconds)):
            await asyncio.sleep(60)
        told.append(f"cut after {seconds}")
    with Deadline(0.01, KeyError()) as limit:
        limit.wait(0.05, ValueError())
        await asyncio.sleep(0.02)
    told.append(f"moved {limit.is_cut}")


async def limits_nest(told: Told) -> None:
    with pytest.raises(KeyError), Deadline(0.01, KeyError()), Deadline(0.5, ValueError()):
        await asyncio.sleep(60)
    told.append("the outer one")
    with pytest.raises(ValueError), Deadline(0.5, KeyError()), Deadline(0.01, ValueError()):  # noqa: PT011
        await asyncio.sleep(60)
    told.append("the inner one")


async def an_event_wakes_all_who_wait(told: Told) -> None:
    event = asyncio.Event()

    async def wait(name: str) -> None:
        await event.wait()
        told.append(name)

    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(wait(name))
        await asyncio.sleep(0.001)
        told.append("set")
        event.set()


async def futures_hand_over(told: Told) -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    first.add_done_callback(lambda future: told.append(f"called back {future.result()}"))
    loop.call_soon(first.set_result, 1)
    loop.call_later(0.001, second.set_exception, ValueError("second"))
    told.append(str(await first))
    told.append(repr((await asyncio.gather(second, return_exceptions=True))[0]))
    done, pending = await asyncio.wait({asyncio.create_task(asyncio.sleep(60))}, timeout=0.001)
    told.append(f"{len(done)} {len(pending)}")
    pending.pop().cancel()


async def a_flag_overtakes_work(told: Told) -> None:
    flag = CallbackEvent()

    async def work() -> str:
        await asyncio.sleep(60)
        return "done"

    asyncio.get_running_loop().call_later(0.005, flag.set)
    told.append(str(await cancel_when(flag, work)))


async def a_companion_runs_beside(told: Told) -> None:
    async def companion() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            told.append("companion ended")

    async def work() -> str:
        await asyncio.sleep(0.001)
        return "worked"

    told.append(await run_alongside(companion, work))


async def pages_are_waited_for(told: Told) -> None:
    loop = asyncio.get_running_loop()
    admission = make_admission(loop.time)
    decoder = make_instance("d", clock=loop.time, admission=admission)
    admission.add(decoder)
    make_ready(decoder, num_pages=2)
    first = await Held(decoder, 2).wait()
    with pytest.raises(QueueTimeout):
        await Held(decoder, 1, deadline=loop.time() + 0.01).wait()
    loop.call_later(0.005, first.release)
    await Held(decoder, 1, deadline=loop.time() + 1).wait()
    told += [repr(decoder.account), repr(admission)]


async def anyio_works_too(told: Told) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)
        with anyio.move_on_after(0.01) as scope:
            await anyio.sleep_forever()
        told.append(f"moved on {scope.cancelled_caught}")
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.001)
        group.cancel_scope.cancel()
    told.append("ended")


SCENARIOS: list[tuple[Scenario, Told]] = [
    (tasks_take_turns, ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]),
    (timers_go_off_in_order, ["soon", "early", "late"]),
    (what_becomes_ready_waits_for_the_next_turn, ["first", "second", "third"]),
    (cancelling_reaches_the_inmost, ["inner enough", "cleaned up", "True 1"]),
    (a_group_fails_as_one, ["taken along", "(ValueError('no'),)"]),
    (a_timeout_ends_a_block, ["expired False", "waited for"]),
    (a_limit_ends_a_block, ["cut after 0.01", "cut after 1.01", "moved False"]),
    (limits_nest, ["the outer one", "the inner one"]),
    (an_event_wakes_all_who_wait, ["set", "a", "b", "c"]),
    (futures_hand_over, ["called back 1", "1", "ValueError('second')", "0 1"]),
    (a_flag_overtakes_work, ["None"]),
    (a_companion_runs_beside, ["companion ended", "worked"]),
    (pages_are_waited_for, ["<Account d: 1/2 pages held by 1>", "<Admission of 2 places, 0 waiting>"]),
    (anyio_works_too, ["moved on True", "ended"]),
]


@pytest.mark.parametrize(("scenario", "expected"), SCENARIOS, ids=[scenario.__name__ for scenario, _ in SCENARIOS])
def test_as_under_asyncio(loop: asyncio.AbstractEventLoop, scenario: Scenario, expected: Told) -> None:
    told: Told = []

    async def main() -> None:
        await scenario(told)

    loop.run_until_complete(main())
    assert told == expected


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_year_passes_at_once() -> None:
    year_s = 365.25 * 86400

    async def main() -> float:
        await asyncio.sleep(year_s)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run(main()) == year_s
    assert time.monotonic() - began < 10.0


def test_computing_takes_no_time() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.0


def test_timers_of_one_moment_go_off_in_the_order_in_which_they_were_set() -> None:
    told: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(100):
            loop.call_at(5.0, told.append, number)
        await asyncio.sleep(6.0)

    run(main())
    assert told == list(range(100))


def test_limits_are_due_when_they_say() -> None:
    """To the eighth of a second where it is a second or more, exactly where it is less."""

    async def cut_after(seconds: float) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(KeyError), Deadline(seconds, KeyError()):
            await asyncio.sleep(1e6)
        return loop.time() - began

    assert run(cut_after(0.25)) == 0.25
    assert 100.0 <= run(cut_after(100.0)) <= 100.125


# ── the end of it ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seconds", [None, math.inf])
def test_who_waits_for_ever_is_told(seconds: float | None) -> None:
    async def main() -> None:
        if seconds is None:
            await asyncio.get_running_loop().create_future()
        else:
            await asyncio.sleep(seconds)

    with pytest.raises(StuckError, match="everybody waits"):
        run(main())


def test_cancelled_timers_do_not_pile_up() -> None:
    loop = VirtualLoop()

    async def main() -> int:
        for _ in range(20_000):
            loop.call_later(1000.0, print).cancel()
        return len(loop._agenda._timers)

    assert run(main(), loop=loop) < 5000


def test_what_still_runs_at_the_end_is_cancelled_and_cleans_up() -> None:
    told: Told = []

    async def go_on() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1)
            told.append("cleaned up")

    async def main() -> str:
        task = asyncio.create_task(go_on())
        await asyncio.sleep(0)
        return task.get_name() and "result"

    assert run(main()) == "result"
    assert told == ["cleaned up"]


def test_an_exception_that_nobody_would_see_is_raised() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(RuntimeError, match="which nobody saw") as raised:
        run(main())
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_what_main_raises_is_raised() -> None:
    async def main() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError):
        run(main())


def test_a_loop_is_closed_once_for_all() -> None:
    loop = VirtualLoop()
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)
    with pytest.raises(NotImplementedError):
        loop.run_in_executor(None, print)
