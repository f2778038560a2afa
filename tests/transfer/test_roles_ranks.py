"""Prefillers and decoders of several tensor-parallel ranks: who writes what to whom, and what rank 0 grants for all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import msgspec
import pytest

from tests.fakes.suspension import Suspensions
from tests.fakes.transfer_world import (
    LIMIT_S,
    PATIENT,
    QUICK,
    Decoder,
    DecoderRank,
    Prefiller,
    World,
    cut_off,
    hold,
    next_held,
    settled,
    until,
)
from transfer import wire
from transfer.agents.mock import Fail, MockWrite, in_turn
from transfer.errors import AttemptLost, HandshakeRefused, PeerLost, ReservationRefused, TransferError
from transfer.memory.reservations import Holding, WriterState
from transfer.plan.feeds import writers_of
from transfer.plan.layout import KvLayout, LayerKv
from transfer.plan.ranks import Rank
from transfer.roles.control import MAX_MESSAGE_BYTES, ControlSocket
from transfer.roles.handshake import Identity
from transfer.roles.notifier import Notifier
from transfer.roles.push import Push
from transfer.roles.rank_slab import OtherSlabs
from transfer.roles.receiver import VANISHED, Receiver

CHUNK = 2


def heads(num_heads: int) -> KvLayout:
    return KvLayout((LayerKv(num_heads, 3, 2),) * 2, CHUNK, 8, "int64")


LATENT = KvLayout((LayerKv(1, 5, 0, "mla"),) * 2, CHUNK, 8, "int64")
MIXED = KvLayout(
    (LayerKv(8, 2, 1, "sliding", 4), LayerKv(2, 3, 3), LayerKv(8, 2, 1, "sliding", 4), LayerKv(4, 2, 2)),
    CHUNK,
    8,
    "int64",
)
"""Head counts that differ by layer, in two kinds of groups: a rank may write to another in some layers only."""
MODELS = {"2 heads": heads(2), "8 heads": heads(8), "latent": LATENT, "mixed": MIXED}
DIVISIONS = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 4), (4, 2), (4, 4), (8, 2), (2, 8)]

NUM_TOKENS = 3 * CHUNK - 1


async def open_push(
    world: World, prefiller: Prefiller, decoder: Decoder, attempt: str = "a", timeout_s: float = 30.0
) -> Push:
    return await prefiller.sender.open(world.params(decoder, attempt, timeout_s), num_tokens=NUM_TOKENS)


async def write_all(prefiller: Prefiller, push: Push) -> None:
    prefiller.compute(push.table)
    for ordinal in range(len(push.table)):
        push.page_filled(ordinal, ordinal)
    async with asyncio.timeout(LIMIT_S):
        await push.finish()


async def read_all(decoder: Decoder, push: Push, attempt: str = "a") -> None:
    decoder.check_elements(push.table, await decoder.read(attempt))
    decoder.receiver.consumed(attempt)


# ── every head, once ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("model", "division"), [*product(MODELS, DIVISIONS)])
async def test_every_element_arrives_and_ready_means_all_of_them(
    world: World, model: str, division: tuple[int, int]
) -> None:
    """Sender ranks write one after the other; all ranks are ready with the last of those that feed any of them. Each
    connects to those that it writes to, and to no other."""
    kv, (num_writers, num_readers) = MODELS[model], division
    decoder = await world.decoder_ranks(kv, num_readers, num_pages=8)
    prefillers = world.prefiller_ranks(kv, num_writers)
    pushes = [await open_push(world, prefiller, decoder) for prefiller in prefillers]
    fed_by = [writers_of(kv, num_writers, Rank(num_readers, index)) for index in range(num_readers)]
    missing = set().union(*fed_by)
    for writer, (prefiller, push) in enumerate(zip(prefillers, pushes, strict=True)):
        connected = [prefiller.agent.num_users(agent.epoch) for agent in decoder.agents]
        assert connected == [int(writer in writers) for writers in fed_by]
        assert list(prefiller.sender._sessions) == [decoder.receiver.endpoint.address]
        await write_all(prefiller, push)
        if writer in missing:
            await until(lambda w=writer: is_done(decoder, w))  # type: ignore[misc]
        missing.discard(writer)
        assert decoder.holding("a") is (Holding.RESERVED if missing else Holding.READY)
    await read_all(decoder, pushes[0])
    await world.proxy.all_ranks(wire.KvReleased, "a", num_readers)
    assert world.proxy.ranks(wire.KvReady, "a") == list(range(num_readers))
    assert world.proxy.ranks(wire.KvReleased, "a") == list(range(num_readers))
    assert world.proxy.count(wire.KvFailed, "a") == 0


def is_done(decoder: Decoder, writer: int) -> bool:
    return bool(decoder.pages.get("a").writers[writer].state is WriterState.DONE)


async def test_a_rank_that_feeds_nobody_succeeds_without_a_byte(world: World) -> None:
    """The latent is whole on both prefiller ranks, and the decoder's one rank gets it from the first."""
    decoder = await world.decoder_ranks(LATENT, 1)
    _, idle = world.prefiller_ranks(LATENT, 2)
    push = await open_push(world, idle, decoder)
    assert all(push.is_present(ordinal) for ordinal in range(len(push.table))), "nothing that it fills matters"
    push.page_filled(0, 0)
    assert await push.finish() == (0, 0.0)
    await push.wait_ended()
    assert decoder.pages.get("a") is None
    other = await open_push(world, idle, decoder, "b")
    other.abort("not needed")
    await other.wait_ended()


