"""The tunnel by which the pages for operators, which the leader has, are reached from another machine.

Each connection to a local Unix socket becomes one to the leader, which joins it to a Unix socket of its own. Bytes go
in frames, and an empty frame says that an end has no more to say: TLS cannot say that by itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from pdproxy.fronts.connection import Connection, framed
from pdproxy.fronts.dialler import Dialler
from pdproxy.fronts.handshake import Admitted, Lead, Peer

MAX_CHUNK_BYTES = 1 << 16
"""The most bytes of a frame."""
KEEPALIVE_S = 10
"""The seconds between two looks whether the other machine is there, while nothing is said; three in vain end it."""


LAST_WRITES_S = 60.0
"""The longest time in seconds that the far end may take for the last bytes of a pipe."""


class LocalEnd(asyncio.Protocol):
    """`LocalEnd` is the local end of a pipe: it passes bytes on to the connection, and brings those from there.

    Mutable state: the transport, while there is one; the connection, once joined, and what was said before; which of
    the two ends has said all.
    """

    def __init__(self, on_made: Callable[[LocalEnd], object] = lambda local: None) -> None:
        self._on_made = on_made
        self._connection: Connection | None = None
        self._transport: asyncio.Transport | None = None
        self._early = b""
        self._has_ended = self._has_far_ended = False
        self._gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()  # until the pipe is joined
        self._on_made(self)

    def join(self, connection: Connection) -> None:
        """Begins to pass on what either end says."""
        self._connection = connection
        connection.max_frame_bytes = MAX_CHUNK_BYTES
        connection.on_frame = self._take
        connection.on_room = self._hold
        watch(connection)
        self.data_received(self._early)
        self._early = b""
        if self._has_ended:
            connection.write(framed(b""))
        self._hold(True)

    async def run(self) -> None:
        """Waits until both ends have gone. To be called once joined; where it is cancelled, it ends both."""
        assert self._connection is not None
        try:
            await self._connection.over.wait()
            if not self._is_over:  # the far end has vanished, and so the local one learns that something is missing
                self.abort()
            await self._gone.wait()
        finally:
            self._connection.abort("the pipe has ended")
            self.abort()

    @property
    def _is_over(self) -> bool:
        return self._has_ended and self._has_far_ended

    def _hold(self, has_room: bool) -> None:
        """Reads only while the connection has room."""
        if self._transport is None or self._has_ended:
            return
        if has_room:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        if self._connection is not None:
            self._connection.hold(True)

    def resume_writing(self) -> None:
        if self._connection is not None:
            self._connection.hold(False)

    def data_received(self, data: bytes) -> None:
        if self._connection is None:  # uvloop begins to read after `connection_made`, whatever that has said
            self._early += data
            self._hold(False)
            return
        for begin in range(0, len(data), MAX_CHUNK_BYTES):
            self._connection.write(framed(data[begin : begin + MAX_CHUNK_BYTES]))

    def eof_received(self) -> bool:
        self._has_ended = True
        if self._connection is not None:
            self._connection.write(framed(b""))
        self._close_if_over()
        return True  # it may still be told something

    def _take(self, chunk: bytes) -> None:
        """Passes on what the far end says."""
        if self._transport is None:
            return
        if chunk:
            self._transport.write(chunk)
            return
        self._has_far_ended = True
        with suppress(OSError):  # it has gone, as its reading end will say
            self._transport.write_eof()
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._is_over and self._connection is not None and self._transport is not None:
            self._connection.close("both ends have said all", LAST_WRITES_S)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._gone.set()
        if self._connection is not None and not self._is_over:
            self._connection.abort("the local end has gone")

    def abort(self) -> None:
        """Ends the local end at once."""
        if self._transport is not None:
            self._transport.abort()


def watch(connection: Connection) -> None:
    """Has the system end the connection when the other machine vanishes: nothing beats in a tunnel."""
    connection.set_option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.set_option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.set_option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.set_option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.set_option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4 * KEEPALIVE_S * 1000)


async def serve_pipe(connection: Connection, path: str, admit: Callable[[], object]) -> None:
    """Admits a connection and joins it to the Unix socket at `path`, until both ends have gone. Raises `OSError` where
    nobody answers there."""
    local = LocalEnd()
    await asyncio.get_running_loop().create_unix_connection(lambda: local, path)
    if connection.is_over:
        local.abort()
        return
    admit()
    local.join(connection)
    await local.run()


class OperatorsTunnel:
    """`OperatorsTunnel` listens at the Unix socket `path`, and joins whoever comes to the leader's pages.

    Where there is no leader, or it cannot be reached, the connection is closed. Mutable state: the leader; the
    connections to it; the tasks, while it runs.
    """

    def __init__(self, path: str, *, front: Peer, tls: ssl.SSLContext | None = None) -> None:
        self._path = path
        self._dialler = Dialler("operators", front, tls)
        self._lead: Lead | None = None
        self._connections: set[Connection] = set()
        self._tasks: asyncio.TaskGroup | None = None

    def follow(self, lead: Lead | None) -> None:
        """Leads to this leader from now on. Pipes to one of another term end."""
        if lead is not None and self._lead is not None and lead.term != self._lead.term:
            for connection in list(self._connections):
                connection.abort("another term has begun")
        self._lead = lead

    @property
    def num_pipes(self) -> int:
        """The number of connections to the leader, those included that are being made."""
        return len(self._connections)

    async def run(self) -> None:
        """Listens until it is cancelled. Raises `OSError` where it cannot."""
        async with asyncio.TaskGroup() as self._tasks:  # tasks start in callbacks, which anyio's groups do not allow
            server = await asyncio.get_running_loop().create_unix_server(lambda: LocalEnd(self._made), self._path)
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None
                server.close()
                with suppress(OSError):
                    os.unlink(self._path)

    def _made(self, local: LocalEnd) -> None:
        if self._tasks is None or self._lead is None:
            local.abort()
        else:
            self._tasks.create_task(self._serve(local, self._lead))

    async def _serve(self, local: LocalEnd, lead: Lead) -> None:
        is_admitted = asyncio.Event()

        def join(connection: Connection, said: Admitted) -> None:
            is_admitted.set()
            self._dialler.forget_reasons()
            local.join(connection)

        def lost(why: str) -> None:
            self._connections.discard(connection)
            if not is_admitted.is_set():
                self._dialler.note(lead, introduction.refused or why)
                local.abort()

        introduction = self._dialler.introduce(lead, lambda: ("", 0), join)
        connection = Connection(introduction.begin, lost)
        self._connections.add(connection)
        try:
            if await self._dialler.dial(lead, connection):
                await connection.over.wait()
                if is_admitted.is_set():
                    await local.run()  # until the local end has taken the last bytes, too
        finally:
            if not connection.is_over:  # this was cancelled
                connection.abort("it is not wanted any more")
                local.abort()
