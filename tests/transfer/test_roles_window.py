"""A request larger than the PD buffer, on its way through it: what was not taken is not overwritten, and all ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes.transfer_world import (
    IDENTITY,
    KV,
    LIMIT_S,
    PATIENT,
    QUICK,
    Decoder,
    Prefiller,
    World,
    elements,
    fill,
    hold,
    next_held,
    settled,
    until,
)
from transfer import wire
from transfer.agents.mock import Fail, Land, in_turn
from transfer.errors import AttemptLost, IllegalTransition, ReservationRefused, TransferError
from transfer.memory.reservations import Holding
from transfer.plan.blocks import PageTable, page_table
from transfer.plan.layout import KvLayout, LayerKv
from transfer.plan.runs import numbers_of
from transfer.roles.push import Push

HEADS = KvLayout((LayerKv(2, 3, 2),) * 2, 2, 8, "int64")
HYBRID = KvLayout((LayerKv(2, 1, 1, "sliding", 8), LayerKv(2, 1, 1)), 2, 8, "int64")


class List:
    """An intake that keeps copies in a list, and takes at once, or `take` by `take`.

    What the engine behind it would be told is in `closings`.
    """

    def __init__(self, *, at_once: bool = True) -> None:
        self.decoder: Decoder | None = None
        self.at_once = at_once
        self.tables: dict[str, PageTable] = {}
        self.copies: dict[str, list[bytes]] = {}
        self.waiting: dict[str, list[tuple[int, int]]] = {}
        self.closings: list[tuple[str, str]] = []
        self.most_waiting = 0
        self.max_pages = 1000
        self.fail_in = ""

    def check(self, table: PageTable) -> None:
        self._perhaps_fail("check")
        if len(table) > self.max_pages:
            raise ReservationRefused(f"this engine has room for {self.max_pages} pages, not {len(table)}")

    def opened(self, attempt: str, table: PageTable) -> None:
        self._perhaps_fail("opened")
        self.tables[attempt], self.copies[attempt], self.waiting[attempt] = table, [], []

    def arrived(self, attempt: str, ordinals: range, pages: Sequence[int]) -> None:
        self._perhaps_fail("arrived")
        self.waiting[attempt] += zip(ordinals, pages, strict=True)
        self.most_waiting = max(self.most_waiting, len(self.waiting[attempt]))
        if self.at_once:
            self.take(attempt, len(self.waiting[attempt]))

    def closed(self, attempt: str, reason: str) -> None:
        self.closings.append((attempt, reason))
        self._perhaps_fail("closed")

    def take(self, attempt: str, count: int = 1) -> None:
        """Copy the next pages and say so."""
        assert self.decoder is not None
        taken, self.waiting[attempt] = self.waiting[attempt][:count], self.waiting[attempt][count:]
        for ordinal, page in taken:
            assert ordinal == len(self.copies[attempt])
            self.copies[attempt].append(self.decoder.buffer.pages[page].numpy().tobytes())
        self.decoder.receiver.pages_taken(attempt, len(self.copies[attempt]))

    def _perhaps_fail(self, where: str) -> None:
        if self.fail_in == where:
            raise RuntimeError(f"broken in {where}")

    def first_bytes(self, attempt: str) -> list[int]:
        return [copy[0] for copy in self.copies[attempt]]


async def windowed(world: World, num_pages: int = 4, *, at_once: bool = True, **options: Any) -> tuple[Decoder, List]:
    intake = List(at_once=at_once)
    decoder = intake.decoder = await world.decoder(num_pages, intake=intake, **options)
    return decoder, intake


async def finish(push: Push) -> None:
    async with asyncio.timeout(LIMIT_S):
        await push.finish()


async def consume(decoder: Decoder, attempt: str = "a") -> None:
    await decoder.read(attempt)
    decoder.receiver.consumed(attempt)


# ── through ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("times", [3, 10])
@pytest.mark.parametrize("by", ["page", "layer", "layer, last page first", "all at once"])
async def test_many_times_the_buffer(world: World, times: int, by: str) -> None:
    decoder, intake = await windowed(world)
    prefiller = world.prefiller()
    num_pages = times * 4
    push = await world.open(prefiller, decoder, num_pages=num_pages)
    if by == "page":
        for ordinal in range(num_pages):
            fill(push, ordinal)
            await asyncio.sleep(0)
    elif by == "all at once":
        push.pages_filled(range(num_pages), range(num_pages))
    else:
        for layer in range(2):
            for ordinal in range(num_pages)[:: -1 if "last" in by else 1]:
                push.layers_filled(ordinal, ordinal, layer, layer + 1)
            await asyncio.sleep(0)
    await finish(push)
    await consume(decoder)
    assert intake.first_bytes("a") == [ordinal + 1 for ordinal in range(num_pages)]
    assert all(len(set(copy)) == 1 for copy in intake.copies["a"]), "no page is half of one and half of another"
    assert intake.most_waiting <= 4
    ready = await world.proxy.next(wire.KvReady, "a")
    assert ready.num_bytes == num_pages * decoder.layout.page_bytes
    await world.proxy.next(wire.KvReleased, "a")
    assert intake.closings == []


@pytest.mark.parametrize("kv", [HEADS, HYBRID], ids=["heads", "hybrid"])
@pytest.mark.parametrize("by_layer", [False, True])
async def test_two_ranks_write_through_one_window(world: World, kv: KvLayout, by_layer: bool) -> None:
    """A page has arrived when both have written it; the faster one waits for credit, not for the slower one's word."""
    intake = List()
    decoder = await world.decoder_ranks(kv, 1, 4, intake=intake)
    intake.decoder = decoder
    pairs = []
    for prefiller in world.prefiller_ranks(kv, 2):
        push = await world.open(prefiller, decoder, num_pages=12)
        prefiller.compute(push.table)
        pairs.append((prefiller, push))
    for prefiller, push in pairs:
        units = [len(prefiller.layout.groups[at.group].layers) if by_layer else 1 for at in push.table.pages]
        for ordinal, num in enumerate(units):
            for layer in range(num):
                if by_layer:
                    push.layers_filled(ordinal, ordinal, layer, layer + 1)
                else:
                    push.page_filled(ordinal, ordinal)
        await asyncio.sleep(0.01)
    await settled(asyncio.gather(*(push.finish() for _, push in pairs)))  # type: ignore[arg-type]
    await consume(decoder)
    table = pairs[0][1].table
    assert len(intake.copies["a"]) == len(table) > 8
    for ordinal, copy in enumerate(intake.copies["a"]):
        for part, content in elements(decoder.layout, table, ordinal):
            assert copy[part.offset : part.offset + part.num_bytes] == content.tobytes(), f"{ordinal} {part}"


