"""Sender and receiver: what becomes of the attempts of a leader that has been replaced.

A page that is granted for one of them may be somebody else's by the count of the leader of today.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from tests.fakes.transfer_world import CHUNK, PATIENT, Decoder, Prefiller, World, fill, until
from transfer import wire
from transfer.dataplane.messages import Failed
from transfer.errors import ReservationRefused, StaleTerm
from transfer.memory.reservations import Grant, Holding
from transfer.plan.layout import KvLayout
from transfer.roles.highest_term import HighestTerm
from transfer.roles.push import Push
from transfer.trust import AttemptKey, new_key

HEADS = KvLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=2, chunk_size=CHUNK, dtype="int64", element_bytes=8)
"""Of which two ranks of a prefiller have one each."""


async def open_of(
    world: World, prefiller: Prefiller, decoder: Decoder, attempt: str, term: int | None, num_pages: int = 2
) -> Push:
    params = msgspec.structs.replace(world.params(decoder, attempt), term=term)
    return await prefiller.sender.open(params, num_tokens=num_pages * CHUNK)


async def finish(world: World, decoder: Decoder, attempt: str, push: Push) -> None:
    fill(push, *range(len(push.table)))
    await push.finish()
    await decoder.read(attempt)
    decoder.receiver.consumed(attempt)
    await push.wait_ended()


# ── what begins ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_highest_term_lets_in_what_is_of_no_term_or_the_highest() -> None:
    highest_term, raised = HighestTerm(), []
    highest_term.when_raised(lambda: raised.append(highest_term.value))
    for term in (None, 7, 7, None, 8, 8, None):
        highest_term.check(term)
    with pytest.raises(StaleTerm) as error:
        highest_term.check(7)
    assert (error.value.term, error.value.heard, highest_term.value, raised) == (7, 8, 8, [7, 8])


@pytest.mark.parametrize("term", [8, 9, None])
async def test_what_is_of_no_lower_term_gets_its_pages(world: World, term: int | None) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    decoder.receiver.highest_term.hear(8)
    await finish(world, decoder, "a", await open_of(world, prefiller, decoder, "a", term))
    assert decoder.receiver.highest_term.value == (term or 8)


async def test_a_decoder_reserves_nothing_for_a_leader_that_has_been_replaced(world: World) -> None:
    """It has heard of the later one from another prefiller's reservation alone."""
    decoder, prefiller, other = await world.decoder(), world.prefiller(), world.prefiller()
    await finish(world, decoder, "new", await open_of(world, other, decoder, "new", 8))
    with pytest.raises(StaleTerm) as error:
        await open_of(world, prefiller, decoder, "old", 7)
    assert (error.value.term, error.value.heard) == (7, 8)
    assert decoder.pages.get("old") is None
    assert decoder.pages.num_free == decoder.num_pages
    assert decoder.pages.statistics()["waited"] == 0
    await finish(world, decoder, "old", await open_of(world, prefiller, decoder, "old", 8))


async def test_what_has_begun_goes_on_when_another_leads(world: World) -> None:
    """The new leader was told of it by whoever holds the lease."""
    decoder, prefiller = await world.decoder(), world.prefiller()
    push = await open_of(world, prefiller, decoder, "a", 7)
    decoder.receiver.highest_term.hear(8)
    await finish(world, decoder, "a", push)
    assert world.proxy.count(wire.KvFailed, "a") == 0


async def test_a_rank_joins_an_attempt_that_has_begun_whoever_leads_by_then(world: World) -> None:
    decoder, prefillers = await world.decoder_ranks(HEADS, 1), world.prefiller_ranks(HEADS, 2)
    first = await open_of(world, prefillers[0], decoder, "a", 7)
    decoder.receiver.highest_term.hear(8)
    second = await open_of(world, prefillers[1], decoder, "a", 7)
    for push in (first, second):
        fill(push, 0, 1)
    await asyncio.gather(first.finish(), second.finish())
    await decoder.read("a")
    decoder.receiver.consumed("a")


async def test_a_rank_that_comes_after_its_attempt_was_turned_away_is_told_why(world: World) -> None:
    """A prefiller of several ranks is answered by whichever of them is refused first."""
    decoder, prefillers = await world.decoder_ranks(HEADS, 1, num_pages=2), world.prefiller_ranks(HEADS, 2)
    holding = await open_of(world, *world.prefiller_ranks(HEADS, 1), decoder, "holding", 7)
    waiting = asyncio.create_task(open_of(world, prefillers[0], decoder, "a", 7))
    await until(lambda: decoder.holding("a") is Holding.QUEUED)
    decoder.receiver.highest_term.hear(8)
    for rank in (waiting, open_of(world, prefillers[1], decoder, "a", 7)):
        with pytest.raises(StaleTerm):
            await rank
    await finish(world, decoder, "holding", holding)


