"""The module turns the bytes of a connection into one call's answer, which a task reads or which is poured into a
sink.

The leg has its connection from the request on until the body's last byte has come, or until somebody gives up. Then the
connection goes back to the others that are kept alive, or is closed. None of this needs a task, a lock or a timer.
"""

from __future__ import annotations

import asyncio
from typing import Final

from pdproxy.engines.http.base import REPLY, CheckSize, EngineBroken, Leg, Sink, Source
from pdproxy.engines.http.http1.connection import Connection, Listener
from pdproxy.engines.http.http1.framing import Counted, Framing
from pdproxy.engines.http.http1.head import MAX_HEAD_BYTES, Head, find_head

MAX_UNREAD_BYTES: Final = 8 * 1024
"""The number of unread bytes that are kept; then the engine has to wait. One slice of what was read can exceed this.
Whoever reads has to do with all of them at a time."""


COUNTED_SLICE_BYTES: Final = 1 << 20
"""The most bytes that a reader of a whole body is handed at a time where its head says how long it is."""


class _Whole(Sink):
    """A `_Whole` is for a reader who wants all of a body at once. `check` is called with its size so far.

    The pieces are put together as they come: many tiny ones, each an object of its own, would take twenty times the
    memory.
    """

    __slots__ = ("_check", "over", "parts")

    def __init__(self, over: asyncio.Future[None], check: CheckSize) -> None:
        self.over = over
        self.parts = bytearray()
        self._check = check

    def feed(self, data: bytes) -> None:
        if self.over.done():
            return
        self.parts += data
        try:
            self._check(len(self.parts))
        except Exception as error:
            self.over.set_exception(error)

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def fail(self, error: EngineBroken) -> None:
        if not self.over.done():
            self.over.set_exception(error)


