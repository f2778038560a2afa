"""Work against an event, and beside other work: whoever is first, and nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from pdproxy.aio.callback_event import CallbackEvent
from pdproxy.aio.race import cancel_when, run_alongside


async def test_work_first() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    assert await cancel_when(CallbackEvent(), work) == 3


async def test_event_first() -> None:
    event, is_cancelled = CallbackEvent(), []

    async def work() -> int:
        event.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled.append(True)
            raise
        return 3

    assert await cancel_when(event, work) is None
    assert is_cancelled == [True]


async def test_work_that_ends_within_the_grace_counts() -> None:
    event = CallbackEvent()
    event.set()

    async def work() -> int:
        for _ in range(20):
            await asyncio.sleep(0)
        return 3

    assert await cancel_when(event, work, grace_s=5.0) == 3
    assert await cancel_when(event, work) is None


async def test_errors_come_out_as_they_are() -> None:
    async def work() -> int:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await cancel_when(CallbackEvent(), work)


async def test_cancelled_from_outside() -> None:
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    task = asyncio.create_task(cancel_when(CallbackEvent(), work))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before


async def test_an_event_and_a_cancellation_at_once_are_a_cancellation() -> None:
    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    for order in ((0, 1), (1, 0)):
        started, flag = asyncio.Event(), CallbackEvent()
        task = asyncio.create_task(cancel_when(flag, work))
        await started.wait()
        for i in order:
            (flag.set, task.cancel)[i]()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_of_two_events_each_ends_its_own_work() -> None:
    inner, outer = CallbackEvent(), CallbackEvent()

    async def both() -> str:
        ended = await cancel_when(inner, asyncio.Event().wait)
        assert ended is None
        return "the outer work goes on"

    inner.set()
    assert await cancel_when(outer, both) == "the outer work goes on"
    outer.set()
    assert await cancel_when(outer, lambda: cancel_when(CallbackEvent(), asyncio.Event().wait)) is None


# ── beside ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Course:
    """Work or a companion whose end the test decides. `was_cancelled`: it was not let to its end."""

    def __init__(self, result: object = None) -> None:
        self.started = asyncio.Event()
        self.end = asyncio.Event()
        self.was_cancelled = False
        self._result = result

    async def __call__(self) -> object:
        self.started.set()
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


@asynccontextmanager
async def under_way(companion: Course, work: Course) -> AsyncIterator[asyncio.Task[object]]:
    """Both have begun. Afterwards neither runs."""
    before = asyncio.all_tasks()
    task = asyncio.create_task(run_alongside(companion, work))
    async with asyncio.timeout(5):
        await companion.started.wait()
        await work.started.wait()
        yield task
        await asyncio.wait([task])
    assert asyncio.all_tasks() == before


async def test_the_work_is_what_counts() -> None:
    companion, work = Course(), Course(3)
    async with under_way(companion, work) as task:
        work.end.set()
        assert await task == 3
    assert companion.was_cancelled


async def test_companion_that_returns_is_no_longer_needed() -> None:
    companion, work = Course("never mind"), Course(3)
    async with under_way(companion, work) as task:
        companion.end.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        work.end.set()
        assert await task == 3
    assert not companion.was_cancelled


async def test_companion_that_fails_ends_the_work() -> None:
    companion, work = Course(KeyError("its own")), Course(3)
    async with under_way(companion, work) as task:
        companion.end.set()
        with pytest.raises(KeyError, match="its own"):
            await task
    assert work.was_cancelled


async def test_work_that_fails_ends_the_companion() -> None:
    companion, work = Course(), Course(KeyError("mine"))
    async with under_way(companion, work) as task:
        work.end.set()
        with pytest.raises(KeyError, match="mine"):
            await task
    assert companion.was_cancelled


async def test_both_fail_and_one_error_comes_out() -> None:
    """The companion's: the work may have failed of that."""
    companion, work = Course(KeyError("its own")), Course(KeyError("mine"))
    async with under_way(companion, work) as task:
        companion.end.set()
        work.end.set()
        with pytest.raises(KeyError, match="its own"):
            await task


async def test_work_that_is_done_as_the_companion_fails_counts() -> None:
    """Its answer has reached the client, who cannot be told of anything more."""
    companion, work = Course(KeyError("its own")), Course(3)
    async with under_way(companion, work) as task:
        companion.end.set()
        work.end.set()
        assert await task == 3


@pytest.mark.parametrize("is_companion_over", [False, True])
async def test_beside_cancelled_from_outside(is_companion_over: bool) -> None:
    companion, work = Course(), Course(3)
    async with under_way(companion, work) as task:
        if is_companion_over:
            companion.end.set()
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert work.was_cancelled
    assert companion.was_cancelled is not is_companion_over


async def test_cancelled_as_the_companion_fails() -> None:
    """Whoever cancels is told so; the failure is nobody's any more."""
    companion, work = Course(KeyError("its own")), Course(3)
    async with under_way(companion, work) as task:
        companion.end.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert work.was_cancelled


async def test_a_scope_around_it_is_the_work_cut_short() -> None:
    companion, work = Course(), Course(3)
    with anyio.move_on_after(0) as scope:
        await run_alongside(companion, work)
    assert scope.cancelled_caught
