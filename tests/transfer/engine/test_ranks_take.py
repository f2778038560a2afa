"""An attempt that was received is read by all ranks, and its pages go back when the last of them has read it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from transfer.engine.api import RankLost
from transfer.engine.ranks.follower import Follower
from transfer.engine.ranks.leader import OtherRanks
from transfer.engine.ranks.messages import DropKv, LetGo, Look, TakeKv, WaitRead
from transfer.engine.ranks.takes import RanksTake
from transfer.errors import AttemptLost, TransferError
from transfer.roles.receiver import Receiver
from transfer.wire import WrittenPages

pytestmark = pytest.mark.engine

WRITTEN = [WrittenPages(pages=[(4, 2)], tag=b"t" * 16, num_senders=2)]


class OwnReceiver:
    """Rank 0's. State: `consumed_with`, what was given back and whether it was wrong."""

    def __init__(self) -> None:
        self.consumed_with: list[tuple[str, bool]] = []

    def take(self, attempt: str) -> list[int]:
        return [4, 5]

    def written(self, attempt: str) -> list[WrittenPages]:
        return WRITTEN

    def consumed(self, attempt: str, *, is_wrong: bool = False) -> None:
        self.consumed_with.append((attempt, is_wrong))


class Others:
    """Answers when the test says so. State: `asked`, the questions in order, and `answers`, a future for each kind."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.asked: list[Any] = []
        self.answers: dict[type, asyncio.Future[list[Any]]] = {
            kind: asyncio.get_running_loop().create_future() for kind in (TakeKv, DropKv, WaitRead)
        }

    async def ask(self, question: Any) -> list[Any]:
        self.asked.append(question)
        return await asyncio.shield(self.answers[type(question)])

    def answer(self, kind: type, error: Exception | None = None) -> None:
        if error is None:
            self.answers[kind].set_result([None])
        else:
            self.answers[kind].set_exception(error)


class World:
    def __init__(self, size: int = 2) -> None:
        self.receiver, self.others, self.tasks = OwnReceiver(), Others(size), list[asyncio.Task[None]]()
        self.takes = RanksTake(cast(Receiver, self.receiver), cast(OtherRanks, self.others), self._spawn)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def settled(self) -> None:
        await asyncio.gather(*self.tasks)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_pages_go_back_when_the_other_ranks_have_read_them_too() -> None:
    world = World()
    world.others.answer(TakeKv)
    assert await world.takes.take("a") == [4, 5]
    assert world.others.asked == [TakeKv("a", WRITTEN)]
    world.takes.let_go("a")
    await turns()
    assert world.others.asked[1:] == [WaitRead("a")]
    assert world.receiver.consumed_with == [], "rank 1 still copies"
    world.others.answer(WaitRead)
    await world.settled()
    assert world.receiver.consumed_with == [("a", False)]


async def test_one_rank_alone_gives_them_back_at_once() -> None:
    world = World(size=1)
    assert await world.takes.take("a") == [4, 5]
    world.takes.let_go("a")
    assert (world.receiver.consumed_with, world.others.asked, world.tasks) == ([("a", False)], [], [])


async def test_wrong_pages_at_another_rank_lose_the_attempt_and_are_read_by_nobody_again() -> None:
    world = World()
    world.others.answer(TakeKv, TransferError("rank 1: 1 of the 2 pages were not written by it last"))
    world.others.answer(DropKv)
    with pytest.raises(AttemptLost, match="attempt a: rank 1: 1 of the 2 pages"):
        await world.takes.take("a")
    await world.settled()
    assert world.receiver.consumed_with == [("a", True)]


async def test_a_client_that_leaves_while_ranks_look_at_the_pages_does_not_free_them_early() -> None:
    world = World()
    taking = asyncio.create_task(world.takes.take("a"))
    await turns()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await turns()
    assert world.others.asked == [TakeKv("a", WRITTEN), DropKv("a")]
    assert world.receiver.consumed_with == [], "rank 1 may be looking"
    world.others.answer(DropKv)
    await world.settled()
    assert world.receiver.consumed_with == [("a", False)]


async def test_a_rank_that_is_lost_keeps_its_pages_from_others() -> None:
    world = World()
    world.others.answer(TakeKv)
    await world.takes.take("a")
    world.takes.let_go("a")
    world.others.answer(WaitRead, RankLost("rank 1 is gone"))
    await world.settled()
    assert world.receiver.consumed_with == []


# ── at another rank ─────────────────────────────────────────────────────────────────────────────────────────────────


class OwnSlab:
    def take(self, attempt: str, written: list[WrittenPages]) -> list[int]:
        assert written == WRITTEN
        return [4, 5]


def follower() -> Follower:
    """Without a model: what it does about attempts."""
    made = Follower.__new__(Follower)
    made._slab, made._taken = cast(Any, OwnSlab()), {}
    return made


async def test_another_rank_has_read_an_attempt_when_it_comes_to_the_step_that_lets_go() -> None:
    other, loop = follower(), asyncio.get_running_loop()
    await other._work(TakeKv("a", WRITTEN))
    await other._work(TakeKv("b", WRITTEN))
    waiting = asyncio.create_task(other._work(WaitRead("a")))
    await asyncio.to_thread(other._take, LetGo("b"), loop)
    await turns()
    assert not waiting.done()
    await asyncio.to_thread(other._take, LetGo("a"), loop)
    await waiting
    assert other._taken == {}
    await other._work(WaitRead("a"))  # asked behind the step: at once


async def test_another_rank_forgets_what_is_not_read_after_all() -> None:
    other = follower()
    await other._work(TakeKv("a", WRITTEN))
    await other._work(DropKv("a"))
    await other._work(DropKv("a"))
    assert other._taken == {}


async def test_wrong_tags_of_all_ranks_are_added_up_wherever_they_are_told(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    from transfer.engine.config import EngineSettings
    from transfer.engine.engine import Engine

    async def facts_of_two(question: Any) -> list[Any]:
        assert question == Look()
        return [{"num_wrong_tags": 2}, {"num_wrong_tags": 4}]

    sizes = {"pd_buffer_size": 1 << 20, "kv_cache_size": 1 << 20}
    engine = Engine(EngineSettings(role="decode", model=tiny_model("llama"), chunk_size=4, threads=1, **sizes))
    await engine.start()
    try:
        assert engine._receiver is not None
        engine._receiver._slab.num_wrong_tags = 1
        with monkeypatch.context() as patch:
            patch.setattr(engine._ranks, "ask", facts_of_two)
            await engine.refresh()
        assert engine.buffer_facts().num_wrong_tags == 7
        assert engine.statistics()["wrong_tags"] == 7
    finally:
        await engine.aclose()