async def test_ready_says_what_all_writers_have_moved(world: World) -> None:
    decoder = await world.decoder_ranks(heads(2), 1)
    pushes = [(p, await open_push(world, p, decoder)) for p in world.prefiller_ranks(heads(2), 2)]
    for prefiller, push in pushes:
        await write_all(prefiller, push)
    ready = await world.proxy.next(wire.KvReady, "a")
    assert ready.num_bytes == 3 * decoder.layout.page_bytes
    await read_all(decoder, pushes[0][1])


async def test_the_bytes_of_all_ranks_are_told_once(world: World) -> None:
    """The proxy adds up what the ranks say."""
    decoder = await world.decoder_ranks(heads(2), 2)
    (prefiller,) = world.prefiller_ranks(heads(2), 1)
    await write_all(prefiller, push := await open_push(world, prefiller, decoder))
    await world.proxy.all_ranks(wire.KvReady, "a", 2)
    told = [signal for signal in world.proxy.heard if isinstance(signal, wire.KvReady)]
    assert sum(signal.num_bytes for signal in told) == 2 * 3 * decoder.layout.page_bytes
    assert {(signal.epoch, signal.num_pages) for signal in told} == {(decoder.agent.epoch, 3)}
    await read_all(decoder, push)


async def test_the_smallest_rank_says_how_many_pages_there_are(world: World) -> None:
    """Its tags lie elsewhere than in a larger slab, and are found all the same."""
    own, other = (Identity("tiny", heads(2).of_rank(2, index)) for index in range(2))
    for sizes in ((4, 9), (9, 4)):
        decoder = await world.decoder(sizes[0], identity=own, others=[DecoderRank(world.fabric, sizes[1], other)])
        assert decoder.pages.num_pages == 4
        for prefiller in world.prefiller_ranks(heads(2), 2):
            await write_all(prefiller, push := await open_push(world, prefiller, decoder, f"{sizes}"))
        await read_all(decoder, push, f"{sizes}")


async def test_a_receiver_is_made_with_all_ranks_of_its_decoder(world: World) -> None:
    ranks = [DecoderRank(world.fabric, 4, Identity("tiny", heads(4).of_rank(4, index))) for index in range(4)]
    stranger = DecoderRank(world.fabric, 4, Identity("other", heads(4).of_rank(4, 1)))
    half = DecoderRank(world.fabric, 4, Identity("tiny", heads(4).of_rank(2, 1)))
    slabs = [await rank.slab.start() for rank in (*ranks, stranger, half)]

    def made(index: int, *others: int, **options: Any) -> Receiver:
        rank, given = ranks[index], OtherSlabs([slabs[other] for other in others], ranks[0].slab.delivered)
        return Receiver(rank.agent, rank.buffer, rank.slab._identity, PATIENT, others=given, **options)

    for wrong, why in [
        ((0,), "needs the slabs of ranks 1 to 3"),
        ((0, 1, 2), "needs the slabs of ranks 1 to 3"),
        ((0, 1, 3, 2), "needs the slabs of ranks 1 to 3"),
        ((0, 1, 2, 3, 3), "needs the slabs of ranks 1 to 3"),
        ((0, 5, 2, 3), "needs the slabs of ranks 1 to 3"),
        ((0, 4, 2, 3), "model"),
        ((1, 0, 2, 3), "on its rank 0"),
    ]:
        with pytest.raises(TransferError, match=why):
            made(*wrong)
    with pytest.raises(TransferError, match="several ranks"):
        made(0, 1, 2, 3, intake=cast(Any, object()))


