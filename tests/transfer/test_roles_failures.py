"""Sender and receiver: time that runs out, peers that fail, freeze or restart, and closing in the midst of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import msgspec
import pytest
import zmq

from tests.fakes.transfer_world import (
    IDENTITY,
    LIMIT_S,
    PAGE_BYTES,
    PATIENT,
    QUICK,
    Decoder,
    Prefiller,
    World,
    fill,
    hold,
    next_held,
    settled,
    until,
)
from transfer import wire
from transfer.agents.base import WriteReceipt
from transfer.agents.mock import Fail, Land, MockWrite, in_turn
from transfer.errors import AttemptLost, PeerLost, ReservationRefused, TransferError
from transfer.memory.reservations import Holding
from transfer.roles import session as session_module
from transfer.roles.push import Push
from transfer.roles.sender import busy_seconds

# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_attempt_that_is_never_written_expires(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    push = await world.open(prefiller, decoder, timeout_s=0.5)
    with pytest.raises(AttemptLost):
        await settled(asyncio.create_task(push.finish()))
    await world.proxy.next(wire.KvFailed, "a")
    await world.proxy.next(wire.KvReleased, "a")


async def test_an_attempt_that_is_never_read_expires(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    push = await world.open(prefiller, decoder, timeout_s=0.5)
    fill(push, 0, 1)
    await push.finish()
    released = await world.proxy.next(wire.KvReleased, "a")
    assert released.reason == "expired"
    with pytest.raises(AttemptLost, match="expired"):
        await decoder.receiver.wait_ready("a")


async def test_an_expired_attempt_is_kept_until_its_writer_has_stopped(world: World) -> None:
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    await raw.reserve(timeout_s=0.05)
    assert await raw.hear() == wire.Cancel(attempt="a")
    assert decoder.pages.num_quarantined == 2
    assert isinstance(await raw.reserve("a"), wire.Refusal)
    await raw.say(wire.WritesEnded(attempt="a", reason="cancelled"))
    assert (await world.proxy.next(wire.KvReleased, "a")).reason == "expired"


async def test_a_push_ends_by_its_deadline_even_if_its_write_does_not(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder, timeout_s=0.5)
    fill(push, 0, 1)
    write = await next_held(prefiller.agent)
    with pytest.raises(AttemptLost):
        await settled(asyncio.create_task(push.finish()))
    await until(lambda: decoder.pages.num_quarantined == 2)
    write.land()
    await world.proxy.next(wire.KvReleased, "a")


async def test_a_silent_writer_fails_and_its_pages_come_back_when_it_is_known_dead(world: World) -> None:
    """Silent it may be standing still in the middle of a write, with or without a connection."""
    decoder = await world.decoder(num_pages=4, config=QUICK)
    raw = world.stranger(decoder)
    await raw.reserve("a", 2)
    await raw.reserve("b", 2)
    decoder.receiver.cancel("b")
    assert await raw.hear() == wire.Cancel(attempt="b")
    waiting = asyncio.create_task(decoder.receiver.wait_ready("a"))
    queued = asyncio.create_task(world.open(world.prefiller(), decoder, "c", 4))
    with pytest.raises(AttemptLost, match="vanished"):
        await settled(waiting)
    await asyncio.sleep(2 * QUICK.writer_timeout_s)  # what is tested is that nothing happens meanwhile
    assert (decoder.pages.num_quarantined, decoder.pages.num_queued) == (4, 1)
    raw.hang_up()
    await asyncio.sleep(2 * QUICK.writer_timeout_s)
    assert (decoder.pages.num_quarantined, decoder.pages.num_queued) == (4, 1)
    raw.die()
    outcomes = [(await world.proxy.next(wire.KvReleased, attempt)).reason for attempt in ("a", "b")]
    assert outcomes == ["failed", "cancelled"]
    (await settled(queued)).abort("not needed")
    await world.proxy.next(wire.KvReleased, "c")
    late = await world.stranger(decoder).reserve("a")
    assert isinstance(late, wire.Refusal), "what it was told is void"


async def test_a_writer_that_cannot_be_reached_is_not_looked_for_over_and_over(world: World) -> None:
    """Its pages wait for news of its end, and no timer does."""
    decoder = await world.decoder(config=QUICK)
    raw = world.stranger(decoder)
    await raw.reserve("a", 2)
    raw.hang_up()
    await until(lambda: decoder.pages.num_quarantined == 2)
    await until(lambda: decoder.receiver._timer is None)
    assert decoder.receiver._last_heard == {}
    assert decoder.pages.num_quarantined == 2
    raw.die()
    await world.proxy.next(wire.KvReleased, "a")


async def test_a_writer_that_goes_on_after_a_long_silence_says_that_it_has_ended(world: World) -> None:
    decoder = await world.decoder(num_pages=2, config=QUICK)
    raw = world.stranger(decoder)
    await raw.reserve("a", 2)
    await world.proxy.next(wire.KvFailed, "a")
    await asyncio.sleep(2 * QUICK.heartbeat_s)
    for _ in range(2):
        assert await raw.hear() == wire.Cancel(attempt="a"), "it is reminded for as long as it is silent"
    assert decoder.pages.num_quarantined == 2
    await raw.say(wire.WritesEnded(attempt="a", reason="stopped"))
    await world.proxy.next(wire.KvReleased, "a")


async def test_what_a_silent_writer_has_finished_stays(world: World) -> None:
    decoder = await world.decoder(config=QUICK)
    raw = world.stranger(decoder)
    await raw.reserve("a", 1)
    await raw.reserve("b", 1)
    await raw.say(wire.WritesDone(attempt="a", num_bytes=64, transfer_s=0.0))
    await world.proxy.next(wire.KvFailed, "b")
    raw.die()
    await world.proxy.next(wire.KvReleased, "b")
    assert decoder.pages.get("a").holding is Holding.READY
    assert len(decoder.receiver.take("a")) == 1
    decoder.receiver.consumed("a")


async def test_heartbeats_keep_a_slow_writer_alive(world: World) -> None:
    decoder, prefiller = await world.decoder(config=QUICK), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder)
    fill(push, 0, 1)
    write = await next_held(prefiller.agent)
    await asyncio.sleep(2.5 * QUICK.writer_timeout_s)  # what is tested is that nothing happens meanwhile
    assert decoder.pages.get("a").holding is Holding.RESERVED
    write.land()
    await push.finish()
    await decoder.receiver.wait_ready("a")
    decoder.receiver.take("a")
    decoder.receiver.consumed("a")


async def test_a_quarantined_writer_is_reminded(world: World) -> None:
    """The cancel, or its answer, was lost with a connection: the pages come back all the same."""
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    await raw.reserve("a")
    decoder.receiver.cancel("a")
    assert await raw.hear() == wire.Cancel(attempt="a")  # and say nothing, as if it had not arrived
    await raw.say(wire.Heartbeat(epoch=raw.epoch, serial=1, open=["a"]))
    assert await raw.hear() == wire.HeartbeatAck(epoch=decoder.agent.epoch, serial=1)
    assert await raw.hear() == wire.Cancel(attempt="a")
    await raw.say(wire.Heartbeat(epoch=raw.epoch, serial=2))
    assert await raw.hear() == wire.HeartbeatAck(epoch=decoder.agent.epoch, serial=2, missing=["a"])
    assert decoder.pages.num_quarantined == 2, "what a heartbeat does not name is asked for, not assumed"
    await raw.say(wire.WritesEnded(attempt="a", reason="cancelled"))
    await world.proxy.next(wire.KvReleased, "a")


async def test_a_receiver_that_stood_still_listens_before_it_judges(world: World) -> None:
    """A stopped decoder wakes up with its timers run out and the heartbeats still unread."""
    decoder = await world.decoder(config=QUICK)
    raw = world.stranger(decoder)
    await raw.reserve("a")
    time.sleep(2 * QUICK.writer_timeout_s)  # noqa: ASYNC251  the whole loop stands still
    await raw.round_trip()
    assert decoder.pages.get("a").holding is Holding.RESERVED
    await raw.say(wire.WritesEnded(attempt="a", reason="over"))
    await world.proxy.next(wire.KvReleased, "a")


async def test_an_old_answer_proves_nothing_about_now(world: World) -> None:
    """A frozen sender wakes up and finds an answer that has lain there: it must not write by it."""
    started = time.monotonic()
    prefiller, raw = world.prefiller(), world.raw_receiver()
    opening = asyncio.create_task(prefiller.sender.open(world.params(raw.endpoint), num_tokens=4))
    await raw.welcome()
    await raw.grant("a", [0])
    heartbeat = await raw.hear(wire.Heartbeat)
    heard_at = time.monotonic()
    push = await settled(opening)
    (session,) = prefiller.sender._sessions.values()
    await asyncio.sleep(0.2)  # the answer lies there
    await raw.say(wire.HeartbeatAck(epoch=raw.agent.epoch, serial=heartbeat.serial))
    await until(lambda: heartbeat.serial not in session._unanswered)
    fences: list[float] = []

    def note(write: MockWrite) -> Land:
        fences.append(write.not_after())
        return Land()

    prefiller.agent.script = note
    fill(push, 0)
    assert (await push.finish())[0] == PAGE_BYTES
    (fence,) = fences
    assert started <= fence - raw.WRITER_TIMEOUT_S / 2 <= heard_at


async def test_a_decoder_that_says_nothing_cannot_keep_a_push_beyond_its_deadline(world: World) -> None:
    prefiller, raw = world.prefiller(), world.raw_receiver()
    prefiller.agent.script = hold
    params = world.params(raw.endpoint, timeout_s=0.2)
    opening = asyncio.create_task(prefiller.sender.open(params, num_tokens=4))
    await raw.welcome()
    await raw.grant("a", [0])
    push = await settled(opening)
    fill(push, 0)
    write = await next_held(prefiller.agent)
    with pytest.raises(AttemptLost, match="out of time"):
        await settled(asyncio.create_task(push.finish()))
    await world.proxy.next(wire.KvFailed, "a")
    write.land()
    await raw.hear(wire.WritesEnded)


# ── failures ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_failing_write(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    prefiller.agent.script = in_turn(Fail(TransferError("no such page")))
    push = await world.open(prefiller, decoder)
    fill(push, 0)
    with pytest.raises(AttemptLost, match="no such page"):
        await settled(asyncio.create_task(push.finish()))
    assert (await world.proxy.next(wire.KvFailed, "a")).reason == "no such page"
    assert (await world.proxy.next(wire.KvReleased, "a")).num_pages == 2


async def test_a_write_that_fails_late(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder)
    fill(push, 0)
    (await next_held(prefiller.agent)).fail(TransferError("broken"))
    await push.wait_ended()
    assert push.failure == "broken"
    await world.proxy.next(wire.KvReleased, "a")


async def test_after_a_lost_connection_the_next_attempt_shakes_hands_anew(world: World) -> None:
    """NIXL has given the peer up while control messages still flow: that session must not be used again."""
    decoder, prefiller = await world.decoder(), world.prefiller()
    prefiller.agent.script = hold
    bystander = await world.open(prefiller, decoder, "b", 1)
    fill(bystander, 5)
    held = await next_held(prefiller.agent)
    prefiller.agent.script = in_turn(Fail(PeerLost("NIXL says so")))
    push = await world.open(prefiller, decoder, "a")
    fill(push, 0)
    with pytest.raises(AttemptLost, match="NIXL says so"):
        await settled(asyncio.create_task(push.finish()))
    await world.proxy.next(wire.KvReleased, "a")

    again = await world.open(prefiller, decoder, "c")
    fill(again, 0, 1)
    await again.finish()
    await decoder.receiver.wait_ready("c")
    decoder.receiver.take("c")
    decoder.receiver.consumed("c")

    assert decoder.pages.get("b").holding is Holding.RESERVED, "its write may still land"
    held.land()
    assert (await world.proxy.next(wire.KvReleased, "b")).num_pages == 1
    async with asyncio.timeout(PATIENT.heartbeat_s / 2):  # the lost session asks at once whether that was heard
        await until(lambda: prefiller.agent.num_users(decoder.agent.epoch) == 1)


async def test_a_frozen_decoder_keeps_its_pages_until_the_write_has_ended(world: World) -> None:
    """No answer for long: the attempt fails at the prefiller, which goes on saying that its write is under way."""
    decoder, prefiller = await world.decoder(config=QUICK), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder)
    fill(push, 0, 1)
    write = await next_held(prefiller.agent)
    (session,) = prefiller.sender._sessions.values()
    session.lose(PeerLost("fell silent"))
    with pytest.raises(AttemptLost, match="fell silent"):
        await push.finish()
    await asyncio.sleep(2 * QUICK.writer_timeout_s)  # what is tested is that nothing happens meanwhile
    assert decoder.pages.num_free == 2
    write.land()
    await world.proxy.next(wire.KvReleased, "a")


async def test_a_receiver_that_does_not_answer_heartbeats_is_lost(world: World) -> None:
    decoder, prefiller = await world.decoder(config=QUICK), world.prefiller()
    push = await world.open(prefiller, decoder)
    hear = decoder.receiver._socket._on_message
    decoder.receiver._socket._on_message = lambda frames: None  # it has gone deaf
    async with asyncio.timeout(LIMIT_S):
        await push.failed.wait()
    assert "fell silent" in (push.failure or "")
    await world.proxy.next(wire.KvFailed, "a")
    await until(lambda: decoder.pages.num_quarantined == 2)
    decoder.receiver._socket._on_message = hear
    await world.proxy.next(wire.KvReleased, "a")


@pytest.mark.parametrize("has_push_under_way", [False, True])
async def test_a_receiver_restarted_under_the_same_port(world: World, has_push_under_way: bool) -> None:
    old, prefiller = await world.decoder(config=QUICK), world.prefiller()
    push = await world.open(prefiller, old, "a")
    if not has_push_under_way:
        fill(push, 0, 1)
        await push.finish()
        await old.receiver.wait_ready("a")
        old.receiver.take("a")
        old.receiver.consumed("a")
    new = await _restart(world, old)
    again = await world.open(prefiller, new, "b")
    fill(again, 2, 3)
    await again.finish()
    await new.receiver.wait_ready("b")
    assert new.bytes_of(new.receiver.take("b")) == [3, 4]
    new.receiver.consumed("b")
    if has_push_under_way:
        with pytest.raises(AttemptLost):
            await settled(asyncio.create_task(push.finish()))
        await world.proxy.next(wire.KvFailed, "a")
    await world.proxy.next(wire.KvReleased, "b")
    assert world.proxy.count(wire.KvFailed, "b") == 0, "the proxy hears nothing of the first, refused, try"


async def _restart(world: World, old: Decoder) -> Decoder:
    world.decoders.remove(old)
    await old.receiver.aclose()
    old.agent.close()
    return await world.decoder(config=replace(QUICK, port=old.receiver.endpoint.port))


@pytest.mark.parametrize("knows", ["nobody", "the old process", "the new process"])
async def test_pages_promised_by_a_process_that_has_ended_are_not_taken_of_the_next_one(
    world: World, knows: str
) -> None:
    old, prefiller = await world.decoder(config=QUICK), world.prefiller()
    if knows == "the old process":
        await _send_one(world, prefiller, old)
    new = await _restart(world, old)
    if knows == "the new process":
        await _send_one(world, prefiller, new)

    stale = msgspec.structs.replace(world.params(new, "stale"), decoder_epoch=old.agent.epoch)
    with pytest.raises(ReservationRefused, match="another process"):
        await settled(asyncio.create_task(prefiller.sender.open(stale, num_tokens=2 * prefiller.layout.chunk_size)))
    assert new.pages.get("stale") is None
    assert (new.pages.num_free, new.pages.num_waited) == (4, 0)

    with_it = msgspec.structs.replace(world.params(new, "right"), decoder_epoch=new.agent.epoch)
    push = await prefiller.sender.open(with_it, num_tokens=2 * prefiller.layout.chunk_size)
    await _pass(push, new, "right")


async def test_pages_promised_by_a_new_process_are_had_by_a_sender_that_knows_the_old_one(world: World) -> None:
    old, prefiller = await world.decoder(config=QUICK), world.prefiller()
    await _send_one(world, prefiller, old)
    new = await _restart(world, old)
    params = msgspec.structs.replace(world.params(new, "a"), decoder_epoch=new.agent.epoch)
    push = await prefiller.sender.open(params, num_tokens=2 * prefiller.layout.chunk_size)
    assert new.pages.num_reserved == 2
    await _pass(push, new, "a")
    assert world.proxy.count(wire.KvFailed, "a") == 0


async def _send_one(world: World, prefiller: Prefiller, decoder: Decoder) -> None:
    await _pass(await world.open(prefiller, decoder, "before"), decoder, "before")


async def _pass(push: Push, decoder: Decoder, attempt: str) -> None:
    fill(push, 0, 1)
    await push.finish()
    await decoder.receiver.wait_ready(attempt)
    assert decoder.bytes_of(decoder.receiver.take(attempt)) == [1, 2]
    decoder.receiver.consumed(attempt)


async def test_reservations_for_an_earlier_epoch_are_refused(world: World) -> None:
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    answer = await raw.reserve(epoch="an earlier one")
    assert isinstance(answer, wire.Refusal)
    assert answer.epoch == decoder.agent.epoch


async def test_a_sender_restarted_under_another_name(world: World) -> None:
    decoder = await world.decoder(num_pages=2, config=QUICK)
    dead = world.stranger(decoder)
    await dead.reserve("a", 2)
    dead.die()
    push = await settled(asyncio.create_task(world.open(world.prefiller(), decoder, "b", 2)))
    fill(push, 0, 1)
    await push.finish()
    await decoder.receiver.wait_ready("b")
    decoder.receiver.take("b")
    decoder.receiver.consumed("b")


# ── closing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_sender_is_closed_while_things_are_under_way(world: World) -> None:
    """A push that is written, one that waits for pages, one whose handshake hangs: all end, and soon."""
    decoder, prefiller = await world.decoder(num_pages=2, config=QUICK), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder, "a", 2)
    fill(push, 0)
    await next_held(prefiller.agent)
    queued = asyncio.create_task(world.open(prefiller, decoder, "b", 2))
    await until(lambda: decoder.pages.num_queued == 1)
    silent = world.raw(zmq.ROUTER)
    endpoint = wire.Endpoint(rank=0, host="127.0.0.1", port=silent.bind_to_random_port("tcp://127.0.0.1"))
    hanging = asyncio.create_task(prefiller.sender.open(world.params(endpoint, "c"), num_tokens=4))
    await asyncio.sleep(0)

    async with asyncio.timeout(LIMIT_S):
        await prefiller.sender.aclose()
        await prefiller.sender.aclose()
    for task in (queued, hanging, asyncio.create_task(push.finish())):
        with pytest.raises((PeerLost, AttemptLost), match="shutting down"):
            await settled(task)
    await push.wait_ended()
    with pytest.raises(PeerLost):
        await world.open(prefiller, decoder, "d")
    await until(lambda: decoder.pages.num_quarantined == 2)  # the write never ended
    decoder.receiver.sender_ended(prefiller.agent.epoch)
    await world.proxy.next(wire.KvReleased, "a")


async def test_a_closed_sender_says_its_last_words(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    await world.open(prefiller, decoder, "a", 2)
    await prefiller.sender.aclose()
    await world.proxy.next(wire.KvReleased, "a")


async def test_a_receiver_is_closed_while_things_are_under_way(world: World) -> None:
    decoder, prefiller = await world.decoder(num_pages=2, config=QUICK), world.prefiller()
    world.decoders.remove(decoder)
    push = await world.open(prefiller, decoder, "a", 1)
    fill(push, 0)
    await push.finish()
    await decoder.receiver.wait_ready("a")
    decoder.receiver.take("a")
    await world.open(prefiller, decoder, "b", 1)
    queued = asyncio.create_task(world.open(prefiller, decoder, "c", 1, timeout_s=0.8))
    await until(lambda: decoder.pages.num_queued == 1)
    waiting = asyncio.create_task(decoder.receiver.wait_ready("b"))
    await asyncio.sleep(0)
    await decoder.receiver.aclose()
    await decoder.receiver.aclose()
    with pytest.raises(AttemptLost, match="shutting down"):
        await settled(waiting)
    decoder.receiver.consumed("a")  # the engine is a moment behind
    decoder.receiver.cancel("b")
    decoder.pages.check_integrity()
    assert decoder.receiver._timer is None
    with pytest.raises(TransferError):
        await settled(queued)


async def test_a_receiver_that_could_not_start_can_be_closed(world: World) -> None:
    taken = await world.decoder()
    config = replace(PATIENT, port=taken.receiver.endpoint.port)
    second = Decoder(world.fabric, 2, config, IDENTITY, None)
    with pytest.raises(zmq.ZMQError):
        await second.receiver.start()
    await second.receiver.aclose()


async def test_an_idle_session_ends_and_the_next_push_makes_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "IDLE_TIMEOUT_S", 0.05)
    decoder, prefiller = await world.decoder(config=replace(QUICK, heartbeat_s=0.01)), world.prefiller()
    for attempt in ("a", "b"):
        push = await world.open(prefiller, decoder, attempt, 1)
        fill(push, 0)
        await push.finish()
        await decoder.receiver.wait_ready(attempt)
        decoder.receiver.take(attempt)
        decoder.receiver.consumed(attempt)
        await until(lambda: not prefiller.sender._sessions and prefiller.agent.num_users(decoder.agent.epoch) == 0)


async def test_an_idle_pair_does_nothing(world: World) -> None:
    decoder, prefiller = await world.decoder(config=QUICK), world.prefiller()
    push = await world.open(prefiller, decoder, "a", 1)
    fill(push, 0)
    await push.finish()
    await decoder.receiver.wait_ready("a")
    decoder.receiver.take("a")
    decoder.receiver.consumed("a")
    await asyncio.sleep(2 * QUICK.writer_timeout_s)  # the last timer runs out
    assert decoder.receiver._timer is None
    used = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - used < 0.02


def test_busy_seconds_is_the_union_of_the_intervals() -> None:
    receipts = [
        WriteReceipt(1, 0.0, 2.0),
        WriteReceipt(1, 1.0, 3.0),
        WriteReceipt(1, 5.0, 6.0),
        WriteReceipt(1, 1.5, 1.7),
    ]
    assert busy_seconds(receipts) == 4.0
    assert busy_seconds([]) == 0.0
