"""Strangers at the control socket: what keeps their bytes from being taken for a prompt's, each lock alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tests.fakes.hostile import TEXTS, new_dice, senders_messages, spoilt_payloads
from tests.fakes.transfer_world import (
    CHUNK,
    KV,
    LAYOUT,
    LIMIT_S,
    PATIENT,
    QUICK,
    Decoder,
    Prefiller,
    RawSender,
    World,
    settled,
    until,
)
from transfer import wire
from transfer.errors import PeerLost, ReservationRefused
from transfer.plan.blocks import page_table
from transfer.plan.keys import chunk_keys
from transfer.roles.curve import lock_client
from transfer.roles.push import Push
from transfer.trust import AttemptKey, FleetKey, new_key

FLEET, OTHER_FLEET = FleetKey(b"f" * 32), FleetKey(b"o" * 32)
ATTEMPTS = AttemptKey(b"a" * 32)
LOCKED = replace(PATIENT, fleet_key=FLEET)
SIGNED = replace(PATIENT, attempt_key=ATTEMPTS)
PROMPT = list(range(2 * CHUNK))
TABLE = page_table(KV.groups, len(PROMPT), CHUNK)
POISON = [0, 0]
"""What the first bytes of two pages are that nobody has written."""


def signed(world: World, decoder: Decoder, attempt: str = "a", timeout_s: float = 30.0) -> wire.PushParams:
    params = world.params(decoder, attempt, timeout_s)
    return msgspec.structs.replace(params, capability=ATTEMPTS.sign(attempt, params.notify))


async def serve(push: Push, decoder: Decoder, attempt: str = "a") -> list[int]:
    """Send what is not there already; returns what the decoder would answer from."""
    for ordinal in range(len(push.table)):
        push.page_filled(ordinal, ordinal)
    await settled(asyncio.ensure_future(push.finish()))
    found = decoder.bytes_of(await decoder.read(attempt))
    decoder.receiver.consumed(attempt)
    return found


FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Knocking:
    """A socket's handshake with `decoder`, watched from before the connection: a refusal may come at once, and once."""

    def __init__(self, socket: zmq.asyncio.Socket, decoder: Decoder, *, or_left: bool = False) -> None:
        self._socket = socket
        failures = FAILURES | zmq.EVENT_DISCONNECTED if or_left else FAILURES
        self._monitor = socket.get_monitor_socket(failures | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(decoder.receiver.endpoint.address)

    async def outcome(self) -> int:
        """Wait until the other side has turned the socket away (or, with `or_left`, has closed the connection, which
        some refusals look like), or has let it in; returns the event that tells."""
        try:
            async with asyncio.timeout(LIMIT_S):
                return int((await recv_monitor_message(self._monitor))["event"])
        finally:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)


def stranger(world: World, decoder: Decoder, key: FleetKey | None = None) -> tuple[RawSender, Knocking]:
    """A sender that says what it wants, with this key or none."""
    socket = world.raw(zmq.DEALER)
    if key is not None:
        lock_client(socket, key)
    knocking = Knocking(socket, decoder, or_left=True)
    return RawSender(socket, decoder, world.proxy.address), knocking


# ── poisoning ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def poison(raw: RawSender) -> wire.ReceiverMessage:
    """Name a known prompt's chunks as one's own, write nothing, say that it is done, and leave."""
    answer = await raw.reserve("evil", keys=chunk_keys(PROMPT, TABLE))
    await raw.say(wire.WritesDone(attempt="evil", num_bytes=64, transfer_s=0.0))
    await raw.round_trip()
    return answer


async def victim(world: World, prefiller: Prefiller, decoder: Decoder, secret: bytes = b"") -> list[int]:
    params = signed(world, decoder, "good")
    keys = chunk_keys(PROMPT, TABLE, secret=secret)
    return await serve(await prefiller.sender.open(params, num_tokens=len(PROMPT), keys=keys), decoder, "good")


def end_poison(decoder: Decoder) -> None:
    decoder.receiver.cancel("evil")


