"""The module keeps the connections to one host and port alive, newest first, and makes new ones.

A call that needs a connection and finds none makes one, even while other calls are making theirs. No call waits for a
connection that is in use.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections.abc import Callable
from typing import Final, cast

from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.engines.http.base import EngineRefused, EngineUnreachable, LocalFault, local_fault
from pdproxy.engines.http.http1.connection import Connection, Keeper
from pdproxy.engines.http.http1.dial import dial, is_done_in_time

KEEPALIVE_S = 4.0
"""The seconds for which an idle connection is kept. uvicorn, and so most engines, close an idle connection after five
seconds.
"""
MAX_KEPT = 1024
RESOLVED_S = 2.0
"""The seconds for which a name's addresses are used without asking again, as long as one of them works."""
LOST_EVERY_S: Final = 1.0
"""The least seconds between two losses that are told: some engines keep no connection for long."""


class Origin(Keeper):
    """An `Origin` lends each connection to one call at a time: `reuse` or `connect` gives one, and it comes back by
    `keep`.

    Mutable state: the connections that are kept, the longest kept first; the timer that closes those that were kept too
    long, while there are any; the name's addresses, and until when they are believed; when a loss was told last;
    whether it is closed.
    """

    def __init__(self, host: str, port: int, descriptors: DescriptorBudget) -> None:
        self._host = host
        self._port = port
        self.descriptors = descriptors
        descriptors.spares[self] = None
        self._kept: list[Connection] = []
        self._timer: asyncio.TimerHandle | None = None
        self._addresses = [host]
        self._addresses_until = math.inf if _is_address(host) else 0.0
        self._lost_at = -math.inf
        self._is_closed = False
        self.on_lost: Callable[[], object] = lambda: None
        """The function that is called when the other end has ended a connection that was kept. It must not raise."""

    def __repr__(self) -> str:
        return f"<Origin {self._host}:{self._port}, {len(self._kept)} kept>"

    def reuse(self) -> Connection | None:
        """Returns the connection that was used last, if one can be used; else None."""
        while self._kept:
            connection = self._kept.pop()
            kept_s = connection.loop.time() - connection.kept_at
            if kept_s < KEEPALIVE_S:
                if connection.can_be_used(kept_s):
                    return connection
                self._tell_of_loss(connection.loop.time())
            connection.abort()
        return None

    async def connect(self, limit_s: float) -> Connection:
        """Returns a new connection, made within `limit_s` seconds. A host's name has as many to be resolved.

        Raises `EngineUnreachable`, `EngineRefused` where every address says that nobody listens, and `LocalFault`.
        """
        descriptors = self.descriptors
        if descriptors.is_tight:
            await descriptors.room()
        descriptors.num_pending += 1
        descriptors.num_opened += 1  # until the connection counts itself, or has failed
        try:
            connection = await self._connect(limit_s)
        except OSError as error:
            raise self._unreachable([error]) from error
        finally:
            descriptors.num_opened -= 1
            descriptors.num_pending -= 1
        if self._is_closed or not connection.is_open:
            connection.abort()
            raise EngineUnreachable("the connection was closed at once")
        return connection

    # ── for connections ─────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, connection: Connection) -> None:
        if self._is_closed or len(self._kept) >= MAX_KEPT or self.descriptors.is_tight:
            connection.abort()
            return
        loop = connection.loop
        connection.kept_at = loop.time()
        self._kept.append(connection)
        if self._timer is None:
            self._timer = loop.call_later(KEEPALIVE_S, self._expire, loop)

    def give_up_one(self) -> bool:
        """Closes the connection that was kept for the longest time. Returns False where none is kept."""
        if not self._kept:
            return False
        self._kept.pop(0).abort()
        return True

    def forget(self, connection: Connection) -> None:
        if connection not in self._kept:
            return
        self._kept.remove(connection)
        self._tell_of_loss(connection.loop.time())

    def close(self) -> None:
        """Closes the connections that are kept, and each one that is handed back from now on. Idempotent."""
        self._is_closed = True
        self.descriptors.spares.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in self._kept:
            connection.abort()
        self._kept.clear()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell_of_loss(self, now: float) -> None:
        if now - self._lost_at >= LOST_EVERY_S:
            self._lost_at = now
            self.on_lost()

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes the connections that were kept for too long. One timer serves all: it comes back when the next one
        will be too old.
        """
        too_old = loop.time() - KEEPALIVE_S
        num_expired = sum(connection.kept_at <= too_old for connection in self._kept)
        for connection in self._kept[:num_expired]:
            connection.abort()
        del self._kept[:num_expired]
        self._timer = loop.call_at(self._kept[0].kept_at + KEEPALIVE_S, self._expire, loop) if self._kept else None

    async def _connect(self, limit_s: float) -> Connection:
        """Tries one address after the other, each for its share of the time. Raises the same errors as `connect`."""
        loop = asyncio.get_running_loop()
        addresses = await self._resolve(loop, limit_s)
        errors: list[OSError] = []
        for address in addresses:
            try:
                sock = await dial(address, self._port, limit_s / len(addresses))
            except OSError as error:
                errors.append(error)
            else:
                return await self._wrap(sock, loop)
        if math.isfinite(self._addresses_until):
            self._addresses_until = 0.0
        message = "; ".join(str(error) or type(error).__name__ for error in errors)
        if all(isinstance(error, ConnectionRefusedError) for error in errors):
            raise EngineRefused(message)
        raise self._unreachable(errors)

    def _unreachable(self, errors: list[OSError]) -> EngineUnreachable:
        message = "; ".join(str(error) or type(error).__name__ for error in errors)
        fault = local_fault(errors)
        if fault is None:
            return EngineUnreachable(message)
        self.descriptors.failed(fault)
        return LocalFault(message)

    async def _wrap(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> Connection:
        """Returns a connection that owns `sock` from now on. That takes the loop a few turns, and nobody else.

        It is not interrupted: uvloop would close the socket's descriptor and leave it with `sock`, which would close it
        again, perhaps when it is another's. A caller that is cancelled leaves a connection that is closed at once.
        """
        connection = Connection(self)
        protocol = cast(asyncio.Protocol, connection)
        wrapping = asyncio.ensure_future(loop.create_connection(lambda: protocol, sock=sock))
        try:
            await asyncio.shield(wrapping)
        except asyncio.CancelledError:
            wrapping.add_done_callback(lambda _: connection.abort())
            raise
        except OSError:
            sock.close()
            raise
        return connection

    async def _resolve(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> list[str]:
        """Returns the addresses of the host, in the order in which they should be tried: the latest known ones where
        the resolver does not answer, which is not the engine's fault. Raises `OSError`."""
        if loop.time() >= self._addresses_until:
            try:
                self._addresses = await self._ask_resolver(loop, limit_s)
            except OSError as error:
                if self._addresses == [self._host] or not _is_silence(error):
                    raise
            self._addresses_until = loop.time() + RESOLVED_S
        return self._addresses

    async def _ask_resolver(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> list[str]:
        asking = asyncio.ensure_future(loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))
        try:
            if not await is_done_in_time(asking, limit_s):
                raise TimeoutError(f"its name was not resolved within {limit_s:g} s")
            found = asking.result()
        finally:
            asking.cancel()
        return list(dict.fromkeys(str(place[0]) for _, _, _, _, place in found))


def _is_silence(error: OSError) -> bool:
    """Tells whether the resolver gave no answer in time. It may have had no turn, because all of the loop's few threads
    wait for other names."""
    return isinstance(error, TimeoutError) or (isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
