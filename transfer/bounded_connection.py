"""A client's connection as uvicorn serves it, with bounds on what uvicorn bounds by nothing: heads, trailers, and
requests that wait for earlier ones.

The proxy's own connection and the built-in engine's are both this one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""The most bytes of a request's head beyond one slice, and of what else is no body: the trailers behind it."""
MAX_PIPELINED = 100
"""The most requests of a client that wait for earlier ones. One read can have ten thousand, and each takes a hundred
times as much in memory."""
SLICE_BYTES = 16 * 1024
"""The most bytes that are parsed at a time. Where each of them makes work, as in a body of chunks of a byte, that takes
four milliseconds. A read can be 16 times as large.
"""
TURN_S = 0.001
"""The seconds after which no further slice of what was read is parsed before the event loop has gone round."""
LARGE_READ_BYTES = 64 * 1024
"""The size from which on one read is all that a turn of the event loop has. uvloop reads up to 32 times in a row as
long as each read fills its 250 KiB.
"""

_NOTHING = memoryview(b"")
"""Nothing to be parsed. The empty end of a read would keep all of it in memory."""


class _TooManyError(Exception):
    """_TooManyError stops the parser. Nobody outside sees it."""


class _Flow(FlowControl):
    """A _Flow reads nothing while it is held, besides what uvicorn has it do.

    Mutable state, besides uvicorn's: whether it is held.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False

    def hold(self) -> None:
        self._is_held = True
        self._transport.pause_reading()

    def let_go(self) -> None:
        self._is_held = False
        if not self.read_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._is_held:
            self.read_paused = False
        else:
            super().resume_reading()


class BoundedConnection(HttpToolsProtocol):
    """BoundedConnection is what uvicorn calls a protocol.

    What must hold: no client has more than a few milliseconds of a turn of the event loop, whatever it sends. Otherwise
    much time would pass between two tokens of somebody else's answer.

    Mutable state, besides uvicorn's (`cycle` is the latest request, `pipeline` those whose turn is still to come):
    what was read and is not parsed; whether a head or trailers are under way, their size without the first slice (-1 in
    that slice), and whether the head is over.
    """

    cycle: Any
    pipeline: deque[tuple[Any, Any]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unparsed = _NOTHING
        self._is_in_head = False
        self._is_past_head = False
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)

    def data_received(self, data: bytes) -> None:
        if len(data) <= SLICE_BYTES:
            self._parse(data)
            return
        self._unparsed = memoryview(data)
        self._parse_some()
        if self._unparsed or len(data) >= LARGE_READ_BYTES:
            self._flow.hold()
            self.loop.call_soon(self._parse_on)

    def _parse(self, data: bytes) -> None:
        """Parses at most `SLICE_BYTES`."""
        HttpToolsProtocol.data_received(self, data)
        if self._is_in_head:
            self._measure_head(len(data))

    def _parse_some(self) -> None:
        """Parses one slice after another until `TURN_S` is over. What follows an upgrade is no HTTP."""
        until = monotonic() + TURN_S  # the loop's own clock stands still within a turn
        while self._unparsed and not self.transport.is_closing():
            data, self._unparsed = self._unparsed[:SLICE_BYTES], self._unparsed[SLICE_BYTES:]
            self._parse(data)  # type: ignore[arg-type]  # the parser takes any buffer
            if self.parser.should_upgrade():
                break
            if self._unparsed and monotonic() >= until:
                return
        self._unparsed = _NOTHING

    def _parse_on(self) -> None:
        """Parses what was read in an earlier turn. Where nothing is left of it, more is read, a turn later: whoever
        answers begins before the client's end is noticed, as when all is parsed where it is read."""
        if not self._unparsed:
            self._flow.let_go()
            return
        try:
            self._parse_some()
        except Exception as bug:  # the loop does the same where `data_received` raises
            self.loop.call_exception_handler({"message": "a client's connection met a bug", "exception": bug})
            self.transport.abort()
        else:
            self.loop.call_soon(self._parse_on)

    def shutdown(self) -> None:
        """Lets those finish who have asked, which is known when all that was read is parsed."""
        while self._unparsed:
            self._parse_on()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed = _NOTHING
        super().connection_lost(exc)

    # ── the parser's calls ──────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a line of the head, as uvicorn does. Trailers are dropped: nobody wants them, and they have no limit of
        their own."""
        if self._is_past_head:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Expects trailers: behind the last chunk's header, which cannot be told from another's, no body comes."""
        self._await_lines()

    def on_body(self, body: bytes) -> None:
        self._is_in_head = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = False
        super().on_message_complete()

    # ── bounds ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def send_400_response(self, msg: str) -> None:
        """Answers 400, but not into the middle of an answer to an earlier request: that answer must look cut off
        instead. Does nothing where the connection is being closed already."""
        if self._is_answering():
            self.transport.close()
        elif not self.transport.is_closing():
            super().send_400_response(msg)

    def _is_answering(self) -> bool:
        """Tells whether an answer may be half sent. Where requests wait, uvicorn does not say whose turn it is."""
        cycle = self.cycle
        return bool(self.pipeline) or (cycle is not None and cycle.response_started and not cycle.response_complete)

    def _begin_head(self) -> None:
        self._is_past_head = False
        self._await_lines()

    def _end_head(self) -> None:
        """Notes that the head is over. Answers 400 and stops the parser where too many requests wait."""
        self._is_in_head, self._is_past_head = False, True
        if len(self.pipeline) >= MAX_PIPELINED:
            self.send_400_response(f"More than {MAX_PIPELINED} requests wait on one connection.")
            raise _TooManyError

    def _await_lines(self) -> None:
        self._is_in_head = True
        self._num_head_bytes = -1

    def _measure_head(self, num_bytes: int) -> None:
        """Notes that a slice of `num_bytes` has ended within a head. The first one may have begun with something else,
        and does not count."""
        self._num_head_bytes = 0 if self._num_head_bytes < 0 else self._num_head_bytes + num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")