async def test_without_any_key_a_stranger_poisons(world: World) -> None:
    """What the locks are for: this is how it is where nothing was configured."""
    decoder = await world.decoder()
    assert isinstance(await poison(world.stranger(decoder)), wire.Reserved)
    assert await victim(world, world.prefiller(), decoder) == POISON
    end_poison(decoder)


async def test_secret_chunk_keys_alone_keep_poison_apart(world: World) -> None:
    decoder = await world.decoder()
    assert isinstance(await poison(world.stranger(decoder)), wire.Reserved)
    assert await victim(world, world.prefiller(), decoder, FLEET.chunk_secret) == [1, 2]
    end_poison(decoder)


async def test_capabilities_alone_keep_poison_out(world: World) -> None:
    decoder = await world.decoder(config=SIGNED)
    refused = await poison(world.stranger(decoder))
    assert isinstance(refused, wire.Refusal)
    assert "attempt key" in refused.reason
    assert decoder.pages.get("evil") is None
    assert await victim(world, world.prefiller(), decoder) == [1, 2]


@pytest.mark.parametrize("key", [None, OTHER_FLEET], ids=["no key", "another key"])
async def test_locked_sockets_alone_keep_poison_out(world: World, key: FleetKey | None) -> None:
    decoder = await world.decoder(config=LOCKED)
    raw, knocking = stranger(world, decoder, key)
    await raw.say(wire.Hello(version=wire.PROTOCOL_VERSION, epoch="raw", layout=LAYOUT))
    await raw.say(raw.request("evil", keys=chunk_keys(PROMPT, TABLE)))
    await raw.say(wire.WritesDone(attempt="evil", num_bytes=64, transfer_s=0.0))
    assert await knocking.outcome() != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert await victim(world, world.prefiller(fleet_key=FLEET), decoder) == [1, 2]
    assert len(decoder.receiver._peers) == 1
    assert "evil" not in decoder.receiver._tombstones


async def test_equal_secrets_share_and_unequal_ones_do_not(world: World) -> None:
    """Three prefillers, two of one fleet, one prompt: each finds there what it may rely on, and reads its own bytes."""
    decoder = await world.decoder(num_pages=8)
    pushed = []
    prefillers = [world.prefiller() for _ in range(3)]
    for prefiller, attempt, secret in zip(prefillers, "abc", (FLEET, FLEET, OTHER_FLEET), strict=True):
        keys = chunk_keys(PROMPT, TABLE, secret=secret.chunk_secret)
        push = await prefiller.sender.open(world.params(decoder, attempt), num_tokens=len(PROMPT), keys=keys)
        pushed.append([push.is_present(ordinal) for ordinal in range(2)])
        assert await serve(push, decoder, attempt) == [1, 2]
    assert pushed == [[False, False], [True, True], [False, False]]


# ── locked sockets ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_one_fleet_understands_itself_and_shares(world: World) -> None:
    decoder = await world.decoder(config=LOCKED)
    prefiller = world.prefiller(fleet_key=FLEET)
    assert await victim(world, prefiller, decoder, FLEET.chunk_secret) == [1, 2]
    again = await prefiller.sender.open(
        world.params(decoder, "again"), num_tokens=8, keys=chunk_keys(PROMPT, TABLE, secret=FLEET.chunk_secret)
    )
    assert again.is_present(0)
    assert await serve(again, decoder, "again") == [1, 2]


UNEQUAL = [(None, FLEET), (FLEET, None), (OTHER_FLEET, FLEET)]
IDS = ["only the receiver", "only the sender", "different ones"]


@pytest.mark.parametrize(("ours", "theirs"), UNEQUAL, ids=IDS)
@pytest.mark.parametrize("what", ["handshake", "attempt"])
async def test_unequal_keys_are_told_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch, ours: FleetKey | None, theirs: FleetKey | None, what: str
) -> None:
    """Whichever limit is shorter ends the wait, and the error says that it may be the keys."""
    limits = {"handshake": 30.0, "attempt": 30.0} | {what: 0.3}
    monkeypatch.setattr("transfer.roles.session.HANDSHAKE_TIMEOUT_S", limits["handshake"])
    decoder = await world.decoder(config=replace(PATIENT, fleet_key=theirs))
    prefiller = world.prefiller(fleet_key=ours)
    expected = "this side has no fleet key" if ours is None else "this side has a fleet key"
    with pytest.raises(PeerLost, match=expected):
        await settled(asyncio.ensure_future(world.open(prefiller, decoder, timeout_s=limits["attempt"])))
    assert decoder.receiver._peers == {}


