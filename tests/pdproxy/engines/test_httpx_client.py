"""Both engine clients against a real socket: what they send, read and close, and say of a peer that misbehaves.

One contract for both; where httpx takes what the other refuses, or the other way round, it is named here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
import uvloop

from pdproxy.engines.http import httpx_client as engine_client
from pdproxy.engines.http.base import (
    EngineBroken,
    EngineClient,
    EngineRefused,
    EngineUnreachable,
    Leg,
    ReplyTooLarge,
    at_most,
)
from pdproxy.engines.http.http1.client import Http1Client
from pdproxy.engines.http.httpx_client import HttpxClient
from tests.fakes.proxy_harness import until
from tests.fakes.raw_peer import RawPeer, Serve, Wire, raw_peer
from tests.fakes.suspension import Suspensions

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-y: z\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Make = Callable[..., EngineClient]


@pytest.fixture(params=[HttpxClient, Http1Client])
def make(request: pytest.FixtureRequest) -> Make:
    kind: Make = request.param
    return kind


@asynccontextmanager
async def talking_to(serve: Serve, make: Make, **options: str) -> AsyncIterator[tuple[RawPeer, EngineClient]]:
    async with raw_peer(serve) as peer:
        client = make(f"http://127.0.0.1:{peer.port}", connect_timeout_s=2, **options)
        try:
            yield peer, client
        finally:
            await client.aclose()


async def answer(client: EngineClient) -> tuple[int, bytes]:
    """A whole call. Raises what it raises."""
    leg = await client.post("/", b"{}", {})
    try:
        return leg.status, await leg.read()
    finally:
        leg.close()


def always(reply: bytes) -> Serve:
    async def serve(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.send(reply)

    return serve


def once(reply: bytes, end: Callable[[Wire], Awaitable[None]]) -> Serve:
    async def serve(wire: Wire) -> None:
        await wire.request()
        await wire.send(reply)
        await end(wire)

    return serve


async def close(wire: Wire) -> None:
    wire.close()


async def reset(wire: Wire) -> None:
    wire.reset()


async def hold(wire: Wire) -> None:
    """Until the client has closed it."""
    await wire.gone()


# ── what is sent ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_post(make: Make) -> None:
    async with talking_to(always(OK), make) as (peer, client):
        for _ in range(2):
            leg = await client.post("/v1/x", b'{"a": 1}', {"x-request-id": "r1"})
            assert (leg.status, leg.header("x-y"), leg.header("X-Y"), leg.header("nope")) == (200, "z", "z", None)
            assert await leg.read() == b"hi"
            assert await leg.read_chunk() == b""
            leg.close()
        assert len(peer.wires) == 1, "connections are kept alive"
        head = peer.requests[0].lower()
        assert head.startswith(b"post /v1/x http/1.1\r\n")
        assert b"content-type: application/json\r\n" in head
        assert b"x-request-id: r1\r\n" in head
        assert b"accept-encoding: identity\r\n" in head
        assert b"host: 127.0.0.1:%d\r\n" % peer.port in head
        assert b"authorization" not in head
        assert peer.requests[0].endswith(b'\r\n\r\n{"a": 1}')


async def test_get(make: Make) -> None:
    async with talking_to(always(OK), make, api_key="secret") as (peer, client):
        assert await client.get("/health?a=b", timeout_s=1) == (200, b"hi")
        assert peer.requests[0].startswith(b"GET /health?a=b HTTP/1.1\r\n")
        assert b"authorization: bearer secret\r\n" in peer.requests[0].lower()


async def endless(wire: Wire) -> None:
    await wire.request()
    await wire.send(CHUNKED)
    while True:
        await wire.send(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")


async def test_an_answer_without_end_is_given_up(make: Make) -> None:
    async with talking_to(endless, make) as (peer, client):
        leg = await client.post("/", b"{}", {})
        with pytest.raises(ReplyTooLarge, match="larger than 3000000 bytes") as caught:
            await leg.read(at_most(3_000_000))
        assert not any(entry.frame.f_locals.get("parts") for entry in caught.traceback), "the error keeps what was read"
        leg.close()
        with pytest.raises(ReplyTooLarge, match="larger than 67108864 bytes"):
            await client.get("/metrics", timeout_s=10)
        await peer.served()


async def test_an_answer_in_tiny_pieces_is_put_together(make: Make) -> None:
    async def serve(wire: Wire) -> None:
        await wire.request()
        await wire.send(CHUNKED)
        for number in range(50):
            await wire.send(b"2\r\n%02d\r\n" % number)
            await asyncio.sleep(0)
        await wire.send(b"0\r\n\r\n")

    async with talking_to(serve, make) as (_, client):
        assert await answer(client) == (200, b"".join(b"%02d" % number for number in range(50)))


async def test_get_elsewhere(make: Make) -> None:
    """A bootstrap server's address is a whole URL."""
    async with talking_to(always(OK), make) as (peer, client), raw_peer(always(OK)) as other:
        assert await client.get(f"http://127.0.0.1:{other.port}/query?a=b", timeout_s=1) == (200, b"hi")
        assert (len(peer.requests), len(other.requests)) == (0, 1)
        assert other.requests[0].startswith(b"GET /query?a=b HTTP/1.1\r\n")
        assert b"%d" % other.port in other.requests[0]


