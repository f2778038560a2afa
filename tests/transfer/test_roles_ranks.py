"""Prefillers and decoders of several tensor-parallel ranks: who writes what to whom, in whose turn, and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.fakes.suspension import Suspensions
from tests.fakes.transfer_world import (
    LIMIT_S,
    PATIENT,
    QUICK,
    Decoder,
    Prefiller,
    World,
    hold,
    next_held,
    settled,
    until,
)
from transfer import wire
from transfer.agents.mock import Fail, MockWrite, in_turn
from transfer.errors import AttemptLost, PeerLost, ReservationRefused, TransferError
from transfer.memory.reservations import Holding, WriterState
from transfer.plan.feeds import writers_of
from transfer.plan.layout import KvLayout, LayerKv
from transfer.plan.ranks import Rank
from transfer.roles.push import Push

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
    world: World, prefiller: Prefiller, decoders: Sequence[Decoder], attempt: str = "a", timeout_s: float = 30.0
) -> Push:
    return await prefiller.sender.open(world.params(decoders, attempt, timeout_s), num_tokens=NUM_TOKENS)


async def write_all(prefiller: Prefiller, push: Push) -> None:
    prefiller.compute(push.table)
    for ordinal in range(len(push.table)):
        push.page_filled(ordinal, ordinal)
    async with asyncio.timeout(LIMIT_S):
        await push.finish()


async def read_all(decoders: Sequence[Decoder], push: Push, attempt: str = "a") -> None:
    for decoder in decoders:
        decoder.check_elements(push.table, await decoder.read(attempt))
        decoder.receiver.consumed(attempt)


# ── every head, once ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("model", "division"), [*product(MODELS, DIVISIONS)])
async def test_every_element_arrives_and_ready_means_all_of_them(
    world: World, model: str, division: tuple[int, int]
) -> None:
    """Sender ranks write one after the other; a receiver's rank is ready with the last of those that feed it."""
    kv, (num_writers, num_readers) = MODELS[model], division
    decoders = await world.decoder_ranks(kv, num_readers, num_pages=8)
    prefillers = world.prefiller_ranks(kv, num_writers)
    pushes = [await open_push(world, prefiller, decoders) for prefiller in prefillers]
    expected = [writers_of(kv, num_writers, Rank(num_readers, index)) for index in range(num_readers)]
    left = [set(writers) for writers in expected]
    for writer, (prefiller, push) in enumerate(zip(prefillers, pushes, strict=True)):
        await write_all(prefiller, push)
        for decoder in (d for d, writers in zip(decoders, expected, strict=True) if writer in writers):
            await until(lambda d=decoder, w=writer: is_done(d, w))  # type: ignore[misc]
        for decoder, missing in zip(decoders, left, strict=True):
            missing.discard(writer)
            assert decoder.holding("a") is (Holding.RESERVED if missing else Holding.READY)
    await read_all(decoders, pushes[0])
    await world.proxy.all_ranks(wire.KvReleased, "a", num_readers)
    assert world.proxy.ranks(wire.KvReady, "a") == list(range(num_readers))
    assert world.proxy.ranks(wire.KvReleased, "a") == list(range(num_readers))
    assert world.proxy.count(wire.KvFailed, "a") == 0


def is_done(decoder: Decoder, writer: int) -> bool:
    return bool(decoder.pages.get("a").writers[writer].state is WriterState.DONE)


async def test_a_rank_that_feeds_nobody_succeeds_without_a_byte(world: World) -> None:
    """The latent is whole on both prefiller ranks, and the decoder's one rank gets it from the first."""
    (decoder,) = await world.decoder_ranks(LATENT, 1)
    _, idle = world.prefiller_ranks(LATENT, 2)
    push = await open_push(world, idle, [decoder])
    assert all(push.is_present(ordinal) for ordinal in range(len(push.table))), "nothing that it fills matters"
    push.page_filled(0, 0)
    assert await push.finish() == (0, 0.0)
    await push.wait_ended()
    assert decoder.pages.get("a") is None
    other = await open_push(world, idle, [decoder], "b")
    other.abort("not needed")
    await other.wait_ended()


