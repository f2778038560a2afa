"""Hostile messages at the proxy's signal socket: refused and logged; signals go on being delivered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from pdproxy.kv_signals import zmq as signal_socket
from pdproxy.kv_signals.board import KvBoard
from pdproxy.kv_signals.zmq import SignalSocket
from tests.fakes.hostile import new_dice, noise, signals, spoilt_payloads
from transfer.wire import KvReady, ProxyNotif, encode

LIMIT_S = 10.0


@asynccontextmanager
async def listening(board: KvBoard) -> AsyncIterator[tuple[SignalSocket, zmq.SyncSocket]]:
    context = zmq.Context()
    socket = SignalSocket(board, "localhost", 0)
    task = asyncio.create_task(socket.run())
    sender = context.socket(zmq.PUSH)
    sender.connect(f"tcp://127.0.0.1:{socket.port}")
    try:
        yield socket, sender
        assert not task.done(), "nothing that a stranger sends ends it"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        socket.close()
        sender.close(linger=0)
        context.term()


async def check_service(board: KvBoard, sender: zmq.SyncSocket) -> None:
    """A signal still gets through, behind everything that was sent before."""
    with_ranks = board.expect("good", [0], epoch="e")
    sender.send(encode(KvReady(attempt="good", rank=0, epoch="e", num_pages=3, num_bytes=30, transfer_s=0.5)))
    facts = await with_ranks.ready(board.now() + LIMIT_S)
    assert (facts.num_pages, facts.num_bytes, facts.transfer_s) == (3, 30, 0.5)
    with_ranks.drop()
    board.check_integrity()


async def test_noise_and_spoilt_signals(caplog: pytest.LogCaptureFixture) -> None:
    dice, board = new_dice(), KvBoard()
    payloads = [*noise(dice, 300), *spoilt_payloads(signals())]
    payloads = [payload for payload in payloads if len(payload) <= signal_socket.MAX_SIGNAL_BYTES]
    dice.shuffle(payloads)
    async with listening(board) as (socket, sender):
        expected = board.expect("a", [0, 1], epoch="e")
        for payload in payloads:
            sender.send(payload)
        await check_service(board, sender)
        assert socket.num_malformed > 1000
        expected.drop()
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert len(caplog.records) < 100, "the rest is counted"


@pytest.mark.parametrize(
    "fields",
    [
        {"num_pages": -1},
        {"num_bytes": -1},
        {"num_bytes": 2**64 - 1},
        {"transfer_s": float("nan")},
        {"transfer_s": float("inf")},
        {"transfer_s": -1.0},
    ],
    ids=str,
)
async def test_figures_that_would_spoil_every_sum_are_refused(fields: dict[str, float]) -> None:
    board = KvBoard()
    known = {"attempt": "a", "rank": 0, "epoch": "e", "num_pages": 1, "num_bytes": 1, "transfer_s": 0.1}
    async with listening(board) as (socket, sender):
        expected = board.expect("a", [0], epoch="e")
        sender.send(encode(KvReady(**known | fields)))  # type: ignore[arg-type]
        await check_service(board, sender)
        assert (socket.num_malformed, expected.is_ready) == (1, False)
        expected.drop()


async def test_a_signal_in_several_frames_is_none() -> None:
    board = KvBoard()
    notif = encode(ProxyNotif(req_id="a"))
    async with listening(board) as (socket, sender):
        expected = board.expect("a", [0])
        for frames in ([notif, notif], [b"", notif], [notif, b"", b""]):
            sender.send_multipart(frames)
        await check_service(board, sender)
        assert (socket.num_malformed, expected.is_ready) == (3, False)
        expected.drop()


async def test_one_that_is_too_large_ends_its_connection_only() -> None:
    board = KvBoard()
    async with listening(board) as (socket, sender):
        with zmq.Context() as context, context.socket(zmq.PUSH) as hostile, hostile.get_monitor_socket() as monitor:
            hostile.connect(f"tcp://127.0.0.1:{socket.port}")
            hostile.send(b"x" * (signal_socket.MAX_SIGNAL_BYTES + 1))
            while recv_monitor_message(monitor)["event"] != zmq.EVENT_DISCONNECTED:
                pass
            hostile.disable_monitor()
            hostile.set(zmq.LINGER, 0)
        await check_service(board, sender)
        assert socket.num_malformed == 0, "it was never read"


async def test_a_flood_leaves_others_their_turns_and_the_log_readable(caplog: pytest.LogCaptureFixture) -> None:
    board = KvBoard()
    async with listening(board) as (socket, sender):
        for _ in range(10_000):
            sender.send(b"nonsense")
        while not socket.num_malformed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        first = socket.num_malformed
        await asyncio.sleep(0)
        assert socket.num_malformed - first <= 64
        await check_service(board, sender)
        assert socket.num_malformed == 10_000
    assert 1 <= len(caplog.records) < 20