async def test_key_and_headers(make: Make) -> None:
    async with talking_to(always(OK), make, api_key="secret") as (peer, client):
        (await client.post("/", b"", {})).close()
        (await client.post("/", b"", {"authorization": "Bearer theirs", "content-type": "a/b"})).close()
        ours, theirs = (request.lower() for request in peer.requests)
        assert b"authorization: bearer secret\r\n" in ours
        assert b"content-length: 0\r\n" in ours
        assert b"authorization: bearer theirs\r\n" in theirs
        assert b"secret" not in theirs
        assert theirs.count(b"content-type") == 1


async def test_a_header_with_a_line_end_is_not_sent(make: Make) -> None:
    async with talking_to(always(OK), make) as (peer, client):
        with pytest.raises(EngineBroken):
            await client.post("/", b"", {"a": "b\r\nc: d"})
        assert peer.requests == []


async def test_path_of_the_engine(make: Make) -> None:
    async with raw_peer(always(OK)) as peer:
        client = make(f"http://127.0.0.1:{peer.port}/engine/", connect_timeout_s=2)
        (await client.post("/v1/x", b"", {})).close()
        await client.get("/health", timeout_s=1)
        assert [request.split()[1] for request in peer.requests] == [b"/engine/v1/x", b"/engine/health"]
        await client.aclose()


async def test_a_large_request(make: Make) -> None:
    body = bytes(range(256)) * 40_000
    async with talking_to(always(OK), make) as (peer, client):
        for _ in range(2):
            leg = await client.post("/", body, {})
            assert await leg.read() == b"hi"
            leg.close()
        assert all(request.endswith(body) for request in peer.requests)
        assert len(peer.wires) == 1


async def test_proxies_of_the_environment_are_none_of_its_business(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with talking_to(always(OK), make) as (_, client):
        assert await answer(client) == (200, b"hi")


async def test_the_key_is_for_the_engine_alone(make: Make) -> None:
    """A bootstrap server at another port has not asked for it, and whoever listens there need not be the engine."""
    async with talking_to(always(OK), make, api_key="secret") as (peer, client), raw_peer(always(OK)) as other:
        for url in ("/x", f"http://127.0.0.1:{peer.port}/x", f"http://127.0.0.1:{other.port}/x?a=1"):
            assert await client.get(url, timeout_s=2) == (200, b"hi")
        assert [b"bearer secret" in one.lower() for one in (*peer.requests, *other.requests)] == [True, True, False]
        assert other.requests[0].startswith(b"GET /x?a=1 HTTP/1.1\r\n")


async def test_ipv6(make: Make) -> None:
    async with raw_peer(always(OK), host="::1") as peer:
        client = make(f"http://[::1]:{peer.port}", connect_timeout_s=2)
        assert await answer(client) == (200, b"hi")
        assert b"[::1]:%d\r\n" % peer.port in peer.requests[0]
        await client.aclose()


# ── answers as they should be ───────────────────────────────────────────────────────────────────────────────────────

GOOD = {
    "with a length": (OK, 200, b"hi"),
    "empty": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, b""),
    "chunked": (CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", 200, b"abcde"),
    "chunked and empty": (CHUNKED + b"0\r\n\r\n", 200, b""),
    "chunk extensions": (CHUNKED + b"3;a=b\r\nabc\r\n0;c\r\n\r\n", 200, b"abc"),
    "trailers": (CHUNKED + b"3\r\nabc\r\n0\r\nx: y\r\nz: 1\r\n\r\n", 200, b"abc"),
    "sizes with zeros": (CHUNKED + b"00A\r\nabcdefghij\r\n000\r\n\r\n", 200, b"abcdefghij"),
    "100 first": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"hi"),
    "103 first": (b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * 2 + OK, 200, b"hi"),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "304": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n", 304, b""),
    "an error": (b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\nno", 500, b"no"),
}
GOOD_AND_CLOSED = {
    "connection: close": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi", 200, b"hi"),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", 200, b"hi"),
    "HTTP/1.0 without length": (b"HTTP/1.0 200 OK\r\n\r\nhi", 200, b"hi"),
    "without length": (b"HTTP/1.1 200 OK\r\n\r\nhi", 200, b"hi"),
}


