"""A proxy that talks back, though nothing is to come in where signals go out; and addresses that are no proxy's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from transfer import wire
from transfer.roles.notifier import MAX_ANSWER_BYTES, Notifier

LIMIT_S = 10.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 4) + b"PULL"


@pytest.fixture
async def notifier() -> AsyncIterator[Notifier]:
    notifier = Notifier()
    yield notifier
    await notifier.aclose()


def failed(attempt: str, reason: str = "because") -> wire.KvFailed:
    return wire.KvFailed(attempt=attempt, rank=0, epoch="e", reason=reason)


async def check_service(notifier: Notifier) -> None:
    """An honest proxy hears what it is told."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        notifier.tell(f"tcp://127.0.0.1:{port}", failed("good"))
        async with asyncio.timeout(LIMIT_S):
            assert wire.decode_signal(await pull.recv()) == failed("good")


class Talker:
    """A plain TCP socket that shakes ZMTP hands as a PULL socket would, and then says what it wants."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def meet(self) -> socket.socket:
        self._server.settimeout(LIMIT_S)
        peer, _ = self._server.accept()
        peer.settimeout(LIMIT_S)
        peer.sendall(GREETING)
        self._read(peer, len(GREETING))
        peer.sendall(bytes([4, len(READY)]) + READY)
        self._read(peer, self._read(peer, 2)[1])
        return peer

    def close(self) -> None:
        self._server.close()

    def _read(self, peer: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += peer.recv(size - len(data))
        return data


@pytest.fixture
async def peer(notifier: Notifier) -> AsyncIterator[socket.socket]:
    """A talker, and hands are shaken."""
    with contextlib.closing(Talker()) as talker:
        notifier.tell(talker.address, failed("a"))
        with await asyncio.to_thread(talker.meet) as peer:
            yield peer


def frame(body: bytes) -> bytes:
    return b"\x02" + struct.pack(">Q", len(body)) + body


async def test_what_is_too_large_ends_the_connection(notifier: Notifier, peer: socket.socket) -> None:
    peer.sendall(frame(bytes(MAX_ANSWER_BYTES + 1))[:-1])
    with contextlib.suppress(ConnectionError):
        while await asyncio.to_thread(peer.recv, 1 << 16):
            pass
    await check_service(notifier)


async def test_what_is_small_is_not_heaped_up(notifier: Notifier, peer: socket.socket) -> None:
    """A few messages and what the kernel buffers; then the talker has to wait, for ever."""
    peer.settimeout(0.5)
    message, num_bytes = frame(bytes(1000)) * 100, 0
    with contextlib.suppress(TimeoutError):
        while num_bytes < 64 << 20:
            num_bytes += await asyncio.to_thread(peer.send, message)
    assert num_bytes < 16 << 20
    await check_service(notifier)


NO_PROXYS = [
    *("", "nonsense", "tcp://", "tcp://:", "tcp://127.0.0.1", "tcp://\0:1", "tcp://\ud800:1", "TCP://127.0.0.1:1"),
    *("ipc:///tmp/somewhere", "inproc://here", "udp://127.0.0.1:1", "pgm://127.0.0.1;239.192.1.1:1"),
]


@pytest.mark.parametrize("address", NO_PROXYS)
async def test_addresses_that_are_no_proxys(notifier: Notifier, address: str, caplog: pytest.LogCaptureFixture) -> None:
    notifier.tell(address, failed("a"))
    assert notifier._sockets == {}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    await check_service(notifier)


async def test_a_long_reason_does_not_cost_the_signal(notifier: Notifier) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        notifier.tell(f"tcp://127.0.0.1:{port}", failed("a", "é" * 100_000))
        async with asyncio.timeout(LIMIT_S):
            payload = await pull.recv()
        assert len(payload) < 1 << 14, "more than a proxy reads"
        assert wire.decode_signal(payload) == failed("a", "é" * 1000)


async def test_of_too_many_proxies_the_one_told_longest_ago_loses_its_socket(
    notifier: Notifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was told leaves all the same, and so does what it is told later."""
    monkeypatch.setattr("transfer.roles.notifier.MAX_PROXIES", 2)
    with zmq.asyncio.Context() as context, contextlib.ExitStack() as stack:
        pulls = [stack.enter_context(context.socket(zmq.PULL)) for _ in range(3)]
        addresses = [f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}" for pull in pulls]
        for index in (0, 1, 0, 2):
            notifier.tell(addresses[index], failed(f"to-{index}"))
        assert list(notifier._sockets) == [addresses[0], addresses[2]]
        notifier.tell(addresses[1], failed("again"))
        assert list(notifier._sockets) == [addresses[2], addresses[1]]
        heard = []
        async with asyncio.timeout(LIMIT_S):
            for index in (0, 0, 1, 1, 2):
                heard.append((index, wire.decode_signal(await pulls[index].recv()).attempt))
        assert heard[:2] + heard[4:] == [(0, "to-0"), (0, "to-0"), (2, "to-2")]
        assert sorted(heard[2:4]) == [(1, "again"), (1, "to-1")]
