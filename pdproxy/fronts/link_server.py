"""The leader's end of the links of a fleet's fronts.

What must hold, besides what `session_end` says: a session is closed only when its front's lease has ended by the
front's own clock. So it is closed when the front was not heard for more than a lease, when the front itself has given
it up, and when the server ends; an end that has lost track leaves the session as it is until the front comes and is
told. Nothing is handled, and no session closed, by a process that may not lead any more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Protocol

from pdproxy.fronts import messages
from pdproxy.fronts.channel import Handlers
from pdproxy.fronts.connection import Connection
from pdproxy.fronts.handshake import (
    BEATS,
    LINK,
    MAX_STRANGER_BYTES,
    PURPOSES,
    REASONS,
    Admitted,
    Answer,
    Beat,
    Challenge,
    Goodbye,
    Hello,
    Peer,
    Proof,
    Reason,
    Refused,
    is_proved,
    prove,
    read_one,
)
from pdproxy.fronts.operators_tunnel import serve_pipe
from pdproxy.fronts.session_end import Broken, SessionEnd, decoder
from pdproxy.serve import listeners

log = logging.getLogger(__name__)

MAX_SILENT = BEATS + 2
"""The number of ticks in a row without a sign of a front after which it has gone. A tick takes a beat at least, and the
first may come at once: so one more than a lease has is a whole lease, and another is the margin."""
MAX_STRANGERS = 64
"""The most connections at once whose other end has not proved itself."""
STRANGER_S = 5.0
"""The longest time in seconds that such a connection is kept."""
MAX_NOTED = 256
"""The number of reasons after which they are logged anew."""
FULL_S = 0.1
"""The pause in seconds before connections are taken again for which the system had no room."""

Send = Callable[[Any], None]


class OpenedSession(Protocol):
    """`OpenedSession` is what the user has for one front. `close` is called once, when the session is over."""

    handlers: Handlers

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Linked:
    """`Linked` is a front that has a session, as a page shows it."""

    peer: Peer
    is_connected: bool
    silent_s: float
    """The seconds since it was heard."""


class _Session:
    """_Session is one front. Mutable state: the latest attempt of its process to connect; whether the session can go
    on; how many ticks ago it was heard, and when."""

    def __init__(self, first: Hello) -> None:
        self.peer = first.peer
        self.process = first.process
        self.attempt = first.attempt
        self.id = secrets.token_hex(16)
        self.opened: OpenedSession | None = None
        self.end: SessionEnd
        self.is_broken = False
        self.num_silent = 0
        self.heard_at = -inf


class LinkServer:
    """`LinkServer` is the leader's end of all links, of one term.

    `incoming` is the union of what fronts say, and `open_session` returns what takes it, for each new session.
    `may_lead` is asked before a frame is handled, and at each tick: once it says no, nothing is handled any more, all
    connections are over, and what is left is `close`. `operators` is the path of a Unix socket that tunnels lead to.
    Mutable state: the sessions by their fronts' ids; all connections; those of strangers; the reasons that were logged.
    """

    def __init__(
        self,
        incoming: Any,
        *,
        term: int,
        secret: str,
        ttl_s: float,
        open_session: Callable[[Peer, Send], OpenedSession],
        may_lead: Callable[[], bool],
        operators: str | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not secret:
            raise ValueError("a link needs a secret")
        self.term = term
        self.secret = secret
        self._tick_s = ttl_s / BEATS
        self._decode = decoder(incoming)
        self._open_session = open_session
        self._may_lead = may_lead
        self._operators = operators
        self._tls = tls
        self._clock = clock
        self._ticked_at = clock()
        self._sessions: dict[str, _Session] = {}
        self._connections: set[Connection] = set()
        self._num_strangers = 0
        self._noted: set[tuple[str, str]] = set()
        self._listeners: list[socket.socket] = []
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._has_lapsed = False
        self._is_closed = False

    # ── its life ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def listen(self, host: str, port: int) -> int:
        """Takes a port; 0 takes a free one. Returns it. Raises `ConfigError`. Connections wait until `run`."""
        self._listeners = listeners(host, port, is_shared=True)
        for one in self._listeners:
            one.setblocking(False)
            one.listen()
        return int(self._listeners[0].getsockname()[1])

    async def run(self) -> None:
        """Serves until it is cancelled or closed."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._start(self._keep_ticking())
                for one in self._listeners:
                    self._start(self._accept(one))
                await self._ended.wait()
                for task in self._running:
                    task.cancel()
        finally:
            self._tasks = None
            self._hang_up("the leader's link has ended")
            for one in self._listeners:
                one.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task, from a connection's callback too, which anyio's groups do not allow."""
        assert self._tasks is not None
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(max(self._ticked_at + self._tick_s - self._clock(), 0.001))
            self.tick()

    def close(self) -> None:
        """Ends all sessions and connections. Idempotent."""
        self._is_closed = True
        self._hang_up("the leader ends")
        for session in list(self._sessions.values()):
            self._close(session, "the leader ends")
        self._ended.set()
        if self._tasks is None:
            for one in self._listeners:
                one.close()

    def tick(self) -> None:
        """Counts how long fronts were not heard, and closes the sessions of those that have gone. To be called about as
        often as fronts beat; what is called sooner does nothing, because a loop's timers may be early."""
        now = self._clock()
        if now - self._ticked_at < self._tick_s or not self._leads():
            return
        self._ticked_at = now
        for session in list(self._sessions.values()):
            session.num_silent += 1
            if session.num_silent >= MAX_SILENT:
                self._close(session, f"it was not heard for {now - session.heard_at:.1f} s")

    def _leads(self) -> bool:
        if not self._has_lapsed and not self._is_closed and not self._may_lead():
            self._has_lapsed = True
            log.warning("this process leads term %d no more: all links are over", self.term)
            self._hang_up("it does not lead any more")
        return not self._has_lapsed and not self._is_closed

    def _hang_up(self, why: str) -> None:
        for connection in list(self._connections):
            connection.abort(why)

    @property
    def peers(self) -> list[Linked]:
        """The fronts that have a session."""
        now = self._clock()
        return [
            Linked(one.peer, one.end.connection is not None, max(0.0, now - one.heard_at))
            for one in self._sessions.values()
        ]

    # ── connections ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:
                if self._is_closed:
                    return
                self.note("", f"a connection cannot be taken: {error}")
                await asyncio.sleep(FULL_S)
                continue
            if self._num_strangers >= MAX_STRANGERS:
                self.note("", f"more than {MAX_STRANGERS} connections wait to prove themselves; new ones are refused")
                client.close()
            else:
                self._num_strangers += 1
                self._start(self._welcome(client))

    async def _welcome(self, client: socket.socket) -> None:
        """Makes a connection, which ends by itself where the other end does not prove itself in time."""
        reception = Reception(self)
        try:
            async with asyncio.timeout(STRANGER_S):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: reception.connection, client, ssl=self._tls
                )
        except OSError as error:  # of TLS, and TimeoutError
            self.note(reception.host, f"no connection comes about: {error!r}")
        finally:
            if not reception.has_begun:
                reception.leave()
                client.close()

    def came(self, connection: Connection) -> None:
        """Takes a connection that was made."""
        self._connections.add(connection)
        if not self._leads():
            connection.abort("it does not lead any more")

    def went(self, connection: Connection) -> None:
        """Forgets a connection that is over."""
        self._connections.discard(connection)

    def left(self) -> None:
        """Notes that somebody is no stranger any more, or has gone."""
        self._num_strangers -= 1

    def refuse(self, connection: Connection, reason: Reason, whom: str) -> None:
        """Tells the other end why nothing comes of its connection, and the log."""
        self.note(connection.address, f"{whom} is refused: {REASONS[reason]}")
        connection.send(Refused(reason, self.term))
        connection.close(reason)

    def note(self, host: str, what: str) -> None:
        """Logs what has come of a connection, once per host and reason."""
        if len(self._noted) >= MAX_NOTED:
            self._noted.clear()
        if (host, what) not in self._noted:
            self._noted.add((host, what))
            log.warning("link of term %d%s: %s", self.term, host and f", {host}", what)

    def check(self, first: Hello) -> Reason | None:
        """Returns the reason to refuse somebody who has said hello; None where there is none."""
        if not self._leads():
            return "lapsed"
        if (first.link, first.protocol) != (LINK, messages.PROTOCOL) or first.purpose not in PURPOSES:
            return "protocol"
        return None if first.term == self.term else "term"

    # ── sessions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, connection: Connection, first: Hello, said: Proof, nonce: bytes) -> None:
        """Goes on with a front's session, or begins one. The front has proved itself."""
        session = self._sessions.get(first.peer.id)
        if session is not None:
            if session.process != first.process:
                self.refuse(connection, "taken", repr(first.peer.id))
                return
            if first.attempt <= session.attempt:
                self.refuse(connection, "late", repr(first.peer.id))
                return
            session.attempt = first.attempt
            if session.end.connection is not None:  # before the count is told: nothing more may come of it
                session.end.connection.abort("the front has connected anew")
                session.end.detach()
        if session is not None and session.id == said.session:
            self._go_on(session, connection, first, said, nonce)
        else:
            if session is not None:  # the front does not have it, and so no lease of it
                self._close(session, "the front has given it up")
            self._begin(connection, first, nonce)

    def _go_on(self, session: _Session, connection: Connection, first: Hello, said: Proof, nonce: bytes) -> None:
        if not session.is_broken:
            try:
                session.end.acknowledge(said.num_handled)
            except Broken as error:
                self._break(session, str(error))
        if session.is_broken:
            connection.send(Admitted(prove(self.secret, "leader", first, nonce, "", 0), "", 0))
            connection.close("the session is over")
            return
        num_handled = session.end.told()
        told = (session.id, num_handled)
        connection.send(Admitted(prove(self.secret, "leader", first, nonce, *told), *told))
        self._attach(session, connection, said.num_handled)

    def _begin(self, connection: Connection, first: Hello, nonce: bytes) -> None:
        session = _Session(first)
        session.end = SessionEnd(
            self._decode,
            lambda: {} if session.opened is None else session.opened.handlers,
            partial(self._take_own, session),
            partial(self._break, session),
        )
        self._sessions[first.peer.id] = session
        connection.send(Admitted(prove(self.secret, "leader", first, nonce, session.id, 0), session.id, 0))
        self._attach(session, connection, 0)
        try:
            session.opened = self._open_session(session.peer, session.end.send)
        except Exception as error:  # a bug: the front would wait for what it is never told
            log.exception("a front's session cannot be opened")
            self._break(session, repr(error))

    def _attach(self, session: _Session, connection: Connection, num_handled: int) -> None:
        session.num_silent, session.heard_at = 0, self._clock()
        session.end.attach(connection, num_handled)
        connection.on_frame = partial(self._take, session)

    def lost(self, connection: Connection, front: str) -> None:
        """Notes that a front's connection is over. Its session waits for the next."""
        session = self._sessions.get(front)
        if session is not None and session.end.connection is connection:
            session.end.detach()

    def _take(self, session: _Session, frame: bytes) -> None:
        if self._leads():
            session.num_silent, session.heard_at = 0, self._clock()
            session.end.take(frame)

    def _take_own(self, session: _Session, message: Any) -> None:
        connection = session.end.connection
        if isinstance(message, Beat) and connection is not None:
            session.end.acknowledge(message.num_handled)
            connection.send(Answer(message.number, session.end.told()))
        elif isinstance(message, Goodbye):
            self._close(session, "the front has ended")
        else:
            raise Broken(f"the front says {type(message).__name__}")

    def _break(self, session: _Session, why: str) -> None:
        """Notes that a session cannot go on. It is kept until the front gives it up, or was not heard for too long, for
        until then the front has its lease."""
        log.error("the session of front %r cannot go on: %s", session.peer.id, why)
        session.is_broken = True
        connection = session.end.connection
        session.end.end()
        if connection is not None:
            connection.abort(why)

    def _close(self, session: _Session, why: str) -> None:
        """Ends a session, and tells the user."""
        if self._sessions.get(session.peer.id) is not session:
            return
        del self._sessions[session.peer.id]
        log.info("the session of front %r is over: %s", session.peer.id, why)
        connection = session.end.connection
        session.end.end()
        if connection is not None:
            connection.close(why)
        if session.opened is not None:
            try:
                session.opened.close()
            except Exception:  # a bug: the others must not pay for it
                log.exception("the session of front %r cannot be closed", session.peer.id)

    # ── the tunnel ──────────────────────────────────────────────────────────────────────────────────────────────────

    def pipe(self, connection: Connection, admit: Callable[[], None], whom: str) -> None:
        """Joins a connection to the operators' socket."""
        if self._operators is None:
            self.refuse(connection, "operators", whom)
        else:
            self._start(self._pipe(connection, self._operators, admit, whom))

    async def _pipe(self, connection: Connection, path: str, admit: Callable[[], None], whom: str) -> None:
        try:
            await serve_pipe(connection, path, admit)
        except OSError:
            if not connection.is_over:
                self.refuse(connection, "operators", whom)


