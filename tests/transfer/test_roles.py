"""Sender and receiver: the way it should go, whole and page by page, and what a cancel leaves behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.transfer_world import (
    LIMIT_S,
    PAGE_BYTES,
    PATIENT,
    World,
    fill,
    hold,
    next_held,
    settled,
    until,
)
from transfer import wire
from transfer.errors import AttemptLost, ReservationRefused
from transfer.memory.reservations import Holding
from transfer.plan.tags import tag_of

# ── the way it should go ────────────────────────────────────────────────────────────────────────────────────────────


async def test_from_reservation_to_release(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    push = await world.open(prefiller, decoder, num_pages=3)
    waiting = asyncio.create_task(decoder.receiver.wait_ready("a"))
    fill(push, 7, 5)
    await asyncio.sleep(0)
    fill(push, 6)
    num_bytes, seconds = await push.finish()
    await push.wait_ended()
    assert (num_bytes, seconds >= 0.0) == (3 * PAGE_BYTES, True)

    ready = await world.proxy.next(wire.KvReady, "a")
    assert (ready.num_pages, ready.num_bytes, ready.epoch) == (3, num_bytes, decoder.agent.epoch)
    assert (await settled(waiting)).num_tokens == 12
    pages = decoder.receiver.take("a")
    assert decoder.bytes_of(pages) == [8, 6, 7]
    assert decoder.receiver.cancel("a") is False, "a reader is not robbed of its pages"
    decoder.receiver.consumed("a")
    released = await world.proxy.next(wire.KvReleased, "a")
    assert (released.num_pages, released.reason) == (3, "consumed")
    assert decoder.receiver.cancel("a") is True
    assert world.proxy.count(wire.KvFailed, "a") == 0


async def test_the_agent_hears_of_the_tag_when_pages_are_granted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    prepared: list[bytes] = []
    monkeypatch.setattr(prefiller.agent, "prepare", prepared.append)
    push = await world.open(prefiller, decoder)
    assert prepared == [tag_of("a")]
    push.abort("enough")


async def test_a_receiver_at_an_address_of_ipv6(world: World) -> None:
    decoder, prefiller = await world.decoder(config=replace(PATIENT, host="::1")), world.prefiller()
    assert {one.address for one in decoder.receiver.endpoints} == {f"tcp://[::1]:{decoder.receiver.endpoints[0].port}"}
    push = await world.open(prefiller, decoder)
    fill(push, 0, 1)
    await push.finish()
    assert (await decoder.receiver.wait_ready("a")).num_tokens == 8
    decoder.receiver.take("a")
    decoder.receiver.consumed("a")


async def test_one_session_serves_many_attempts(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    for attempt in ("a", "b", "c"):
        push = await world.open(prefiller, decoder, attempt)
        fill(push, 0, 1)
        await push.finish()
        await decoder.receiver.wait_ready(attempt)
        decoder.receiver.take(attempt)
        decoder.receiver.consumed(attempt)
    assert prefiller.agent.num_users(decoder.agent.epoch) == 1


async def test_whole_requests_are_served_in_order_under_contention(world: World) -> None:
    """Twenty requests of one to four pages, a buffer of five: nobody waits for ever, nobody is overtaken."""
    decoder = await world.decoder(num_pages=5)
    prefillers = [world.prefiller(), world.prefiller()]
    opened: list[str] = []

    async def serve(number: int) -> None:
        attempt, num_pages = f"attempt-{number:02}", number % 4 + 1
        push = await world.open(prefillers[0], decoder, attempt, num_pages)
        opened.append(attempt)
        fill(push, *range(num_pages))
        await push.finish()
        await decoder.receiver.wait_ready(attempt)
        pages = decoder.receiver.take(attempt)
        await asyncio.sleep(0)
        assert decoder.bytes_of(pages) == [page + 1 for page in range(num_pages)]
        decoder.receiver.consumed(attempt)

    await settled(asyncio.gather(*(serve(number) for number in range(20))))  # type: ignore[arg-type]
    assert opened == sorted(opened)


async def test_attempts_of_two_prefillers_share_the_buffer(world: World) -> None:
    decoder = await world.decoder(num_pages=2)
    one, other = world.prefiller(), world.prefiller()
    first = await world.open(one, decoder, "a", 2)
    second = asyncio.create_task(world.open(other, decoder, "b", 2))
    await until(lambda: decoder.pages.num_queued == 1)
    fill(first, 0, 1)
    await first.finish()
    await decoder.receiver.wait_ready("a")
    decoder.receiver.take("a")
    decoder.receiver.consumed("a")
    push = await settled(second)
    fill(push, 2, 3)
    await push.finish()
    await decoder.receiver.wait_ready("b")
    assert decoder.bytes_of(decoder.receiver.take("b")) == [3, 4]
    decoder.receiver.consumed("b")


async def test_filled_pages_travel_together_up_to_a_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.roles.rank_push.MAX_WRITE_BYTES", 2 * PAGE_BYTES)
    decoder, prefiller = await world.decoder(num_pages=5), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder, num_pages=5)
    fill(push, 0, 1, 2, 3, 4)
    sizes = []
    for _ in range(3):
        write = await next_held(prefiller.agent)
        sizes.append(write.num_bytes // PAGE_BYTES)
        write.land()
    await push.finish()
    assert sizes == [2, 2, 1]
    decoder.receiver.cancel("a")
    await world.proxy.next(wire.KvReleased, "a")


# ── cancelled ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_cancel_while_queued(world: World) -> None:
    decoder, prefiller = await world.decoder(num_pages=2), world.prefiller()
    first = await world.open(prefiller, decoder, "a", 2)
    second = asyncio.create_task(world.open(prefiller, decoder, "b", 2))
    await until(lambda: decoder.pages.num_queued == 1)
    assert decoder.receiver.cancel("b") is True
    with pytest.raises(ReservationRefused, match="cancelled"):
        await settled(second)
    await world.proxy.next(wire.KvFailed, "b")
    assert (await world.proxy.next(wire.KvReleased, "b")).num_pages == 0
    first.abort("not needed")
    await world.proxy.next(wire.KvReleased, "a")


async def test_cancel_while_a_write_is_under_way(world: World) -> None:
    """The push is over at once; its pages are nobody's until the write has ended."""
    decoder, prefiller = await world.decoder(num_pages=2), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder, "a", 2)
    fill(push, 0)
    write = await next_held(prefiller.agent)
    waiting = asyncio.create_task(decoder.receiver.wait_ready("a"))
    await asyncio.sleep(0)

    assert decoder.receiver.cancel("a", "the client left") is False
    with pytest.raises(AttemptLost, match="the client left"):
        await settled(waiting)
    with pytest.raises(AttemptLost):
        await settled(asyncio.create_task(push.finish()))
    assert push.failed.is_set()
    assert decoder.pages.num_quarantined == 2
    with pytest.raises(AttemptLost):
        await decoder.receiver.wait_ready("a")
    queued = asyncio.create_task(world.open(prefiller, decoder, "b", 1))
    await until(lambda: decoder.pages.num_queued == 1)

    write.land()
    await push.wait_ended()
    released = await world.proxy.next(wire.KvReleased, "a")
    assert (released.num_pages, released.reason) == (2, "cancelled")
    (await settled(queued)).abort("not needed")
    await world.proxy.next(wire.KvReleased, "b")
    assert world.proxy.count(wire.KvReady, "a") == 0


