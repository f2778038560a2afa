"""Hostile messages at the receiver's control socket: refused and logged; the service goes on and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
import zmq

from tests.fakes.hostile import NAMES, new_dice, noise, senders_messages, spoilt_payloads
from tests.fakes.transfer_world import (
    CHUNK,
    LAYOUT,
    PAGE_BYTES,
    PATIENT,
    QUICK,
    Decoder,
    Prefiller,
    RawSender,
    World,
    fill,
    settled,
    until,
)
from transfer import wire
from transfer.errors import AttemptLost
from transfer.memory.reservations import Holding
from transfer.roles.control import MAX_MESSAGE_BYTES, Complaints
from transfer.roles.receiver import ReceiverConfig
from transfer.roles.sender import Push

NUM_PAGES = 8


pytestmark = pytest.mark.usefixtures("no_error_is_logged")


async def serve_one(push: Push, decoder: Decoder, attempt: str, num_pages: int = 2) -> None:
    """Fill it, finish it, and read the right bytes."""
    fill(push, *range(num_pages))
    await settled(asyncio.ensure_future(push.finish()))
    await settled(asyncio.ensure_future(decoder.receiver.wait_ready(attempt)))
    assert decoder.bytes_of(decoder.receiver.take(attempt)) == [page + 1 for page in range(num_pages)]
    decoder.receiver.consumed(attempt)


async def check_service(world: World, prefiller: Prefiller, decoder: Decoder) -> None:
    """Whoever was silent for long enough holds nothing any more, and a push of the whole buffer succeeds.

    What a stranger has made ready waits for its reader, for as long as the stranger asked: it is read, or found out
    where the stranger has said that it wrote what it has not.
    """
    for reservation in decoder.pages.all():
        if reservation.holding is Holding.READY:
            with contextlib.suppress(AttemptLost):
                decoder.receiver.take(reservation.attempt)
                decoder.receiver.consumed(reservation.attempt)
    await until(lambda: decoder.pages.num_free == decoder.pages.num_pages and not decoder.pages.num_queued)
    decoder.check_all_free()
    attempt = f"good-{random.getrandbits(32)}"
    await serve_one(await world.open(prefiller, decoder, attempt, NUM_PAGES), decoder, attempt, NUM_PAGES)
    decoder.check_all_free()


def messages(decoder: Decoder, world: World) -> list[wire.Message]:
    return senders_messages(decoder.agent.epoch, LAYOUT, CHUNK, world.proxy.address)


async def send_all(raw: RawSender, payloads: Iterable[bytes], decoder: Decoder) -> None:
    for count, payload in enumerate(payloads):
        await raw.socket.send(payload)
        if count % 50 == 49:
            await raw.round_trip()
            decoder.pages.check_integrity()
    await raw.round_trip()
    decoder.pages.check_integrity()


@asynccontextmanager
async def disturbed(world: World, config: ReceiverConfig = QUICK) -> AsyncIterator[tuple[Decoder, RawSender]]:
    """While a good push named ``good`` is open, a stranger who has shaken hands does what it wants.

    In the end the good push arrives, and the silent stranger's pages come back.
    """
    decoder, prefiller = await world.decoder(NUM_PAGES, config), world.prefiller()
    push = await world.open(prefiller, decoder, "good")
    raw = world.stranger(decoder)
    await raw.greet()
    yield decoder, raw
    await serve_one(push, decoder, "good")
    raw.die()
    world.sockets.remove(raw.socket)
    await check_service(world, prefiller, decoder)


async def test_noise(world: World) -> None:
    dice = new_dice()
    async with disturbed(world) as (decoder, raw):
        await send_all(raw, noise(dice, 400), decoder)


async def test_valid_messages_spoilt(world: World) -> None:
    dice = new_dice()
    async with disturbed(world) as (decoder, raw):
        payloads = spoilt_payloads(messages(decoder, world))
        dice.shuffle(payloads)
        await send_all(raw, payloads, decoder)
        assert len(decoder.receiver._tombstones) < 200
        assert not any(len(attempt) > 256 for attempt in decoder.receiver._tombstones)


async def test_what_a_stranger_made_ready_waits_for_its_reader(world: World) -> None:
    """For longer than anybody may be silent."""
    async with disturbed(world) as (decoder, raw):
        assert isinstance(await raw.reserve("a", timeout_s=3600.0), wire.Reserved)
        await raw.say(wire.WritesDone(attempt="a", num_bytes=2 * PAGE_BYTES, transfer_s=0.1))
        await raw.round_trip()
        await asyncio.sleep(2 * QUICK.writer_timeout_s)
        assert decoder.holding("a") is Holding.READY


async def test_valid_messages_in_any_order(world: World) -> None:
    """Of one stranger's own attempts, of the good one's, and of some that nobody knows."""
    dice = new_dice()
    async with disturbed(world) as (decoder, raw):
        kinds = messages(decoder, world)
        payloads = []
        for _ in range(3000):
            message = dice.choice(kinds)
            changes = {"attempt": dice.choice(NAMES)} if hasattr(message, "attempt") else {}
            if isinstance(message, wire.PagesWritten):
                changes["count"] = dice.choice([0, 1, 2, 2**40])  # type: ignore[assignment]
            if isinstance(message, wire.Reserve):
                changes["keys"] = []  # type: ignore[assignment]
            payloads.append(wire.encode(replace_fields(message, **changes)))
        await send_all(raw, payloads, decoder)


def replace_fields(message: wire.Message, **changes: object) -> wire.Message:
    return type(message)(**{name: getattr(message, name) for name in message.__struct_fields__} | changes)


async def test_wrong_numbers_of_frames(world: World) -> None:
    heartbeat = wire.encode(wire.Heartbeat(epoch="x"))
    async with disturbed(world) as (decoder, raw):
        for frames in ([b"", heartbeat], [heartbeat, heartbeat], [heartbeat] * 3, [b""] * 100):
            await raw.socket.send_multipart(frames)
        await raw.round_trip()
        assert decoder.pages.get("good").holding is Holding.RESERVED


async def test_a_message_that_is_too_large_ends_its_connection_only(world: World) -> None:
    """A connection that sends one is dropped by ZMQ, unread; it comes back by itself, as somebody unknown."""
    async with disturbed(world) as (decoder, raw):
        assert isinstance(await raw.reserve("a"), wire.Reserved)
        await raw.socket.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        answer = None
        while answer is None:  # what is said before the connection is seen to be gone is lost
            await raw.say(raw.request("b"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    answer = wire.decode_from_receiver(await raw.socket.recv())
        assert isinstance(answer, wire.Refusal)
        assert "shaken hands" in answer.reason
        assert decoder.pages.get("b") is None


IMPOSSIBLE: list[list[str]] = [
    ["PagesWritten"],
    ["Reserve", "PagesWritten"],
    ["WritesDone", "Reserve"],
    ["Reserve", "Reserve"],
    ["Reserve", "WritesDone", "WritesDone"],
    ["Reserve", "WritesDone", "WritesEnded"],
    ["Reserve", "WritesEnded", "WritesEnded"],
    ["Reserve", "WritesEnded", "WritesDone"],
    ["Reserve", "WritesEnded", "Reserve", "WritesDone"],
    ["Reserve", "Hello", "WritesDone", "Hello"],
]


@pytest.mark.parametrize("kinds", IMPOSSIBLE, ids=" ".join)
async def test_impossible_orders(world: World, kinds: list[str]) -> None:
    async with disturbed(world) as (decoder, raw):
        by_name = {type(message).__name__: message for message in messages(decoder, world)}
        for kind in kinds:
            await raw.say(by_name[kind])
        await raw.round_trip()
        decoder.pages.check_integrity()


async def test_an_attempt_that_waits_is_not_done(world: World) -> None:
    async with disturbed(world) as (decoder, raw):
        await raw.say(raw.request("all", NUM_PAGES))
        for _ in range(3):
            await raw.say(wire.WritesDone(attempt="all", num_bytes=1, transfer_s=0.0))
        await raw.round_trip()
        assert decoder.pages.get("all").holding is Holding.QUEUED
        assert decoder.receiver._moved == {}, "what is not so is not counted"
        await raw.say(wire.WritesEnded(attempt="all", reason="sorry"))
        await raw.round_trip()
        assert decoder.pages.get("all") is None


async def test_an_attempt_belongs_to_the_connection_that_asked_first(world: World) -> None:
    async with disturbed(world) as (decoder, raw):
        refused = await raw.reserve("good")
        assert isinstance(refused, wire.Refusal)
        assert "another connection" in refused.reason
        for message in (
            wire.WritesDone(attempt="good", num_bytes=0, transfer_s=0.0),
            wire.WritesEnded(attempt="good", reason="because"),
            wire.PagesWritten(attempt="good", count=1),
        ):
            await raw.say(message)
        await raw.round_trip()
        assert decoder.pages.get("good").holding is Holding.RESERVED


async def test_a_stranger_of_very_many_ranks_is_refused(world: World) -> None:
    async with disturbed(world) as (_, raw):
        for size in (2**20, 2**40, 2**63):
            hello = wire.Hello(version=wire.PROTOCOL_VERSION, epoch="x", layout=replace_layout(tp_size=size))
            await raw.say(hello)
            await raw.say(raw.request(f"of-{size}"))
        await raw.round_trip()


def replace_layout(**changes: object) -> wire.Layout:
    return wire.Layout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | changes)  # type: ignore[arg-type]


# ── floods ──────────────────────────────────────────────────────────────────────────────────────────────────────────

FLOOD = 10_000
UNHURRIED = ReceiverConfig(heartbeat_s=0.3, writer_timeout_s=3.0)


async def test_a_flood(world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Ten thousand messages, most of them well formed: everything that remembers stays small, and so does the log."""
    for name in ("MAX_TOMBSTONES", "MAX_PEERS", "MAX_QUEUED"):
        monkeypatch.setattr(f"transfer.roles.receiver.{name}", 100)
    dice = new_dice()
    async with disturbed(world, UNHURRIED) as (decoder, raw):
        receiver = decoder.receiver
        for count in range(FLOOD):
            kind = dice.randrange(6)
            if kind < 2:
                await raw.say(raw.request(f"a{count}", 1 + count % 2, timeout_s=1.0))
            elif kind == 2:
                await raw.say(wire.WritesDone(attempt=f"a{dice.randrange(count + 1)}", num_bytes=1, transfer_s=0.0))
            elif kind == 3:
                await raw.say(wire.WritesEnded(attempt=f"a{dice.randrange(count + 1)}", reason="x" * 5000))
            else:
                await raw.socket.send(dice.randbytes(20))
            if count % 500 == 499:
                await raw.round_trip()
        assert len(receiver._tombstones) <= 100
        assert max(map(len, receiver._tombstones.values()), default=0) <= 1000
        assert decoder.pages.num_queued <= 100
        assert len(decoder.pages._attempts) <= 100 + NUM_PAGES
        assert len(receiver._moved) <= NUM_PAGES
        assert sum(map(len, receiver._moved.values())) <= NUM_PAGES
        assert len(receiver._last_heard) <= 2
        ours = [record for record in caplog.records if record.name.startswith("transfer")]
        assert 5 < len(ours) < 200, "some of it is in the log, and the rest is counted"