async def test_a_mixed_fleet_serves_those_that_belong_to_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decoder with a key, one without, and a prefiller of either kind for both."""
    monkeypatch.setattr("transfer.roles.session.HANDSHAKE_TIMEOUT_S", 0.3)
    decoders = {FLEET: await world.decoder(config=LOCKED), None: await world.decoder()}
    prefillers = {key: world.prefiller(fleet_key=key) for key in decoders}
    for ours, prefiller in prefillers.items():
        for theirs, decoder in decoders.items():
            if ours is theirs:
                push = await world.open(prefiller, decoder)
                assert await serve(push, decoder) == [1, 2]
            else:
                with pytest.raises(PeerLost, match="fleet key"):
                    await world.open(prefiller, decoder)


async def test_the_public_key_alone_opens_nothing(world: World) -> None:
    """Who knows only the public half, and has a pair of his own, is asked for the fleet's, and turned away."""
    decoder = await world.decoder(config=LOCKED)
    socket = world.raw(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    socket.set(zmq.CURVE_PUBLICKEY, public)
    socket.set(zmq.CURVE_SECRETKEY, secret)
    socket.set(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(FLEET.curve_secret)))
    knocking = Knocking(socket, decoder)
    await socket.send(wire.encode(wire.Heartbeat(epoch="raw")))
    assert await knocking.outcome() == zmq.EVENT_HANDSHAKE_FAILED_AUTH


async def test_nobody_at_the_door_lets_nobody_in(world: World) -> None:
    """ZMQ without anybody to ask would let everybody in who knows the public half. Whoever knocks while the doorkeeper
    is on its way out is asked about, and hears nothing at all."""
    decoder = await world.decoder(config=LOCKED)
    assert decoder.receiver._doorkeeper is not None
    decoder.receiver._doorkeeper.close()
    raw, knocking = stranger(world, decoder, FLEET)
    await raw.say(wire.Heartbeat(epoch="raw"))
    with contextlib.suppress(TimeoutError):
        assert await knocking.outcome() != zmq.EVENT_HANDSHAKE_SUCCEEDED


V1 = b"\x01\x00" + b"\x0d\x00" + wire.encode(wire.Heartbeat(epoch="x"))[:12]
V2 = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x01\x05" + b"\x00\x00"


@pytest.mark.parametrize("greeting", [V1, V2], ids=["ZMTP 1", "ZMTP 2"])
async def test_older_protocols_are_not_spoken(world: World, greeting: bytes) -> None:
    """The connection is ended, and no word of it is heard."""
    decoder = await world.decoder(config=LOCKED)
    heard: list[Any] = []
    decoder.receiver._socket._on_message = heard.append
    endpoint = decoder.receiver.endpoint
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    payload = wire.encode(wire.Heartbeat(epoch="x"))
    writer.write(greeting + b"\x00" + struct.pack("B", len(payload)) + payload)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(LIMIT_S):
            while await reader.read(1 << 12):
                pass
    writer.close()
    assert heard == []


async def test_what_is_said_cannot_be_read_on_the_way(world: World) -> None:
    """A relay between the two sees every byte: neither the attempt nor a chunk's key is among them."""
    for key in (None, FLEET):
        decoder = await world.decoder(config=replace(PATIENT, fleet_key=key))
        async with relayed(decoder.receiver.endpoint) as (endpoint, relay):
            keys, attempt = chunk_keys(PROMPT, TABLE), "attempt-to-look-for"
            params = world.params(endpoint, attempt)
            prefiller = world.prefiller(fleet_key=key)
            push = await prefiller.sender.open(params, num_tokens=len(PROMPT), keys=keys)
            assert await serve(push, decoder, attempt) == [1, 2]
            is_seen = [attempt.encode() in relay.seen, keys[0] in relay.seen]
            assert is_seen == [key is None] * 2
            await prefiller.sender.aclose()