# ── what waits ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_waits_for_pages_is_turned_away_when_another_leads(world: World) -> None:
    """Those of the old leader get no page, also not the ones that the others leave in the same instant. Those behind
    them in the queue get theirs."""
    decoder, prefiller = await world.decoder(num_pages=4), world.prefiller()
    granted: list[str] = []
    pump = decoder.pages.pump

    def watched() -> list[Grant]:
        grants: list[Grant] = pump()
        granted.extend(grant.reservation.attempt for grant in grants)
        return grants

    decoder.pages.pump = watched
    first = await open_of(world, prefiller, decoder, "first", 7)
    waiting: dict[str, asyncio.Task[Push]] = {}
    for name, term, num_pages in (("large", 7, 4), ("small", 7, 1), ("nobody's", None, 2)):
        waiting[name] = asyncio.create_task(open_of(world, prefiller, decoder, name, term, num_pages))
        await until(lambda: decoder.pages.num_queued == len(waiting))
    newer = asyncio.create_task(open_of(world, prefiller, decoder, "newer", 8))
    for name in ("large", "small"):
        with pytest.raises(StaleTerm):
            await waiting[name]
        assert (await world.proxy.next(wire.KvFailed, name)).reason == "its leader has been replaced"
        await world.proxy.next(wire.KvReleased, name)
    await finish(world, decoder, "nobody's", await waiting["nobody's"])
    await finish(world, decoder, "newer", await newer)
    await finish(world, decoder, "first", first)
    assert granted == ["first", "nobody's", "newer"]


# ── words that are none ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("term", [0, -1, 2**63, 2**64 - 1])
async def test_a_term_that_is_none_is_refused_with_an_answer(world: World, term: int) -> None:
    raw = world.stranger(decoder := await world.decoder())
    answer = await raw.reserve(term=term)
    assert isinstance(answer, wire.Refusal)
    assert answer.reason == f"a term is from 1 to {2**63 - 1}, not {term}"
    assert (answer.term, decoder.receiver.highest_term.value) == (None, None)


async def test_nobody_is_kept_out_by_an_attempt_that_nobody_signed(world: World) -> None:
    key = AttemptKey.parse(new_key())
    raw = world.stranger(decoder := await world.decoder(config=replace(PATIENT, attempt_key=key)))
    assert isinstance(await raw.reserve(term=2**63 - 1), wire.Refusal)
    assert decoder.receiver.highest_term.value is None


# ── engines of other releases ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_prefiller_that_knows_no_terms_is_served(world: World) -> None:
    raw = world.stranger(decoder := await world.decoder())
    decoder.receiver.highest_term.hear(8)
    await raw.greet()
    fields = msgspec.msgpack.decode(wire.encode(raw.request()))
    del fields["term"]
    await raw.socket.send(msgspec.msgpack.encode(fields))
    assert isinstance(await raw.hear(), wire.Reserved)
    await raw.say(wire.WritesEnded(attempt="a", reason="done with it"))


async def test_a_prefiller_that_knows_no_terms_understands_the_refusal(world: World) -> None:
    raw = world.stranger(decoder := await world.decoder())
    decoder.receiver.highest_term.hear(8)
    await raw.greet()
    await raw.say(raw.request(term=7))
    fields = msgspec.msgpack.decode(await raw.socket.recv())
    assert fields.pop("term") == 8
    assert fields == {
        "type": "ReservationRefused",
        "attempt": "a",
        "epoch": decoder.agent.epoch,
        "reason": "the attempt is of term 7, and a leader of term 8 has been heard of",
    }


async def test_a_refusal_is_for_the_term_where_a_higher_one_is_told(world: World) -> None:
    """A decoder of an earlier release tells none, and refuses for another reason."""
    prefiller, raw = world.prefiller(), world.raw_receiver()
    for attempt, told, kind in (("a", None, ReservationRefused), ("b", 7, ReservationRefused), ("c", 8, StaleTerm)):
        params = msgspec.structs.replace(world.params(raw.endpoint, attempt), term=7)
        opening = asyncio.create_task(prefiller.sender.open(params, num_tokens=CHUNK))
        if told is None:
            await raw.welcome()
        assert (await raw.hear(wire.Reserve)).term == 7
        raw._heard.clear()
        await raw.say(wire.Refusal(attempt=attempt, epoch=raw.agent.epoch, reason="because", term=told))
        with pytest.raises(ReservationRefused) as error:
            await opening
        assert type(error.value) is kind


def test_a_data_plane_passes_both_terms_on() -> None:
    failed = msgspec.msgpack.decode(msgspec.msgpack.encode(Failed.of(3, StaleTerm(7, 8))), type=Failed)
    assert isinstance(failed.error, StaleTerm)
    assert (failed.error.term, failed.error.heard) == (7, 8)