async def test_metadata_that_fits_into_no_message_is_refused(world: World) -> None:
    """The sender is told: ZMQ would drop the connection without a word."""
    decoder = await world.decoder_ranks(heads(2), 2)
    slabs = decoder.receiver._slabs
    slabs[1] = msgspec.structs.replace(slabs[1], metadata=bytes(MAX_MESSAGE_BYTES))
    one, other = world.prefiller_ranks(heads(2), 2)
    with pytest.raises(HandshakeRefused, match="metadata"):
        await open_push(world, other, decoder)
    push = await open_push(world, one, decoder)  # its heads go elsewhere, and it is not told of that rank
    push.abort("not needed")


# ── joining ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_rank_that_joins_late_has_its_pages_at_once(world: World) -> None:
    """Others that came before it wait for room; these pages were granted with the first rank."""
    decoder = await world.decoder_ranks(heads(2), 1)
    one, other = world.prefiller_ranks(heads(2), 2)
    first = await open_push(world, one, decoder, "a")
    waiting = asyncio.create_task(open_push(world, one, decoder, "b"))
    await until(lambda: decoder.pages.num_queued == 1)
    late = await settled(asyncio.create_task(open_push(world, other, decoder, "a")))
    for prefiller, push in ((one, first), (other, late)):
        await write_all(prefiller, push)
    await read_all(decoder, first)
    (await settled(waiting)).abort("not needed")
    await world.proxy.next(wire.KvReleased, "b")


async def test_ranks_must_ask_for_the_same(world: World) -> None:
    decoder = await world.decoder_ranks(heads(2), 1)
    one, other = world.prefiller_ranks(heads(2), 2)
    first = await open_push(world, one, decoder)
    with pytest.raises(ReservationRefused, match="another num_pages"):
        await other.sender.open(world.params(decoder), num_tokens=CHUNK)
    assert decoder.holding("a") is Holding.RESERVED, "who asked wrongly is not of the attempt"
    await write_all(one, first)
    await write_all(other, push := await open_push(world, other, decoder))
    await read_all(decoder, push)


# ── in one order ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("second", ["ab", "ba"])
async def test_two_attempts_in_opposite_orders_do_not_block_each_other(world: World, second: str) -> None:
    """Room for one of them. Rank 0 of the prefiller begins with `a`, rank 1 with either; both then push the other."""
    decoder = await world.decoder_ranks(heads(2), 2, num_pages=3)
    prefillers = world.prefiller_ranks(heads(2), 2)
    tasks = []
    for prefiller, attempts in zip(prefillers, ("ab", second), strict=True):
        for attempt in attempts:

            async def serve(prefiller: Prefiller = prefiller, attempt: str = attempt) -> None:
                await write_all(prefiller, await open_push(world, prefiller, decoder, attempt))

            tasks.append(task := asyncio.create_task(serve()))
            sessions = prefiller.sender._sessions
            await until(lambda t=task, s=sessions, a=attempt: t.done() or any(x.is_open(a) for x in s.values()))  # type: ignore[misc]
    for attempt in ("a", "b"):
        await until(lambda a=attempt: decoder.pages.get(a) is not None)  # type: ignore[misc]
        await decoder.read(attempt)
        decoder.receiver.consumed(attempt)
    await settled(asyncio.gather(*tasks))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["the decoder cancels", "it is cancelled itself", "its time runs out"])
async def test_a_rank_that_waits_its_turn_leaves_nothing(world: World, how: str) -> None:
    decoder = await world.decoder_ranks(heads(2), 2, num_pages=3)
    holder, waiter = world.prefiller_ranks(heads(2), 2)
    before = await open_push(world, holder, decoder, "before")
    opening = asyncio.create_task(open_push(world, waiter, decoder, "a", 0.1 if how.startswith("its") else 30.0))
    await until(lambda: decoder.pages.num_queued == 1)
    if how.startswith("the"):
        decoder.receiver.cancel("a")
    elif how.startswith("it is"):
        opening.cancel()
    with pytest.raises((ReservationRefused, asyncio.CancelledError)):
        await settled(opening)
    await world.proxy.all_ranks(wire.KvReleased, "a", 2)
    assert decoder.pages.get("a") is None
    before.abort("not needed")
    await world.proxy.all_ranks(wire.KvReleased, "before", 2)
    assert not any(session._open for session in waiter.sender._sessions.values())