async def test_ready_says_what_all_writers_have_moved(world: World) -> None:
    (decoder,) = await world.decoder_ranks(heads(2), 1)
    pushes = [(p, await open_push(world, p, [decoder])) for p in world.prefiller_ranks(heads(2), 2)]
    for prefiller, push in pushes:
        await write_all(prefiller, push)
    ready = await world.proxy.next(wire.KvReady, "a")
    assert ready.num_bytes == 3 * decoder.layout.page_bytes
    await read_all([decoder], pushes[0][1])


# ── joining ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_rank_that_joins_late_has_its_pages_at_once(world: World) -> None:
    """Others that came before it wait for room; these pages were granted with the first rank."""
    (decoder,) = await world.decoder_ranks(heads(2), 1)
    one, other = world.prefiller_ranks(heads(2), 2)
    first = await open_push(world, one, [decoder], "a")
    waiting = asyncio.create_task(open_push(world, one, [decoder], "b"))
    await until(lambda: decoder.pages.num_queued == 1)
    late = await settled(asyncio.create_task(open_push(world, other, [decoder], "a")))
    for prefiller, push in ((one, first), (other, late)):
        await write_all(prefiller, push)
    await read_all([decoder], first)
    (await settled(waiting)).abort("not needed")
    await world.proxy.next(wire.KvReleased, "b")


async def test_ranks_must_ask_for_the_same(world: World) -> None:
    (decoder,) = await world.decoder_ranks(heads(2), 1)
    one, other = world.prefiller_ranks(heads(2), 2)
    first = await open_push(world, one, [decoder])
    with pytest.raises(ReservationRefused, match="another num_pages"):
        await other.sender.open(world.params(decoder), num_tokens=CHUNK)
    assert decoder.holding("a") is Holding.RESERVED, "who asked wrongly is not of the attempt"
    await write_all(one, first)
    await write_all(other, push := await open_push(world, other, [decoder]))
    await read_all([decoder], push)


async def test_a_rank_waits_its_turn_where_it_writes_nothing(world: World) -> None:
    decoders = await world.decoder_ranks(heads(2), 2)
    holder = world.prefiller_ranks(heads(2), 2)[0]
    _, observer = world.prefiller_ranks(heads(2), 2)
    before = await open_push(world, holder, decoders, "before")
    opening = asyncio.create_task(open_push(world, observer, decoders))
    await until(lambda: decoders[0].pages.num_queued == 1)
    assert decoders[1].pages.get("a") is None, "nobody asks at rank 1 for what has no turn at rank 0"
    before.abort("not needed")
    push = await settled(opening)
    assert (decoders[0].holding("a"), decoders[1].holding("a")) == (Holding.RESERVED, Holding.RESERVED)
    await write_all(observer, push)
    first = await open_push(world, holder, decoders)
    await write_all(holder, first)
    await read_all(decoders, push)
    await world.proxy.next(wire.KvReleased, "before")


@pytest.mark.parametrize("how", ["the decoder cancels", "it is cancelled itself", "its time runs out"])
async def test_a_rank_that_only_waits_its_turn_leaves_nothing(world: World, how: str) -> None:
    decoders = await world.decoder_ranks(heads(2), 2)
    holder = world.prefiller_ranks(heads(2), 2)[0]
    _, observer = world.prefiller_ranks(heads(2), 2)
    before = await open_push(world, holder, decoders, "before")
    timeout_s = 0.1 if how.startswith("its") else 30.0
    opening = asyncio.create_task(open_push(world, observer, decoders, timeout_s=timeout_s))
    await until(lambda: decoders[0].pages.num_queued == 1)
    if how.startswith("the"):
        decoders[0].receiver.cancel("a")
    elif how.startswith("it is"):
        opening.cancel()
    with pytest.raises((ReservationRefused, asyncio.CancelledError)):
        await settled(opening)
    await world.proxy.next(wire.KvReleased, "a")
    assert decoders[0].pages.get("a") is None
    before.abort("not needed")
    await world.proxy.next(wire.KvReleased, "before")
    assert not any(session._open for session in observer.sender._sessions.values())


