"""What the engine's own cache has takes no page and is not sent; what is pinned for it is given back exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from tests.fakes.engine_cache import FakeEngineCache
from tests.fakes.reservations import named, wanted
from tests.fakes.transfer_world import (
    CHUNK,
    PAGE_BYTES,
    World,
    fill,
    hold,
    next_held,
    settled,
    until,
)
from transfer import wire
from transfer.errors import AttemptLost, IntegrityError, TransferError
from transfer.memory.reservations import Change, Holding, Reservation, Reservations
from transfer.plan.blocks import page_table
from transfer.plan.layout import KvLayout, LayerKv
from transfer.roles.receiver import ReceiverConfig

ZERO, ONE = b"rank 0", b"rank 1"


ABCD = named("a", "b", "c", "d")
ABC_ = named("a", "b", "c", "")


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────


def granted(table: Reservations, attempt: str, keys: Sequence[bytes] = ABCD) -> Reservation:
    table.request(wanted(attempt, len(keys), keys=keys), 0, ZERO)
    [grant] = table.pump()
    table.check_integrity()
    return grant.reservation


@pytest.mark.parametrize(
    ("content", "num_cached"),
    [([], 0), (ABCD[:1], 1), (ABCD[:3], 3), (ABCD, 3), (ABCD[1:], 0), ([ABCD[0], ABCD[2]], 1)],
    ids=["nothing", "the first", "all but the last", "all", "all but the first", "a gap"],
)
def test_the_front_of_the_prompt_takes_no_page(content: list[bytes], num_cached: int) -> None:
    """The last page is always sent: there is something to wait for, and a prompt's end may not fill its page."""
    table = Reservations(8, FakeEngineCache(content))
    reservation = granted(table, "a")
    assert reservation.num_cached == num_cached
    assert len(reservation.pages) == table.num_pages - table.num_free == 4 - num_cached
    assert table.num_cached == table.statistics()["cached"] == num_cached
    table.writes_done("a")
    assert len(table.take("a")) == 4 - num_cached
    table.consume("a")
    table.check_integrity()
    assert table.num_free == 8


def test_a_chunk_that_is_here_and_there_takes_no_page_either() -> None:
    """Behind the engine's chunks the buffer's own are shared; those that both have are left to others."""
    cache = FakeEngineCache()
    table = Reservations(8, cache)
    first = granted(table, "a")
    table.writes_done("a")
    cache.content = set(ABCD[:2])
    second = granted(table, "b", [*ABCD, b"e"])
    assert (second.num_cached, second.present) == (2, {2, 3})
    assert [second.page(ordinal) for ordinal in (2, 3)] == first.pages[2:]
    assert second.own_pages == [second.page(4)]
    assert table.num_free == 8 - 4 - 1
    table.writes_done("b")
    table.check_integrity()
    third = granted(table, "c", [*ABCD, b"e", b""])
    assert third.present == {2, 3, 4}, "and what was written behind the cached ones is found under its own name"
    assert third.page(4) == second.page(4)


def test_a_prompt_fits_by_what_it_lacks() -> None:
    cache = FakeEngineCache(ABCD[:2])
    table = Reservations(4, cache)
    granted(table, "two", named("", ""))
    assert granted(table, "a").num_cached == 2
    table.check_integrity()


def test_who_waits_for_pages_keeps_nothing_pinned() -> None:
    """What was evicted meanwhile is sent in the end."""
    cache = FakeEngineCache(ABCD[:2])
    table = Reservations(4, cache)
    granted(table, "three", named("", "", ""))
    table.request(wanted("a", 4, keys=ABCD), 0, ZERO)
    assert table.pump() == []
    assert cache.pinned == {}
    table.check_integrity()
    cache.evict(ABCD[1:])
    table.withdraw("three", "cancelled")
    table.writes_ended("three")
    [grant] = table.pump()
    assert (grant.reservation.num_cached, len(grant.pages)) == (1, 3)
    assert cache.pinned == {"a": (ABCD[0],)}


@pytest.mark.parametrize("what", ["no keys", "page by page", "windowed"])
def test_where_the_engine_is_not_asked(what: str) -> None:
    cache = FakeEngineCache(ABCD)
    table = Reservations(3 if what == "windowed" else 8, cache)
    keys = [] if what == "no keys" else ABCD
    request = wanted("a", 4, num_now=1 if what == "page by page" else None, keys=keys)
    table.request(request, 0, ZERO, windowed=True)
    [grant] = table.pump()
    assert (cache.num_asked, grant.reservation.num_cached) == (0, 0)


