"""Exchange is one request of a client's and its answer, on one of the proxy's own connections.

It needs no messages, and no wait while there is room. The request is collected as it comes. Only when it is whole, or
cannot be served, a task is started for it, which ends with the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from uvicorn.protocols.http.flow_control import FlowControl

from pdproxy.errors import Draining, ProxyError
from pdproxy.orchestrator.context import Client, Headers, Outlet
from pdproxy.server.headers import ClientHeaders
from pdproxy.server.response_head import CHUNKED, CLOSE, ResponseHeadWriter, declared_bytes
from pdproxy.server.routes import BODY_COPIES, GenerationRoute
from pdproxy.telemetry.record import RequestRecord
from transfer.memory_budget import MemoryShare

log = logging.getLogger(__name__)

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
_SIZE_LINES: Final = [b"%x\r\n" % size for size in range(2049)]
"""The first lines of chunks, by size, for sizes up to 2,048 bytes. Nearly every event is smaller."""


class ServerConnection(Protocol):
    """ServerConnection is what an exchange needs of its connection."""

    transport: asyncio.Transport
    flow: FlowControl
    loop: asyncio.AbstractEventLoop
    tasks: set[asyncio.Task[None]]
    heads: ResponseHeadWriter

    @property
    def ends_soon(self) -> bool:
        """True where no connection should outlive its answer, because descriptors are short or the proxy is leaving."""

    def on_response_complete(self) -> None:
        """Notes that everything was sent."""


class Exchange(Client, Outlet):
    """Exchange collects a request and sends its answer. It is an outlet for bodies that go out in chunks.

    Mutable state of the request: its body, in one piece or as it is put together of several; its size, whether that is
    all and whether more is wanted; what is objected to it; the time limit for its body; the task that serves it, and
    whether that one has begun. The exchange owns the request's share of the memory budget, which it gives back at the
    end. Of the answer: its head, while it waits for something to go with it; how many bytes are missing from what was
    declared; the callback for when there is room again. And whether the client has gone.
    """

    __slots__ = (
        "_awaits_continue",
        "_body",
        "_flow",
        "_head",
        "_is_chunked",
        "_is_http11",
        "_is_running",
        "_is_whole",
        "_limit",
        "_line",
        "_num_bytes",
        "_num_missing",
        "_objection",
        "_on_room",
        "_parts",
        "_record",
        "_route",
        "_task",
        "_transport",
        "_wants_more",
        "forwarded",
        "headers",
        "is_gone",
        "is_started",
        "keep_alive",
        "memory",
        "response_complete",
    )

    headers: Mapping[str, str]
    forwarded: Mapping[str, str]
    memory: MemoryShare
    is_started: bool

    def __init__(
        self,
        line: ServerConnection,
        route: GenerationRoute,
        headers: ClientHeaders,
        *,
        is_http11: bool,
        keep_alive: bool,
        awaits_continue: bool,
    ) -> None:
        self._line = line
        self._transport = line.transport  # as is `_flow`, asked for with every token
        self._flow = line.flow
        self._route = route
        self.headers = headers
        self.forwarded = {}
        self._is_http11 = is_http11
        self.keep_alive = keep_alive
        """True where the connection outlives the answer. The name is uvicorn's, as is `response_complete`."""
        self._awaits_continue = awaits_continue
        self._record: RequestRecord | None = None
        self.memory = route.memory.share()
        self._body = b""
        self._parts: bytearray | None = None
        self._num_bytes = 0
        self._is_whole = False
        self._wants_more = True
        self._objection: ProxyError | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_running = False
        self.is_started = False
        self.response_complete = False
        self._head: bytes | None = None
        self._is_chunked = False
        self._num_missing: int | None = None
        self._on_room: Callable[[], None] | None = None
        self.is_gone = False

    # ── the request ─────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, piece: bytes) -> None:
        """Takes a piece of the body. Nothing is kept that is more than the route takes."""
        if self._wants_more:
            self._num_bytes += len(piece)
            if self._num_bytes <= self._route.max_body_bytes:
                if self._num_bytes == len(piece):
                    self._body = piece  # most bodies are one piece
                else:
                    self._keep(piece)

    def has_all(self) -> None:
        """Notes that there is no more of the body."""
        self._is_whole = True

    def go_on(self) -> None:
        """Goes on with the request, whose turn it is and of which something more may have come."""
        if not self._wants_more:
            return
        if self._record is None:
            self._begin()
        if self._objection is None and BODY_COPIES * self._num_bytes > self.memory.num_bytes:
            self._objection = self._route.objection(self._num_bytes, self.memory)
        if self._is_whole or self._objection is not None:
            self._start()
        elif self._limit is None:
            self._await_body()

    def hurry(self) -> None:
        """Refuses what is not a whole request by now, because the proxy is shutting down."""
        if self._wants_more and self._record is not None:
            self._refuse(Draining("the proxy is shutting down", retry_after_s=5.0))

    def leave(self) -> None:
        """Notes that the client has gone before it had everything, and ends the work for it."""
        self.is_gone = True
        if self._is_running:
            assert self._task is not None
            self._task.cancel()
            return
        self.memory.release()  # a task that has not begun answers nobody, and needs none
        if self._wants_more and self._record is not None:
            self._close_intake()
            self._route.gone(self._record)

    def _keep(self, piece: bytes) -> None:
        """Keeps another piece. One block is made of all: many tiny pieces, each an object of its own, would take twenty
        times the body's memory."""
        if self._parts is None:
            self._parts = bytearray(self._body)
            self._body = b""
        self._parts += piece

    def _begin(self) -> None:
        self._record, self.forwarded = self._route.begin(self.headers)
        try:
            self._route.check(self._record, self.headers, self.memory)
        except ProxyError as error:
            self._objection = error

    def _await_body(self) -> None:
        if self._awaits_continue:
            self._awaits_continue = False
            self._transport.write(CONTINUE)
        self._limit = self._line.loop.call_later(self._route.body_timeout_s, self._is_too_slow)

    def _is_too_slow(self) -> None:
        self._refuse(self._route.too_slow())

    def _refuse(self, objection: ProxyError) -> None:
        self._objection = objection
        self._start()

    def _close_intake(self) -> None:
        self._wants_more = False
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    # ── its task ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        self._close_intake()
        self._task = self._line.loop.create_task(self._serve())
        self._line.tasks.add(self._task)

    async def _serve(self) -> None:
        """Answers the client, as a task of its own. `leave` cancels the task, and then this is a proper end."""
        task = self._task
        assert task is not None
        self._is_running = True
        try:
            answering = self._answering()
            if answering is not None:
                await answering
        except asyncio.CancelledError:
            if not self.is_gone or task.uncancel():
                raise
        except Exception:
            log.exception("an exchange with a client met a bug")
        finally:
            self._is_running = False
            self._task = None
            self._line.tasks.discard(task)
            self.memory.release()
            if not self.response_complete:
                self._break_off()

    def _break_off(self) -> None:
        """Closes the connection, so that a client which was promised more sees that it does not come. Closing waits
        until everything was taken, which may be never where there is no room; then the connection is aborted."""
        self._flush()
        if self._flow.write_paused:
            self._transport.abort()
        else:
            self._transport.close()

    def _answering(self) -> Coroutine[Any, Any, None] | None:
        """Returns a coroutine that answers the client; None where the client has gone."""
        route, record, objection = self._route, self._record, self._objection
        assert record is not None
        parts, self._parts = self._parts, None
        body, self._body = self._body, b""
        self._objection = None
        if self.is_gone:
            route.gone(record)
            return None
        if objection is not None:
            return route.refuse(self, record, objection)
        return route.serve(self, record, body if parts is None else bytes(parts))

    # ── the answer ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, status: int, headers: Headers) -> None:
        """Prepares the head. It goes out with the first piece of the body, or alone when no piece has come by the next
        turn."""
        self._num_missing = declared_bytes(headers)
        self._is_chunked = self._num_missing is None and self._is_http11
        self._head = self._write_head(status, headers, CHUNKED if self._is_chunked else b"")
        self._line.loop.call_soon(self._flush)

    async def send(self, chunk: bytes) -> None:
        while self._flow.write_paused:
            await self._flow.drain()
        self.write(chunk)

    async def end(self) -> None:
        while self._flow.write_paused:
            await self._flow.drain()
        if self._num_missing:
            raise ValueError(f"the answer ends {self._num_missing} bytes before its end")
        self._put(LAST_CHUNK if self._is_chunked else b"")
        self._complete()

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        while not self.answer_now(status, headers, body):
            await self._flow.drain()

    def answer_now(self, status: int, headers: Headers, body: bytes) -> bool:
        if self._flow.write_paused:
            return False
        self._head = self._write_head(status, headers, b"content-length: %d\r\n" % len(body))
        self._put(body)
        self._complete()
        return True

    @property
    def outlet(self) -> Outlet | None:
        return self if self._is_chunked else None

    def write(self, piece: bytes) -> None:
        if not piece:
            return
        if self._is_chunked:
            size = len(piece)
            line = _SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size
            piece = b"".join((line, piece, b"\r\n"))  # to format a large one copies it twice
        elif self._num_missing is not None:
            self._num_missing -= len(piece)
            if self._num_missing < 0:
                raise ValueError("the answer is longer than its head says")
        self._put(piece)

    @property
    def is_full(self) -> bool:
        return self._flow.write_paused

    def on_room(self, callback: Callable[[], None] | None) -> None:
        self._on_room = callback

    def has_room(self) -> None:
        """Calls the callback of `on_room`, because the connection is no longer full."""
        if self._on_room is not None:
            self._on_room()

    def _write_head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        if self._awaits_continue and not self._is_whole:
            self.keep_alive = False  # what comes next may be the body, or the next request
        elif self.keep_alive and self._is_whole and self._line.ends_soon:
            self.keep_alive = False
        head = self._line.heads.write(status, headers, framing if self.keep_alive else framing + CLOSE)
        self.is_started = True
        return head

    def _flush(self) -> None:
        if self._head is not None:
            self._put(b"")

    def _put(self, data: bytes) -> None:
        """Writes `data` to the connection, behind the head where that was not sent yet."""
        if self._head is not None:
            data, self._head = self._head + data, None
        if data and not self.is_gone:
            self._transport.write(data)

    def _complete(self) -> None:
        if self.is_gone:
            return
        self.response_complete = True
        if not self.keep_alive:
            self._transport.close()
        self._line.on_response_complete()

    def __repr__(self) -> str:
        where = "answered" if self.response_complete else "served" if self._task is not None else "received"
        return f"<Exchange {where}, {self._num_bytes} bytes of body{', client gone' if self.is_gone else ''}>"