# ── in one order everywhere ─────────────────────────────────────────────────────────────────────────────────────────


async def _two_attempts_in_opposite_orders(
    world: World, decoders: Sequence[Decoder], prefillers: Sequence[Prefiller]
) -> list[asyncio.Task[Any]]:
    """Room for one of them. Rank 0 of the prefiller begins with `a`, rank 1 with `b`; both then push the other one."""
    tasks = []
    for prefiller, attempts in zip(prefillers, ("ab", "ba"), strict=True):
        for attempt in attempts:

            async def serve(prefiller: Prefiller = prefiller, attempt: str = attempt) -> None:
                push = await open_push(world, prefiller, decoders, attempt)
                await write_all(prefiller, push)

            tasks.append(task := asyncio.create_task(serve()))
            sessions = prefiller.sender._sessions
            await until(lambda t=task, s=sessions, a=attempt: t.done() or any(a in x._open for x in s.values()))  # type: ignore[misc]
    return tasks


async def test_two_attempts_in_opposite_orders_do_not_block_each_other(world: World) -> None:
    decoders = await world.decoder_ranks(heads(2), 2, num_pages=3)
    prefillers = world.prefiller_ranks(heads(2), 2)
    tasks = await _two_attempts_in_opposite_orders(world, decoders, prefillers)
    for attempt in ("a", "b"):
        for decoder in decoders:
            await until(lambda d=decoder, a=attempt: d.pages.get(a) is not None)  # type: ignore[misc]
            await decoder.read(attempt)
            decoder.receiver.consumed(attempt)
    await settled(asyncio.gather(*tasks))  # type: ignore[arg-type]