async def test_credit_is_what_was_taken(world: World) -> None:
    """The sender is never further ahead than the window is long; one page taken is one page more."""
    decoder, intake = await windowed(world, at_once=False)
    prefiller = world.prefiller()
    posted: list[int] = []

    def note(write: Any) -> Land:
        posted.append(write.num_bytes // decoder.layout.page_bytes)
        return Land()

    prefiller.agent.script = note
    push = await world.open(prefiller, decoder, num_pages=12)
    fill(push, *range(12))
    for taken in range(1, 9):
        await until(lambda t=taken: len(intake.waiting["a"]) == 4 and sum(posted) == 3 + t)  # type: ignore[misc]
        assert decoder.pages.get("a").num_written == 3 + taken
        intake.take("a")
    await until(lambda: sum(posted) == 12 and len(intake.waiting["a"]) == 4)
    await finish(push)
    assert decoder.holding("a") is Holding.RESERVED, "written, and not yet taken"
    waiting = asyncio.create_task(decoder.receiver.wait_ready("a"))
    intake.take("a", 3)
    await asyncio.sleep(0)
    assert not waiting.done()
    with pytest.raises(IllegalTransition):
        decoder.receiver.pages_taken("a", 13)
    intake.take("a")
    await settled(waiting)
    await consume(decoder)
    assert intake.first_bytes("a") == list(range(1, 13))


async def test_writes_through_a_window_have_a_limit_of_their_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder waits for every part, and takes it while the next one travels."""
    monkeypatch.setattr("transfer.roles.rank_push.MAX_WINDOW_WRITE_BYTES", IDENTITY.layout.page_bytes)
    decoder, intake = await windowed(world, at_once=False)
    prefiller = world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder, num_pages=5)
    fill(push, *range(5))
    for num_written in range(1, 5):
        write = await next_held(prefiller.agent)
        assert write.num_bytes == decoder.layout.page_bytes
        write.land()
        await until(lambda n=num_written: len(intake.waiting["a"]) == n)  # type: ignore[misc]
    push.abort("not needed")
    await world.proxy.next(wire.KvReleased, "a")


async def test_pages_written_is_said_when_there_is_news(world: World) -> None:
    """Not once per layer."""
    decoder, _ = await windowed(world)
    prefiller = world.prefiller()
    push = await world.open(prefiller, decoder, num_pages=6)
    said: list[int] = []
    send = push._ranks[0].session.send

    def note(message: Any) -> None:
        if isinstance(message, wire.PagesWritten):
            said.append(message.count)
        send(message)

    push._ranks[0].session.send = note  # type: ignore[method-assign]
    for layer in range(2):
        for ordinal in range(6):
            push.layers_filled(ordinal, ordinal, layer, layer + 1)
            await asyncio.sleep(0.001)
    await finish(push)
    assert said == sorted(set(said))
    assert said[0] > 0
    assert said[-1] == 6
    await consume(decoder)


async def test_what_fits_does_not_pass_through(world: World) -> None:
    decoder, intake = await windowed(world)
    prefiller = world.prefiller()
    push = await world.open(prefiller, decoder, num_pages=4)
    fill(push, *range(4))
    await finish(push)
    assert decoder.bytes_of(await decoder.read("a")) == [1, 2, 3, 4]
    decoder.receiver.consumed("a")
    assert intake.tables == {}


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_without_an_intake_it_is_refused_with_the_numbers(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    with pytest.raises(ReservationRefused, match="needs 12 pages and this PD buffer has 4"):
        await world.open(prefiller, decoder, num_pages=12)


async def test_an_intake_may_refuse(world: World) -> None:
    decoder, intake = await windowed(world)
    intake.max_pages = 8
    prefiller = world.prefiller()
    with pytest.raises(ReservationRefused, match="room for 8 pages, not 12"):
        await world.open(prefiller, decoder, num_pages=12)
    assert (intake.tables, intake.closings) == ({}, [])
    push = await world.open(prefiller, decoder, "b", num_pages=8)
    fill(push, *range(8))
    await finish(push)
    await consume(decoder, "b")


# ── in the middle ───────────────────────────────────────────────────────────────────────────────────────────────────


async def _half_way(world: World, decoder: Decoder, intake: List, timeout_s: float = 30.0) -> tuple[Prefiller, Push]:
    """Five of twelve pages are taken, and the window is full again."""
    prefiller = world.prefiller()
    push = await world.open(prefiller, decoder, num_pages=12, timeout_s=timeout_s)
    fill(push, *range(12))
    for _ in range(5):
        await until(lambda: bool(intake.waiting["a"]))
        intake.take("a")
    await until(lambda: len(intake.waiting["a"]) == 4)
    return prefiller, push


@pytest.mark.parametrize(
    "how", ["cancelled", "expired", "aborted", "the sender vanishes", "the intake raises", "a write fails"]
)
async def test_it_fails_in_the_middle(world: World, how: str) -> None:
    """The intake hears of it once, the buffer is free again, and those behind it are served in order."""
    config = QUICK if how == "the sender vanishes" else PATIENT
    decoder, intake = await windowed(world, at_once=False, config=config)
    prefiller, push = await _half_way(world, decoder, intake, 1.0 if how == "expired" else 30.0)
    other = world.prefiller()
    behind = [asyncio.create_task(world.open(other, decoder, attempt, num)) for attempt, num in (("b", 2), ("c", 12))]
    await until(lambda: decoder.pages.num_queued == 2)
    if how == "cancelled":
        decoder.receiver.cancel("a")
    elif how == "aborted":
        push.abort("not needed")
    elif how == "the sender vanishes":
        prefiller.die(decoder)
    elif how == "the intake raises":
        intake.fail_in = "arrived"
        intake.take("a")
    elif how == "a write fails":
        prefiller.agent.script = in_turn(Fail(TransferError("broken")))
        intake.take("a")
    await world.proxy.next(wire.KvReleased, "a")
    assert [attempt for attempt, _ in intake.closings] == ["a"]
    with pytest.raises(AttemptLost):
        intake.take("a")
    intake.fail_in, intake.at_once = "", True
    small = await settled(behind[0])
    assert not behind[1].done()
    fill(small, 20, 21)
    await finish(small)
    await consume(decoder, "b")
    large = await settled(behind[1])
    fill(large, *range(12))
    await finish(large)
    await consume(decoder, "c")
    assert intake.first_bytes("c") == list(range(1, 13))
    assert [attempt for attempt, _ in intake.closings] == ["a"]


@pytest.mark.parametrize("where", ["check", "opened", "closed"])
async def test_what_an_intake_raises_fails_its_attempt_only(world: World, where: str) -> None:
    decoder, intake = await windowed(world)
    prefiller = world.prefiller()
    intake.fail_in = where
    blocker = await world.open(prefiller, decoder, "blocker", num_pages=1)
    windowed_one = asyncio.create_task(world.open(prefiller, decoder, "a", num_pages=6))
    behind = asyncio.create_task(world.open(prefiller, decoder, "behind", num_pages=1))
    await until(lambda: decoder.pages.num_queued + windowed_one.done() + behind.done() == 2)
    blocker.abort("not needed")
    if where == "closed":
        (await settled(windowed_one)).abort("not needed")
    else:
        with pytest.raises(ReservationRefused, match=r"intake failed|cancelled"):
            await settled(windowed_one)
    (await settled(behind)).abort("not needed")
    for attempt in ("behind", *(["a"] if where != "check" else [])):
        await world.proxy.next(wire.KvReleased, attempt)
    assert len(intake.closings) == (where != "check")
    decoder.receiver.cancel("a")
    assert len(intake.closings) == (where != "check")


async def test_nobody_comes_for_it(world: World) -> None:
    """All of it went through, and its decode leg never came: the intake may forget it."""
    decoder, intake = await windowed(world)
    prefiller = world.prefiller()
    push = await world.open(prefiller, decoder, num_pages=6, timeout_s=0.5)
    fill(push, *range(6))
    await finish(push)
    await world.proxy.next(wire.KvReady, "a")
    assert intake.closings == []
    await world.proxy.next(wire.KvReleased, "a")
    assert intake.closings == [("a", "expired")]


async def test_the_receiver_is_closed_under_it(world: World) -> None:
    """The intake hears of it, once, and those who wait for the KV do."""
    decoder, intake = await windowed(world, at_once=False)
    _, push = await _half_way(world, decoder, intake)
    waiting = asyncio.create_task(decoder.receiver.wait_ready("a"))
    await asyncio.sleep(0)
    for _ in range(2):
        await decoder.receiver.aclose()
    assert intake.closings == [("a", "the decoder is shutting down")]
    with pytest.raises(AttemptLost, match="shutting down"):
        await settled(waiting)
    push.abort("nobody is there")
    decoder.pages.writer_gone(decoder.pages.get("a").joined[0])


async def test_it_is_cancelled_while_it_waits_to_be_alone(world: World) -> None:
    decoder, intake = await windowed(world)
    prefiller = world.prefiller()
    first = await world.open(prefiller, decoder, "first", 1)
    waiting = asyncio.create_task(world.open(prefiller, decoder, "a", 6))
    await until(lambda: decoder.pages.num_queued == 1)
    decoder.receiver.cancel("a")
    with pytest.raises(ReservationRefused, match="cancelled"):
        await settled(waiting)
    assert (intake.tables, intake.closings) == ({}, []), "it was never opened"
    first.abort("not needed")
    await world.proxy.next(wire.KvReleased, "first")


async def test_a_late_write_lands_in_pages_that_are_nobodys(world: World) -> None:
    decoder, intake = await windowed(world, at_once=False)
    prefiller, push = await _half_way(world, decoder, intake)
    prefiller.agent.script = hold
    intake.take("a")
    write = await next_held(prefiller.agent)
    decoder.receiver.cancel("a")
    await push.failed.wait()
    behind = asyncio.create_task(world.open(prefiller, decoder, "b", 1))
    await until(lambda: decoder.pages.num_queued == 1)
    assert decoder.pages.num_quarantined == 4
    write.land()
    (await settled(behind)).abort("not needed")
    await world.proxy.next(wire.KvReleased, "b")
    assert len(intake.closings) == 1


async def test_an_intake_taken_by_surprise(world: World) -> None:
    """A sender that claims more than its credit is not believed, and nothing of it is passed on."""
    decoder, intake = await windowed(world, at_once=False)
    raw = world.stranger(decoder)
    granted = await raw.reserve("a", 12)
    assert isinstance(granted, wire.Reserved)
    pages = numbers_of(granted.pages)
    assert (len(pages), granted.present) == (4, [])
    await raw.say(wire.PagesWritten(attempt="a", count=5))
    await raw.say(wire.WritesDone(attempt="a", num_bytes=1, transfer_s=0.0))
    await raw.round_trip()
    assert intake.waiting["a"] == []
    await raw.say(wire.PagesWritten(attempt="a", count=3))
    await raw.say(wire.PagesWritten(attempt="a", count=2))
    await raw.round_trip()
    assert intake.waiting["a"] == list(zip(range(3), pages[:3], strict=True))
    stranger = world.stranger(decoder)
    await stranger.greet()
    await stranger.say(wire.PagesWritten(attempt="a", count=4))
    await stranger.round_trip()
    assert len(intake.waiting["a"]) == 3
    intake.take("a", 2)
    assert await raw.hear() == wire.PagesTaken(attempt="a", count=2)
    await raw.say(wire.WritesEnded(attempt="a", reason="over"))
    await world.proxy.next(wire.KvReleased, "a")
    assert intake.closings == [("a", "over")]


async def test_the_table_that_an_intake_is_shown_is_the_senders(world: World) -> None:
    decoder, intake = await windowed(world)
    prefiller = world.prefiller()
    params = world.params(decoder)
    push = await prefiller.sender.open(params, num_tokens=21)
    assert intake.tables["a"] == push.table == page_table(KV.groups, 21, IDENTITY.layout.chunk_size)
    fill(push, *range(6))
    await finish(push)
    await consume(decoder)