@pytest.mark.parametrize("is_joined", [True, False], ids=["the other rank waits with it", "it waits alone"])
async def test_a_rank_that_dies_while_it_waits_its_turn_is_gone_after_the_writers_timeout(
    world: World, is_joined: bool
) -> None:
    """Nobody tells of its death; no page is held for it, on any rank, and who comes behind it is served."""
    decoder = await world.decoder_ranks(heads(2), 2, num_pages=3, config=QUICK)
    holder = world.prefiller_ranks(heads(2), 2)
    befores = [await open_push(world, prefiller, decoder, "before") for prefiller in holder]
    victim, other = world.prefiller_ranks(heads(2), 2)[::-1]
    waiting = [asyncio.create_task(open_push(world, victim, decoder))]
    await until(lambda: decoder.pages.num_queued == 1)
    if is_joined:
        waiting.append(asyncio.create_task(open_push(world, other, decoder)))
        await until(lambda: len(decoder.pages.get("a").writers) == 2)
    cut_off(victim.sender)
    await world.proxy.all_ranks(wire.KvReleased, "a", 2)
    assert {signal.reason for signal in world.proxy.heard if isinstance(signal, wire.KvFailed)} == {VANISHED}
    assert decoder.pages.get("a") is None
    for push in befores:
        push.abort("not needed")
    await world.proxy.all_ranks(wire.KvReleased, "before", 2)
    pushes = [await open_push(world, prefiller, decoder, "next") for prefiller in holder]
    for prefiller, push in zip(holder, pushes, strict=True):
        await write_all(prefiller, push)
    await read_all(decoder, pushes[0], "next")
    for task in waiting[:1]:
        task.cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, ReservationRefused | asyncio.CancelledError) for result in results)


# ── one of two ranks fails ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["fails", "vanishes", "is aborted", "all are cancelled", "the time runs out"])
async def test_pages_are_nobodys_until_every_rank_has_ended(world: World, how: str) -> None:
    """One rank's write is still under way when the other one is gone: the pages wait for it."""
    config = QUICK if how == "vanishes" else PATIENT
    decoder = await world.decoder_ranks(heads(2), 1, num_pages=3, config=config)
    one, other = world.prefiller_ranks(heads(2), 2)
    timeout_s = 0.3 if how.startswith("the") else 30.0
    for prefiller in (one, other):
        prefiller.mute()
        prefiller.agent.script = hold
    pushes = [await open_push(world, prefiller, decoder, timeout_s=timeout_s) for prefiller in (one, other)]
    for push in pushes:
        push.page_filled(0, 0)
    lost, held = [await next_held(prefiller.agent) for prefiller in (one, other)]
    if how == "fails":
        lost.fail(TransferError("no such page"))
    elif how == "vanishes":
        one.die(decoder)
    elif how == "is aborted":
        pushes[0].abort("not needed")
        lost.land()
    elif how == "all are cancelled":
        decoder.receiver.cancel("a", "the client left")
        lost.land()
    await world.proxy.next(wire.KvFailed, "a")
    with pytest.raises(AttemptLost):
        await settled(asyncio.create_task(pushes[1].finish()))
    assert decoder.pages.num_quarantined == 3
    queued = asyncio.create_task(open_push(world, other, decoder, "next"))
    await until(lambda: decoder.pages.num_queued == 1)
    held.land()
    if not lost.has_landed and how.startswith("the"):
        assert decoder.pages.num_quarantined == 3, "the first one's write may still land"
        lost.land()
    (await settled(queued)).abort("not needed")
    await world.proxy.next(wire.KvReleased, "next")
    assert world.proxy.ranks(wire.KvFailed, "a") == [0]
    assert world.proxy.ranks(wire.KvReleased, "a") == [0]
    assert world.proxy.count(wire.KvReady, "a") == 0
    if not lost.future.done():
        lost.land()