class Http1Leg(Leg, Source, Listener):
    """An `Http1Leg` is one call's answer. A caller may read it, or `pour` it, or first read and then pour.

    Mutable state: the connection as long as the leg has it; a head that has only begun, and how many bytes came without
    a final head; head and framing, once they are there; what has come and was not read, and how much more of it may
    come; the sink; why the answer broke off; the future of the task that waits.
    """

    __slots__ = (
        "_begun_head",
        "_connection",
        "_failure",
        "_framing",
        "_head",
        "_num_head_bytes",
        "_room",
        "_sink",
        "_unread",
        "_waiter",
        "status",
    )

    status: int
    """The HTTP status; 0 until the head of the answer has come."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        self._begun_head = b""
        self._num_head_bytes = 0
        self._head: Head | None = None
        self._framing: Framing | None = None
        self._unread: list[bytes] = []
        self._room = MAX_UNREAD_BYTES
        self._sink: Sink | None = None
        self._failure: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.status = 0

    # ── for whoever made the call ───────────────────────────────────────────────────────────────────────────────────

    def header(self, name: str) -> str | None:
        return None if self._head is None else self._head.header(name)

    def arrival(self) -> asyncio.Future[None]:
        """Returns the future of the next thing that comes. Raises `EngineBroken`, at once or when it is awaited.

        The first thing is the head. Before it has come, nothing else may be asked of a leg. A caller that gives up
        waiting must close the leg.
        """
        connection = self._connection
        if connection is None:
            raise EngineBroken(self._failure)
        self._waiter = waiter = connection.loop.create_future()
        return waiter

    async def read(self, check: CheckSize = REPLY) -> bytes:
        """Returns the whole body, or what is left of it. Raises `EngineBroken`, and what `check` raises."""
        body = self.read_now(check)
        return await self._read_rest(check) if body is None else body

    def read_now(self, check: CheckSize = REPLY) -> bytes | None:
        """Returns the whole body, or what is left of it; None where more is to come. Most replies come in one piece
        with their heads."""
        self._check_not_poured()
        if not self._is_over:
            return None
        body = self._take_unread()
        check(len(body))
        return body

    async def _read_rest(self, check: CheckSize) -> bytes:
        """Returns the body, of which more is to come. Its reader is woken once, by its end."""
        connection = self._connection
        if connection is None:
            raise EngineBroken(self._failure)
        whole = _Whole(connection.loop.create_future(), check)
        if isinstance(self._framing, Counted):  # no byte of it makes work of its own
            connection.slice_bytes = COUNTED_SLICE_BYTES
        try:
            self.pour(whole)
            await whole.over
        except BaseException:
            whole.parts.clear()  # an error keeps this frame alive as long as somebody has it, which may be an attempt
            self.close()
            raise
        return bytes(whole.parts)

    async def read_chunk(self) -> bytes:
        """Returns everything that has come since the last call, ``b""`` at the end. Raises `EngineBroken`."""
        self._check_not_poured()
        if not self._unread and not self._is_over:
            await self._wait()
        return self._take_unread()

    @property
    def source(self) -> Http1Leg:
        return self

    def close(self) -> None:
        """Gives the answer up. Idempotent. Where the body's end has not come, the connection is closed at once."""
        connection, self._connection = self._connection, None
        self._sink = None
        self._unread.clear()
        if connection is not None:
            self._failure = "the leg was closed"
            connection.abort()

    # ── for whoever passes it on ────────────────────────────────────────────────────────────────────────────────────

    def pour(self, sink: Sink) -> None:
        self._check_not_poured()
        unread = self._take_unread()
        self._sink = sink
        if unread:
            sink.feed(unread)
        if self._is_over or self._failure is not None:
            self._tell_of_end()

    def pause(self) -> None:
        """Tells the engine that the sink wants no more for now. Bytes that were read from the socket already may still
        come. Idempotent.
        """
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._resume()

    # ── for the connection ──────────────────────────────────────────────────────────────────────────────────────────

    def received(self, data: bytes) -> None:
        """Takes bytes from the engine."""
        framing = self._framing
        try:
            if framing is None:
                head, rest = find_head(self._begun_head + data)
                if head is None:
                    self._wait_for_head(rest, len(data))
                    return
                data = rest
                framing = self._opened(head)
            body = framing.strip(data)
        except EngineBroken as error:
            self._give_up(str(error))
            return
        if body:
            sink = self._sink
            if sink is not None:
                sink.feed(body)
            else:
                self._keep(body)
        if framing.is_complete:
            self._finish(framing)

    def lost(self, error: Exception | None) -> None:
        """Takes note that the connection is closed. Without an error, the engine has closed it."""
        self._connection = None
        try:
            if error is not None:
                raise EngineBroken(f"the connection was lost: {error or type(error).__name__}")
            if self._framing is None:
                raise EngineBroken("it closed the connection before it had answered")
            self._framing.closed()
        except EngineBroken as failure:
            self._failure = str(failure)
        self._tell_of_end()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_over(self) -> bool:
        return self._framing is not None and self._framing.is_complete

    def _check_not_poured(self) -> None:
        if self._sink is not None:
            raise RuntimeError("the body goes to a sink")

    def _wait_for_head(self, begun: bytes, num_bytes: int) -> None:
        """Keeps a head that has only begun. Raises `EngineBroken` after too many bytes without a final one, of which a
        reply may have any number of others before it."""
        self._begun_head = begun
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise EngineBroken(f"the heads of its answer are larger than {MAX_HEAD_BYTES} bytes")

    def _opened(self, head: Head) -> Framing:
        self._head = head
        self._framing = framing = head.framing()
        self.status = head.status
        self._wake()
        return framing

    def _keep(self, body: bytes) -> None:
        """Keeps bytes for a reader and wakes it."""
        self._unread.append(body)
        self._room -= len(body)
        if self._room < 0:
            self.pause()
        if self._waiter is not None:
            self._wake()

    def _take_unread(self) -> bytes:
        body = b"".join(self._unread)
        self._unread.clear()
        if self._room < 0:
            self._resume()
        self._room = MAX_UNREAD_BYTES
        return body

    def _resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def _finish(self, framing: Framing) -> None:
        """Hands the connection back, because the whole body is here. It is free for others before anybody is told."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        assert self._head is not None
        connection.hand_back(is_reusable=self._head.keeps_alive and not framing.has_surplus)
        self._tell_of_end()

    def _give_up(self, failure: str) -> None:
        """Ends the answer, because the engine said what cannot be understood."""
        connection, self._connection = self._connection, None
        self._failure = failure
        if connection is not None:
            connection.abort()
        self._tell_of_end()

    def _tell_of_end(self) -> None:
        """Tells the waiting task, or the sink, of the answer's end. The sink hears nothing more after that."""
        self._wake()
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if self._failure is None:
            sink.end()
        else:
            sink.fail(EngineBroken(self._failure))

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if self._failure is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(EngineBroken(self._failure))

    async def _wait(self) -> None:
        """Waits for what comes next. A caller that is cancelled here has lost the connection. Raises `EngineBroken`."""
        try:
            await self.arrival()
        except BaseException:
            self.close()
            raise
