"""A process counts its descriptors here, and takes connections only while there are enough of them.

A process that has none left can neither accept nor open anything, and event loops make it worse: asyncio stops
accepting for a second, and libuv resets everybody who waits. So the last ones are never given to clients.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any

RESERVE = 32
"""Descriptors that are kept from clients' requests: for probes, signals, the operators' pages and log files."""
CLIENT_RESERVE = 12
"""Descriptors that are kept from clients' connections, of which those that are turned away take a few for a moment."""
MEASURE_EVERY_S = 0.25
"""Least seconds between two measurements that somebody asks for who is short of descriptors."""
NUM_LEAVING = 6
"""Most connections that are turned away and not closed yet."""
LINGER_S = 0.5
"""Seconds for which a connection that is turned away stays half open. If it were closed while the client still writes,
it would be reset, and the reset may overtake the answer."""
PAUSE_S = 0.1
"""Seconds for which nobody is accepted after a failure. Clients wait in the system's line meanwhile."""
BATCH = 64
"""Most connections that are accepted in one turn of the event loop."""

LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of a socket that are this machine's own, and say nothing of the other end."""


def raise_limit() -> int:
    """Raises the soft limit of this process's descriptors to the hard limit. Returns the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems take less than their own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return limit()


def limit() -> int:
    """Returns the number of descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def num_open() -> int | None:
    """Returns the number of descriptors that this process has open; None where the system does not tell."""
    try:
        if (num := os.stat("/proc/self/fd").st_size) > 0:  # from Linux 6.2 on; costs as little as it looks
            return num
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        return limit() if error.errno in LOCAL_ERRNOS else None


def can_open() -> bool:
    """Tells whether this process can open one more descriptor now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in LOCAL_ERRNOS
    return True


class Descriptors:
    """Descriptors counts what this process has open: its own connections as they come and go, and all the rest by
    measuring now and then.

    Mutable state: the limit; the connections of clients, and those that the process has opened itself, the ones among
    them that are perhaps not open yet; what is open besides, as measured, and when that was; the clients that were
    turned away.
    """

    def __init__(self) -> None:
        self.limit = limit()
        self.num_clients = 0
        self.num_opened = 0
        self.num_pending = 0
        self.num_others = 0
        self.num_turned_away = 0
        self._measured_at = 0.0
        self.measure()

    @property
    def num_free(self) -> int:
        return self.limit - self.num_others - self.num_clients - self.num_opened

    @property
    def is_tight(self) -> bool:
        """True where only the reserve is left."""
        return self.limit - self.num_others - self.num_clients - self.num_opened <= RESERVE

    def measure(self) -> None:
        """Looks at the limit and at what is open. Not for the hot path."""
        self._measured_at = monotonic()
        self.limit = limit()
        num = num_open()
        if num is not None:
            least = num - self.num_clients - self.num_opened
            self.num_others = max(0, least, min(self.num_others, least + self.num_pending))

    def measure_again(self) -> None:
        """Measures, unless that was done just now."""
        if monotonic() - self._measured_at >= MEASURE_EVERY_S:
            self.measure()

    def has_room_for_client(self) -> bool:
        """Tells whether one more connection of a client may be taken."""
        if self.num_free <= CLIENT_RESERVE:
            self.measure_again()
        return self.num_free > CLIENT_RESERVE

    def make_room(self) -> bool:
        """Closes what is open and not in use. Returns whether descriptors will be free one turn of the event loop
        later."""
        return False

    def turned_away(self) -> None:
        """Notes that a client's connection was not taken."""
        self.num_turned_away += 1

    def failed(self, error: OSError) -> None:
        """Notes that the system had nothing left, whatever was counted."""
        self.measure()

    def __repr__(self) -> str:
        return (
            f"<Descriptors {self.num_free} of {self.limit} free: {self.num_clients} clients, "
            f"{self.num_opened} opened, {self.num_others} others>"
        )


