"""ClientConnection is a client's connection: it serves generation requests itself, and leaves all others to uvicorn.

uvicorn makes a dict, two coroutines and an event of every request and takes its answer as messages, which costs as much
as all else that the proxy does for it. Both kinds of requests are parsed by httptools. Both also keep the order of
requests that come in one go: the next begins when the last has been answered, whichever side answers it.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.aio.write_batch import batched
from pdproxy.server import codings
from pdproxy.server.direct import DirectRoutes
from pdproxy.server.exchange import Exchange
from pdproxy.server.headers import ClientHeaders
from pdproxy.server.response_head import ResponseHeadWriter
from transfer.bounded_connection import BoundedConnection
from transfer.memory_budget import MemoryBudget

LOOK_S = 1.0
"""Seconds between two looks whether a client is still there from whom nothing is read."""
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class ClientConnection(BoundedConnection):
    """ClientConnection is what uvicorn calls a protocol.

    Mutable state, besides that of a `BoundedConnection`: the exchange whose turn it is; since when nothing was under
    way, on the loop's clock, how much its client had not taken of answers then, and the timer that looks whether that
    is too long; the timer that looks for the client while requests wait in the pipeline; its share of the memory
    budget, for what its client has not taken of answers, while that is more than a little.
    """

    cycle: Any  # an `Exchange`, or uvicorn's own

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        routes: DirectRoutes,
        memory: MemoryBudget,
        descriptors: DescriptorBudget | None = None,
        is_leaving: Callable[[], bool] | None = None,
    ) -> None:
        """Takes `is_leaving`, which tells whether connections end with their next answer, because the proxy does."""
        super().__init__(config, server_state, app_state, _loop)
        self.heads = ResponseHeadWriter(server_state)
        self._routes = routes
        self._descriptors = descriptors
        self._is_leaving = is_leaving
        self._turn: Exchange | None = None
        self._idle_since = 0.0
        self._num_unsent_bytes = 0
        self._rest_timer: asyncio.TimerHandle | None = None
        self._line_timer: asyncio.TimerHandle | None = None
        self._unsent = memory.share()

    @property
    def ends_soon(self) -> bool:
        descriptors = self._descriptors
        if descriptors is not None and (descriptors.is_short or descriptors.is_tight):
            return True
        return self._is_leaving is not None and self._is_leaving()

    def rests_since(self) -> float | None:
        """Returns since when nothing is under way, on the loop's clock; None where something is, or where the
        connection would not be closed at once: because it is being closed, or its client has not taken everything."""
        is_busy = self.cycle is not None and not self.cycle.response_complete
        is_bound = (
            is_busy
            or self._is_in_head
            or self._unparsed
            or self.transport.is_closing()
            or self.transport.get_write_buffer_size() > 0
        )
        return None if is_bound else self._idle_since

    # ── the transport's calls ───────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(batched(transport, self.loop))  # type: ignore[arg-type]
        self._rest()

    def _parse(self, data: bytes) -> None:
        super()._parse(data)
        if self._turn is not None and not self.transport.is_closing():
            self._turn.go_on()

    def eof_received(self) -> None:
        """Writes what waits: the loop closes the connection then, whose client may go on reading."""
        self.transport.flush()  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        turn, self._turn = self._turn, None
        if isinstance(self.cycle, Exchange):
            self.cycle = None
        for waiting, _ in self.pipeline:
            if isinstance(waiting, Exchange):
                waiting.memory.release()
        self.pipeline.clear()
        for timer in (self._rest_timer, self._line_timer):
            if timer is not None:
                timer.cancel()
        self._unsent.release()
        super().connection_lost(exc)
        if turn is not None:
            turn.leave()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._idle_since = self.loop.time()
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        self._unsent.charge(self._num_unsent_bytes)

    def resume_writing(self) -> None:
        self._unsent.release()
        super().resume_writing()
        if self._turn is not None:
            self._turn.has_room()

    # ── the parser's ────────────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._begin_head()
        self._idle_since = self.loop.time()

    def on_headers_complete(self) -> None:
        """Decides who serves the request: an `Exchange`, or uvicorn. It waits in the pipeline for earlier requests."""
        self._end_head()
        parser, headers = self.parser, self.headers
        if codings.is_foreign(headers):
            self._hand_to_uvicorn(codings.refuse)
            return
        route = None
        if parser.get_method() == b"POST" and not parser.should_upgrade():
            route = self._routes.find(self.url, headers)
        if route is None:
            self._hand_to_uvicorn(self.app)
            return
        is_http11 = parser.get_http_version() == "1.1"
        exchange = Exchange(
            self,
            route,
            ClientHeaders(headers),
            is_http11=is_http11,
            keep_alive=is_http11 and parser.should_keep_alive(),
            awaits_continue=self.expect_100_continue,
        )
        before, self.cycle = self.cycle, exchange
        if before is None or before.response_complete:
            self._turn = exchange
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))
            self._watch_client()

    def on_body(self, body: bytes) -> None:
        self._is_in_head = False
        cycle = self.cycle
        if isinstance(cycle, Exchange):
            cycle.take(body)
            if self.pipeline and cycle is self.pipeline[0][0]:  # its turn comes later, and then it asks for the rest
                cycle.memory.charge(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = False
        if isinstance(self.cycle, Exchange):
            self.cycle.has_all()
        else:
            super().on_message_complete()

    def _hand_to_uvicorn(self, app: Any) -> None:
        """Hands the request to uvicorn, so that `app` answers it when it is its turn."""
        url, headers, awaits_continue = self.url, self.headers, self.expect_100_continue
        HttpToolsProtocol.on_message_begin(self)  # past the bounds, which have seen this head
        self.url, self.expect_100_continue = url, awaits_continue
        self.headers += headers
        usual, self.app = self.app, app
        HttpToolsProtocol.on_headers_complete(self)
        self.app = usual
        if self._is_leaving is not None and self._is_leaving():
            self.cycle.keep_alive = False
        if self.pipeline:
            self._watch_client()

    def _is_answering(self) -> bool:
        return self._turn is not None and self._turn.is_started

    # ── one after another, and rests between them ───────────────────────────────────────────────────────────────────

    def on_response_complete(self) -> None:
        """Begins the next request in the pipeline, or rests where there is none. Exchanges and uvicorn's own requests
        both call this when they have been answered."""
        self._turn = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            if self.transport.get_write_buffer_size():  # to be closed when all was taken, which may be never
                self._rest()
            return
        if not self.pipeline:
            if self.flow.read_paused:
                self.flow.resume_reading()
            self._rest()
            return
        cycle, app = self.pipeline.pop()
        if not self.pipeline:
            self.flow.resume_reading()
        if isinstance(cycle, Exchange):
            self._turn = cycle
            cycle.go_on()
        else:
            task = self.loop.create_task(cycle.run_asgi(app))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)

    def shutdown(self) -> None:
        super().shutdown()
        if self._turn is not None:
            self._turn.hurry()

    def _watch_client(self) -> None:
        """Looks for the client from time to time while requests of its wait in the pipeline. Nothing is read then, not
        even the end, so that the loop would not notice that the client has gone before something is written."""
        if self._line_timer is None:
            self._line_timer = self.loop.call_later(LOOK_S, self._look_for_client)

    def _look_for_client(self) -> None:
        self._line_timer = None
        if not self.pipeline or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _GONE)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._watch_client()

    def _rest(self) -> None:
        self._idle_since = self.loop.time()
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        if self._rest_timer is None:
            self._rest_timer = self.loop.call_later(self.timeout_keep_alive, self._look)

    def _look(self) -> None:
        """Closes a connection that has rested too long, and one whose client takes nothing of an answer of uvicorn's,
        which has no limit of its own. One timer serves many requests: it stays set, and looks again when it is due."""
        self._rest_timer = None
        is_under_way = self.cycle is not None and not self.cycle.response_complete
        is_stuck = self._turn is None and (self.flow.write_paused or self.transport.is_closing())
        if is_under_way and not is_stuck:
            self._rest()
            return
        due_at = self._idle_since + self.timeout_keep_alive
        if self.loop.time() < due_at:
            self._rest_timer = self.loop.call_at(due_at, self._look)
        elif (num_bytes := self.transport.get_write_buffer_size()) > 0:
            self._look_at_unsent(num_bytes)
        else:
            self.timeout_keep_alive_handler()

    def _look_at_unsent(self, num_bytes: int) -> None:
        """Ends the connection of a client that has taken nothing of its answer since the last look: `num_bytes` are
        left. The answer's exchange is over, and nobody else would ever take it out of memory."""
        if num_bytes < self._num_unsent_bytes:
            self._unsent.give_back(max(0, self._unsent.num_bytes - num_bytes))
            self._rest()
        else:
            self.transport.abort()

    def _unset_keepalive_if_required(self) -> None:
        """Does nothing, because uvicorn's own timer, one per request, is never set."""
