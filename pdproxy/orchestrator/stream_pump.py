"""StreamPump relays without waiting: events go from the engine's socket to the client's within one callback.

No task runs per piece, nothing is awaited and no timer is set. The engine has to wait for a client that takes less than
the engine gives. The proxy keeps only what the operating system would not take, and at most one more read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdproxy.aio.deadline import Deadline
from pdproxy.engines.http.base import EngineBroken, Sink, Source
from pdproxy.openai.dialect import OPENAI, Dialect
from pdproxy.openai.sse import EventBuffer
from pdproxy.openai.token_count import TokenCount
from pdproxy.orchestrator.context import Outlet

Show = Callable[[bytes], tuple[bytes, Exception | None]]
"""A function that returns whole events as the client gets them, and the error that ends the stream behind them."""
MakeError = Callable[[], Exception]


class StreamPump(Sink):
    """StreamPump takes pieces from a source and writes their events to an outlet.

    Mutable state: whether the answer said that it is complete; whether the client is waited for; `over`, a future that
    is done when nothing more will come. It holds `EngineBroken`, or what `show` or the buffer has found, where one of
    these ends the stream. The code that awaits it takes the pump off the outlet then (`on_room`).
    """

    __slots__ = (
        "_buffer",
        "_dialect",
        "_done_mark",
        "_error_mark",
        "_idle_s",
        "_limit",
        "_outlet",
        "_show",
        "_shows_all",
        "_silent",
        "_source",
        "_stalled",
        "_tokens",
        "_usage_mark",
        "is_done",
        "over",
    )

    def __init__(
        self,
        source: Source,
        outlet: Outlet,
        buffer: EventBuffer,
        show: Show,
        limit: Deadline,
        *,
        idle_s: float,
        silent: MakeError,
        stalled: MakeError,
        shows_all: bool,
        tokens: TokenCount,
        dialect: Dialect = OPENAI,
    ) -> None:
        """Takes `limit`, which is moved with every piece. After `idle_s` seconds without one it raises `silent`, and
        `stalled` where the client has taken nothing for so long.

        `shows_all`: an event goes to the client as it is, and `show` is not asked about it, unless it ends the stream
        or tells a usage. `tokens` counts those; `show` has to count the others.
        """
        self._source = source
        self._outlet = outlet
        self._buffer = buffer
        self._show = show
        self._limit = limit
        self._idle_s = idle_s
        self._silent = silent
        self._stalled = stalled
        self._shows_all = shows_all
        self._tokens = tokens
        self._dialect = dialect
        # Read once: they are looked for in every piece.
        self._done_mark = dialect.done_mark
        self._error_mark = dialect.error_mark
        self._usage_mark = dialect.usage_mark
        self.is_done = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Begins to pour: from now on the source calls `feed`, and `end` or `fail` at last."""
        self._limit.wait(self._idle_s, self._silent)
        self._source.pour(self)

    # ── for the source ──────────────────────────────────────────────────────────────────────────────────────────────

    def feed(self, data: bytes) -> None:
        if self.over.done():
            return
        self._limit.more(self._idle_s)
        try:
            events = self._buffer.feed(data)
        except Exception as error:  # an event is too large
            self.over.set_exception(error)
            return
        if not events:
            return
        # `find` is used because `in` first checks whether it looks for a number, which takes ten times as long.
        if events.find(self._done_mark) >= 0:
            self.is_done = self.is_done or self._dialect.has_done(events)
        if not self._shows_all or events.find(self._error_mark) >= 0 or events.find(self._usage_mark) >= 0:
            self._show_some(events)
        else:
            self._tokens.add(events)
            self._write(events)

    def _show_some(self, events: bytes) -> None:
        try:
            shown, error = self._show(events)
        except Exception as bug:  # it fails the request, not the connection that called
            self.over.set_exception(bug)
            return
        if shown:
            self._write(shown)
        if error is not None:
            self.over.set_exception(error)

    def _write(self, events: bytes) -> None:
        outlet = self._outlet
        outlet.write(events)
        if outlet.is_full:
            self._wait_for_client()

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def fail(self, error: EngineBroken) -> None:
        if not self.over.done():
            self.over.set_exception(error)

    # ── for the outlet ──────────────────────────────────────────────────────────────────────────────────────────────

    def _wait_for_client(self) -> None:
        self._source.pause()
        self._limit.wait(self._idle_s, self._stalled)
        self._outlet.on_room(self._go_on)

    def _go_on(self) -> None:
        self._outlet.on_room(None)
        self._limit.wait(self._idle_s, self._silent)
        self._source.resume()