def test_whoever_joins_later_is_told_the_same() -> None:
    table = Reservations(8, FakeEngineCache(ABCD[:2]))
    table.request(wanted("a", 4, keys=ABCD, expected=(0, 1)), 0, ZERO)
    [first] = table.pump()
    second = table.request(wanted("a", 4, keys=ABCD, expected=(0, 1)), 1, ONE)
    assert second is not None
    assert (second.pages, second.present) == (first.pages, first.present) == (table.get("a").pages, [])  # type: ignore[union-attr]
    for rank in (0, 1):
        assert table.get("a").holding is Holding.RESERVED  # type: ignore[union-attr]
        table.writes_done("a", rank)
    table.check_integrity()


EXITS: dict[str, Callable[[Reservations], Change | None]] = {
    "withdrawn": lambda table: table.withdraw("a", "cancelled"),
    "its writer ended": lambda table: table.writes_ended("a"),
    "its writer died": lambda table: next(iter(table.writer_gone(ZERO)), None),
    "ready, and withdrawn": lambda table: (table.writes_done("a"), table.withdraw("a", "expired"))[1],
    "the receiver closes": lambda table: table.close(),
}


@pytest.mark.parametrize("how", EXITS)
def test_every_way_out_gives_the_pins_back_once(how: str) -> None:
    """`FakeEngineCache` does not take one back twice."""
    cache = FakeEngineCache(ABCD[:2])
    table = Reservations(4, cache)
    granted(table, "a")
    assert cache.pinned == {"a": tuple(ABCD[:2])}
    EXITS[how](table)
    assert cache.pinned == {}
    for again in EXITS.values() if how != "the receiver closes" else ():
        if table.get("a") is not None and again is not EXITS["ready, and withdrawn"]:
            again(table)
    if how != "the receiver closes":
        table.writes_ended("a")
        table.check_integrity()
        assert table.num_free == 4
    table.close()


def test_what_was_taken_is_the_readers() -> None:
    cache = FakeEngineCache(ABCD[:2])
    table = Reservations(4, cache)
    granted(table, "a")
    table.writes_done("a")
    table.take("a")
    assert table.withdraw("a", "too late") is None
    table.consume("a")
    table.close()
    table.check_integrity()
    assert cache.adopt("a") == tuple(ABCD[:2])


def test_a_pin_that_got_lost_is_noticed() -> None:
    table = Reservations(4, FakeEngineCache(ABCD[:2]))
    granted(table, "a")
    table._pinned.clear()
    with pytest.raises(IntegrityError, match="pins differ"):
        table.check_integrity()


# ── sender and receiver ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_cached", range(4))
async def test_only_the_rest_travels(world: World, num_cached: int) -> None:
    """The engine has no page of the buffer for what it has itself; the rest is where the table says."""
    cache = FakeEngineCache(ABCD[:num_cached])
    decoder, prefiller = await world.decoder(num_pages=6, cache=cache), world.prefiller()
    push = await world.open(prefiller, decoder, "a", 4, keys=ABC_)
    assert [push.is_present(ordinal) for ordinal in range(4)] == [ordinal < num_cached for ordinal in range(4)]
    assert (push.num_cached, push.num_sent) == (num_cached, 4 - num_cached)
    assert decoder.pages.num_free == 6 - push.num_sent
    fill(push, 10, 11, 12, 13)
    assert (await settled(asyncio.ensure_future(push.finish())))[0] == push.num_sent * PAGE_BYTES
    ready = await world.proxy.next(wire.KvReady, "a")
    told = [signal.num_pages for signal in world.proxy.heard if isinstance(signal, wire.KvGranted)]
    assert told == ([push.num_sent] if num_cached else []), "said before it is ready, and only where it is news"
    assert (ready.num_pages, ready.num_bytes) == (push.num_sent, push.num_sent * PAGE_BYTES)
    assert decoder.bytes_of(await decoder.read("a")) == [11 + ordinal for ordinal in range(num_cached, 4)]
    decoder.receiver.consumed("a")
    assert (await world.proxy.next(wire.KvReleased, "a")).num_pages == push.num_sent
    assert cache.adopt("a") == tuple(ABCD[:num_cached])


async def test_one_page_after_the_other_behind_cached_ones(world: World) -> None:
    """Each in a write of its own."""
    cache = FakeEngineCache(ABCD[:2])
    decoder, prefiller = await world.decoder(num_pages=6, cache=cache), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder, "a", 5, keys=[*ABCD, b""])
    for ordinal in range(5):
        push.page_filled(ordinal, 20 + ordinal)
        if ordinal >= 2:
            (await next_held(prefiller.agent)).land()
    await settled(asyncio.ensure_future(push.finish()))
    assert decoder.bytes_of(await decoder.read("a")) == [23, 24, 25]
    decoder.receiver.consumed("a")
    cache.adopt("a")


