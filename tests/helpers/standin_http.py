"""As much of an HTTP server as a stand-in for an engine needs: it starts at once, and notices a client that leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    """A whole body, or events as they come."""

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"
    events: AsyncIterator[bytes] | None = None


Route = Callable[[str, str, bytes], Awaitable[Reply]]


async def serve(route: Route, host: str, port: int) -> asyncio.Server:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read: bytes | None = b""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while read is not None:
                read = await _exchange(route, read, reader, writer)
        writer.close()

    return await asyncio.start_server(connected, host, port, limit=1 << 24)


async def _exchange(
    route: Route, read: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bytes | None:
    """One request, of which `read` is there, and its answer. Returns what was read of the next one; None when the
    client has gone, whose request is cancelled then."""
    head = (read + await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    lengths = [line.split(":")[1] for line in head[1:] if line.lower().startswith("content-length:")]
    body = await reader.readexactly(int(lengths[0]) if lengths else 0)
    answering = asyncio.ensure_future(_answer(route, method, path, body, writer))
    reading = asyncio.ensure_future(reader.read(1))
    await asyncio.wait({answering, reading}, return_when=asyncio.FIRST_COMPLETED)
    if not answering.done() and not reading.result():
        answering.cancel()
    with suppress(asyncio.CancelledError):
        await answering
    reading.cancel()
    with suppress(asyncio.CancelledError):
        return await reading or None
    return b""


async def _answer(route: Route, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    reply = await route(method, path, body)
    head = [f"HTTP/1.1 {reply.status} -", f"content-type: {reply.content_type}"]
    if reply.events is None:
        writer.write("\r\n".join([*head, f"content-length: {len(reply.body)}", "", ""]).encode() + reply.body)
    else:
        head[1] = "content-type: text/event-stream; charset=utf-8"
        writer.write("\r\n".join([*head, "transfer-encoding: chunked", "", ""]).encode())
        async for piece in reply.events:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
    await writer.drain()


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def failure(status: int, message: str) -> Reply:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return Reply(json.dumps({"error": error}).encode(), status=status)
