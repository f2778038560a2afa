"""A server of bare sockets that does to a connection whatever a test tells it to: every byte, and every end of one.

Nothing is buffered or framed on its side, and what it does with a socket is done at once: who closes one and then calls
a client, in the same turn of the loop, has a client that cannot have noticed.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

LIMIT_S = 5.0


class GoneError(Exception):
    """The client has closed the connection."""


class Wire:
    """One connection, the server's end. Mutable state: what came and was not asked for; the requests so far."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._unread = b""
        self.requests: list[bytes] = []

    async def request(self) -> bytes:
        """The next whole request. Raises `GoneError`."""
        while b"\r\n\r\n" not in self._unread:
            await self.receive()
        head, _, _ = self._unread.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        num_bytes = len(head) + 4 + (int(lengths[0].split(b":")[1]) if lengths else 0)
        while len(self._unread) < num_bytes:
            await self.receive()
        request, self._unread = self._unread[:num_bytes], self._unread[num_bytes:]
        self.requests.append(request)
        return request

    async def receive(self) -> None:
        """Some more bytes. Raises `GoneError`."""
        try:
            data = await self._loop.sock_recv(self._sock, 65536)
        except OSError:
            data = b""
        if not data:
            raise GoneError
        self._unread += data

    async def send(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._sock, data)
        except OSError:
            raise GoneError from None

    async def dribble(self, data: bytes) -> None:
        """Byte by byte, each with a turn of the loop in which the client can read it."""
        for i in range(len(data)):
            await self.send(data[i : i + 1])
            await asyncio.sleep(0)

    async def gone(self) -> None:
        """Until the client has closed the connection; it must not say anything more."""
        self._unread = b""
        try:
            await self.receive()
        except GoneError:
            return
        raise AssertionError(f"it said {self._unread!r}")

    def close(self) -> None:
        """Where everything was read, the client is told of an end, else of a reset."""
        self._sock.close()

    def reset(self) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


Serve = Callable[[Wire], Awaitable[None]]
"""What becomes of a connection; at its end the connection is closed."""


class RawPeer:
    """Mutable state: every connection so far, in order, and the tasks that serve them."""

    def __init__(self, serve: Serve, listener: socket.socket) -> None:
        self._serve = serve
        self._listener = listener
        self._tasks: list[asyncio.Task[None]] = []
        self.wires: list[Wire] = []
        self.port: int = listener.getsockname()[1]

    @property
    def requests(self) -> list[bytes]:
        return [request for wire in self.wires for request in wire.requests]

    def accept(self) -> None:
        """Somebody knocks."""
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(sock)
        self.wires.append(wire)
        self._tasks.append(asyncio.create_task(self._handle(wire)))

    @property
    def num_open(self) -> int:
        """Connections that have not come to their end."""
        return sum(not task.done() for task in self._tasks)

    async def served(self) -> None:
        """Until every connection so far has come to its end."""
        await asyncio.gather(*self._tasks)

    async def _handle(self, wire: Wire) -> None:
        try:
            await self._serve(wire)
        except GoneError:
            pass
        finally:
            wire.close()

    async def stop(self) -> None:
        """Raises what went wrong in serving."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


@asynccontextmanager
async def raw_peer(serve: Serve, host: str = "127.0.0.1") -> AsyncIterator[RawPeer]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        listener.setblocking(False)
        peer = RawPeer(serve, listener)
        loop = asyncio.get_running_loop()
        loop.add_reader(listener, peer.accept)
        try:
            async with asyncio.timeout(LIMIT_S):
                yield peer
        finally:
            loop.remove_reader(listener)
            await peer.stop()
