"""Stands between the proxy and an engine, and can stop a leg at a named point until the test lets it go on."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

Point = Literal["request", "reply", "event"]
"""Before the engine sees the leg; before the proxy sees the first of its answer; after its first event."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_GENERATION = re.compile(rb"^POST /v1/(?:chat/)?completions ")


@dataclass
class Stop:
    """Of one leg, at one point."""

    point: Point
    mark: bytes
    """In the leg's body."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """The proxy has given the leg up."""


@dataclass
class _Connection:
    """One of the proxy's, and the one to the engine that belongs to it. `stop`: of the leg that is under way."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    to_engine: asyncio.StreamWriter
    from_engine: asyncio.StreamReader
    stop: Stop | None = None


class Relay:
    """Mutable state: the stops that no leg has come to yet; the bodies of all legs, as they came; the proxy's
    connections."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._stops: list[Stop] = []
        self.bodies: list[bytes] = []
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self, point: Point, mark: str) -> Stop:
        """The next leg with `mark` in its body stops there."""
        stop = Stop(point, mark.encode())
        self._stops.append(stop)
        return stop

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def aclose(self) -> None:
        assert self._server is not None
        self._server.close()
        for stop in self._stops:
            stop.go.set()
        for writer in self._writers:
            writer.transport.abort()
        while self._writers:  # noqa: ASYNC110 (there are few, and they are about to end)
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                await self._carry(reader, writer)
        finally:
            await _close(writer)
            self._writers.discard(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_engine, to_engine = await asyncio.open_connection("127.0.0.1", self._target_port)
        connection = _Connection(reader, writer, to_engine, from_engine)
        ways = [asyncio.create_task(self._forth(connection)), asyncio.create_task(self._back(connection))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            await _close(to_engine)
            if connection.stop is not None:
                connection.stop.closed.set()

    async def _forth(self, connection: _Connection) -> None:
        """Requests, one by one, until the proxy closes."""
        while True:
            head = await connection.reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            body = await connection.reader.readexactly(int(length[1])) if length else b""
            if _GENERATION.match(head):
                self.bodies.append(body)
                connection.stop = self._take(body)
                if not await self._may_pass(connection, "request"):
                    return
            connection.to_engine.write(head + body)

    async def _back(self, connection: _Connection) -> None:
        """Whatever the engine says, until it closes."""
        while data := await connection.from_engine.read(1 << 16):
            if connection.stop is not None and connection.stop.point == "reply":
                connection.stop.reached.set()
                await connection.stop.go.wait()
            connection.writer.write(data)
            await connection.writer.drain()
            if connection.stop is not None and connection.stop.point == "event" and b"data: " in data:
                connection.stop.reached.set()
                await connection.stop.go.wait()

    def _take(self, body: bytes) -> Stop | None:
        for stop in self._stops:
            if stop.mark in body:
                self._stops.remove(stop)
                return stop
        return None

    async def _may_pass(self, connection: _Connection, point: Point) -> bool:
        """False: the proxy has closed the connection meanwhile."""
        stop = connection.stop
        if stop is None or stop.point != point:
            return True
        stop.reached.set()
        gone = asyncio.create_task(connection.reader.read(1))
        go = asyncio.create_task(stop.go.wait())
        try:
            await asyncio.wait([gone, go], return_when=asyncio.FIRST_COMPLETED)
            return not gone.done()
        finally:
            for task in (gone, go):
                task.cancel()
            await asyncio.gather(gone, go, return_exceptions=True)


async def _close(writer: asyncio.StreamWriter) -> None:
    """At once: what was not sent yet nobody wants any more."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def relayed(port: int) -> AsyncIterator[Relay]:
    relay = Relay(port)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.aclose()
