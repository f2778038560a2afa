"""A control socket hears every message, whatever else it is used for when the message comes."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Iterator

import pytest
import zmq

from transfer.roles.control import ControlSocket

LIMIT_S = 5.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.mark.parametrize("addressee", [b"nobody", b"peer"])
async def test_a_message_that_comes_while_another_is_sent_is_heard(
    context: zmq.Context[zmq.Socket[bytes]], addressee: bytes
) -> None:
    """Also where that other one cannot go out: ZMQ tells of a message once, and to send takes note of it."""
    heard: asyncio.Queue[list[bytes]] = asyncio.Queue()
    router = ControlSocket(context, zmq.ROUTER, heard.put_nowait)
    router.raw.set(zmq.ROUTER_MANDATORY, 1)
    port = router.raw.bind_to_random_port("tcp://127.0.0.1")
    router.listen()
    peer = context.socket(zmq.DEALER)
    peer.set(zmq.IDENTITY, b"peer")
    peer.connect(f"tcp://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(LIMIT_S):
            peer.send(b"first")
            assert await heard.get() == [b"peer", b"first"]
            peer.send(b"second")
            # Not awaited: the event loop must not see the message before the other one is sent.
            assert select.select([router.raw.fileno()], [], [], LIMIT_S)[0]
            assert router.send([addressee, b"a word"]) is (addressee == b"peer")
            assert await heard.get() == [b"peer", b"second"]
    finally:
        router.close(0)
        peer.close(0)
