"""A client on a connection of the proxy's own, without a socket: this says what a transport would say, when it would.

What the client is told is taken apart write by write, and each must be HTTP to the letter.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from pdproxy.server.app import App
from pdproxy.server.connection import ClientConnection
from tests.fakes.calls import LIMIT_S, Call, Sent, Serving, Watch, as_it_is
from transfer.memory_budget import MemoryBudget

STATUS_LINE = re.compile(rb"HTTP/1\.1 ([2-5]\d\d) [A-Za-z ]+")
HEADER = re.compile(rb"([a-z][a-z0-9-]*): (\S|\S.*\S)")
SIZE = re.compile(rb"0|[1-9a-f][0-9a-f]*")


class Entrance:
    """What a server has for the connections to `app`."""

    def __init__(self, app: App, memory: MemoryBudget) -> None:
        self.state = ServerState()
        self._memory = memory
        self._app = app
        self._config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", interface="asgi3")
        self._config.load()

    def open(self, loop: Any) -> ClientConnection:
        return ClientConnection(self._config, self.state, {}, loop, routes=self._app.direct, memory=self._memory)


class Line:
    """Implements as much of a transport as is used. There is no room in it as long as the client has not taken what
    was written: which it does at once, unless it is blocked.

    On one that `is_slow` it does that a turn of the loop later; and at its beginning there is no room, until somebody
    waits for it. Mutable state: what was not taken, and the most that ever was; whether the client is blocked; whether
    somebody wants it closed, and whether it is.
    """

    def __init__(self, call: ConnectedCall, connection: ClientConnection, *, is_slow: bool) -> None:
        self._call = call
        self._connection = connection
        self._is_slow = is_slow
        self.is_blocked = False
        self.num_kept = 0
        self.most_kept = 0
        self._is_closing = False
        self.is_lost = False
        transport: Any = self
        connection.connection_made(transport)
        connection.flow = Flow(self)
        if is_slow:
            self.fill(1)

    # ── for the connection ──

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes) -> None:
        if self.is_lost:
            return
        self._call.told(data)
        if not self._is_slow and not self.is_blocked:
            return
        self.fill(len(data))
        self.take_soon()

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.write(b"".join(pieces))

    def take_soon(self) -> None:
        """Who takes its time over it takes part in the request: as a task that it starts."""
        self._taking = asyncio.create_task(self._take_next_turn())

    def get_write_buffer_size(self) -> int:
        return self.num_kept

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        if not self.num_kept:
            asyncio.get_running_loop().call_soon(self.lose)

    def abort(self) -> None:
        self._is_closing = True
        self.num_kept = 0
        asyncio.get_running_loop().call_soon(self.lose)

    def pause_reading(self) -> None:
        """Nothing more is said to it."""

    def resume_reading(self) -> None: ...

    # ── for the client ──

    def fill(self, num_bytes: int) -> None:
        is_first, self.num_kept = not self.num_kept, self.num_kept + num_bytes
        self.most_kept = max(self.most_kept, self.num_kept)
        if is_first:
            self._connection.pause_writing()

    async def _take_next_turn(self) -> None:
        await asyncio.sleep(0)
        self.take()

    def take(self) -> None:
        if not self.num_kept or self.is_blocked or self.is_lost:
            return
        self.num_kept = 0
        self._connection.resume_writing()
        if self._is_closing:
            self.lose()

    def lose(self, error: Exception | None = None) -> None:
        """Idempotent."""
        self._is_closing = True
        if not self.is_lost:
            self.is_lost = True
            self._connection.connection_lost(error)


class Flow(FlowControl):
    """Lets `line` know of whoever waits for room."""

    def __init__(self, line: Line) -> None:
        transport: Any = line
        super().__init__(transport)
        self._line = line

    async def drain(self) -> None:
        self._line.take_soon()
        await super().drain()


class ServingLoop:
    """The running loop, to a connection that starts its one task on it."""

    def __init__(self, create_task: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self.create_task = create_task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class ConnectedCall(Call):
    """Its request is there in one piece, and it closes its connection when it has the answer."""

    def __init__(self, entrance: Entrance, sent: Sent, *, watch: Watch = as_it_is, is_slow: bool = False) -> None:
        super().__init__()
        self._watch = watch
        self._task: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()
        self._is_chunked = False
        self._num_missing = 0
        self._fault: AssertionError | None = None
        connection = entrance.open(ServingLoop(self._serve))
        self.line = Line(self, connection, is_slow=is_slow)
        connection.data_received(_as_bytes(sent))

    @property
    def task(self) -> asyncio.Task[None]:
        assert self._task is not None, "nobody has begun to serve it"
        return self._task

    def leave(self) -> None:
        self.line.lose(ConnectionResetError())
        if self._task is None:
            self._is_over.set()

    def block(self) -> None:
        self.line.is_blocked = True

    def unblock(self) -> None:
        self.line.is_blocked = False
        self.line.take()

    async def ended(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self._is_over.wait()
        if self._fault is not None:
            raise self._fault

    async def done(self) -> None:
        await self.ended()
        if self._task is not None:
            await self._task

    def _serve(self, serving: Serving) -> asyncio.Task[None]:
        assert self._task is None, "a request is served by one task"
        self._task = asyncio.create_task(self._watch(serving))
        self._task.add_done_callback(self._served)
        return self._task

    def _served(self, task: asyncio.Task[None]) -> None:
        if not self.is_whole and not self.line.is_closing():
            self._fault = AssertionError("an answer without an end, on a connection that stays open")
        self.line.close()
        self._is_over.set()

    # ── the answer ──────────────────────────────────────────────────────────────────────────────────────────────────

    def told(self, data: bytes) -> None:
        """Raises nothing: the proxy is not to hear of it."""
        try:
            self._read(data)
        except AssertionError as error:
            self._fault = self._fault or error

    def _read(self, data: bytes) -> None:
        """One write: a head, chunks, or all of that; never a part of one."""
        assert data, "nothing was written"
        assert not self.is_whole, f"behind the answer's end: {data!r}"
        if not self.is_started:
            data = self._read_head(data)
        if self._is_chunked:
            while data:
                data = self._read_chunk(data)
            return
        self._num_missing -= len(data)
        assert self._num_missing >= 0, "the answer is longer than its head says"
        self._add(data)
        self.is_whole = self._num_missing == 0

    def _read_head(self, data: bytes) -> bytes:
        head, end, rest = data.partition(b"\r\n\r\n")
        assert end, f"half a head: {data!r}"
        first, *lines = head.split(b"\r\n")
        status, fields = STATUS_LINE.fullmatch(first), [HEADER.fullmatch(line) for line in lines]
        assert status is not None, first
        assert None not in fields, lines
        pairs = [(one[1].decode(), one[2].decode()) for one in fields if one is not None]
        self.status, self.headers = int(status[1]), dict(pairs)
        assert len(pairs) == len(self.headers), f"a header came twice: {pairs}"
        self._is_chunked = self.headers.get("transfer-encoding") == "chunked"
        assert self._is_chunked != ("content-length" in self.headers), "nobody knows where it ends"
        self._num_missing = int(self.headers.get("content-length", 0))
        return rest

    def _read_chunk(self, data: bytes) -> bytes:
        size, end, rest = data.partition(b"\r\n")
        assert end, data
        assert SIZE.fullmatch(size), data
        num_bytes = int(size, 16)
        assert rest[num_bytes : num_bytes + 2] == b"\r\n", f"a chunk of another size than it says: {data!r}"
        piece, rest = rest[:num_bytes], rest[num_bytes + 2 :]
        self.is_whole = not piece
        assert not self.is_whole or not rest, f"behind the answer's end: {rest!r}"
        self._add(piece)
        return rest

    def _add(self, piece: bytes) -> None:
        if piece:
            self.pieces.append(piece)
            self.first_byte.set()


def _as_bytes(sent: Sent) -> bytes:
    """A body that never comes is said to have one byte."""
    length = 1 if sent.body is None else len(sent.body)
    headers = {"host": "proxy", "content-length": str(length)} | sent.headers
    lines = [f"{sent.method} {sent.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + (sent.body or b"")