async def test_one_of_two_ranks_fails_after_the_other_is_done(world: World) -> None:
    decoder = await world.decoder_ranks(heads(2), 1)
    one, other = world.prefiller_ranks(heads(2), 2)
    done, failing = [await open_push(world, prefiller, decoder) for prefiller in (one, other)]
    await write_all(one, done)
    other.agent.script = in_turn(Fail(TransferError("broken")))
    failing.page_filled(0, 0)
    assert (await world.proxy.next(wire.KvReleased, "a")).num_pages == 3
    assert world.proxy.count(wire.KvReady, "a") == 0


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_push_that_fails_at_one_rank_is_over_at_all(world: World, failing: int) -> None:
    """Its write to the other rank goes on landing: until then the pages are kept for it, on every rank."""
    decoder = await world.decoder_ranks(heads(2), 2, num_pages=3)
    (prefiller,) = world.prefiller_ranks(heads(2), 1)
    prefiller.mute()
    prefiller.agent.script = hold
    push = await open_push(world, prefiller, decoder)
    push.page_filled(0, 0)
    writes = await held_by_rank(prefiller, decoder)
    writes[failing].fail(TransferError("broken"))
    await settled(asyncio.ensure_future(push.failed.wait()))
    assert push.failure == "broken"
    decoder.receiver.cancel("a")  # whatever the decoder does about it
    await world.proxy.all_ranks(wire.KvFailed, "a", 2)
    assert decoder.pages.num_quarantined == 3
    assert not push._ended.done()
    writes[1 - failing].land()
    await world.proxy.all_ranks(wire.KvReleased, "a", 2)
    assert world.proxy.ranks(wire.KvFailed, "a") == [0, 1]
    await push.wait_ended()


async def held_by_rank(prefiller: Prefiller, decoder: Decoder) -> list[MockWrite]:
    """One held write to each."""
    writes = {write.peer: write for write in [await next_held(prefiller.agent) for _ in decoder.agents]}
    return [writes[agent.epoch] for agent in decoder.agents]


async def test_a_last_word_is_said_once(world: World) -> None:
    """Who has heard it may hold a second try of the same attempt, which the first must not end."""
    decoder = await world.decoder_ranks(heads(2), 2)
    (prefiller,) = world.prefiller_ranks(heads(2), 1)
    prefiller.agent.script = hold
    push = await open_push(world, prefiller, decoder)
    push.page_filled(0, 0)
    first, second = await held_by_rank(prefiller, decoder)
    said: list[str] = []
    (session,) = prefiller.sender._sessions.values()
    release = session.release

    def note(message: Any) -> None:
        said.append(type(message).__name__)
        release(message)

    session.release = note  # type: ignore[method-assign]
    first.land()
    push.abort("not needed")
    assert said == []
    second.land()
    await push.wait_ended()
    await world.proxy.all_ranks(wire.KvReleased, "a", 2)
    assert said == ["WritesEnded"]


async def test_pages_wait_for_what_a_broken_connection_left_on_any_rank(world: World) -> None:
    """The sender's word that a write was broken off, and the word that it is dead: both wait for every rank."""
    decoder = await world.decoder_ranks(heads(2), 2, num_pages=3)
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def delivered() -> None:
        asked.set()
        await may_answer.wait()

    decoder.receiver._others = OtherSlabs([], delivered)
    for attempt, how in (("a", "breaks"), ("b", "dies")):
        asked.clear()
        may_answer.clear()
        (prefiller,) = world.prefiller_ranks(heads(2), 1)
        prefiller.agent.script = hold
        push = await open_push(world, prefiller, decoder, attempt)
        push.page_filled(0, 0)
        writes = await held_by_rank(prefiller, decoder)
        if how == "breaks":
            writes[0].land()
            writes[1].fail(TransferError("broken"))
        else:
            prefiller.die(decoder)
        await settled(asyncio.create_task(asked.wait()))  # type: ignore[arg-type]
        assert decoder.pages.num_quarantined == 3
        may_answer.set()
        await world.proxy.all_ranks(wire.KvReleased, attempt, 2)
        assert decoder.pages.num_free == 3
        for write in writes if how == "dies" else ():
            write.land()


