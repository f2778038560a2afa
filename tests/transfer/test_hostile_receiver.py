"""A receiver that lies and babbles: the sender fails what it was to push there, cleanly, and serves everyone else."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import pytest
import zmq

from tests.fakes.hostile import new_dice, noise, receivers_messages, spoilt_payloads
from tests.fakes.transfer_world import (
    CHUNK,
    LAYOUT,
    Decoder,
    Prefiller,
    RawReceiver,
    World,
    fill,
    settled,
    until,
)
from transfer import wire
from transfer.errors import AttemptLost, HandshakeRefused, PeerLost, ReservationRefused, TransferError
from transfer.roles.control import MAX_MESSAGE_BYTES
from transfer.roles.sender import Push

pytestmark = pytest.mark.usefixtures("no_error_is_logged")


@pytest.fixture
async def decoder(world: World) -> Decoder:
    return await world.decoder()


def welcome_of(raw: RawReceiver, **changes: Any) -> wire.Welcome:
    """What is changed in both of them, a welcome and its slab, is changed alike."""
    slab = wire.Slab(
        epoch=raw.agent.epoch,
        layout=LAYOUT,
        metadata=raw.agent.epoch.encode(),
        base_address=raw._buffer.region.base_address,
        num_pages=1,
        device_id=0,
        memory="DRAM",
    )
    welcome = wire.Welcome(
        epoch=raw.agent.epoch,
        layout=LAYOUT,
        slabs=[msgspec.structs.replace(slab, **only(wire.Slab, changes))],
        num_pages=1,
        whole_requests=True,
        heartbeat_s=2.5,
        writer_timeout_s=10.0,
    )
    return msgspec.structs.replace(welcome, **only(wire.Welcome, changes))


def only(kind: type[msgspec.Struct], changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if name in kind.__struct_fields__}


def opening(
    world: World, prefiller: Prefiller, raw: RawReceiver, num_pages: int = 1, timeout_s: float = 3.0
) -> asyncio.Task[Push]:
    params = world.params(raw.endpoint, timeout_s=timeout_s)
    return asyncio.create_task(prefiller.sender.open(params, num_tokens=num_pages * CHUNK))


async def opened(
    world: World, prefiller: Prefiller, raw: RawReceiver, num_pages: int = 1, *, timeout_s: float = 3.0, **changes: Any
) -> Push:
    """Attempt ``a``, granted page 0 (a window, where more are asked for)."""
    task = opening(world, prefiller, raw, num_pages, timeout_s)
    await raw.hear(wire.Hello)
    await raw.say(welcome_of(raw, **changes))
    await raw.grant("a", [0])
    return await settled(task)


async def check_service(world: World, prefiller: Prefiller, decoder: Decoder) -> None:
    """An honest receiver is served."""
    push = await world.open(prefiller, decoder, "good")
    fill(push, 3, 4)
    await settled(asyncio.ensure_future(push.finish()))
    await settled(asyncio.ensure_future(decoder.receiver.wait_ready("good")))
    assert decoder.bytes_of(decoder.receiver.take("good")) == [4, 5]
    decoder.receiver.consumed("good")


async def check_failed(push: Push) -> str:
    with pytest.raises(AttemptLost) as failure:
        await settled(asyncio.ensure_future(push.finish()))
    await settled(asyncio.ensure_future(push.wait_ended()))
    return str(failure.value)


SLAB = wire.Slab(epoch="e", layout=LAYOUT, metadata=b"e", base_address=4096, num_pages=1, device_id=0, memory="DRAM")
INSANE: list[dict[str, Any]] = [
    {"heartbeat_s": 0.0},
    {"heartbeat_s": -1.0},
    {"heartbeat_s": math.nan},
    {"heartbeat_s": math.inf},
    {"heartbeat_s": 1e-9},
    {"heartbeat_s": 9.0},
    {"heartbeat_s": 5.0},
    {"writer_timeout_s": 0.0},
    {"writer_timeout_s": -1.0},
    {"writer_timeout_s": math.nan},
    {"writer_timeout_s": math.inf},
    {"writer_timeout_s": 1e-6},
    {"num_pages": 2**40},
    {"num_pages": 2**64 - 1},
    {"num_pages": -1},
    {"base_address": 0},
    {"base_address": -1},
    {"base_address": 2**64 - 1},
    {"memory": "nonsense"},
    {"metadata": b""},
    {"metadata": b"\xff" * 1000},
    {"epoch": "somebody else's"},
    {"epoch": ""},
    {"epoch": "x" * 1000},
    {"layout": msgspec.structs.replace(LAYOUT, tp_size=2**62)},
    {"layout": msgspec.structs.replace(LAYOUT, page_bytes=2**62)},
    {"layout": msgspec.structs.replace(LAYOUT, model="x" * 100_000)},
    {"slabs": []},
    {"slabs": [SLAB, SLAB]},
    {"slabs": [msgspec.structs.replace(SLAB, num_pages=0)]},
    {"slabs": [msgspec.structs.replace(SLAB, layout=msgspec.structs.replace(LAYOUT, tp_size=2, tp_rank=1))]},
    {"slabs": [msgspec.structs.replace(SLAB, layout=msgspec.structs.replace(LAYOUT, model="another"))]},
]


@pytest.mark.parametrize("changes", INSANE, ids=lambda changes: f"{changes}"[:60])
async def test_a_welcome_that_cannot_be(world: World, decoder: Decoder, changes: dict[str, Any]) -> None:
    """No push begins, and what is asked for in the end is not asked for at once, over and over."""
    prefiller, raw = world.prefiller(), world.raw_receiver()
    task = opening(world, prefiller, raw, timeout_s=0.15)
    await raw.hear(wire.Hello)
    await raw.say(welcome_of(raw, **changes))
    with pytest.raises(TransferError):
        await settled(task)
    await check_service(world, prefiller, decoder)
    assert not raw._socket.get(zmq.EVENTS) & zmq.POLLIN, "nothing is said to such a receiver any more"


async def test_an_honest_but_hasty_receiver_is_accepted(world: World) -> None:
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw, heartbeat_s=0.01, writer_timeout_s=0.04)
    await check_failed(push)  # nobody acknowledges its heartbeats


async def test_a_heartbeat_within_half_the_timeout_is_accepted(world: World) -> None:
    """For so long this side goes on without an answer."""
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw, heartbeat_s=4.9, writer_timeout_s=10.0)
    fill(push, 7)
    await settled(asyncio.ensure_future(push.finish()))


GRANTS: list[dict[str, Any]] = [
    {"pages": []},
    {"pages": [1]},
    {"pages": [-1]},
    {"pages": [2**63]},
    {"pages": [0, 0]},
    {"pages": [0, 0, 0]},
    {"pages": list(range(1000))},
    {"pages": [0], "present": [0]},
    {"pages": [0, 1], "present": [-1]},
    {"pages": [0, 1], "present": [2]},
    {"pages": [0, 1], "present": [2**63]},
    {"pages": [0, 1], "num_cached": 1},
    {"pages": [], "num_cached": 2},
    {"pages": [0], "num_cached": 2},
    {"pages": [0], "num_cached": 2**40},
    {"pages": [0], "num_cached": 1, "present": [0]},
]
"""Each number as a run of its own."""
RUNS: list[dict[str, Any]] = [
    {"pages": [(0, 2)]},
    {"pages": [(0, 0), (0, 1)]},
    {"pages": [(0, 3), (0, -1)]},
    {"pages": [(0, 2**62)]},
    {"pages": [(-1, 2)]},
    {"pages": [(0, 1), (0, 1)], "present": [(0, 2**62)]},
]


def as_runs(grant: dict[str, Any]) -> dict[str, Any]:
    ones = {name: [(number, 1) for number in grant[name]] for name in ("pages", "present") if name in grant}
    return {**grant, **ones}


@pytest.mark.parametrize("grant", [*map(as_runs, GRANTS), *RUNS], ids=str)
async def test_a_grant_that_cannot_be(world: World, decoder: Decoder, grant: dict[str, Any]) -> None:
    """Two pages of a buffer that is said to have one."""
    prefiller, raw = world.prefiller(), world.raw_receiver()
    task = opening(world, prefiller, raw, num_pages=2)
    await raw.welcome()
    await raw.hear(wire.Reserve)
    await raw.say(wire.Reserved(attempt="a", **grant))
    # A session that is lost is tried once more, from the start.
    raw._heard.clear()
    await check_service(world, prefiller, decoder)
    with pytest.raises(PeerLost, match="cannot be"):
        await settled(task)


async def test_a_page_that_is_refused_fails_a_push_that_asks_one_by_one(world: World, decoder: Decoder) -> None:
    """At once, and not when its time is up."""
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw, num_pages=2, whole_requests=False)
    raw._heard.clear()
    fill(push, 7, 8)
    await raw.hear(wire.Reserve)
    await raw.say(wire.Refusal(attempt="a", epoch=raw.agent.epoch, reason="no more of them"))
    assert "no more of them" in await check_failed(push)
    await check_service(world, prefiller, decoder)


async def test_more_taken_than_was_written(world: World, decoder: Decoder) -> None:
    """Believing it would let the sender write two pages of the window into one place at once."""
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw, num_pages=3)
    await raw.say(wire.PagesTaken(attempt="a", count=2))
    assert "taken" in await check_failed(push)
    await check_service(world, prefiller, decoder)


async def test_taken_where_there_is_no_window(world: World, decoder: Decoder) -> None:
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw)
    for count in (-1, 2**40, 0):
        await raw.say(wire.PagesTaken(attempt="a", count=count))
    fill(push, 7)
    await settled(asyncio.ensure_future(push.finish()))
    await check_service(world, prefiller, decoder)


async def test_welcome_twice_and_grants_twice(world: World, decoder: Decoder) -> None:
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw)
    await raw.say(welcome_of(raw, epoch="another", num_pages=2**40, heartbeat_s=0.0))
    await raw.say(wire.Reserved(attempt="a", pages=[(5, 1)]))
    await raw.say(wire.Reserved(attempt="unknown", pages=[(0, 1)]))
    await raw.say(wire.Refusal(attempt="a", epoch=raw.agent.epoch, reason="too late"))
    await raw.say(wire.HeartbeatAck(epoch=raw.agent.epoch))
    fill(push, 7)
    await settled(asyncio.ensure_future(push.finish()))
    assert int(raw._buffer.pages[0][0]) == 8
    await check_service(world, prefiller, decoder)


LATE: list[wire.Message] = [
    wire.HelloRefused(field="dtype", ours="x", theirs="y"),
    wire.HeartbeatAck(epoch="another"),
    wire.Refusal(attempt="a", epoch="another", reason="because"),
    wire.Cancel(attempt="a"),
]


@pytest.mark.parametrize("message", LATE, ids=lambda message: type(message).__name__)
async def test_what_ends_a_push_ends_it_at_once(world: World, decoder: Decoder, message: wire.Message) -> None:
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw)
    await raw.say(message)
    await check_failed(push)
    await check_service(world, prefiller, decoder)


async def test_everything_before_the_handshake(
    world: World, decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    prefiller, raw = world.prefiller(), world.raw_receiver()
    task = opening(world, prefiller, raw)
    await raw.hear(wire.Hello)
    for message in receivers_messages(welcome_of(raw))[1:]:
        await raw.say(message)
    await raw.say(wire.HelloRefused(field="dtype", ours="x", theirs="y"))
    with pytest.raises(HandshakeRefused):
        await settled(task)
    assert "before the handshake" in caplog.text
    await check_service(world, prefiller, decoder)


async def test_noise_and_spoilt_messages(world: World, decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    """Round after round: a push is open, a tenth of all there is comes in, and the push fails or succeeds in time."""
    dice, prefiller = new_dice(), world.prefiller()
    payloads = [*noise(dice, 100), *spoilt_payloads(receivers_messages(welcome_of(world.raw_receiver())))]
    dice.shuffle(payloads)
    for part in range(10):
        raw = world.raw_receiver()
        push = await opened(world, prefiller, raw)
        for payload in payloads[part::10]:
            await raw._socket.send_multipart([raw._identity, payload])
        await raw.say(wire.Cancel(attempt="a"))
        await check_failed(push)
    assert len(caplog.records) < 1000
    await check_service(world, prefiller, decoder)


async def test_wrong_numbers_of_frames(world: World, decoder: Decoder) -> None:
    """A message in many frames is none, though its frames might be."""
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw)
    cancel = wire.encode(wire.Cancel(attempt="a"))
    for frames in ([b"", cancel], [cancel, cancel], [cancel, b"", b""]):
        await raw._socket.send_multipart([raw._identity, *frames])
    fill(push, 7)
    await settled(asyncio.ensure_future(push.finish()))
    await check_service(world, prefiller, decoder)


async def test_a_message_that_is_too_large(world: World, decoder: Decoder) -> None:
    """The connection is dropped and made again; what was lost with it is not waited for beyond the deadline."""
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw, timeout_s=0.5)
    cancel = wire.encode(wire.Cancel(attempt="a"))
    await raw._socket.send_multipart([raw._identity, b"x" * (MAX_MESSAGE_BYTES + 1)])
    await raw._socket.send_multipart([raw._identity, cancel])
    await check_failed(push)
    await check_service(world, prefiller, decoder)


async def test_a_flood_of_cancels_for_others(world: World, decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw)
    for count in range(10_000):
        await raw._socket.send_multipart([raw._identity, wire.encode(wire.Cancel(attempt=f"other-{count}"))])
        if count % 100 == 0:
            await asyncio.sleep(0)
    fill(push, 7)
    await settled(asyncio.ensure_future(push.finish()))
    assert len(caplog.records) < 200
    await check_service(world, prefiller, decoder)


async def test_no_spinning(world: World) -> None:
    """Heartbeats of an open attempt come as often as was agreed."""
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw, heartbeat_s=0.05, writer_timeout_s=10.0)
    await asyncio.sleep(0.3)
    push.abort("enough")
    await raw.hear(wire.WritesEnded)
    num_heartbeats = sum(isinstance(message, wire.Heartbeat) for message in raw._heard)
    assert 1 <= num_heartbeats <= 8


async def test_of_heartbeats_without_an_answer_only_the_latest_are_remembered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.roles.session.MAX_UNANSWERED", 3)
    prefiller, raw = world.prefiller(), world.raw_receiver()
    push = await opened(world, prefiller, raw, heartbeat_s=0.01, writer_timeout_s=10.0)
    (session,) = prefiller.sender._sessions.values()
    await until(lambda: session._num_heartbeats > 5)
    assert list(session._unanswered) == [session._num_heartbeats - before for before in (2, 1, 0)]
    push.abort("enough")
    await raw.hear(wire.WritesEnded)


# ── addresses ───────────────────────────────────────────────────────────────────────────────────────────────────────


HOSTS = ["", " ", "\0", "*", "127.0.0.1:1;tcp://x", "x" * 5000, "é", "\ud800", "[::1"]
PORTS = [-1, 0, 70_000, 2**70]
NOWHERE = [*((host, 7300) for host in HOSTS), *(("127.0.0.1", port) for port in PORTS)]


@pytest.mark.parametrize(("host", "port"), NOWHERE)
async def test_addresses_that_are_none(world: World, host: str, port: int) -> None:
    prefiller = world.prefiller()
    endpoint = wire.Endpoint(rank=0, host=host, port=port)
    with pytest.raises((PeerLost, ReservationRefused)):
        await settled(
            asyncio.ensure_future(prefiller.sender.open(world.params(endpoint, timeout_s=0.05), num_tokens=4))
        )


async def test_more_receivers_than_there_can_be_sockets(world: World, decoder: Decoder) -> None:
    prefiller = world.prefiller()
    prefiller.sender._context.set(zmq.MAX_SOCKETS, 8)
    receivers = [wire.Endpoint(rank=0, host="127.0.0.1", port=1000 + number) for number in range(30)]
    opens = [prefiller.sender.open(world.params(one, timeout_s=0.05), num_tokens=4) for one in receivers]
    results = await asyncio.gather(*opens, return_exceptions=True)
    assert all(isinstance(result, TransferError) for result in results)
    assert any("no socket" in str(result) for result in results)
    await check_service(world, world.prefiller(), decoder)
