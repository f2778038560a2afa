"""Sender and receiver: who is refused, in which words, and what strangers cannot do."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

from tests.fakes.transfer_world import (
    CHUNK,
    KV,
    LAYOUT,
    PATIENT,
    World,
    settled,
)
from transfer import wire
from transfer.errors import HandshakeRefused, PeerLost, ReservationRefused, TransferError
from transfer.memory.reservations import Holding
from transfer.roles import receiver as receiver_module
from transfer.roles import session as session_module
from transfer.roles.handshake import Identity
from transfer.roles.receiver import ReceiverConfig

# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


DIFFERENT = [
    ("model", "other"),
    ("dtype", "bfloat16"),
    ("chunk_size", 8),
    ("cache", "layer,kv,head,token;0"),
    ("heads", "2×2"),
    ("tp_size", 0),
    ("tp_rank", 3),
    ("page_bytes", 32),
]


@pytest.mark.parametrize(("field", "theirs"), DIFFERENT)
async def test_a_receiver_refuses_a_handshake_naming_the_field(world: World, field: str, theirs: object) -> None:
    raw = world.stranger(await world.decoder())
    answer = await raw.greet(msgspec.structs.replace(LAYOUT, **{field: theirs}))
    assert isinstance(answer, wire.HelloRefused)
    assert (answer.field, answer.theirs.startswith(str(theirs))) == (field.replace("tp_rank", "tp_size"), True)
    refused = await raw.reserve()
    assert isinstance(refused, wire.Refusal)
    assert "shaken hands" in refused.reason


@pytest.mark.parametrize(("field", "theirs"), DIFFERENT)
async def test_a_sender_refuses_a_handshake_naming_the_field(world: World, field: str, theirs: object) -> None:
    prefiller, raw = world.prefiller(), world.raw_receiver()
    opening = asyncio.create_task(prefiller.sender.open(world.params(raw.endpoint), num_tokens=CHUNK))
    await raw.welcome(msgspec.structs.replace(LAYOUT, **{field: theirs}))
    with pytest.raises(HandshakeRefused, match="cannot exchange KV") as refusal:
        await settled(opening)
    assert refusal.value.field == field.replace("tp_rank", "tp_size")


async def test_both_ends_know_what_the_other_refused(world: World) -> None:
    decoder = await world.decoder()
    prefiller = world.prefiller(Identity("other", KV.of_rank()))
    for _ in range(2):
        with pytest.raises(HandshakeRefused, match="model") as refusal:
            await world.open(prefiller, decoder)
        assert (refusal.value.ours, refusal.value.theirs) == ("other", "tiny")


async def test_a_prefiller_with_pages_of_another_size_is_told_the_way_out(world: World) -> None:
    decoder, kv = await world.decoder(), replace(KV, chunk_size=2 * KV.chunk_size)
    with pytest.raises(HandshakeRefused, match=r"chunk_size is .* at the peer; give all engines the same option"):
        await world.open(world.prefiller(Identity("tiny", kv.of_rank())), decoder)


async def test_another_protocol_version_is_refused(world: World) -> None:
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    await raw.say(wire.Hello(version=wire.PROTOCOL_VERSION + 1, epoch="x", layout=LAYOUT))
    answer = await raw.hear()
    assert isinstance(answer, wire.HelloRefused)
    assert answer.field == "protocol version"


async def test_larger_than_the_buffer(world: World) -> None:
    decoder, prefiller = await world.decoder(num_pages=4), world.prefiller()
    with pytest.raises(ReservationRefused, match="needs 5 pages and this PD buffer has 4"):
        await world.open(prefiller, decoder, num_pages=5)


async def test_no_room_in_time(world: World) -> None:
    decoder, prefiller = await world.decoder(num_pages=2), world.prefiller()
    first = await world.open(prefiller, decoder, "a", 2)
    with pytest.raises(ReservationRefused):
        await world.open(prefiller, decoder, "b", 1, timeout_s=0.05)
    await world.proxy.next(wire.KvReleased, "b")
    first.abort("not needed")
    await world.proxy.next(wire.KvReleased, "a")


async def test_nobody_there(world: World) -> None:
    """The wait for a handshake is the attempt's own time at most, and leaves nothing behind."""
    prefiller = world.prefiller()
    unused = world.raw(zmq.ROUTER)
    port = unused.bind_to_random_port("tcp://127.0.0.1")
    started = time.monotonic()
    with pytest.raises(PeerLost, match="did not answer within"):
        await prefiller.sender.open(
            world.params(wire.Endpoint(rank=0, host="127.0.0.1", port=port), timeout_s=0.1), num_tokens=4
        )
    assert time.monotonic() - started < 1.0