class Reception:
    """`Reception` is the leader's part in the handshake of one connection.

    Mutable state: how far it has come; whether its other end still counts as a stranger.
    """

    def __init__(self, server: LinkServer) -> None:
        self.connection = Connection(self._made, self._lost)
        self.has_begun = False
        self.host = ""
        self._server = server
        self._hello: Hello | None = None
        self._nonce = secrets.token_bytes(32)
        self._is_stranger = True
        self._is_refused = False

    def _made(self, connection: Connection) -> None:
        self.has_begun = True
        self.host = connection.address
        connection.limit(STRANGER_S)
        connection.max_frame_bytes = MAX_STRANGER_BYTES
        connection.on_frame = self._take
        self._server.came(connection)

    def leave(self) -> None:
        """Counts as no stranger any more. Idempotent."""
        if self._is_stranger:
            self._is_stranger = False
            self._server.left()

    def _lost(self, why: str) -> None:
        if self._is_stranger and not self._is_refused:
            self._server.note(self.host, f"somebody has not proved to belong to the fleet: {why}")
        self.leave()
        self._server.went(self.connection)
        if self._hello is not None:
            self._server.lost(self.connection, self._hello.peer.id)

    def _take(self, frame: bytes) -> None:
        message, connection = read_one(frame), self.connection
        if self._hello is None and isinstance(message, Hello):
            self._hello = message
            reason = self._server.check(message)
            if reason is None:
                connection.send(Challenge(self._nonce))
            else:
                self._refuse(reason, message)
        elif self._hello is not None and isinstance(message, Proof):
            self._judge(self._hello, message)
        else:
            connection.abort("what is there is no front")

    def _judge(self, first: Hello, said: Proof) -> None:
        server, connection = self._server, self.connection
        reason = server.check(first)  # it may lead no more since
        if reason is None and not is_proved(server.secret, "front", first, self._nonce, said):
            reason = "secret"
        if reason is not None:
            self._refuse(reason, first)
        elif first.purpose == "operators":
            connection.on_frame = self._early
            server.pipe(connection, partial(self._admit_pipe, first), repr(first.peer.id))
        else:
            self.leave()
            connection.limit(None)
            server.admit(connection, first, said, self._nonce)

    def _refuse(self, reason: Reason, first: Hello) -> None:
        self._is_refused = True
        whom = f"{first.peer.id!r} (term {first.term}, version {first.link}.{first.protocol})"
        self._server.refuse(self.connection, reason, whom)

    def _early(self, frame: bytes) -> None:
        self.connection.abort("it speaks before it was admitted")

    def _admit_pipe(self, first: Hello) -> None:
        self.leave()
        self.connection.limit(None)
        mac = prove(self._server.secret, "leader", first, self._nonce, "operators", 0)
        self.connection.send(Admitted(mac, "operators", 0))