async def test_many_pages_at_once_behind_cached_ones(world: World) -> None:
    """The remote pages of a whole batch are looked up together."""
    keys = named(*map(str, range(40)))
    cache = FakeEngineCache(keys[:9])
    decoder, prefiller = await world.decoder(num_pages=40, cache=cache), world.prefiller()
    push = await world.open(prefiller, decoder, "a", 40, keys=keys)
    push.pages_filled(list(range(40)), list(range(20, 60)))
    await settled(asyncio.ensure_future(push.finish()))
    assert decoder.bytes_of(await decoder.read("a")) == list(range(30, 61))
    decoder.receiver.consumed("a")
    cache.adopt("a")


async def test_rank_0_answers_for_the_caches_of_all_ranks(world: World) -> None:
    """An engine's cache has the same chunks on every rank; what it has is sent to none of them."""
    kv = KvLayout((LayerKv(2, 2, 2),) * 2, CHUNK, 8, "int64")
    cache = FakeEngineCache(ABCD[:2])
    decoder = await world.decoder_ranks(kv, 2, cache=cache)
    prefiller = world.prefiller_ranks(kv, 1)[0]
    prefiller.compute(page_table(kv.groups, 4 * CHUNK, CHUNK))
    push = await world.open(prefiller, decoder, "a", 4, keys=ABC_)
    assert (push.num_cached, push.num_sent) == (2, 2)
    fill(push, *range(4))
    await settled(asyncio.ensure_future(push.finish()))
    pages = await decoder.read("a")
    assert len(pages) == 2
    decoder.check_elements(push.table, pages, first=2)
    decoder.receiver.consumed("a")
    cache.adopt("a")


@pytest.mark.parametrize("how", ["it is cancelled", "it expires", "its write fails", "it is aborted", "ready, then so"])
async def test_whatever_ends_it_unpins(world: World, how: str) -> None:
    cache = FakeEngineCache(ABCD[:2])
    decoder, prefiller = await world.decoder(num_pages=6, cache=cache), world.prefiller()
    if how != "ready, then so":
        prefiller.agent.script = hold
    push = await world.open(prefiller, decoder, "a", 4, keys=ABC_, timeout_s=0.3 if how == "it expires" else 30.0)
    assert cache.pinned
    fill(push, *range(4))
    if how == "ready, then so":
        await settled(asyncio.ensure_future(push.finish()))
        await until(lambda: decoder.holding("a") is Holding.READY)
        assert decoder.receiver.cancel("a")
    else:
        write = await next_held(prefiller.agent)
        if how == "it is cancelled":
            decoder.receiver.cancel("a")
        elif how == "it is aborted":
            push.abort("not needed")
        elif how == "its write fails":
            write.fail(TransferError("broken"))
        if how != "its write fails":
            await settled(asyncio.ensure_future(push.failed.wait()))
            write.land()
        with pytest.raises(AttemptLost):
            await settled(asyncio.ensure_future(push.finish()))
    await until(lambda: not cache.pinned)
    await world.proxy.next(wire.KvReleased, "a")


async def test_a_receiver_that_closes_keeps_nothing_pinned(world: World) -> None:
    cache = FakeEngineCache(ABCD[:2])
    decoder, prefiller = await world.decoder(num_pages=6, cache=cache), world.prefiller()
    world.decoders.clear()  # its pages are not free at the end: nobody told it that the writes have ended
    await world.open(prefiller, decoder, "a", 4, keys=ABC_)
    await decoder.receiver.aclose()
    assert cache.pinned == {}


async def test_a_prefiller_that_vanishes_leaves_no_pin(world: World) -> None:
    cache = FakeEngineCache(ABCD[:2])
    config = ReceiverConfig(heartbeat_s=0.05, writer_timeout_s=0.3)
    decoder, prefiller = await world.decoder(num_pages=6, cache=cache, config=config), world.prefiller()
    await world.open(prefiller, decoder, "a", 4, keys=ABC_)
    prefiller.die()
    await until(lambda: not cache.pinned)
    prefiller.die(decoder)


class BrokenCache(FakeEngineCache):
    """Raises, or answers what cannot be."""

    def __init__(self, answer: int | Exception) -> None:
        super().__init__()
        self._answer = answer

    def pin(self, attempt: str, keys: Sequence[bytes]) -> int:
        self.pinned[attempt] = tuple(keys)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize("answer", [-1, 4, 10**9, RuntimeError("a bug")], ids=str)
async def test_an_engine_that_fails_costs_a_transfer_and_nothing_else(world: World, answer: int | Exception) -> None:
    cache = BrokenCache(answer)
    decoder, prefiller = await world.decoder(num_pages=6, cache=cache), world.prefiller()
    push = await world.open(prefiller, decoder, "a", 4, keys=ABC_)
    assert (push.num_cached, cache.pinned) == (0, {})
    fill(push, *range(4))
    await settled(asyncio.ensure_future(push.finish()))
    assert decoder.bytes_of(await decoder.read("a")) == [1, 2, 3, 4]
    decoder.receiver.consumed("a")
