"""HttpxClient against a real socket: what it sends, reads, closes, and says when the peer misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from pdproxy.engines.base import EngineBroken, EngineRefused
from pdproxy.engines.client import HttpxClient

Serve = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-y: z\r\n\r\nhi"


class Peer:
    """A server that answers as `serve` says, and keeps what it got."""

    def __init__(self, serve: Serve) -> None:
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.disconnected = asyncio.Event()
        self._serve = serve

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                body = await reader.readexactly(int(length.split(b":")[1]))
                self.requests.append(head + body)
                await self._serve(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.disconnected.set()
        finally:
            writer.close()


@asynccontextmanager
async def talking_to(serve: Serve) -> AsyncIterator[tuple[Peer, HttpxClient]]:
    peer = Peer(serve)
    server = await asyncio.start_server(peer.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpxClient(f"http://127.0.0.1:{port}", connect_timeout_s=2)
    try:
        yield peer, client
    finally:
        await client.aclose()
        server.close()


async def ok(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)


async def test_post() -> None:
    async with talking_to(ok) as (peer, client):
        for _ in range(2):
            leg = await client.post("/v1/x", b'{"a": 1}', {"x-request-id": "r1"})
            assert (leg.status, leg.header("x-y"), leg.header("nope")) == (200, "z", None)
            assert await leg.read() == b"hi"
            await leg.aclose()
        assert peer.num_connections == 1, "connections are kept alive"
        head = peer.requests[0].lower()
        assert head.startswith(b"post /v1/x http/1.1\r\n")
        assert b"content-type: application/json\r\n" in head
        assert b"x-request-id: r1\r\n" in head
        assert b"accept-encoding: identity\r\n" in head
        assert peer.requests[0].endswith(b'\r\n\r\n{"a": 1}')


async def test_chunks_come_as_they_are_sent() -> None:
    proceed = asyncio.Event()

    async def stream(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await proceed.wait()
        writer.write(b"2\r\nde\r\n0\r\n\r\n")

    async with talking_to(stream) as (_, client):
        leg = await client.post("/", b"", {})
        assert await leg.read_chunk() == b"abc"
        proceed.set()
        assert [await leg.read_chunk(), await leg.read_chunk()] == [b"de", b""]
        await leg.aclose()


async def test_closing_early_closes_the_connection() -> None:
    async def endless(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")

    async with talking_to(endless) as (peer, client):
        leg = await client.post("/", b"", {})
        await leg.read_chunk()
        await leg.aclose()
        await leg.aclose()
        await asyncio.wait_for(peer.disconnected.wait(), 2)


async def test_cancelled_before_the_head_closes_the_connection() -> None:
    seen = asyncio.Event()

    async def hang(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set()

    async with talking_to(hang) as (peer, client):
        task = asyncio.create_task(client.post("/", b"", {}))
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(peer.disconnected.wait(), 2)


async def test_nobody_listens() -> None:
    nobody = HttpxClient("http://127.0.0.1:1", connect_timeout_s=2)
    with pytest.raises(EngineRefused):
        await nobody.post("/", b"", {})
    with pytest.raises(EngineRefused):
        await nobody.get("/health", timeout_s=1)
    await nobody.aclose()


async def test_peer_that_hangs_up_after_the_request_is_not_asked_again() -> None:
    """It may have done something with it: that is the orchestrator's decision."""

    async def hang_up(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        raise ConnectionError

    async with talking_to(hang_up) as (peer, client):
        with pytest.raises(EngineBroken):
            await client.post("/", b"", {})
        assert len(peer.requests) == 1


async def test_peer_that_dies_in_its_answer() -> None:
    async def die(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await writer.drain()
        raise ConnectionError

    async with talking_to(die) as (_, client):
        leg = await client.post("/", b"", {})
        with pytest.raises(EngineBroken):
            await leg.read()
        await leg.aclose()


class StaleConnection(httpx.AsyncBaseTransport):
    """The first request meets a kept-alive connection that the peer had closed: writing to it fails."""

    def __init__(self, *, is_fresh: bool) -> None:
        self.is_fresh = is_fresh
        self.num_requests = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.num_requests += 1
        if self.num_requests > 1:
            return httpx.Response(200, stream=httpx.ByteStream(b"hi"))
        trace = request.extensions["trace"]
        if self.is_fresh:
            await trace("connection.connect_tcp.complete", {})
        await trace("http11.send_request_headers.failed", {})
        raise httpx.RemoteProtocolError("Server disconnected without sending a response.")


async def test_one_silent_retry_on_a_stale_connection() -> None:
    transport = StaleConnection(is_fresh=False)
    client = HttpxClient("http://engine", connect_timeout_s=1, transport=transport)
    leg = await client.post("/", b"", {})
    assert (leg.status, transport.num_requests) == (200, 2)
    await leg.aclose()


async def test_no_retry_on_a_fresh_connection() -> None:
    transport = StaleConnection(is_fresh=True)
    client = HttpxClient("http://engine", connect_timeout_s=1, transport=transport)
    with pytest.raises(EngineBroken):
        await client.post("/", b"", {})
    assert transport.num_requests == 1