async def test_a_locked_connection_that_was_cut_comes_back(world: World) -> None:
    """The same session goes on behind a new connection, and who connects anew is asked for his key anew."""
    decoder, prefiller = await world.decoder(config=LOCKED), world.prefiller(fleet_key=FLEET)
    async with relayed(decoder.receiver.endpoint) as (endpoint, relay):
        for num_cuts, attempt in enumerate(("a", "b", "c")):
            await until(lambda num=num_cuts: num == 0 or relay.num_met == num + 1)  # type: ignore[misc]
            push = await prefiller.sender.open(world.params(endpoint, attempt), num_tokens=8)
            assert await serve(push, decoder, attempt) == [1, 2]
            relay.cut()
        assert len(decoder.receiver._peers) == 1
        await prefiller.sender.aclose()


class Relay:
    """A place in front of a receiver. It keeps what went through, and can end the connections that are there now."""

    def __init__(self, endpoint: wire.Endpoint) -> None:
        self._behind = endpoint
        self._pumps = set[asyncio.Task[None]]()
        self.seen = bytearray()
        self.num_met = 0

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(self._behind.host, self._behind.port)
        self._pumps |= {asyncio.create_task(self._pump(*ends)) for ends in ((reader, behind[1]), (behind[0], writer))}
        self.num_met += 1

    def cut(self) -> None:
        for task in self._pumps:
            task.cancel()

    async def aclose(self) -> None:
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.seen.extend(data)
                writer.write(data)


@contextlib.asynccontextmanager
async def relayed(endpoint: wire.Endpoint) -> AsyncIterator[tuple[wire.Endpoint, Relay]]:
    relay = Relay(endpoint)
    server = await asyncio.start_server(relay.meet, "127.0.0.1", 0)
    try:
        yield wire.Endpoint(rank=0, host="127.0.0.1", port=server.sockets[0].getsockname()[1]), relay
    finally:
        server.close()
        await relay.aclose()


# ── capabilities ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_attempt_of_the_proxy_is_served(world: World) -> None:
    decoder, prefiller = await world.decoder(config=SIGNED), world.prefiller()
    push = await prefiller.sender.open(signed(world, decoder), num_tokens=8)
    assert await serve(push, decoder) == [1, 2]
    await world.proxy.next(wire.KvReleased, "a")


async def test_an_attempt_of_nobody_is_refused_at_once(world: World) -> None:
    decoder, prefiller = await world.decoder(config=SIGNED), world.prefiller()
    with pytest.raises(ReservationRefused, match="the proxy needs the same one"):
        await settled(asyncio.ensure_future(world.open(prefiller, decoder)))


async def test_a_capability_is_for_one_attempt_and_one_address(world: World) -> None:
    decoder = await world.decoder(config=SIGNED)
    raw, address = world.stranger(decoder), world.proxy.address
    good = ATTEMPTS.sign("a", address)
    for changes in (
        {"capability": None},
        {"capability": ""},
        {"capability": good[:-1]},
        {"capability": good.upper()},
        {"capability": ATTEMPTS.sign("b", address)},
        {"capability": ATTEMPTS.sign("a", None)},
        {"capability": AttemptKey(b"b" * 32).sign("a", address)},
        {"capability": good, "notify": "tcp://127.0.0.1:1"},
        {"capability": good, "notify": None},
    ):
        assert isinstance(await raw.reserve("a", **changes), wire.Refusal), changes
    assert isinstance(await raw.reserve("b", capability=good), wire.Refusal)
    assert isinstance(await raw.reserve("a", capability=good), wire.Reserved)
    await raw.say(wire.WritesEnded(attempt="a", reason="sorry"))
    await world.proxy.next(wire.KvReleased, "a")
    again = await raw.reserve("a", capability=good)
    assert isinstance(again, wire.Refusal), "it was for one time"
    assert "over" in again.reason


