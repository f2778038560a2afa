"""One call's answer, from the bytes of a connection to whoever wants them: read by a task, or poured into a sink.

The leg has its connection from the request on until the body's last byte has come, or until somebody gives up; then the
connection goes back to the others that are kept alive, or is closed. Nothing of this takes a task, a lock or a timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdproxy.engines.base import EngineBroken
from pdproxy.engines.http1.chunked import Chunked
from pdproxy.engines.http1.connection import Connection
from pdproxy.engines.http1.framing import Framing
from pdproxy.engines.http1.head import Head, HeadReader
from pdproxy.engines.http1.sink import Sink

MAX_UNREAD_BYTES = 64 * 1024
"""Of what nobody reads so much is kept; then the engine has to wait. It can be exceeded by one read of the socket."""


class Http1Leg:
    """Implements `base.Leg`. Read it, or `pour` it, or first the one and then the other.

    Mutable state: the connection as long as the leg has it; head and framing, once they are there; what has come and
    was not read, and whether somebody reads it to the end; what makes body of data, head first; the sink; why it broke
    off; the future of whoever waits.
    """

    __slots__ = (
        "_connection",
        "_failure",
        "_framing",
        "_head",
        "_heads",
        "_is_read_whole",
        "_loop",
        "_num_unread",
        "_sink",
        "_take",
        "_unread",
        "_waiter",
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection: Connection | None = connection
        self._loop = loop
        self._heads = HeadReader()
        self._head: Head | None = None
        self._framing: Framing | None = None
        self._unread: list[bytes] = []
        self._num_unread = 0
        self._is_read_whole = False
        self._sink: Sink | None = None
        self._take: Callable[[bytes], bytes] = self._take_head
        self._failure: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ── for whoever made the call ───────────────────────────────────────────────────────────────────────────────────

    @property
    def status(self) -> int:
        return self._known_head.status

    def header(self, name: str) -> str | None:
        return self._known_head.header(name)

    async def opened(self) -> Http1Leg:
        """Itself, when the head is there. Raises `EngineBroken`."""
        while self._head is None:
            await self._wait()
        return self

    async def read(self) -> bytes:
        """The whole body, or what is left of it. Raises `EngineBroken`."""
        self._check_not_poured()
        self._is_read_whole = True
        self._resume()
        while not self._is_over:
            await self._wait()
        return self._take_unread()

    async def read_chunk(self) -> bytes:
        """Everything that has come since, ``b""`` at the end. Raises `EngineBroken`."""
        self._check_not_poured()
        while not self._unread and not self._is_over:
            await self._wait()
        return self._take_unread()

    @property
    def source(self) -> Http1Leg:
        return self

    def close(self) -> None:
        """Idempotent. Where the body's end has not come, the connection is closed, at once."""
        connection, self._connection = self._connection, None
        self._sink = None
        self._unread.clear()
        if connection is not None:
            self._failure = "the leg was closed"
            connection.abort()

    # ── for whoever passes it on ────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_chunked(self) -> bool:
        """The body can be poured raw."""
        return isinstance(self._framing, Chunked)

    @property
    def is_between_chunks(self) -> bool:
        """Of a body that is poured raw: whole chunks were fed so far, so that something may be put behind them."""
        return self._chunked.is_between_chunks

    def pour(self, sink: Sink, *, raw: bool = False) -> None:
        """From here on the body goes to `sink`: first, and at once, what has come and was not read.

        `raw`: as chunks, each with its framing as the engine wrote it. The first may be one that holds what was not
        read yet; the last chunk, of size 0, is left out, as are trailers: `end` stands for them.
        """
        self._check_not_poured()
        chunked = self._chunked if raw else None
        unread = b"".join(self._unread)
        self._unread, self._num_unread = [], 0
        self._sink = sink
        self._resume()
        if chunked is not None:
            self._take = chunked.frames
            unread = chunked.to_frames(unread)
        if unread:
            sink.feed(unread)
        self._tell_of_end()

    def pause(self) -> None:
        """The sink wants no more for now; what was read from the socket already may still come. Idempotent."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._resume()

    # ── for the connection ──────────────────────────────────────────────────────────────────────────────────────────

    def received(self, data: bytes) -> None:
        """From the engine."""
        try:
            body = self._take(data)
        except EngineBroken as error:
            self._give_up(str(error))
            return
        if body:
            if self._sink is not None:
                self._sink.feed(body)
            else:
                self._keep(body)
        framing = self._framing
        if framing is not None and framing.is_complete and self._connection is not None:
            self._finish(framing)

    def lost(self, error: Exception | None) -> None:
        """The connection is closed; by the engine where there is no error."""
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
    def _known_head(self) -> Head:
        if self._head is None:
            raise RuntimeError("there is no head yet")
        return self._head

    @property
    def _chunked(self) -> Chunked:
        if not isinstance(self._framing, Chunked):
            raise ValueError("the body is not chunked")
        return self._framing

    @property
    def _is_over(self) -> bool:
        return self._framing is not None and self._framing.is_complete

    def _check_not_poured(self) -> None:
        if self._sink is not None:
            raise RuntimeError("the body goes to a sink")

    def _take_head(self, data: bytes) -> bytes:
        """Returns what has come of the body."""
        found = self._heads.feed(data)
        if found is None:
            return b""
        self._head, data = found
        self._framing = self._head.framing()
        self._take = self._framing.strip
        self._wake()
        return self._take(data) if data else b""

    def _keep(self, body: bytes) -> None:
        """For whoever reads it."""
        self._unread.append(body)
        if self._is_read_whole:
            return
        self._num_unread += len(body)
        if self._num_unread > MAX_UNREAD_BYTES:
            self.pause()
        self._wake()

    def _take_unread(self) -> bytes:
        unread = self._unread
        if not unread:
            return b""
        body = unread[0] if len(unread) == 1 else b"".join(unread)
        self._unread = []
        if self._num_unread > MAX_UNREAD_BYTES:
            self._resume()
        self._num_unread = 0
        return body

    def _resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def _finish(self, framing: Framing) -> None:
        """All of it is here: the connection is free for others before anybody is told."""
        connection, self._connection = self._connection, None
        assert connection is not None
        connection.hand_back(is_reusable=self._known_head.keeps_alive and not framing.has_surplus)
        self._tell_of_end()

    def _give_up(self, failure: str) -> None:
        """The engine said what cannot be understood."""
        connection, self._connection = self._connection, None
        self._failure = failure
        if connection is not None:
            connection.abort()
        self._tell_of_end()

    def _tell_of_end(self) -> None:
        """If it has come: to whoever waits, or to the sink, which then has heard all that there is to hear."""
        if not self._is_over and self._failure is None:
            return
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
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        """For whatever comes next. Who is cancelled here has lost the connection. Raises `EngineBroken`."""
        if self._failure is not None:
            raise EngineBroken(self._failure)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        except BaseException:
            self.close()
            raise