@pytest.mark.parametrize("name", GOOD)
async def test_answer(make: Make, name: str) -> None:
    reply, status, body = GOOD[name]
    async with talking_to(always(reply), make) as (peer, client):
        assert [await answer(client), await answer(client)] == [(status, body)] * 2
        assert len(peer.wires) == 1, "the connection is used again"


@pytest.mark.parametrize("name", GOOD_AND_CLOSED)
async def test_answer_that_is_the_last_one(make: Make, name: str) -> None:
    reply, status, body = GOOD_AND_CLOSED[name]
    async with talking_to(once(reply, close), make) as (peer, client):
        assert [await answer(client), await answer(client)] == [(status, body)] * 2
        assert len(peer.wires) == 2


@pytest.mark.parametrize("name", [*GOOD, *GOOD_AND_CLOSED])
async def test_answer_byte_by_byte(make: Make, name: str) -> None:
    reply, status, body = (GOOD | GOOD_AND_CLOSED)[name]

    async def slow(wire: Wire) -> None:
        await wire.request()
        await wire.dribble(reply)

    async with talking_to(slow, make) as (_, client):
        assert await answer(client) == (status, body)


@pytest.mark.parametrize("name", ["chunk extensions", "trailers", "103 first"])
async def test_answer_cut_anywhere(make: Make, name: str) -> None:
    """The second part comes when the first was read."""
    reply, status, body = GOOD[name]
    places = iter(range(1, len(reply)))

    async def cut(wire: Wire) -> None:
        for place in places:
            await wire.request()
            await wire.send(reply[:place])
            for _ in range(3):
                await asyncio.sleep(0)
            await wire.send(reply[place:])

    async with talking_to(cut, make) as (_, client):
        for _ in range(1, len(reply)):
            assert await answer(client) == (status, body)


async def test_chunks_come_as_they_are_sent(make: Make) -> None:
    proceed = asyncio.Event()

    async def stream(wire: Wire) -> None:
        await wire.request()
        await wire.send(CHUNKED + b"3\r\nabc\r\n")
        await proceed.wait()
        await wire.send(b"2\r\nde\r\n0\r\n\r\n")
        await wire.gone()

    async with talking_to(stream, make) as (_, client):
        leg = await client.post("/", b"", {})
        assert await leg.read_chunk() == b"abc"
        proceed.set()
        assert [await leg.read_chunk(), await leg.read_chunk(), await leg.read_chunk()] == [b"de", b"", b""]
        leg.close()


async def test_the_rest_of_an_answer(make: Make) -> None:
    proceed = asyncio.Event()

    async def stream(wire: Wire) -> None:
        await wire.request()
        await wire.send(CHUNKED + b"3\r\nabc\r\n")
        await proceed.wait()
        await wire.send(b"2\r\nde\r\n1\r\nf\r\n0\r\n\r\n")
        await wire.gone()

    async with talking_to(stream, make) as (_, client):
        leg = await client.post("/", b"", {})
        assert await leg.read_chunk() == b"abc"
        proceed.set()
        assert await leg.read() == b"def"
        leg.close()


