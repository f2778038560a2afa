"""A data plane in the engine's own process: a thread with an event loop. For tests, small uses, and machines with few
cores; a busy engine slows it down (see `transfer.dataplane.plane`)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from transfer.agents.base import Event, TransferAgent
from transfer.dataplane.host import Host
from transfer.dataplane.messages import Close, Command, Filled
from transfer.dataplane.plane import Face
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.roles.handshake import Identity
from transfer.roles.sender import Sender
from transfer.trust import FleetKey

log = logging.getLogger(__name__)


class InProcess:
    """A home for a data plane. `make_agent` is called on the thread, whose agent it becomes.

    Mutable state: `_commands`, not carried out yet, and `_loop`, None before the thread runs and when it has ended,
    both under `_lock`; `_sender`, the thread's own.
    """

    def __init__(
        self,
        make_agent: Callable[[], TransferAgent],
        buffer: PagedBuffer,
        identity: Identity,
        *,
        fleet_key: FleetKey | None = None,
    ) -> None:
        self.layout = identity.layout
        self._make_agent = make_agent
        self._buffer = buffer  # it stays as long as it may be sent from
        self._identity = identity
        self._fleet_key = fleet_key
        self._commands: deque[Command] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sender: Sender | None = None
        self._wake: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return "in this process"

    def start(self, face: Face) -> Future[None]:
        """See `Home`."""
        started: Future[None] = Future()
        started.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, args=(face, started), name="data-plane", daemon=True)
        self._thread.start()
        return started

    def send(self, command: Command) -> None:
        """See `Home`."""
        with self._lock:
            self._commands.append(command)
            # A filled layer is worth a wake-up only if none is on its way; so is everything else.
            if len(self._commands) == 1 and self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake)

    def forget(self) -> None:
        """See `Home`."""
        with self._lock:
            self._commands.clear()

    def event(self) -> LocalEvent:
        """See `Home`."""
        return LocalEvent()

    def mark(self, event: Event) -> dict[str, Any]:
        """See `Home`."""
        return {"event": event}

    def close(self) -> None:
        """See `Home`."""
        self.send(Close())
        if self._thread is not None:
            self._thread.join()

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, face: Face, started: Future[None]) -> None:
        try:
            asyncio.run(self._serve(face, started))
        except Exception as error:
            log.exception("the data plane's thread died")
            if not started.done():
                started.set_exception(TransferError(f"{type(error).__name__}: {error}"))
        finally:
            face.lost("the data plane has ended", for_good=True)

    async def _serve(self, face: Face, started: Future[None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            agent = self._make_agent()
        except TransferError as error:
            started.set_exception(error)
            return
        try:
            await asyncio.wrap_future(agent.register(self._buffer.region))
            self._sender = Sender(agent, self._identity, fleet_key=self._fleet_key)
            host = Host(self._sender, face.reported, _event_of)
            with self._lock:
                self._wake = lambda: self._carry_out(host)
                self._loop = loop
            started.set_result(None)
            self._carry_out(host)
            await host.closed.wait()
            await host.aclose()
        except TransferError as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            with self._lock:
                self._loop = None
            await asyncio.to_thread(agent.close)

    def _carry_out(self, host: Host) -> None:
        with self._lock:
            commands, self._commands = self._commands, deque()
        for command in commands:
            host.handle(command)


class LocalEvent:
    """An event that happens with `set`. Readers see what was written before it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """The work is done. Idempotent."""
        self._event.set()

    def query(self) -> bool:
        """Returns whether it was set."""
        return self._event.is_set()


def _event_of(filled: Filled) -> Event | None:
    event: Event | None = filled.event
    return event