async def test_an_address_that_is_none(world: World) -> None:
    endpoint = wire.Endpoint(rank=0, host="not an address", port=0)
    with pytest.raises(PeerLost, match="cannot connect"):
        await world.prefiller().sender.open(world.params(endpoint), num_tokens=4)


async def test_handshake_without_an_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HANDSHAKE_TIMEOUT_S", 0.05)
    prefiller = world.prefiller()
    silent = world.raw(zmq.ROUTER)
    endpoint = wire.Endpoint(rank=0, host="127.0.0.1", port=silent.bind_to_random_port("tcp://127.0.0.1"))
    opens = [
        asyncio.create_task(prefiller.sender.open(world.params(endpoint, attempt), num_tokens=4))
        for attempt in ("a", "b")
    ]
    results = await settled(asyncio.gather(*opens, return_exceptions=True))  # type: ignore[arg-type]
    assert all(isinstance(result, PeerLost) for result in results)


async def test_a_handshake_that_somebody_else_began_is_tried_again(world: World) -> None:
    """It was lost when it had taken long already; who came late has not had a try of its own."""
    prefiller, raw = world.prefiller(), world.raw_receiver()
    first = asyncio.create_task(prefiller.sender.open(world.params(raw.endpoint, "a"), num_tokens=CHUNK))
    await raw.hear(wire.Hello)
    second = asyncio.create_task(prefiller.sender.open(world.params(raw.endpoint, "b"), num_tokens=CHUNK))
    await asyncio.sleep(0)
    (session,) = prefiller.sender._sessions.values()
    session.lose(PeerLost("no answer"))
    with pytest.raises(PeerLost, match="no answer"):
        await settled(first)
    raw._heard.clear()
    await raw.welcome()
    await raw.grant("b", [0])
    (await settled(second)).abort("not needed")
    assert (await raw.hear(wire.WritesEnded)).attempt == "b"


async def test_the_first_of_several_who_wait_for_a_handshake_is_cancelled(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    first, second = (asyncio.create_task(world.open(prefiller, decoder, attempt)) for attempt in ("a", "b"))
    await asyncio.sleep(0)
    first.cancel()
    push = await settled(second)
    with pytest.raises(asyncio.CancelledError):
        await settled(first)
    push.abort("not needed")
    await world.proxy.next(wire.KvReleased, "b")
    assert decoder.pages.get("a") is None


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_reservation_must_have_an_end(world: World, timeout_s: float) -> None:
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    assert isinstance(await raw.reserve(timeout_s=timeout_s), wire.Refusal)


def test_a_writer_must_be_heard_several_times_before_it_is_given_up() -> None:
    with pytest.raises(TransferError, match="or more often, not every"):
        ReceiverConfig(heartbeat_s=5.0, writer_timeout_s=1.0)


@pytest.mark.parametrize("timeout_s", [24 * 3600.0 + 1, 1e300])
async def test_a_reservation_does_not_last_for_ever(world: World, timeout_s: float) -> None:
    raw = world.stranger(await world.decoder())
    refusal = await raw.reserve(timeout_s=timeout_s)
    assert isinstance(refusal, wire.Refusal)
    assert "cannot last" in refusal.reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_tokens": 2 * CHUNK + 1}, "9 tokens are 3 pages, not 2"),
        ({"num_tokens": CHUNK}, "4 tokens are 1 pages, not 2"),
        ({"num_tokens": 0}, "no KV"),
        ({"num_tokens": -5}, "no KV"),
        ({"num_tokens": 2**63}, "no KV"),
        ({"num_now": 1}, "whole requests only"),
        ({"num_pages": 0, "num_now": 0, "num_tokens": 8}, "8 tokens are 2 pages, not 0"),
        ({"num_pages": -1, "num_now": -1, "num_tokens": 8}, "8 tokens are 2 pages, not -1"),
    ],
)
async def test_what_is_asked_for_must_fit_together(world: World, changes: dict[str, Any], why: str) -> None:
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    refusal = await raw.reserve(**changes)
    assert isinstance(refusal, wire.Refusal)
    assert why in refusal.reason
    assert decoder.pages.get("a") is None
    assert isinstance(await raw.reserve(), wire.Reserved)
    await raw.say(wire.WritesEnded(attempt="a", reason="over"))
    await world.proxy.next(wire.KvReleased, "a")