async def test_a_large_answer(make: Make) -> None:
    body = bytes(range(256)) * 40_000
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with talking_to(always(reply), make) as (peer, client):
        assert await answer(client) == (200, body)
        leg = await client.post("/", b"", {})
        chunks = [chunk async for chunk in _chunks(leg)]
        assert b"".join(chunks) == body
        leg.close()
        assert len(peer.wires) == 1


async def _chunks(leg: Leg) -> AsyncIterator[bytes]:
    while chunk := await leg.read_chunk():
        yield chunk


async def test_an_engine_waits_for_whoever_does_not_read(make: Make) -> None:
    num_bytes = 64 * 1024 * 1024
    all_sent = asyncio.Event()

    async def flood(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % num_bytes)
        await wire.send(bytes(num_bytes))
        all_sent.set()

    async with talking_to(flood, make) as (_, client):
        leg = await client.post("/", b"", {})
        await leg.read_chunk()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(all_sent.wait(), 0.2)
        leg.close()


# ── answers as they should not be ───────────────────────────────────────────────────────────────────────────────────

BAD = {
    "closed before the head": (b"", close),
    "closed in the head": (b"HTTP/1.1 200 OK\r\ncontent-", close),
    "closed in the body": (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", close),
    "closed in a chunk": (CHUNKED + b"5\r\nabc", close),
    "closed between chunks": (CHUNKED + b"3\r\nabc\r\n", close),
    "closed in the trailers": (CHUNKED + b"3\r\nabc\r\n0\r\n", close),
    "reset before the head": (b"", reset),
    "reset in the body": (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", reset),
    "reset in a chunk": (CHUNKED + b"5\r\nabc", reset),
    "reset in a body until the end": (b"HTTP/1.1 200 OK\r\n\r\nabc", reset),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", hold),
    "a huge head": (b"HTTP/1.1 200 OK\r\n" + b"a: %b\r\n" % (b"b" * 1000) * 200 + b"\r\n", hold),
    "a head without end": (b"HTTP/1.1 200 OK\r\na: " + b"b" * 200_000, hold),
    "upgrade": (b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", hold),
    "bare line ends": (b"HTTP/1.1 200 OK\ncontent-length: 2\n\nhi", hold),
    "two lengths": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi", hold),
    "the same length twice": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nhi", hold),
    "negative length": (b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nhi", hold),
    "length and chunks": (b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", hold),
    "another coding": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", hold),
    "no chunk size": (CHUNKED + b"xyz\r\nabc\r\n", hold),
    "negative chunk size": (CHUNKED + b"-3\r\nabc\r\n", hold),
    "huge chunk size": (CHUNKED + b"f" * 40 + b"\r\nabc\r\n", hold),
    "chunk too long": (CHUNKED + b"3\r\nabcdef\r\n0\r\n\r\n", hold),
    "bare line end behind a size": (CHUNKED + b"3\nabc\r\n0\r\n\r\n", hold),
}
HTTPX_READS = {
    "bare line ends": b"hi",
    "the same length twice": b"hi",
    "length and chunks": b"",
}
"""It is more lenient, as h11 is."""


@pytest.mark.parametrize("name", BAD)
async def test_bad_answer(make: Make, name: str) -> None:
    reply, end = BAD[name]
    async with talking_to(once(reply, end), make) as (peer, client):
        if make is HttpxClient and name in HTTPX_READS:
            assert await answer(client) == (200, HTTPX_READS[name])
            return
        with pytest.raises(EngineBroken, match=r"."):
            await answer(client)
        assert len(peer.requests) == 1, "it is not asked again"
        await peer.served()
        with pytest.raises(EngineBroken):
            await answer(client)
        assert len(peer.wires) == 2, "the connection is not used again"


@pytest.mark.parametrize("name", ["with a length", "chunked", "204"])
@pytest.mark.parametrize("surplus", [b"x", OK, b"\r\n"])
async def test_something_behind_the_answer(make: Make, name: str, surplus: bytes) -> None:
    """Whoever writes it cannot be trusted with another request on that connection."""
    reply, status, body = GOOD[name]
    async with talking_to(once(reply + surplus, hold), make) as (peer, client):
        assert await answer(client) == (status, body)
        if make is HttpxClient:  # it takes what is there for the beginning of the next answer
            return
        assert await answer(client) == (status, body)
        assert len(peer.wires) == 2
        await peer.served()


async def test_something_behind_the_answer_a_little_later(make: Make) -> None:
    answered, sent = asyncio.Event(), asyncio.Event()

    async def talkative(wire: Wire) -> None:
        await wire.request()
        await wire.send(OK)
        await answered.wait()
        await wire.send(OK)
        sent.set()
        await wire.gone()

    async with talking_to(talkative, make) as (peer, client):
        assert await answer(client) == (200, b"hi")
        await asyncio.sleep(0.02)  # a connection just used is not looked at
        answered.set()
        await sent.wait()
        assert await answer(client) == (200, b"hi")
        assert len(peer.wires) == 2


# ── the request's end ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_answer_before_the_requests_end(make: Make) -> None:
    """The engine does not read the rest; the connection cannot be used again."""

    async def hasty(wire: Wire) -> None:
        await wire.receive()
        await wire.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await closed.wait()

    closed = asyncio.Event()
    async with talking_to(hasty, make) as (peer, client):
        if make is HttpxClient:  # it reads only when all is written, so that this would take for ever
            return
        for _ in range(2):
            leg = await client.post("/", bytes(32 * 1024 * 1024), {})
            assert (leg.status, await leg.read()) == (413, b"no")
            leg.close()
        assert len(peer.wires) == 2
        closed.set()


async def test_peer_that_closes_in_the_middle_of_a_request(make: Make) -> None:
    async def close_early(wire: Wire) -> None:
        await wire.receive()

    async with talking_to(close_early, make) as (peer, client):
        with pytest.raises(EngineBroken):
            await client.post("/", bytes(32 * 1024 * 1024), {})
        assert len(peer.wires) == 1


# ── a connection that the engine has closed ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("is_noticed", [True, False])
async def test_kept_connection_closed_by_the_engine(make: Make, end: str, is_noticed: bool) -> None:
    """Found out before the request is on it, even in the very turn of the loop in which it happens."""
    over = asyncio.Event()

    async def answer_once(wire: Wire) -> None:
        await wire.request()
        await wire.send(OK)
        await over.wait()

    async with talking_to(answer_once, make) as (peer, client):
        assert await answer(client) == (200, b"hi")
        await asyncio.sleep(0.02)  # a connection just used is not looked at
        getattr(peer.wires[0], end)()
        if is_noticed:
            await asyncio.sleep(0.01)
        assert await answer(client) == (200, b"hi")
        assert [len(wire.requests) for wire in peer.wires] == [1, 1]


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_kept_connection_closed_when_the_request_is_on_it(make: Make, end: str) -> None:
    """It may have done something with it: that is the orchestrator's decision."""

    async def hang_up_at_the_second(wire: Wire) -> None:
        await wire.request()
        await wire.send(OK)
        await wire.request()
        getattr(wire, end)()

    async with talking_to(hang_up_at_the_second, make) as (peer, client):
        assert await answer(client) == (200, b"hi")
        with pytest.raises(EngineBroken):
            await answer(client)
        assert len(peer.requests) == 2
        assert await answer(client) == (200, b"hi")


# ── leaving ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_chunks", [0, 1])
async def test_closing_early_closes_the_connection(make: Make, num_chunks: int) -> None:
    async with talking_to(once(CHUNKED + b"3\r\nabc\r\n", hold), make) as (peer, client):
        leg = await client.post("/", b"", {})
        for _ in range(num_chunks):
            await leg.read_chunk()
        leg.close()
        leg.close()
        await peer.served()


@pytest.mark.parametrize("step", ["head", "body", "chunk"])
async def test_cancelled_closes_the_connection(make: Make, step: str) -> None:
    reply = b"" if step == "head" else CHUNKED + b"3\r\nabc\r\n"
    seen = asyncio.Event()

    async def hang(wire: Wire) -> None:
        await wire.request()
        await wire.send(reply)
        seen.set()
        await wire.gone()

    async def call() -> None:
        leg = await client.post("/", b"", {})
        try:
            await leg.read_chunk()
            await (leg.read_chunk() if step == "chunk" else leg.read())
        finally:
            leg.close()

    async with talking_to(hang, make) as (peer, client):
        task = asyncio.create_task(call())
        await seen.wait()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await peer.served()


async def test_many_at_once(make: Make) -> None:
    """Nobody waits for anybody; then there are enough connections for all."""
    all_there, num_there = asyncio.Event(), 0

    async def wait_for_all(wire: Wire) -> None:
        nonlocal num_there
        while True:
            await wire.request()
            num_there += 1
            if num_there == 20:
                all_there.set()
            await all_there.wait()
            await wire.send(OK)

    async with talking_to(wait_for_all, make) as (peer, client):
        for _ in range(2):
            assert await asyncio.gather(*(answer(client) for _ in range(20))) == [(200, b"hi")] * 20
        assert len(peer.wires) == 20


# ── nobody there ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_nobody_listens(make: Make, host: str) -> None:
    nobody = make(f"http://{host}:1", connect_timeout_s=2)
    with pytest.raises(EngineRefused):
        await nobody.post("/", b"", {})
    with pytest.raises(EngineRefused):
        await nobody.get("/health", timeout_s=1)
    await nobody.aclose()


async def test_name_of_nobody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
    nobody = make("http://nobody.invalid:1", connect_timeout_s=2)
    with pytest.raises(EngineUnreachable) as caught:
        await nobody.post("/", b"", {})
    assert not isinstance(caught.value, EngineRefused)
    await nobody.aclose()


async def test_nobody_answers_the_knock(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        knocking = [socket.socket() for _ in range(2)]
        for one in knocking:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        client = make(f"http://127.0.0.1:{port}", connect_timeout_s=0.05)
        with pytest.raises(EngineUnreachable) as caught:
            await client.post("/", b"", {})
        assert not isinstance(caught.value, EngineRefused)
        with pytest.raises(EngineUnreachable):
            await client.get("/", timeout_s=0.05)
        await client.aclose()
        for one in knocking:
            one.close()


async def test_get_of_an_answer_that_trickles_takes_no_longer_than_it_may(make: Make) -> None:
    async def trickle(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n")
        for _ in range(500):
            await wire.send(b"x")
            await asyncio.sleep(0.02)

    async with talking_to(trickle, make) as (peer, client):
        with pytest.raises(EngineBroken):
            await client.get("/", timeout_s=0.2)
        await peer.wires[0].gone()


async def test_get_takes_no_longer_than_it_may(make: Make) -> None:
    async with talking_to(once(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", hold), make) as (peer, client):
        with pytest.raises(EngineBroken):
            await client.get("/", timeout_s=0.05)
        await peer.served()


async def test_closed(make: Make) -> None:
    async with talking_to(always(OK), make) as (peer, client):
        assert await answer(client) == (200, b"hi")
        await client.aclose()
        await client.aclose()
        await peer.served()
        with pytest.raises(EngineUnreachable, match="fleet"):
            await client.post("/", b"", {})
        with pytest.raises(EngineUnreachable, match="fleet"):
            await client.get("/", timeout_s=1)


# ── the loop that the proxy runs on ─────────────────────────────────────────────────────────────────────────────────

ON_UVLOOP = [
    test_post,
    test_a_large_request,
    test_a_large_answer,
    test_chunks_come_as_they_are_sent,
    test_an_engine_waits_for_whoever_does_not_read,
    test_something_behind_the_answer_a_little_later,
    test_answer_before_the_requests_end,
    test_peer_that_closes_in_the_middle_of_a_request,
    test_many_at_once,
    test_get_takes_no_longer_than_it_may,
    test_nobody_answers_the_knock,
    test_ipv6,
    test_closed,
    *(partial(test_answer, name=name) for name in GOOD),
    *(partial(test_answer_that_is_the_last_one, name=name) for name in GOOD_AND_CLOSED),
    *(partial(test_answer_byte_by_byte, name=name) for name in (GOOD | GOOD_AND_CLOSED)),
    *(partial(test_bad_answer, name=name) for name in BAD),
    *(partial(test_something_behind_the_answer, name=name, surplus=b"x") for name in ("with a length", "chunked")),
    *(
        partial(test_kept_connection_closed_by_the_engine, end=end, is_noticed=is_noticed)
        for end in ("close", "reset")
        for is_noticed in (True, False)
    ),
    *(partial(test_kept_connection_closed_when_the_request_is_on_it, end=end) for end in ("close", "reset")),
    *(partial(test_cancelled_closes_the_connection, step=step) for step in ("head", "body", "chunk")),
    *(partial(test_nobody_listens, host=host) for host in ("127.0.0.1", "localhost")),
]


@pytest.mark.parametrize("test", ON_UVLOOP)
def test_on_uvloop(test: Callable[[Make], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(test(Http1Client))


# ── httpx alone: a write that fails ─────────────────────────────────────────────────────────────────────────────────


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
    leg.close()


async def test_no_retry_on_a_fresh_connection() -> None:
    transport = StaleConnection(is_fresh=True)
    client = HttpxClient("http://engine", connect_timeout_s=1, transport=transport)
    with pytest.raises(EngineBroken):
        await client.post("/", b"", {})
    assert transport.num_requests == 1


# ── httpx alone: closing, which takes time there ────────────────────────────────────────────────────────────────────


class SlowlyClosed(httpx.AsyncByteStream):
    """A body of one chunk, closed when `may_close` is set. Mutable state: how far that is."""

    def __init__(self) -> None:
        self.may_close = asyncio.Event()
        self.num_begun = 0
        self.is_closed = False

    def client(self) -> HttpxClient:
        """Whoever asks anything of it is answered with this."""
        transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=self))
        return HttpxClient("http://engine", connect_timeout_s=1, transport=transport)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"hi"

    async def aclose(self) -> None:
        self.num_begun += 1
        await self.may_close.wait()
        self.is_closed = True


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_cancelled_caller_does_not_end_the_closing(is_read: bool) -> None:
    slow = SlowlyClosed()
    client = slow.client()

    async def call() -> None:
        leg = await client.post("/", b"", {})
        try:
            await (leg.read() if is_read else asyncio.Event().wait())
        finally:
            leg.close()
            leg.close()

    calling = asyncio.create_task(call())
    for _ in range(10):
        await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    closing = asyncio.create_task(client.aclose())
    for _ in range(10):
        await asyncio.sleep(0)
    assert (slow.num_begun, closing.done()) == (1, False)
    slow.may_close.set()
    await closing
    assert slow.is_closed


async def test_closing_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "CLOSE_S", 0.01)
    slow = SlowlyClosed()
    client = slow.client()
    (await client.post("/", b"", {})).close()
    async with asyncio.timeout(5):
        await client.aclose()
    assert (slow.num_begun, slow.is_closed) == (1, False)


async def stutter(wire: Wire) -> None:
    """Every step of an answer is another turn of the loop."""
    while True:
        await wire.request()
        for piece in (CHUNKED[:20], CHUNKED[20:], b"2\r\nhi\r\n", b"1\r\n!\r\n0\r\n\r\n"):
            await wire.send(piece)
            for _ in range(5):
                await asyncio.sleep(0)


async def interrupted(n: int, *, as_it_wakes: bool) -> bool:
    """One call of httpx's, at its n-th suspension, if there is one. Nothing may be left of it."""
    async with talking_to(stutter, HttpxClient) as (peer, client):
        assert isinstance(client, HttpxClient)
        assert await answer(client) == (200, b"hi!")
        suspensions = Suspensions(n, lambda: asking.cancel(), as_it_wakes=as_it_wakes)
        asking = asyncio.create_task(suspensions.watch(answer(client)))
        await asyncio.wait([asking])
        assert asking.cancelled() if suspensions.is_reached else asking.result() == (200, b"hi!")
        pool: Any = client._http._transport
        await until(lambda: not pool._pool._requests)
        await until(lambda: peer.num_open == len(pool._pool.connections))
        assert await answer(client) == (200, b"hi!")
        return suspensions.is_reached


@pytest.mark.cancellation
@pytest.mark.parametrize("as_it_wakes", [False, True])
async def test_httpx_interrupted_anywhere(as_it_wakes: bool) -> None:
    n = 1
    while await interrupted(n, as_it_wakes=as_it_wakes):
        n += 1
    assert n > 5