class _ClientSocket(socket.socket):
    """_ClientSocket is a client's connection, which is counted until it is closed. Event loops close it by either of
    two calls."""

    descriptors: Descriptors | None = None

    def close(self) -> None:
        self._gone()
        super().close()

    def detach(self) -> int:
        self._gone()
        return super().detach()

    def _gone(self) -> None:
        counted, self.descriptors = self.descriptors, None
        if counted is not None:
            counted.num_clients -= 1


Serve = Callable[[socket.socket], Coroutine[Any, Any, Any]]
"""A function that makes a connection of an accepted socket, which it owns from then on."""


def uvicorn_connections(server: Any, **tls: Any) -> Serve:
    """Returns a function that makes of an accepted socket what `server`, a `uvicorn.Server`, makes of one. `tls` goes
    to the event loop's `connect_accepted_socket`."""

    def protocol() -> asyncio.Protocol:
        config, state = server.config, server.server_state
        made: asyncio.Protocol = config.http_protocol_class(
            config=config, server_state=state, app_state=server.lifespan.state
        )
        return made

    async def connect(accepted: socket.socket) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(protocol, accepted, **tls)

    return connect


class Acceptor:
    """Acceptor takes connections from `listener`, which it owns, while `descriptors` has room for them. It is made
    within the event loop that it belongs to, and can stand for an `asyncio.Server`.

    A client for whom there is no room gets `refusal`, which is a whole HTTP answer, or nothing at all where that is
    empty, and is closed.

    Mutable state: whether it is closed; those who are being turned away, the first of them first; the tasks that begin
    a connection.
    """

    def __init__(
        self, listener: socket.socket, serve: Serve, descriptors: Descriptors, *, refusal: bytes, backlog: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._serve = serve
        self._descriptors = descriptors
        self._refusal = refusal
        self._is_closed = False
        self._leaving: deque[socket.socket] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        listener.setblocking(False)
        listener.listen(backlog)
        self._go_on()

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return () if self._is_closed else (self._listener,)

    def close(self) -> None:
        """Accepts nobody from now on. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        while self._leaving:
            self._close(self._leaving.popleft())

    async def wait_closed(self) -> None:
        """Returns at once: connections that were accepted have other owners."""

    def _go_on(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(BATCH):
            if self._descriptors.num_free <= CLIENT_RESERVE and self._descriptors.make_room():
                return  # there will be room in the next turn, and whoever waits is still there then
            try:
                one, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._descriptors.failed(error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(PAUSE_S, self._go_on)
                return
            self._take(_ClientSocket(one.family, one.type, one.proto, one.detach()))

    def _take(self, one: _ClientSocket) -> None:
        one.setblocking(False)
        if not self._descriptors.has_room_for_client():
            self._turn_away(one)
            return
        one.descriptors = self._descriptors
        self._descriptors.num_clients += 1
        task = self._loop.create_task(self._begin(one))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, one: socket.socket) -> None:
        try:
            await self._serve(one)
        except OSError:  # a client that leaves before it is there, or that does not know how to encrypt
            one.close()
        except BaseException:
            one.close()
            raise

    # ── for whom there is no room ───────────────────────────────────────────────────────────────────────────────────

    def _turn_away(self, one: socket.socket) -> None:
        self._descriptors.turned_away()
        with suppress(OSError):
            if self._refusal:
                one.send(self._refusal)
            one.shutdown(socket.SHUT_WR)
        if len(self._leaving) == NUM_LEAVING:
            self._close(self._leaving.popleft())
        self._leaving.append(one)
        self._loop.call_later(LINGER_S, self._let_go, one)

    def _let_go(self, one: socket.socket) -> None:
        if one in self._leaving:
            self._leaving.remove(one)
            self._close(one)

    def _close(self, one: socket.socket) -> None:
        with suppress(OSError):
            one.recv(1 << 16)  # what lies unread at the close would reset the connection
        one.close()
