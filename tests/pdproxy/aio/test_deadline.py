"""Blocks that are cut short: by their time, which moves, by somebody's word, and beside a cancellation from outside."""

from __future__ import annotations

import asyncio
import math
import socket
import time

import pytest

from pdproxy.aio.deadline import Deadline
from tests.fakes.both_loops import on_both_loops


class LateError(Exception):
    """What a limit raises here."""


class InnerError(LateError):
    """An inner one's."""


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_block_within_its_time_is_not_touched() -> None:
    with Deadline(5.0, LateError()):
        await asyncio.sleep(0)


async def test_a_block_over_its_time_raises_its_error() -> None:
    with pytest.raises(LateError), Deadline(0.01, LateError):
        await forever()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@on_both_loops
async def test_what_came_while_the_loop_stood_still_came_in_time() -> None:
    """A limit of a second, of which this process slept through the end. (libuv looks at its timers first.)"""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    with Deadline(1.0, LateError):
        await asyncio.sleep(0.5)
        theirs.sendall(b"here")
        stand_still(1.0)
        assert await reader.read(4) == b"here"
    writer.close()
    theirs.close()


async def test_a_limit_ends_a_block_also_where_the_loop_stood_still() -> None:
    async def wait() -> None:
        stand_still(1.3)
        await forever()

    with pytest.raises(LateError), Deadline(1.0, LateError):
        await wait()


async def test_a_limit_that_moves_waits_from_then_on() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(InnerError), Deadline(0.02, LateError) as limit:  # noqa: PT012
        limit.wait(0.08, InnerError)
        await forever()
    assert loop.time() - started >= 0.075


async def test_a_limit_can_move_closer() -> None:
    with pytest.raises(InnerError):  # noqa: PT012
        async with asyncio.timeout(5):
            with Deadline(60.0, LateError) as limit:
                limit.wait(0.01, InnerError)
                await forever()


async def test_more_time_is_more_time() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(LateError), Deadline(0.03, LateError) as limit:  # noqa: PT012
        for _ in range(4):
            await asyncio.sleep(0.01)
            limit.more(0.03)
        await forever()
    assert loop.time() - started >= 0.065


async def test_a_limit_that_has_become_endless_can_get_an_end_again() -> None:
    with pytest.raises(LateError):  # noqa: PT012
        async with asyncio.timeout(5):
            with Deadline(0.01, InnerError) as limit:
                limit.wait(math.inf, InnerError)
                await asyncio.sleep(0.02)
                limit.wait(0.01, LateError)
                await forever()


async def test_it_can_be_cut_at_any_time_and_only_once() -> None:
    async def work(limit: Deadline) -> None:
        with limit:
            try:
                await forever()
            finally:
                await asyncio.sleep(0)  # a second cut must not disturb the tidying up
                tidied.set()

    tidied = asyncio.Event()
    limit = Deadline(math.inf, LateError)
    limit.cut()
    task = asyncio.create_task(work(limit))
    await asyncio.sleep(0)
    limit.cut()
    limit.cut()
    with pytest.raises(LateError):
        await task
    assert tidied.is_set()
    limit.cut()


async def test_what_the_block_raises_by_itself_goes_through() -> None:
    with pytest.raises(ZeroDivisionError), Deadline(0.01, LateError):  # noqa: PT012
        try:
            await forever()
        finally:
            raise ZeroDivisionError
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_outside_goes_through_even_when_the_time_is_up_too() -> None:
    async def work() -> None:
        with Deadline(math.inf, LateError) as limit:
            limits.append(limit)
            await forever()

    limits: list[Deadline] = []
    for order in ((0, 1), (1, 0)):
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        ways = (task.cancel, limits[-1].cut)
        for way in order:
            ways[way]()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_one_that_was_cut_keeps_its_error_whoever_makes_it_wait_anew() -> None:
    """Between the cut and the moment in which the block learns of it others may have their turn: whoever looks after an
    instance that went down, or the block itself, which clears up."""
    for seconds in (0.0, 0.01, 5.0):
        with pytest.raises(LateError) as raised, Deadline(math.inf, LateError) as limit:  # noqa: PT012
            limit.cut()
            limit.wait(seconds, InnerError)
            await forever()
        assert raised.type is LateError
    await asyncio.sleep(0.03)


async def test_of_nested_limits_each_cuts_its_own_block() -> None:
    with pytest.raises(LateError), Deadline(0.02, LateError):  # noqa: PT012
        with pytest.raises(InnerError), Deadline(0.005, InnerError):
            await forever()
        with Deadline(5.0, InnerError):
            await forever()


async def test_when_both_are_due_the_outer_one_counts() -> None:
    with pytest.raises(LateError), Deadline(math.inf, LateError) as outer, Deadline(math.inf, InnerError) as inner:  # noqa: PT012
        asyncio.get_running_loop().call_soon(inner.cut)
        asyncio.get_running_loop().call_soon(outer.cut)
        await forever()


async def test_a_block_that_ends_leaves_no_timer_behind() -> None:
    with Deadline(0.01, LateError):
        await asyncio.sleep(0)
    await asyncio.sleep(0.03)
