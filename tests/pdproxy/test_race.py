"""Work against an event: whoever is first, and nothing left running."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.race import unless


async def test_work_first() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    assert await unless(asyncio.Event(), work) == 3


async def test_event_first() -> None:
    event, is_cancelled = asyncio.Event(), []

    async def work() -> int:
        event.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled.append(True)
            raise
        return 3

    assert await unless(event, work) is None
    assert is_cancelled == [True]


async def test_work_that_ends_within_the_grace_counts() -> None:
    event = asyncio.Event()
    event.set()

    async def work() -> int:
        for _ in range(20):
            await asyncio.sleep(0)
        return 3

    assert await unless(event, work, grace_s=5.0) == 3
    assert await unless(event, work) is None


async def test_errors_come_out_as_they_are() -> None:
    async def work() -> int:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await unless(asyncio.Event(), work)


async def test_cancelled_from_outside() -> None:
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    task = asyncio.create_task(unless(asyncio.Event(), work))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
