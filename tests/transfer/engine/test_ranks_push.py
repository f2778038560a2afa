"""One attempt's pushes of all ranks: all of them succeed, or none."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, cast

import pytest

from transfer.dataplane.plane import DataPlane
from transfer.engine.api import RankLost
from transfer.engine.ranks.leader import OtherRanks
from transfer.engine.ranks.messages import AbortPush, EndPush, FinishPush, OpenPush, WatchPush
from transfer.engine.ranks.pushes import RanksPush
from transfer.errors import AttemptLost, ReservationRefused, TransferError
from transfer.wire import Endpoint, PushParams

pytestmark = pytest.mark.engine

PARAMS = PushParams(attempt="a", receivers=[Endpoint(rank=0, host="h", port=1)], timeout_s=5.0)


class OwnPush:
    """Rank 0's own, which ends as it is told to."""

    def __init__(self) -> None:
        self.granted: Future[None] = running()
        self.failed: Future[str] = running()
        self.result: Future[tuple[int, float]] = running()
        self.ended: Future[None] = running()
        self.ended.set_result(None)

    @property
    def failure(self) -> str | None:
        return self.failed.result() if self.failed.done() else None

    def abort(self, reason: str) -> None:
        if self.failure is None and not self.result.done():
            self.failed.set_result(reason)
            self.result.set_exception(AttemptLost(reason))

    def finish(self) -> Future[tuple[int, float]]:
        return self.result


def running() -> Future[Any]:
    """Like those of a data plane: who waits for it cannot cancel it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class OtherRank:
    """Answers `ask` when the test says so. State: `posted` and `asked`, and a future for each kind of ask."""

    size = 2

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.asked: list[Any] = []
        self.answers: dict[type, asyncio.Future[list[Any]]] = {
            kind: asyncio.get_running_loop().create_future()
            for kind in (OpenPush, WatchPush, FinishPush, EndPush, AbortPush)
        }
        self.answers[EndPush].set_result([None])

    async def ask(self, question: Any) -> list[Any]:
        self.asked.append(question)
        return await asyncio.shield(self.answers[type(question)])

    def post(self, question: Any) -> None:
        self.posted.append(question)

    def fails(self, kind: type, error: Exception) -> None:
        self.answers[kind].set_exception(error)
        self.answers[kind].exception()

    @property
    def has_aborted(self) -> bool:
        return any(isinstance(question, AbortPush) for question in self.posted)


class World:
    """A sender whose push opens when `granted` is done, and another rank."""

    def __init__(self) -> None:
        self.own = OwnPush()
        self.other = OtherRank()
        self.granted = self.own.granted

    def open(self, params: PushParams, *, num_tokens: int, keys: list[bytes]) -> OwnPush:
        return self.own

    def opening(self) -> asyncio.Task[RanksPush]:
        ranks = cast(OtherRanks, self.other)
        return asyncio.create_task(RanksPush.open(cast(DataPlane, self), ranks, PARAMS, 9, [b"k"]))

    async def opened(self) -> RanksPush:
        self.granted.set_result(None)
        self.other.answers[OpenPush].set_result([None])
        return await self.opening()


async def test_all_ranks_ask_for_pages_at_the_same_time() -> None:
    world = World()
    opening = world.opening()
    await turns()
    assert world.other.asked == [OpenPush(PARAMS, 9, [b"k"])]
    world.granted.set_result(None)
    await turns()
    assert not opening.done()
    world.other.answers[OpenPush].set_result([None])
    push = await opening
    await push.wait_ended()
    assert (world.own.failure, world.other.posted) == (None, [])


async def turns() -> None:
    """Until nothing can happen any more without somebody's doing."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("who", ["own", "other", "client"])
async def test_pages_that_one_rank_does_not_get_are_given_up_by_all(who: str) -> None:
    world = World()
    opening = world.opening()
    await turns()
    if who == "own":
        world.other.answers[OpenPush].set_result([None])
        world.granted.set_exception(ReservationRefused("no room"))
    else:
        world.granted.set_result(None)
    await turns()
    if who == "other":
        world.other.fails(OpenPush, TransferError("rank 1: no room"))
    elif who == "client":
        opening.cancel()
    with pytest.raises(asyncio.CancelledError if who == "client" else TransferError):
        await opening
    assert world.other.has_aborted
    assert world.own.failure is not None, "what was granted is given back"


async def test_a_push_that_another_rank_loses_is_over_here() -> None:
    world = World()
    push = await world.opened()
    world.other.fails(WatchPush, TransferError("rank 1: the decoder is gone"))
    assert await asyncio.wait_for(asyncio.wrap_future(push.failed), 5) == push.failure
    assert push.failure == "rank 1: the decoder is gone"
    assert world.other.has_aborted, "there may be a third rank"
    await push.wait_ended()


async def test_a_push_that_is_lost_here_is_over_everywhere() -> None:
    world = World()
    push = await world.opened()
    await turns()
    world.own.abort("the decoder is gone")
    await turns()
    assert world.other.posted == [AbortPush("a", "the decoder is gone")]
    await push.wait_ended()


async def test_a_rank_that_is_lost_is_no_fault_of_the_decoder() -> None:
    """The push is not what fails: whoever waits hears of the rank."""
    world = World()
    push = await world.opened()
    world.other.fails(WatchPush, RankLost("rank 1 is gone"))
    await turns()
    assert not push.failed.done()
    await push.wait_ended()


async def test_a_finished_push_counts_the_bytes_of_all_ranks() -> None:
    world = World()
    push = await world.opened()
    world.own.result.set_result((100, 0.5))
    finishing = asyncio.create_task(push.finish())
    await turns()
    assert not finishing.done()
    world.other.answers[FinishPush].set_result([40])
    assert await finishing == (140, 0.5)
    await push.wait_ended()


async def test_a_push_that_another_rank_cannot_finish_is_lost() -> None:
    world = World()
    push = await world.opened()
    world.own.result.set_result((100, 0.5))
    world.other.fails(FinishPush, TransferError("rank 1: out of time"))
    world.other.answers[AbortPush].set_result([None])
    with pytest.raises(AttemptLost, match="rank 1: out of time"):
        await push.finish()
    await push.wait_ended()


async def test_local_pages_are_kept_until_every_rank_has_given_up() -> None:
    world = World()
    push = await world.opened()
    finishing = asyncio.create_task(push.finish())
    await turns()
    world.own.abort("the decoder's rank 0 is gone")
    await turns()
    assert not finishing.done(), "another rank may say that its part has arrived"
    world.other.answers[AbortPush].set_result([None])
    with pytest.raises(AttemptLost, match="the decoder's rank 0 is gone"):
        await finishing
    await push.wait_ended()


async def test_an_abort_reaches_every_rank() -> None:
    world = World()
    push = await world.opened()
    push.abort("cancelled")
    assert world.own.failure == "cancelled"
    assert AbortPush("a", "cancelled") in world.other.posted
    await push.wait_ended()
    assert EndPush("a") in world.other.asked
