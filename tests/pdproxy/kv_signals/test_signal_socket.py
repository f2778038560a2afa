"""Signals over a real ZMQ socket, ours and LMCache's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from pdproxy.errors import ConfigError
from pdproxy.kv_signals.board import KvBoard
from pdproxy.kv_signals.zmq import SignalSocket
from transfer.roles.notifier import Notifier
from transfer.wire import KvReady, KvReleased, encode


@asynccontextmanager
async def listening(board: KvBoard) -> AsyncIterator[tuple[SignalSocket, zmq.SyncSocket]]:
    context = zmq.Context()
    signals = SignalSocket(board, "localhost", 0)
    task = asyncio.create_task(signals.run())
    sender = context.socket(zmq.PUSH)
    sender.connect(f"tcp://127.0.0.1:{signals.port}")
    try:
        yield signals, sender
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        signals.close()
        sender.close(linger=0)
        context.term()


async def test_ready_and_released() -> None:
    board = KvBoard()
    async with listening(board) as (_, sender):
        expectation = board.expect("a1", [0], epoch="e")
        sender.send(encode(KvReady(attempt="a1", rank=0, epoch="e", num_pages=3, num_bytes=30, transfer_s=0.5)))
        facts = await expectation.ready(board.now() + 5)
        assert (facts.num_pages, facts.num_bytes, facts.transfer_s) == (3, 30, 0.5)
        sender.send(encode(KvReleased(attempt="a1", rank=0, epoch="e", num_pages=3, reason="consumed")))
        await asyncio.wait_for(expectation.released.wait(), 5)


async def test_lmcaches_notification() -> None:
    board = KvBoard()
    async with listening(board) as (_, sender):
        expectation = board.expect("a1", [0, 1])
        for _ in range(2):
            sender.send(msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": "a1"}))
        await expectation.ready(board.now() + 5)
        expectation.drop()


async def test_signals_over_ipv6() -> None:
    board = KvBoard()
    signals, notifier = SignalSocket(board, "::1", 0), Notifier()
    task = asyncio.create_task(signals.run())
    try:
        expectation = board.expect("a1", [0], epoch="e")
        said = KvReady(attempt="a1", rank=0, epoch="e", num_pages=3, num_bytes=30, transfer_s=0.5)
        notifier.tell(f"tcp://[::1]:{signals.port}", said)
        await expectation.ready(board.now() + 5)
        expectation.drop()
    finally:
        await notifier.aclose()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        signals.close()


async def test_what_is_no_signal_is_counted_and_forgotten() -> None:
    board = KvBoard()
    async with listening(board) as (signals, sender):
        expectation = board.expect("a1", [0])
        for payload in (b"", b"\xff" * 9, msgspec.msgpack.encode({"type": "Nonsense"}), msgspec.msgpack.encode(3)):
            sender.send(payload)
        sender.send(msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": "a1"}))
        await expectation.ready(board.now() + 5)
        expectation.drop()
        assert signals.num_malformed == 4


async def test_a_port_that_is_taken() -> None:
    board = KvBoard()
    async with listening(board) as (signals, _):
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{signals.port}"):
            SignalSocket(board, "127.0.0.1", signals.port)