# ── forgotten ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_who_was_forgotten_shakes_hands_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of handshakes has pushed a sender out that was idle: its next push is served all the same."""
    monkeypatch.setattr(receiver_module, "MAX_PEERS", 3)
    decoder, prefiller = await world.decoder(), world.prefiller()
    (await world.open(prefiller, decoder, "before")).abort("not needed")
    await world.proxy.next(wire.KvReleased, "before")
    for _ in range(5):
        await world.stranger(decoder).greet()
    assert len(decoder.receiver._peers) == 3
    push = await settled(asyncio.create_task(world.open(prefiller, decoder)))
    push.abort("not needed")
    await world.proxy.next(wire.KvReleased, "a")


async def test_who_has_attempts_is_not_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "MAX_PEERS", 3)
    decoder, prefiller = await world.decoder(), world.prefiller()
    first = await world.open(prefiller, decoder, "a")
    for _ in range(5):
        await world.stranger(decoder).greet()
    second = await world.open(prefiller, decoder, "b")
    (session,) = prefiller.sender._sessions.values()
    assert not session.is_lost
    assert first.failure is None
    for attempt, push in (("a", first), ("b", second)):
        push.abort("not needed")
        await world.proxy.next(wire.KvReleased, attempt)


async def test_who_was_heard_last_is_forgotten_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "MAX_PEERS", 2)
    decoder = await world.decoder()
    one, other = world.stranger(decoder), world.stranger(decoder)
    for raw in (one, other, one):
        await raw.greet()
    await world.stranger(decoder).greet()
    assert isinstance(await one.reserve(num_pages=5), wire.Refusal)
    refusal = await other.reserve()
    assert isinstance(refusal, wire.Refusal)
    assert (refusal.epoch, "shaken hands" in refusal.reason) == ("", True)


# ── strangers ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_strangers_word_about_an_attempt_is_ignored(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    push = await world.open(prefiller, decoder, "a")
    raw = world.stranger(decoder)
    await raw.say(wire.WritesDone(attempt="a", num_bytes=0, transfer_s=0.0))
    await raw.say(wire.WritesEnded(attempt="a", reason="because"))
    await raw.say(wire.WritesDone(attempt="unknown", num_bytes=0, transfer_s=0.0))
    await raw.round_trip()
    assert decoder.pages.get("a").holding is Holding.RESERVED
    assert isinstance(await raw.reserve("a", num_pages=1), wire.Refusal)
    push.abort("not needed")
    await world.proxy.next(wire.KvReleased, "a")


