"""The module holds the answers of simulated engines. They implement `engines.http.base.Leg`.

A stream has only the pieces that the proxy needs: the first token, the end, and a sign of life in between where an
answer is long. So an answer costs the same however long it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdproxy.engines.http.base import REPLY, CheckSize, EngineBroken

_FIRST = b'data: {"choices":[{"index":0,"text":"a","token_ids":[0]}]}\n\n'
_LAST = b'data: {"choices":[{"index":0,"text":"a","token_ids":[%b],"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
_WHOLE = b'{"choices":[{"index":0,"text":"a","finish_reason":"length"}]}'


class WholeLeg:
    """WholeLeg is an answer that is all there at once."""

    __slots__ = ("_body", "status")

    source = None

    def __init__(self, body: bytes, status: int = 200) -> None:
        self._body = body
        self.status = status

    def header(self, name: str) -> str | None:
        return "application/json" if name == "content-type" else None

    async def read(self, check: CheckSize = REPLY) -> bytes:
        return self._body

    def read_now(self, check: CheckSize = REPLY) -> bytes | None:
        return self._body

    async def read_chunk(self) -> bytes:
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        """Does nothing: nothing is held."""


class StreamLeg:
    """StreamLeg is an answer being written. `on_close` is called where the proxy does not want the rest of it.

    Mutable state: what has not been read yet; tokens told of in all; whether it is over, or why it broke off; the
    future of a reader that waits for more; `on_close`, until it is over.
    """

    __slots__ = ("_error", "_is_over", "_on_close", "_unread", "_waiter", "num_told")

    source = None
    status = 200

    def __init__(self, on_close: Callable[[], object]) -> None:
        self._on_close: Callable[[], object] | None = on_close
        self._unread = b""
        self.num_told = 0
        self._is_over = False
        self._error: EngineBroken | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ── the engine's side ───────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Puts the first token into the stream."""
        self.num_told = 1
        self._put(_FIRST)

    def tell(self, num_tokens: int) -> None:
        """Tells the stream that `num_tokens` have been written; it does nothing where that is not more than was
        told."""
        num_new = num_tokens - self.num_told
        if num_new > 0:
            self.num_told = num_tokens
            ids = ",".join("0" * num_new)
            self._put(b'data: {"choices":[{"index":0,"text":"a","token_ids":[%b]}]}\n\n' % ids.encode())

    def end(self, num_tokens: int) -> None:
        """Ends the stream, because the last of its `num_tokens` tokens has been written."""
        num_new = num_tokens - self.num_told
        self._is_over = True
        self._on_close = None
        self._put(_LAST % (b"0," * num_new)[:-1])

    def break_off(self, error: EngineBroken) -> None:
        """Breaks the stream off, because the process has gone; it does nothing where the answer is over."""
        if not self._is_over:
            self._is_over = True
            self._on_close = None
            self._error = error
            self._wake()

    # ── the proxy's side ────────────────────────────────────────────────────────────────────────────────────────────

    async def begun(self) -> None:
        """Waits until there is a first piece. Raises `EngineBroken`."""
        if not self._unread and not self._is_over:
            await self._more()
        if not self._unread and self._error is not None:
            raise self._error

    def header(self, name: str) -> str | None:
        return "text/event-stream" if name == "content-type" else None

    async def read(self, check: CheckSize = REPLY) -> bytes:
        """Returns the whole answer, for one that is not streamed."""
        while await self.read_chunk():
            pass
        return _WHOLE

    def read_now(self, check: CheckSize = REPLY) -> bytes | None:
        return None

    async def read_chunk(self) -> bytes:
        if not self._unread and not self._is_over:
            await self._more()
        if self._unread:
            unread, self._unread = self._unread, b""
            return unread
        if self._error is not None:
            raise self._error
        return b""

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            on_close, self._on_close = self._on_close, None
            if on_close is not None:
                on_close()

    def _more(self) -> asyncio.Future[None]:
        """Returns a future that is done when there is more, or nothing will come. One may wait at a time."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter

    def _put(self, piece: bytes) -> None:
        self._unread += piece
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