async def test_who_joins_an_attempt_needs_its_capability_too(world: World) -> None:
    decoder, prefiller = await world.decoder(config=SIGNED), world.prefiller()
    push = await prefiller.sender.open(signed(world, decoder), num_tokens=8)
    refused = await world.stranger(decoder).reserve("a")
    assert isinstance(refused, wire.Refusal)
    assert "attempt key" in refused.reason
    assert await serve(push, decoder) == [1, 2]


async def test_capabilities_of_chance(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is sent in the new field, and whatever a valid message becomes: nothing is granted."""
    caplog.set_level(logging.WARNING)
    dice = new_dice()
    decoder = await world.decoder(8, replace(QUICK, attempt_key=ATTEMPTS))
    raw = world.stranger(decoder)
    await raw.greet()
    good = ATTEMPTS.sign("a", world.proxy.address)
    near = [good[:at] + dice.choice("0123456789abcdef\0é") + good[at + 1 :] for at in range(64)]
    wrong = [*(text for text in near if text != good), *TEXTS, good + "0", "0" + good, good * 4]
    payloads = [wire.encode(raw.request("a", capability=text)) for text in wrong]
    payloads += spoilt_payloads([senders_messages(decoder.agent.epoch, LAYOUT, CHUNK, world.proxy.address)[1]])
    dice.shuffle(payloads)
    for count, payload in enumerate(payloads):
        await raw.socket.send(payload)
        if count % 50 == 49:
            await raw.round_trip()
    await raw.round_trip()
    assert decoder.pages.all() == []
    assert decoder.pages.num_free == 8
    assert good not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# ── where signals go ────────────────────────────────────────────────────────────────────────────────────────────────

ELSEWHERE = [
    "tcp://10.1.2.3:7500",
    "tcp://127.example.com:7500",
    "tcp://proxy.local:7500",
    "tcp://127.0.0.1:0;10.1.2.3:1",
]


@pytest.mark.parametrize("address", ELSEWHERE)
async def test_by_default_signals_stay_on_this_machine(world: World, address: str) -> None:
    decoder = await world.decoder()
    refused = await world.stranger(decoder).reserve(notify=address)
    assert isinstance(refused, wire.Refusal)
    assert address in refused.reason
    assert "notify_hosts" in refused.reason
    assert decoder.receiver._notifier._sockets == {}


async def test_an_option_says_where_else_they_may_go(world: World) -> None:
    """And then nowhere but there."""
    port = world.proxy.address.rpartition(":")[2]
    config = replace(PATIENT, notify_hosts=("proxy.local:7500", f"127.0.0.1:{port}"))
    decoder, prefiller = await world.decoder(config=config), world.prefiller()
    assert await serve(await world.open(prefiller, decoder), decoder) == [1, 2]
    refused = await world.stranger(decoder).reserve("b", notify="tcp://127.0.0.1:1")
    assert isinstance(refused, wire.Refusal)


async def test_a_proxy_that_signs_says_where_they_go(world: World) -> None:
    """Unless the option says otherwise: it counts, whoever has signed."""
    address = "tcp://192.0.2.1:7500"
    capability = ATTEMPTS.sign("a", address)
    decoder = await world.decoder(config=SIGNED)
    raw = world.stranger(decoder)
    assert isinstance(await raw.reserve("a", notify=address, capability=capability), wire.Reserved)
    await raw.say(wire.WritesEnded(attempt="a", reason="sorry"))
    await raw.round_trip()
    strict = await world.decoder(config=replace(SIGNED, notify_hosts=("proxy.local",)))
    refused = await world.stranger(strict).reserve("a", notify=address, capability=capability)
    assert isinstance(refused, wire.Refusal)
    assert "notify_hosts" in refused.reason


def test_no_key_is_shown() -> None:
    fleet, attempts = new_key(), new_key()
    config = replace(PATIENT, fleet_key=FleetKey.parse(fleet), attempt_key=AttemptKey.parse(attempts))
    shown = repr(config)
    assert not any(
        text in shown for text in (fleet, attempts, repr(bytes.fromhex(fleet)), repr(bytes.fromhex(attempts)))
    )
    assert FleetKey.parse(fleet).fingerprint in shown