async def test_another_senders_word_about_an_attempt_is_ignored(world: World) -> None:
    """One that has shaken hands, as the same rank even, on a connection of its own."""
    decoder = await world.decoder()
    owner, other = world.stranger(decoder), world.stranger(decoder)
    assert isinstance(await owner.reserve(), wire.Reserved)
    await other.greet()
    for message in (
        wire.WritesDone(attempt="a", num_bytes=1, transfer_s=0.0),
        wire.WritesEnded(attempt="a", reason="because"),
        wire.PagesWritten(attempt="a", count=1),
    ):
        await other.say(message)
    await other.round_trip()
    assert decoder.holding("a") is Holding.RESERVED
    refusal = await other.reserve()
    assert isinstance(refusal, wire.Refusal)
    assert "another connection" in refusal.reason
    await owner.say(wire.WritesEnded(attempt="a", reason="over"))
    await world.proxy.next(wire.KvReleased, "a")


async def test_what_is_said_twice_counts_once(world: World) -> None:
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    await raw.reserve()
    await raw.say(wire.PagesWritten(attempt="a", count=2))  # there is no window
    for _ in range(3):
        await raw.say(wire.WritesDone(attempt="a", num_bytes=7, transfer_s=0.0))
    await raw.say(wire.WritesEnded(attempt="a", reason="no, after all not"))
    await raw.round_trip()
    assert (await world.proxy.next(wire.KvReady, "a")).num_bytes == 7
    assert [done.num_bytes for done in decoder.receiver._moved["a"]] == [7]
    await decoder.read("a")
    decoder.receiver.consumed("a")
    await world.proxy.next(wire.KvReleased, "a")
    assert world.proxy.count(wire.KvReady, "a") == 1
    assert world.proxy.count(wire.KvFailed, "a") == 0


async def test_malformed_control_messages_are_ignored(world: World) -> None:
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    for frames in ([b""], [b"\xc1"], [b"a", b"b", b"c"], [wire.encode(wire.Cancel(attempt="a"))]):
        await raw.socket.send_multipart(frames)
    await raw.round_trip()


async def test_a_senders_strange_news_are_ignored(world: World) -> None:
    """A receiver that babbles, and one that answers before it was asked."""
    prefiller = world.prefiller()
    router = world.raw(zmq.ROUTER)
    endpoint = wire.Endpoint(rank=0, host="127.0.0.1", port=router.bind_to_random_port("tcp://127.0.0.1"))
    opening = asyncio.create_task(prefiller.sender.open(world.params(endpoint), num_tokens=4))
    identity, _ = await router.recv_multipart()
    for payload in (
        b"\xc1",
        wire.encode(wire.HeartbeatAck(epoch="x")),
        wire.encode(wire.Reserved(attempt="z", pages=[])),
    ):
        await router.send_multipart([identity, payload])
    refusal = wire.HelloRefused(field="dtype", ours="float16", theirs="float32")
    await router.send_multipart([identity, wire.encode(refusal)])
    with pytest.raises(HandshakeRefused, match="dtype"):
        await settled(opening)


async def test_a_proxy_address_that_is_none_does_no_harm(world: World) -> None:
    decoder = await world.decoder()
    refused = await world.stranger(decoder).reserve(notify="nonsense")
    assert isinstance(refused, wire.Refusal)
    assert "nonsense" in refused.reason


async def test_a_proxy_address_that_nobody_can_reach_does_no_harm(world: World) -> None:
    """Of the right form, and no port."""
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    assert isinstance(await raw.reserve(notify="tcp://127.0.0.1:99999"), wire.Reserved)
    decoder.receiver.cancel("a")
    await raw.say(wire.WritesEnded(attempt="a", reason="cancelled"))
    await raw.round_trip()


async def test_an_attempt_is_not_ready_with_half_its_pages(world: World) -> None:
    decoder = await world.decoder(config=replace(PATIENT, whole_requests=False))
    raw = world.stranger(decoder)
    assert isinstance(await raw.reserve(num_pages=2, num_now=1), wire.Reserved)
    await raw.say(wire.WritesDone(attempt="a", num_bytes=64, transfer_s=0.0))
    await raw.round_trip()
    assert decoder.pages.get("a").holding is Holding.RESERVED
    await raw.say(wire.WritesEnded(attempt="a", reason="sorry"))
    await world.proxy.next(wire.KvReleased, "a")
