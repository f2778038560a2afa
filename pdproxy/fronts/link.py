"""A front's end of its link to the leader of a fleet.

What must hold, besides what `session_end` says: the front's lease, by its own clock, ends before the leader takes the
front for gone. The lease runs from when a beat was *sent*, and only once it was answered; the leader counts from when
it heard something, and only what takes longer than a lease. A session that the front gives up itself takes the lease
along. A violation would be seen as a session that the leader closes while its front still `is_held`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

import anyio

from pdproxy.fronts.channel import Handlers
from pdproxy.fronts.connection import Connection
from pdproxy.fronts.dialler import Dialler
from pdproxy.fronts.handshake import BEATS, Admitted, Answer, Beat, Goodbye, Lead, Peer
from pdproxy.fronts.session_end import Broken, SessionEnd, decoder

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 0.5
"""The pause before the leader is tried again: it doubles from the one to the other, and chance halves it at most."""
MAX_SILENT = 2
"""The number of beats in a row without a sign of the leader after which the connection is made anew."""


class _Carrier:
    """_Carrier is one connection of a link. Mutable state: when it proved itself; whether it was admitted."""

    def __init__(self, link: Link, lead: Lead, on_over: Callable[[], object]) -> None:
        self._link = link
        self._lead = lead
        self._on_over = on_over
        self._proved_at = -inf
        self._is_admitted = False
        self._introduction = link.dialler.introduce(lead, self._told, self._admitted)
        self.connection = Connection(self._introduction.begin, self._lost)

    def _told(self) -> tuple[str, int]:
        self._proved_at = self._link.clock()  # the proof counts as a beat, whose answer is the admission
        return self._link.told()

    def _admitted(self, connection: Connection, message: Admitted) -> None:
        self._is_admitted = True
        self._link.admitted(connection, message, self._proved_at)

    def _lost(self, why: str) -> None:
        lead, link = self._lead, self._link
        if link.lost(self.connection):
            if self._is_admitted:
                log.info("the connection to the leader of term %d is over: %s", lead.term, why)
            else:
                link.dialler.note(lead, self._introduction.refused or why)
        self._on_over()


class Link:
    """`Link` is a front's end. It handles messages of the union `incoming` with `handlers`.

    `on_begin` is called with the term when a session has begun in which the leader knows nothing of this front, before
    any message of it is handled; what is sent in it goes first. `on_lapse` is called each time the lease ends. `front`
    has an id that no other process has. Mutable state: the leader, and the highest term; the session; its connection;
    the lease, and the beats that were not answered; the pause before the next try.
    """

    def __init__(
        self,
        incoming: Any,
        *,
        front: Peer,
        on_begin: Callable[[int], object],
        on_lapse: Callable[[], object],
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.handlers: Handlers = {}
        self._decode = decoder(incoming)
        self._on_begin = on_begin
        self._on_lapse = on_lapse
        self.clock = clock
        self.dialler = Dialler("front", front, tls)
        self._lead: Lead | None = None
        self._term: int | None = None
        self._end: SessionEnd | None = None
        self._session = ""
        self._connection: Connection | None = None
        self._dialling: anyio.CancelScope | None = None
        self._changed = asyncio.Event()
        self._has_term = asyncio.Event()
        self._is_closed = False
        self._lease_until = -inf
        self._has_lapsed = True
        self._beats: deque[tuple[int, float]] = deque()
        self._num_beats = 0
        self._num_silent = 0
        self._ttl_s = 0.0
        self._pause_s = FIRST_PAUSE_S

    # ── what the user sees ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_held(self) -> bool:
        """Tells whether the front's lease runs. It is reckoned from the clock, so that it is true after a stop, too."""
        return self.clock() < self._lease_until

    @property
    def term(self) -> int | None:
        """The highest term that was followed; None before the first."""
        return self._term

    @property
    def is_connected(self) -> bool:
        """Tells whether there is a session with a connection."""
        return self._end is not None and self._end.connection is not None

    @property
    def num_unsent_bytes(self) -> int:
        """The bytes that the leader has not said to have handled. Beyond `MAX_TAPE_BYTES` the session is given up."""
        return 0 if self._end is None else self._end.num_kept_bytes

    def send(self, message: Any) -> None:
        """Sends a message, with all others of this turn. Never waits. Does nothing while there is no session."""
        if self._end is not None:
            self._end.send(message)

    def send_soon(self, message: Any) -> None:
        """Sends a message that may wait a moment for others. Never waits. Does nothing while there is no session."""
        if self._end is not None:
            self._end.send_soon(message)

    @property
    def frame(self) -> object:
        """The identity of the frame that is sent next, in this session."""
        return object() if self._end is None else (self._session, self._end.frame)

    def follow(self, lead: Lead | None) -> None:
        """Follows a leader. One of a lower term is ignored. One of a higher term ends the session at once; the lease
        runs on by its clock. With None no leader is known: no connection is made, and one that is there stays."""
        if self._is_closed or (lead is not None and self._term is not None and lead.term < self._term):
            return
        if lead is not None and lead.term != self._term:
            self._term = lead.term
            self._has_term.set()
            self._pause_s = FIRST_PAUSE_S
            self._drop("another term has begun")
        elif lead == self._lead:
            return
        self._lead = lead
        if lead is not None:
            self._ttl_s = lead.ttl_s
        if not self.is_connected:
            self._hang_up("the leader's address has changed")
        self._changed.set()

    def say_goodbye(self) -> None:
        """Ends the link in order: the leader handles all that was sent, and closes the session. `on_lapse` is not
        called."""
        self._is_closed = self._has_lapsed = True
        if self._end is not None and self._end.connection is not None:
            connection = self._end.connection
            self._end.flush()
            connection.send(Goodbye())
            connection.close("the front has ended")
        self._lease_until = -inf
        self._drop("the front has ended")
        self._changed.set()

    async def run(self) -> None:
        """Keeps the link, until it is cancelled or has said goodbye."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_time)
                while not self._is_closed:
                    lead = self._lead
                    self._changed.clear()
                    if lead is None:
                        await self._changed.wait()
                    else:
                        await self._try(lead)
                        await self._pause()
                tasks.cancel_scope.cancel()
        finally:
            self._hang_up("the front's link was cancelled")

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_time(self) -> None:
        await self._has_term.wait()
        beat_at = self.clock()
        while True:
            now = self.clock()
            self.check_lapse()
            if now >= beat_at:
                self.beat()
                beat_at = now + self._ttl_s / BEATS
            until = beat_at if self._has_lapsed else min(beat_at, self._lease_until)
            await asyncio.sleep(max(until - self.clock(), 0.001))

    def check_lapse(self) -> None:
        """Tells the user, once, where the lease has ended."""
        if not self._has_lapsed and not self.is_held:
            self._has_lapsed = True
            log.warning("the lease of term %s has ended: the leader was not heard", self._term)
            self._on_lapse()

    def beat(self) -> None:
        """Says that the front is there. Gives up a connection over which nothing comes; beats are counted, so that a
        front that stood still blames nobody."""
        end = self._end
        if end is None or (connection := end.connection) is None:
            return
        self._num_silent = 0 if connection.has_heard else self._num_silent + 1
        connection.has_heard = False
        if self._num_silent >= MAX_SILENT:
            connection.abort("the leader does not answer")
            return
        self._num_beats += 1
        self._beats.append((self._num_beats, self.clock()))
        connection.send(Beat(self._num_beats, end.told()))

    def _extend(self, sent_at: float) -> None:
        self._lease_until = max(self._lease_until, sent_at + self._ttl_s)
        if self.is_held:
            self._has_lapsed = False

    # ── connections ─────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_to(self, lead: Lead, on_over: Callable[[], object]) -> Connection:
        """Returns the next connection, which waits to be made. `on_over` is called when it is over."""
        carrier = _Carrier(self, lead, on_over)
        self._connection = carrier.connection
        return carrier.connection

    async def _try(self, lead: Lead) -> None:
        """Connects, and waits for the end of the connection."""
        over = asyncio.Event()
        connection = self.connection_to(lead, over.set)
        try:
            with anyio.CancelScope() as self._dialling:
                if await self.dialler.dial(lead, connection):
                    await over.wait()
        finally:
            self._dialling = None
            if not connection.is_over:
                connection.abort("it is not wanted any more")

    async def _pause(self) -> None:
        """Waits before the next try, unless there is news."""
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        try:
            async with asyncio.timeout(pause_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _hang_up(self, why: str) -> None:
        connection, self._connection = self._connection, None
        self._beats.clear()
        if self._end is not None:
            self._end.detach()
        if connection is not None and not connection.is_over:
            connection.abort(why)
        if self._dialling is not None:
            self._dialling.cancel()

    def told(self) -> tuple[str, int]:
        """Returns the session that the front has, or "", and how many frames of it were handled."""
        return self._session, 0 if self._end is None else self._end.told()

    def lost(self, connection: Connection) -> bool:
        """Notes that a connection is over. Returns whether it was wanted."""
        if self._connection is not connection:
            return False
        self._connection = None
        self._beats.clear()
        if self._end is not None:
            self._end.detach()
        return True

    # ── the session ─────────────────────────────────────────────────────────────────────────────────────────────────

    def admitted(self, connection: Connection, message: Admitted, sent_at: float) -> None:
        """Goes on with a connection over which the leader has proved itself; the front had done so at `sent_at`."""
        self.dialler.forget_reasons()
        self._num_silent = 0
        self.check_lapse()
        if not message.session:
            self._give_up("the leader has ended it")
        elif self._end is not None and message.session == self._session:
            try:
                self._end.attach(connection, message.num_handled)
            except Broken as error:
                self._give_up(str(error))
            else:
                self._extend(sent_at)
        else:
            self._begin(connection, message.session, sent_at)

    def _begin(self, connection: Connection, session: str, sent_at: float) -> None:
        """Begins a session. One that was before is over, and its lease has ended: the leader had not closed it else."""
        assert self._term is not None
        if self._end is not None:
            self._lease_until = -inf
            self.check_lapse()
            self._end.end()
        self._session = session
        self._end = end = SessionEnd(self._decode, lambda: self.handlers, self._take_own, self._give_up)
        end.attach(connection, 0)
        self._extend(sent_at)
        log.info("a session with the leader of term %d begins", self._term)
        try:
            self._on_begin(self._term)
        except Exception as error:  # a bug: the leader would never hear what it has to know
            log.exception("a session cannot be begun")
            self._give_up(repr(error))

    def _take_own(self, message: Any) -> None:
        if not isinstance(message, Answer) or self._end is None:
            raise Broken(f"the leader says {type(message).__name__}")
        self._end.acknowledge(message.num_handled)
        while self._beats and self._beats[0][0] <= message.number:
            number, sent_at = self._beats.popleft()
            if number == message.number:
                self._extend(sent_at)
                self._pause_s = FIRST_PAUSE_S

    def _give_up(self, why: str) -> None:
        """Ends the session, and its lease with it, so that the leader may close it when it hears of that."""
        log.error("the session with the leader of term %s is given up: %s", self._term, why)
        self._lease_until = -inf
        self._drop(why)
        self.check_lapse()

    def _drop(self, why: str) -> None:
        if self._end is not None:
            self._end.end()
        self._end, self._session = None, ""
        self._hang_up(why)