async def test_pages_stay_in_quarantine_where_a_rank_cannot_be_asked(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = await world.decoder_ranks(heads(2), 2, num_pages=3)
    delivered = decoder.receiver._others

    async def fail() -> None:
        raise TransferError("rank 1 is gone")

    decoder.receiver._others = OtherSlabs([], fail)
    (prefiller,) = world.prefiller_ranks(heads(2), 1)
    await open_push(world, prefiller, decoder)
    prefiller.die(decoder)
    await until(lambda: "rank 1 is gone" in caplog.text)
    assert decoder.pages.num_quarantined == 3
    decoder.receiver._others = delivered
    decoder.receiver.sender_ended(prefiller.agent.epoch)
    await world.proxy.all_ranks(wire.KvReleased, "a", 2)


@pytest.mark.parametrize("which", [0, 1])
async def test_a_wrong_tag_on_any_rank_is_counted_and_its_chunks_are_forgotten(world: World, which: int) -> None:
    decoder = await world.decoder_ranks(heads(2), 2, num_pages=3)
    (prefiller,) = world.prefiller_ranks(heads(2), 1)
    keys = [b"x", b"y", b"z"]
    push = await prefiller.sender.open(world.params(decoder), num_tokens=NUM_TOKENS, keys=keys)
    await write_all(prefiller, push)
    await settled(asyncio.ensure_future(decoder.receiver.wait_ready("a")))
    decoder.buffers[which].tags[:, decoder.pages.get("a").pages[1]] = 0
    with pytest.raises(AttemptLost, match="1 of the 3 pages of attempt a were not written by it last"):
        await decoder.read("a")
    assert [decoder.receiver.num_wrong_tags, decoder.others[0].slab.num_wrong_tags] == [1 - which, which]
    if which == 1:  # rank 0 has found nothing, and is told
        decoder.receiver.consumed("a", is_wrong=True)
    assert decoder.pages.num_free == 3
    again = await prefiller.sender.open(world.params(decoder, "b"), num_tokens=NUM_TOKENS, keys=keys)
    assert not any(again.is_present(ordinal) for ordinal in range(3))
    again.abort("not needed")


async def test_a_write_that_lands_while_a_rank_copies_is_seen_there(world: World) -> None:
    decoder = await world.decoder_ranks(heads(2), 2, num_pages=3)
    (prefiller,) = world.prefiller_ranks(heads(2), 1)
    await write_all(prefiller, await open_push(world, prefiller, decoder))
    pages, slab = await decoder.read("a"), decoder.others[0].slab
    slab.check_tags("a", pages)
    decoder.others[0].buffer.tags[:, pages[2]] = 0
    with pytest.raises(AttemptLost, match="1 of the 3 pages"):
        slab.check_tags("a", pages)
    decoder.receiver.check_tags("a")
    decoder.receiver.consumed("a", is_wrong=True)


# ── whose address ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_receivers_list_must_be_all_ranks_of_one_decoder(world: World) -> None:
    decoder = await world.decoder_ranks(heads(4), 4)
    (prefiller,) = world.prefiller_ranks(heads(4), 1)
    ends = decoder.receiver.endpoints
    assert {end.address for end in ends} == {decoder.receiver.endpoint.address}
    elsewhere = wire.Endpoint(rank=3, host=ends[0].host, port=ends[0].port + 1)
    for receivers, why in [
        ([], "ranks 0, 1"),
        (ends[1:], "ranks 0, 1"),
        ([*ends[:2], ends[3]], "ranks 0, 1"),
        ([*ends, ends[3]], "ranks 0, 1"),
        ([*ends[:3], elsewhere], "at one address"),
        (ends[:2], "is rank 0 of 4, not 0 of 2"),
    ]:
        params = wire.PushParams(attempt="a", receivers=receivers, timeout_s=5.0)
        with pytest.raises(TransferError, match=why):
            await prefiller.sender.open(params, num_tokens=NUM_TOKENS)
    assert decoder.pages.get("a") is None
    shuffled = wire.PushParams(attempt="a", receivers=[ends[i] for i in (2, 0, 3, 1)], timeout_s=5.0)
    push = await prefiller.sender.open(shuffled, num_tokens=NUM_TOKENS)
    await write_all(prefiller, push)
    await read_all(decoder, push)


async def test_a_decoder_that_was_restarted_is_shaken_hands_with_anew(world: World) -> None:
    """Found out when it is asked for pages; its ranks are new ones, and written to."""
    old = await world.decoder_ranks(heads(2), 2, num_pages=3)
    (prefiller,) = world.prefiller_ranks(heads(2), 1)
    await write_all(prefiller, push := await open_push(world, prefiller, old, "before"))
    await read_all(old, push, "before")
    world.decoders.remove(old)
    await old.receiver.aclose()
    for agent in old.agents:
        agent.close()
    config = replace(PATIENT, port=old.receiver.endpoint.port)
    new = await world.decoder_ranks(heads(2), 2, num_pages=3, config=config)
    push = await settled(asyncio.create_task(open_push(world, prefiller, new)))
    await write_all(prefiller, push)
    await read_all(new, push)
    await world.proxy.all_ranks(wire.KvReleased, "a", 2)
    assert world.proxy.count(wire.KvFailed, "a") == 0


async def test_a_rank_that_cannot_be_reached_is_told_as_the_whole_decoder_is(world: World) -> None:
    """What was connected to the others is undone: nothing of the decoder is used."""
    decoder = await world.decoder_ranks(heads(2), 2)
    (prefiller,) = world.prefiller_ranks(heads(2), 1)
    world.fabric.kill(decoder.agents[1].epoch)
    with pytest.raises(PeerLost, match="is not there"):
        await open_push(world, prefiller, decoder)
    assert decoder.pages.get("a") is None
    await until(lambda: prefiller.agent.num_users(decoder.agents[0].epoch) == 0)


# ── what it costs ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(8, 8), (1, 8), (8, 1), (64, 64)])
async def test_messages_per_attempt_are_in_proportion_to_the_ranks(
    world: World, monkeypatch: pytest.MonkeyPatch, num_senders: int, num_receivers: int
) -> None:
    """Counted at the sockets, signals to the proxy too: from asking for pages until they are given back, of the second
    attempt, because the first one's handshakes are not repeated."""
    kv = heads(64)
    decoder = await world.decoder_ranks(kv, num_receivers, num_pages=3)
    prefillers = world.prefiller_ranks(kv, num_senders)
    told: Counter[str] = Counter()
    send, tell = ControlSocket.send, Notifier.tell

    def count(self: ControlSocket, frames: Sequence[bytes]) -> bool:
        told[msgspec.msgpack.decode(frames[-1])["type"]] += 1
        return send(self, frames)

    def count_signal(self: Notifier, address: str | None, signal: wire.Signal) -> None:
        told[type(signal).__name__] += 1
        tell(self, address, signal)

    monkeypatch.setattr(ControlSocket, "send", count)
    monkeypatch.setattr(Notifier, "tell", count_signal)
    for attempt in ("before", "a"):
        told.clear()
        pushes = await asyncio.gather(*(open_push(world, prefiller, decoder, attempt) for prefiller in prefillers))
        for push in pushes:
            push.pages_filled(range(3), range(3))
        await settled(asyncio.gather(*(push.finish() for push in pushes)))  # type: ignore[arg-type]
        await decoder.read(attempt)
        decoder.receiver.consumed(attempt)
    await world.proxy.all_ranks(wire.KvReleased, "a", num_receivers)
    sent = [told[kind] for kind in ("Hello", "Reserve", "Reserved", "WritesDone")]
    assert sent == [0, num_senders, num_senders, num_senders]
    assert told["KvReady"] == told["KvReleased"] == num_receivers
    assert told.total() <= 4 * (num_senders + num_receivers), told


async def test_a_welcome_names_only_the_ranks_that_are_written_to(world: World) -> None:
    """So that it fits into a message, however many ranks there are."""
    kv = heads(64)
    decoder = await world.decoder_ranks(kv, 64, num_pages=3)
    one, whole = world.prefiller_ranks(kv, 64)[7], world.prefiller_ranks(kv, 1)[0]
    for prefiller, ranks in ((one, [7]), (whole, list(range(64)))):
        (await open_push(world, prefiller, decoder)).abort("not needed")
        (session,) = prefiller.sender._sessions.values()
        assert [slab.layout.tp_rank for slab in session.welcome.slabs] == ranks
        await until(lambda: decoder.pages.get("a") is None)
        decoder.receiver._tombstones.clear()
    assert len(wire.encode(session.welcome)) < MAX_MESSAGE_BYTES // 10


# ── cancelled anywhere ──────────────────────────────────────────────────────────────────────────────────────────────


async def _strike_everywhere(
    begin: Callable[[int], Coroutine[Any, Any, Any]],
    check: Callable[[int], Coroutine[Any, Any, None]],
    as_it_wakes: bool,
) -> int:
    """`begin` is cancelled at its first suspension, its second, … until it has no more. How many it had."""
    for strike_at in range(1, 100):
        task: asyncio.Task[Any] | None = None
        suspensions = Suspensions(strike_at, lambda: task.cancel(), as_it_wakes=as_it_wakes)  # type: ignore  # noqa: B023
        task = asyncio.create_task(suspensions.watch(begin(strike_at)))
        try:
            result = await settled(task)
        except asyncio.CancelledError:
            pass
        else:
            if isinstance(result, Push):
                result.abort("not needed")
        await check(strike_at)
        if not suspensions.is_reached:
            return strike_at - 1
    raise AssertionError("it never ends")


@pytest.mark.parametrize("as_it_wakes", [False, True])
@pytest.mark.parametrize("is_new", [True, False], ids=["handshake", "reserve"])
async def test_an_open_cancelled_anywhere_leaves_nothing(world: World, as_it_wakes: bool, is_new: bool) -> None:
    """A rank of four, whose heads go to rank 1 alone, and one that writes to both ranks."""
    decoder = await world.decoder_ranks(heads(4), 2, num_pages=6)
    pairs = [(world.prefiller_ranks(heads(4), 4)[3], world.prefiller_ranks(heads(4), 1)[0])]

    async def begin(serial: int) -> Push:
        if is_new:
            pairs.append((world.prefiller_ranks(heads(4), 4)[3], world.prefiller_ranks(heads(4), 1)[0]))
        await open_push(world, pairs[-1][0], decoder, f"quarter-{serial}")
        return await open_push(world, pairs[-1][1], decoder, f"a-{serial}")

    async def check(serial: int) -> None:
        for prefiller in pairs[-1]:
            for push in list(prefiller.sender._pushes):
                push.abort("not needed")
        await until(lambda: decoder.pages.num_free == 6 and not decoder.pages.num_queued)
        for prefiller in pairs[-1]:
            sessions = prefiller.sender._sessions.values()
            await until(lambda s=sessions: not any(session._open or session._asks for session in s))  # type: ignore[misc]
            if is_new:
                await prefiller.sender.aclose()

    assert await _strike_everywhere(begin, check, as_it_wakes) >= (4 if is_new else 2)


@pytest.mark.parametrize("as_it_wakes", [False, True])
async def test_a_finish_cancelled_anywhere_leaves_nothing(world: World, as_it_wakes: bool) -> None:
    decoder = await world.decoder_ranks(heads(2), 2, num_pages=3)
    (prefiller,) = world.prefiller_ranks(heads(2), 1)

    async def begin(serial: int) -> None:
        prefiller.agent.script = hold
        push = await open_push(world, prefiller, decoder, f"a-{serial}")
        try:
            for ordinal in range(3):
                push.page_filled(ordinal, ordinal)
            await until(lambda: len(world.fabric.under_way) == 2)
            for delay_s, write in zip((0.0, 0.01), world.fabric.under_way, strict=True):
                asyncio.get_running_loop().call_later(delay_s, write.land)
            await push.finish()
        except BaseException:
            push.abort("cancelled")
            raise

    async def check(serial: int) -> None:
        await asyncio.sleep(0.02)  # what was to land has landed
        for write in world.fabric.under_way:
            write.land()
        await until(lambda: not prefiller.sender._pushes)
        decoder.receiver.cancel(f"a-{serial}")
        await until(lambda: decoder.pages.num_free == 3)

    assert await _strike_everywhere(begin, check, as_it_wakes) >= 3


@pytest.mark.parametrize("as_it_wakes", [False, True])
async def test_a_sender_closed_anywhere_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, as_it_wakes: bool
) -> None:
    """From the first word of the handshake to the last write: whoever waits is told, and the pages come back."""
    monkeypatch.setattr("transfer.roles.sender.CLOSE_TIMEOUT_S", 0.2)
    decoder = await world.decoder_ranks(heads(4), 2, num_pages=3)
    for strike_at in range(1, 100):
        (prefiller,) = world.prefiller_ranks(heads(4), 1)
        closing: list[asyncio.Task[None]] = []
        suspensions = Suspensions(
            strike_at,
            lambda c=closing, p=prefiller: c.append(asyncio.create_task(p.sender.aclose())),  # type: ignore[misc]
            as_it_wakes=as_it_wakes,
        )

        async def serve(prefiller: Prefiller = prefiller, attempt: str = f"a-{strike_at}") -> None:
            push = await open_push(world, prefiller, decoder, attempt)
            push.page_filled(0, 0)
            await asyncio.sleep(0)
            push.pages_filled([1, 2], [1, 2])
            await push.finish()

        task = asyncio.create_task(suspensions.watch(serve()))
        try:
            await settled(task)
        except (PeerLost, AttemptLost, ReservationRefused) as error:
            assert "shutting down" in str(error)  # noqa: PT017
        for task_or_none in closing:
            await settled(task_or_none)
        decoder.receiver.cancel(f"a-{strike_at}")
        await until(lambda: decoder.pages.num_free == 3)
        assert not prefiller.sender._pushes or not closing
        if not suspensions.is_reached:
            break
    assert strike_at > 4
