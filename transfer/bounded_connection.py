"""A client's connection as uvicorn serves it, with bounds on what uvicorn bounds by nothing: heads, trailers, and
requests that wait for earlier ones.

The proxy's own connection and the built-in engine's are both this one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""The most bytes of a request's head beyond one read, and of what else is no body: the trailers behind it."""
MAX_PIPELINED = 100
"""The most requests of a client that wait for earlier ones. One read can have ten thousand, and each takes a hundred
times as much in memory."""


class _TooManyError(Exception):
    """_TooManyError stops the parser. Nobody outside sees it."""


class BoundedConnection(HttpToolsProtocol):
    """BoundedConnection is what uvicorn calls a protocol.

    Mutable state, besides uvicorn's (`cycle` is the latest request, `pipeline` those whose turn is still to come):
    whether a head or trailers are under way, their size without the first read (-1 in that read), and whether the head
    is over.
    """

    cycle: Any
    pipeline: deque[tuple[Any, Any]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_in_head = False
        self._is_past_head = False
        self._num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._measure_head(len(data))

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
        """Notes that a read of `num_bytes` has ended within a head. The first one may have begun with something else,
        and does not count."""
        self._num_head_bytes = 0 if self._num_head_bytes < 0 else self._num_head_bytes + num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")