@pytest.mark.parametrize("lands", ["before the cancel arrives", "after"])
async def test_cancel_meets_writes_done(world: World, lands: str) -> None:
    """The last write ends at the sender while the decoder withdraws the attempt: freed once, never ready."""
    decoder, prefiller = await world.decoder(num_pages=2), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder, "a", 2)
    fill(push, 0, 1)
    write = await next_held(prefiller.agent)
    if lands.startswith("before"):
        write.land()
        decoder.receiver.cancel("a")  # both messages are on their way now
        await push.finish()
    else:
        decoder.receiver.cancel("a")
        with pytest.raises(AttemptLost):
            await push.finish()
        write.land()
    await world.proxy.next(wire.KvReleased, "a")
    assert decoder.pages.get("a") is None


async def test_cancel_before_the_reservation_arrives(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    assert decoder.receiver.cancel("a", "the client left") is True
    with pytest.raises(ReservationRefused, match="the attempt is over: the client left"):
        await world.open(prefiller, decoder, "a")
    with pytest.raises(AttemptLost, match="the client left"):
        await decoder.receiver.wait_ready("a")


async def test_the_graveyard_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.roles.receiver.MAX_TOMBSTONES", 2)
    decoder = await world.decoder()
    for attempt in ("a", "b", "c"):
        decoder.receiver.cancel(attempt)
    assert list(decoder.receiver._tombstones) == ["b", "c"]


async def test_abort_by_the_prefiller(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    push = await world.open(prefiller, decoder)
    fill(push, 0)
    waiting = asyncio.create_task(decoder.receiver.wait_ready("a"))
    await asyncio.sleep(0)
    push.abort("no longer wanted")
    push.abort("again")
    await push.wait_ended()
    with pytest.raises(AttemptLost, match="no longer wanted"):
        await settled(waiting)
    await world.proxy.next(wire.KvReleased, "a")
    assert push.failure == "no longer wanted"


async def test_a_push_that_nobody_wants_is_never_announced(world: World) -> None:
    """Every byte is there, but the answer ended at the prefiller: that is not the decoder's to read."""
    decoder, prefiller = await world.decoder(), world.prefiller()
    push = await world.open(prefiller, decoder)
    fill(push, 0, 1)
    await until(lambda: len(push._ranks[0].receipts) > 0)
    push.abort("the answer has ended")
    assert (await world.proxy.next(wire.KvReleased, "a")).reason == "failed"
    assert world.proxy.count(wire.KvReady, "a") == 0


async def test_abort_after_success_changes_nothing(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    push = await world.open(prefiller, decoder)
    fill(push, 0, 1)
    await push.finish()
    push.abort("too late")
    assert push.failure is None
    await decoder.receiver.wait_ready("a")
    decoder.receiver.take("a")
    decoder.receiver.consumed("a")
    await world.proxy.next(wire.KvReleased, "a")
    assert world.proxy.count(wire.KvFailed, "a") == 0


async def test_a_cancelled_open_leaves_the_queue(world: World) -> None:
    decoder, prefiller = await world.decoder(num_pages=2), world.prefiller()
    first = await world.open(prefiller, decoder, "a", 2)
    second = asyncio.create_task(world.open(prefiller, decoder, "b", 2))
    await until(lambda: decoder.pages.num_queued == 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settled(second)
    await world.proxy.next(wire.KvReleased, "b")
    assert decoder.pages.num_queued == 0
    first.abort("not needed")
    await world.proxy.next(wire.KvReleased, "a")


@pytest.mark.parametrize("where", ["while the grant travels", "after it has arrived"])
async def test_an_open_cancelled_in_the_instant_of_its_grant_gives_the_pages_back(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    decoder, prefiller = await world.decoder(num_pages=2), world.prefiller()
    first = await world.open(prefiller, decoder, "a", 2)
    second = asyncio.create_task(world.open(prefiller, decoder, "b", 2))
    await until(lambda: decoder.pages.num_queued == 1)
    (session,) = prefiller.sender._sessions.values()
    owner, name = (decoder.receiver, "_grant") if where.startswith("while") else (session, "_granted")
    original = getattr(owner, name)

    def grant_and_cancel(*args: Any) -> None:
        original(*args)
        second.cancel()

    monkeypatch.setattr(owner, name, grant_and_cancel)
    first.abort("not needed")
    with pytest.raises(asyncio.CancelledError):
        await settled(second)
    assert (await world.proxy.next(wire.KvReleased, "b")).num_pages == 2


async def test_cancel_in_the_instant_of_the_grant(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's cancel is read right behind its grant: the attempt was never open, and the caller is told so."""
    decoder, prefiller = await world.decoder(num_pages=2), world.prefiller()
    first = await world.open(prefiller, decoder, "a", 2)
    second = asyncio.create_task(world.open(prefiller, decoder, "b", 2))
    await until(lambda: decoder.pages.num_queued == 1)
    (session,) = prefiller.sender._sessions.values()
    granted = session._granted

    def grant_and_cancel(message: wire.Reserved) -> None:
        granted(message)
        session._cancelled("b")

    monkeypatch.setattr(session, "_granted", grant_and_cancel)
    first.abort("not needed")
    with pytest.raises(ReservationRefused, match="cancelled"):
        await settled(second)
    assert (await world.proxy.next(wire.KvReleased, "b")).num_pages == 2


async def test_a_cancelled_wait_does_not_disturb_others(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    push = await world.open(prefiller, decoder)
    one, other = (asyncio.create_task(decoder.receiver.wait_ready("a")) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    fill(push, 0, 1)
    await push.finish()
    assert (await settled(other)).attempt == "a"
    decoder.receiver.cancel("a")
    await world.proxy.next(wire.KvReleased, "a")


async def test_an_attempt_is_pushed_once_at_a_time(world: World) -> None:
    """A leg that was sent twice must not speak for the pages of the first."""
    decoder, prefiller = await world.decoder(), world.prefiller()
    push = await world.open(prefiller, decoder, "a")
    with pytest.raises(ReservationRefused, match="already"):
        await world.open(prefiller, decoder, "a")
    with pytest.raises(ReservationRefused):
        await world.open(world.prefiller(), decoder, "a")
    fill(push, 0, 1)
    await push.finish()
    await decoder.receiver.wait_ready("a")
    assert decoder.bytes_of(decoder.receiver.take("a")) == [1, 2]
    decoder.receiver.consumed("a")


# ── page by page ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_page_by_page(world: World) -> None:
    decoder, prefiller = await world.decoder(config=replace(PATIENT, whole_requests=False)), world.prefiller()
    push = await world.open(prefiller, decoder, num_pages=3)
    assert decoder.pages.num_free == 3
    fill(push, 0, 1, 2)
    await push.finish()
    await decoder.receiver.wait_ready("a")
    assert decoder.bytes_of(decoder.receiver.take("a")) == [1, 2, 3]
    decoder.receiver.consumed("a")


async def test_page_by_page_two_requests_can_block_each_other_until_a_deadline(world: World) -> None:
    """The deadlock that whole requests prevent: each holds half of what it needs. Time ends it, and leaves nothing."""
    decoder = await world.decoder(num_pages=2, config=replace(PATIENT, whole_requests=False))
    prefiller = world.prefiller()
    short = await world.open(prefiller, decoder, "short", 2, timeout_s=0.3)
    long = await world.open(prefiller, decoder, "long", 2)
    for push in (short, long):
        fill(push, 0, 1)
    await until(lambda: decoder.pages.num_queued == 2)
    assert decoder.pages.num_free == 0
    with pytest.raises(AttemptLost):
        await settled(asyncio.create_task(short.finish()))
    await world.proxy.next(wire.KvReleased, "short")
    await settled(asyncio.create_task(long.finish()))
    decoder.receiver.cancel("long")
    await world.proxy.next(wire.KvReleased, "long")


async def test_page_by_page_an_abort_ends_the_wait_for_the_next_page(world: World) -> None:
    decoder = await world.decoder(num_pages=2, config=replace(PATIENT, whole_requests=False))
    prefiller = world.prefiller()
    one = await world.open(prefiller, decoder, "a", 2)
    other = await world.open(prefiller, decoder, "b", 2)
    fill(one, 0, 1)
    await until(lambda: decoder.pages.num_queued == 1)
    one.abort("not needed")
    async with asyncio.timeout(LIMIT_S):
        await one.wait_ended()
    await world.proxy.next(wire.KvReleased, "a")
    fill(other, 2, 3)
    await other.finish()
    decoder.receiver.cancel("b")
    await world.proxy.next(wire.KvReleased, "b")


async def test_page_by_page_a_cancelled_head_lets_those_behind_it_pass(world: World) -> None:
    """It keeps what it has, in quarantine, and no longer stands in the way of one that fits beside it."""
    decoder = await world.decoder(num_pages=4, config=replace(PATIENT, whole_requests=False))
    raw = world.stranger(decoder)
    await raw.reserve("head", 4, num_now=2)
    await raw.reserve("other", 1)
    head, small = (raw.request(attempt, size, num_now=now) for attempt, size, now in (("head", 4, 2), ("small", 1, 1)))
    await raw.say(head)
    await raw.say(small)
    await raw.round_trip()
    assert decoder.pages.num_queued == 2
    decoder.receiver.cancel("head")
    assert decoder.pages.get("small").holding is Holding.RESERVED
    for attempt in ("head", "other", "small"):
        await raw.say(wire.WritesEnded(attempt=attempt, reason="over"))
        await world.proxy.next(wire.KvReleased, attempt)