async def test_without_waiting_ones_turn_they_would(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank asks only where it writes: each attempt gets one buffer and waits for the other's for ever."""

    async def do_not_wait(push: Push, session: object) -> None:
        pass

    monkeypatch.setattr(Push, "_wait_turn", do_not_wait)
    decoders = await world.decoder_ranks(heads(2), 2, num_pages=3)
    prefillers = world.prefiller_ranks(heads(2), 2)
    tasks = await _two_attempts_in_opposite_orders(world, decoders, prefillers)
    ready, queued = Holding.READY, Holding.QUEUED
    await until(lambda: [decoders[0].holding(attempt) for attempt in "ab"] == [ready, queued])
    await until(lambda: [decoders[1].holding(attempt) for attempt in "ab"] == [queued, ready])
    await until(lambda: sum(task.done() for task in tasks) == 2)
    for attempts in ("ba", "ab"):  # first those who wait
        for decoder, attempt in zip(decoders, attempts, strict=True):
            decoder.receiver.cancel(attempt)
    results = await settled(asyncio.gather(*tasks, return_exceptions=True))  # type: ignore[arg-type]
    assert sum(isinstance(result, ReservationRefused) for result in results) == 2


# ── one of two ranks fails ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["fails", "vanishes", "is aborted", "all are cancelled", "the time runs out"])
async def test_pages_are_nobodys_until_every_rank_has_ended(world: World, how: str) -> None:
    """One rank's write is still under way when the other one is gone: the pages wait for it."""
    config = QUICK if how == "vanishes" else PATIENT
    (decoder,) = await world.decoder_ranks(heads(2), 1, num_pages=3, config=config)
    one, other = world.prefiller_ranks(heads(2), 2)
    timeout_s = 0.3 if how.startswith("the") else 30.0
    for prefiller in (one, other):
        prefiller.mute()
        prefiller.agent.script = hold
    pushes = [await open_push(world, prefiller, [decoder], timeout_s=timeout_s) for prefiller in (one, other)]
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
    queued = asyncio.create_task(open_push(world, other, [decoder], "next"))
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
    (decoder,) = await world.decoder_ranks(heads(2), 1)
    one, other = world.prefiller_ranks(heads(2), 2)
    done, failing = [await open_push(world, prefiller, [decoder]) for prefiller in (one, other)]
    await write_all(one, done)
    other.agent.script = in_turn(Fail(TransferError("broken")))
    failing.page_filled(0, 0)
    assert (await world.proxy.next(wire.KvReleased, "a")).num_pages == 3
    assert world.proxy.count(wire.KvReady, "a") == 0


async def test_a_push_that_fails_at_one_rank_is_over_at_all(world: World) -> None:
    """Its write to the other rank goes on landing: there, and only there, pages are kept for it."""
    decoders = await world.decoder_ranks(heads(2), 2, num_pages=3)
    prefiller = world.prefiller(decoders[0].receiver._identity.__class__("tiny", heads(2).of_rank()))
    prefiller.mute()
    prefiller.agent.script = hold
    push = await open_push(world, prefiller, decoders)
    push.page_filled(0, 0)
    writes = await held_by_rank(prefiller, decoders)
    writes[1].fail(TransferError("broken"))
    await world.proxy.next(wire.KvReleased, "a")
    assert world.proxy.ranks(wire.KvReleased, "a") == [1]
    assert decoders[0].pages.num_free == 0
    assert not push._ended.done()
    writes[0].land()
    await world.proxy.all_ranks(wire.KvReleased, "a", 2)
    assert world.proxy.ranks(wire.KvFailed, "a") == [0, 1]
    await push.wait_ended()


async def held_by_rank(prefiller: Prefiller, decoders: Sequence[Decoder]) -> list[MockWrite]:
    """One held write to each."""
    writes = {write.peer: write for write in [await next_held(prefiller.agent) for _ in decoders]}
    return [writes[decoder.agent.epoch] for decoder in decoders]


async def test_a_last_word_is_said_once(world: World) -> None:
    """A rank that has heard it may hold a second try of the same attempt, which the first must not end."""
    decoders = await world.decoder_ranks(heads(2), 2)
    prefiller = world.prefiller(replace_layout(decoders[0], heads(2)))
    prefiller.agent.script = hold
    push = await open_push(world, prefiller, decoders)
    push.page_filled(0, 0)
    first, second = await held_by_rank(prefiller, decoders)
    said: list[tuple[int, str]] = []
    for rank in push._ranks:
        release = rank.session.release

        def note(message: Any, rank: Any = rank, release: Callable[[Any], None] = release) -> None:
            said.append((rank.rank, type(message).__name__))
            release(message)

        rank.session.release = note  # type: ignore[method-assign]
    first.land()
    push.abort("not needed")
    await until(lambda: decoders[0].holding("a") is None)
    second.land()
    await push.wait_ended()
    await world.proxy.all_ranks(wire.KvReleased, "a", 2)
    assert sorted(said) == [(0, "WritesEnded"), (1, "WritesEnded")]


def replace_layout(decoder: Decoder, kv: KvLayout) -> Any:
    return replace(decoder.receiver._identity, layout=kv.of_rank())


# ── whose address ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_receivers_list_must_be_all_ranks_of_one_decoder(world: World) -> None:
    decoders = await world.decoder_ranks(heads(4), 4)
    prefiller = world.prefiller(replace_layout(decoders[0], heads(4)))
    ends = [decoder.receiver.endpoint for decoder in decoders]
    moved = [replace_rank(end, rank) for end, rank in zip(ends, (1, 0, 2, 3), strict=True)]
    twice = [*ends[:3], replace_rank(ends[2], 3)]
    for receivers, why in [
        ([], "ranks 0, 1"),
        (ends[1:], "ranks 0, 1"),
        ([*ends[:2], ends[3]], "ranks 0, 1"),
        ([*ends, ends[3]], "ranks 0, 1"),
        (twice, "ranks 0, 1"),
        (ends[:2], "is rank 0 of 4, not 0 of 2"),
        (moved, "is rank 1 of 4, not 0 of 4"),
    ]:
        params = wire.PushParams(attempt="a", receivers=receivers, timeout_s=5.0)
        with pytest.raises(TransferError, match=why):
            await prefiller.sender.open(params, num_tokens=NUM_TOKENS)
    assert all(decoder.pages.get("a") is None for decoder in decoders)
    shuffled = wire.PushParams(attempt="a", receivers=[ends[i] for i in (2, 0, 3, 1)], timeout_s=5.0)
    push = await prefiller.sender.open(shuffled, num_tokens=NUM_TOKENS)
    await write_all(prefiller, push)
    await read_all(decoders, push)


def replace_rank(endpoint: wire.Endpoint, rank: int) -> wire.Endpoint:
    return wire.Endpoint(rank=rank, host=endpoint.host, port=endpoint.port)


# ── between two ranks ───────────────────────────────────────────────────────────────────────────────────────────────


async def restart(world: World, decoder: Decoder) -> Decoder:
    world.decoders.remove(decoder)
    await decoder.receiver.aclose()
    decoder.agent.close()
    config = replace(PATIENT, port=decoder.receiver.endpoint.port)
    return await world.decoder(3, config, decoder.receiver._identity)


@pytest.mark.parametrize("restarted", [(0,), (1,), (0, 1)])
async def test_a_receiver_that_was_restarted_does_not_cost_the_other_ranks_anything(
    world: World, restarted: tuple[int, ...]
) -> None:
    """Found out when it is asked for pages, at which time the lower rank's are held already: they stay."""
    decoders = await world.decoder_ranks(heads(2), 2, num_pages=3)
    prefiller = world.prefiller(replace_layout(decoders[0], heads(2)))
    await write_all(prefiller, push := await open_push(world, prefiller, decoders, "before"))
    await read_all(decoders, push, "before")
    for index in restarted:
        decoders[index] = await restart(world, decoders[index])
    push = await settled(asyncio.create_task(open_push(world, prefiller, decoders)))
    await write_all(prefiller, push)
    await read_all(decoders, push)
    await world.proxy.all_ranks(wire.KvReleased, "a", 2)
    assert world.proxy.count(wire.KvFailed, "a") == 0
    assert world.proxy.ranks(wire.KvReleased, "a") == [0, 1]


async def _blocked_at_rank_1(
    world: World, timeout_s: float = 30.0
) -> tuple[list[Decoder], Prefiller, Push, asyncio.Task[Push]]:
    """Attempt `a` holds rank 0 and waits for rank 1, where `before` has all pages."""
    decoders = await world.decoder_ranks(heads(2), 2, num_pages=3)
    prefiller = world.prefiller(replace_layout(decoders[0], heads(2)))
    prefiller.mute()
    before = await open_push(world, prefiller, decoders, "before")
    before._ranks[0].session.release(wire.WritesEnded(attempt="before", reason="makes room at rank 0"))
    before._owing.remove(before._ranks[0])
    await until(lambda: decoders[0].pages.num_free == 3)
    opening = asyncio.create_task(open_push(world, prefiller, decoders, timeout_s=timeout_s))
    await until(lambda: decoders[1].pages.num_queued == 1)
    assert decoders[0].holding("a") is Holding.RESERVED
    return decoders, prefiller, before, opening


@pytest.mark.parametrize("how", ["session 0 is lost", "session 1 is lost", "time", "cancel 0", "cancel 1", "closed"])
async def test_what_is_held_at_rank_0_comes_back_when_rank_1_cannot_be_had(world: World, how: str) -> None:
    decoders, prefiller, before, opening = await _blocked_at_rank_1(world, 0.2 if how == "time" else 30.0)
    sessions = [prefiller.sender._sessions[decoder.receiver.endpoint.address] for decoder in decoders]
    if how.startswith("session"):
        sessions[int(how.split()[1])].lose(PeerLost("fell silent"))
    elif how.startswith("cancel"):
        decoders[int(how.split()[1])].receiver.cancel("a")
    elif how == "closed":
        await prefiller.sender.aclose()
    with pytest.raises((ReservationRefused, PeerLost)):
        await settled(opening)
    before.abort("not needed")
    await world.proxy.all_ranks(wire.KvReleased, "a", 2)
    await until(lambda: decoders[1].pages.num_free == 3)
    assert world.proxy.ranks(wire.KvReleased, "a") == [0, 1]
    assert not any(session._open for session in sessions)


async def test_a_session_that_was_lost_while_waiting_at_a_lower_rank_is_made_anew(world: World) -> None:
    """Nobody has asked anything there yet: the session fell asleep, and the push need not know."""
    decoders = await world.decoder_ranks(heads(2), 2, num_pages=3)
    holder, prefiller = (world.prefiller(replace_layout(decoders[0], heads(2))) for _ in range(2))
    before = await open_push(world, holder, decoders, "before")
    opening = asyncio.create_task(open_push(world, prefiller, decoders))
    await until(lambda: decoders[0].pages.num_queued == 1)
    session = prefiller.sender._sessions[decoders[1].receiver.endpoint.address]
    session.lose(PeerLost("the session was idle"))
    before.abort("not needed")
    push = await settled(opening)
    assert push._ranks[1].session is not session
    await write_all(prefiller, push)
    await read_all(decoders, push)
    await world.proxy.all_ranks(wire.KvReleased, "before", 2)


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
    decoders = await world.decoder_ranks(heads(4), 2, num_pages=6)
    known = world.prefiller_ranks(heads(4), 4)[3]  # waits its turn at rank 0, writes to rank 1
    both = world.prefiller(replace_layout(decoders[0], heads(4)))
    pairs = [(known, both)]

    async def begin(serial: int) -> Push:
        if is_new:
            pairs.append(
                (world.prefiller_ranks(heads(4), 4)[3], world.prefiller(replace_layout(decoders[0], heads(4))))
            )
        await open_push(world, pairs[-1][0], decoders, f"observed-{serial}")
        return await open_push(world, pairs[-1][1], decoders, f"a-{serial}")

    async def check(serial: int) -> None:
        for prefiller in pairs[-1]:
            for push in list(prefiller.sender._pushes):
                push.abort("not needed")
        for decoder in decoders:  # an observer's attempt is the proxy's to end
            decoder.receiver.cancel(f"observed-{serial}")
        await until(lambda: all(d.pages.num_free == 6 and not d.pages.num_queued for d in decoders))
        for prefiller in pairs[-1]:
            sessions = prefiller.sender._sessions.values()
            await until(lambda s=sessions: not any(session._open or session._asks for session in s))  # type: ignore[misc]
            if is_new:
                await prefiller.sender.aclose()

    assert await _strike_everywhere(begin, check, as_it_wakes) >= 4


@pytest.mark.parametrize("as_it_wakes", [False, True])
async def test_a_finish_cancelled_anywhere_leaves_nothing(world: World, as_it_wakes: bool) -> None:
    decoders = await world.decoder_ranks(heads(2), 2, num_pages=3)
    prefiller = world.prefiller(replace_layout(decoders[0], heads(2)))

    async def begin(serial: int) -> None:
        prefiller.agent.script = hold
        push = await open_push(world, prefiller, decoders, f"a-{serial}")
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
        for decoder in decoders:
            decoder.receiver.cancel(f"a-{serial}")
        await until(lambda: all(d.pages.num_free == 3 for d in decoders))

    assert await _strike_everywhere(begin, check, as_it_wakes) >= 3


@pytest.mark.parametrize("as_it_wakes", [False, True])
async def test_a_sender_closed_anywhere_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, as_it_wakes: bool
) -> None:
    """From the first word of the handshake to the last write: whoever waits is told, and the pages come back."""
    monkeypatch.setattr("transfer.roles.sender.CLOSE_TIMEOUT_S", 0.2)
    decoders = await world.decoder_ranks(heads(4), 2, num_pages=3)
    for strike_at in range(1, 100):
        prefiller = world.prefiller(replace_layout(decoders[0], heads(4)))
        closing: list[asyncio.Task[None]] = []
        suspensions = Suspensions(
            strike_at,
            lambda c=closing, p=prefiller: c.append(asyncio.create_task(p.sender.aclose())),  # type: ignore[misc]
            as_it_wakes=as_it_wakes,
        )

        async def serve(prefiller: Prefiller = prefiller, attempt: str = f"a-{strike_at}") -> None:
            push = await open_push(world, prefiller, decoders, attempt)
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
        for decoder in decoders:
            decoder.receiver.cancel(f"a-{strike_at}")
        await until(lambda: all(d.pages.num_free == 3 for d in decoders))
        assert not prefiller.sender._pushes or not closing
        if not suspensions.is_reached:
            break
    assert strike_at > 5