async def test_a_crowd_that_only_shakes_hands_pushes_nobody_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is forgotten while it has no attempts shakes hands anew; one that has some is not forgotten."""
    monkeypatch.setattr("transfer.roles.receiver.MAX_PEERS", 3)
    decoder, prefiller, other = await world.decoder(NUM_PAGES, PATIENT), world.prefiller(), world.prefiller()
    await serve_one(await world.open(other, decoder, "before"), decoder, "before")
    push = await world.open(prefiller, decoder, "good")
    for _ in range(10):
        await world.stranger(decoder).greet()
    assert len(decoder.receiver._peers) == 3
    assert decoder.receiver._last_heard.keys() <= decoder.receiver._peers.keys()
    await serve_one(await world.open(prefiller, decoder, "again"), decoder, "again")
    await serve_one(push, decoder, "good")
    await serve_one(await world.open(other, decoder, "after"), decoder, "after")


async def test_a_flood_leaves_others_their_turns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading goes on for as long as there is something to read, but not without a pause."""
    decoder = await world.decoder(config=PATIENT)
    handled, seen = 0, []
    raw = world.stranger(decoder)
    await raw.greet()

    def handle(writer: bytes, message: wire.SenderMessage) -> None:
        nonlocal handled
        handled += 1
        if handled == 1:
            asyncio.get_running_loop().call_soon(lambda: seen.append(handled))

    monkeypatch.setattr(decoder.receiver, "_handle", handle)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(decoder.receiver.endpoint.address)
        for _ in range(500):
            socket.send(wire.encode(wire.Heartbeat(epoch="x")))
        await until(lambda: handled >= 400)
    assert seen[0] <= 64


# ── the log ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_complaints_are_limited_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    complaints = Complaints(logging.getLogger("transfer.test"), burst=3, clock=lambda: now)
    for number in range(10):
        complaints.add("message %d is nonsense", number)
    assert caplog.messages == [f"message {number} is nonsense" for number in range(3)]
    now = 1.0
    complaints.add("message %d is nonsense", 10)
    complaints.add("message %d is nonsense", 11)
    assert caplog.messages[3:] == ["message 10 is nonsense (and 7 more before)"]
    now = 100.0
    for number in range(20, 30):
        complaints.add("message %d is nonsense", number)
    assert caplog.messages[4:] == ["message 20 is nonsense (and 1 more before)", *caplog.messages[5:7]]
    assert len(caplog.messages) == 7
