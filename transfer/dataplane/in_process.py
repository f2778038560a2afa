"""A data plane in the engine's own process: a thread with an event loop. It is meant for tests, small uses, and
machines with few cores. A busy engine slows it down (see `transfer.dataplane.plane`)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from transfer.agents.base import Event, TransferAgent, close_agent
from transfer.dataplane.host import PushHost
from transfer.dataplane.messages import Close, Command, Filled
from transfer.dataplane.plane import CLOSING, Listener
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.engine_memory import EngineMemory
from transfer.roles.handshake import Identity
from transfer.roles.sender import Sender
from transfer.trust import FleetKey

log = logging.getLogger(__name__)


class InProcess:
    """`InProcess` is a backend for a data plane. `make_agent` is called on the thread, which owns that agent from then
    on. `buffer`, which has the pages, or an engine's own memory, is kept as long as it may be sent from.

    Mutable state, under `_lock`: `_commands`, which are not carried out yet; `_loop`, which is None before the thread
    runs and after it has ended; `_wake`, which carries the commands out on that loop. Besides: `_sender`, which is the
    thread's own; `_thread`; `_is_closed`.
    """

    def __init__(
        self,
        make_agent: Callable[[], TransferAgent],
        buffer: PagedBuffer | EngineMemory,
        identity: Identity,
        *,
        fleet_key: FleetKey | None = None,
    ) -> None:
        self.layout = identity.layout
        self._make_agent = make_agent
        self._buffer = buffer
        self._identity = identity
        self._fleet_key = fleet_key
        self._commands: deque[Command] = deque()
        self._lock = threading.RLock()  # reentrant: `close` calls `send` under it
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sender: Sender | None = None
        self._wake: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return "in this process"

    @property
    def is_well(self) -> bool:
        """Tells whether commands are carried out. See `Backend`."""
        return self._loop is not None

    def start(self, listener: Listener, started: Future[None]) -> None:
        """Starts the thread. See `Backend`."""
        thread = threading.Thread(target=self._run, args=(listener, started), name="data-plane", daemon=True)
        thread.start()
        self._thread = thread

    def prepare(self, command: Command) -> Command:
        """Returns the command as it is. See `Backend`."""
        return command

    def send(self, prepared: Command) -> None:
        """Queues a command, and wakes the thread. See `Backend`."""
        with self._lock:
            if self._is_closed and not isinstance(prepared, Close):
                return
            self._commands.append(prepared)
            if len(self._commands) == 1 and self._loop is not None:  # else the loop has been woken already
                self._loop.call_soon_threadsafe(self._wake)

    def forget(self) -> None:
        """Drops the commands that are queued. See `Backend`."""
        with self._lock:
            self._commands.clear()

    def event(self) -> LocalEvent:
        """Returns a new event. See `Backend`."""
        return LocalEvent()

    def mark(self, event: Event) -> dict[str, Any]:
        """Returns the field of `Filled` that holds the event. See `Backend`."""
        return {"event": event}

    def close(self) -> None:
        """Ends the thread, and waits for it. See `Backend`."""
        with self._lock:
            self._is_closed = True
            self.send(Close())
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, listener: Listener, started: Future[None]) -> None:
        reason = CLOSING
        try:
            asyncio.run(self._serve(listener, started))
        except Exception as error:
            reason = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
            if started.done():
                log.exception("the data plane's thread died")
        finally:
            with self._lock:
                self._is_closed = True
            listener.lost(reason, for_good=True)
            if not started.done():
                started.set_exception(TransferError(reason))

    async def _serve(self, listener: Listener, started: Future[None]) -> None:
        agent = self._make_agent()
        try:
            await asyncio.wrap_future(agent.register(self._buffer.region))
            placement = self._buffer.placement if isinstance(self._buffer, EngineMemory) else None
            self._sender = Sender(agent, self._identity, placement=placement, fleet_key=self._fleet_key)
            host = PushHost(self._sender, listener.reported, _event_of)
            with self._lock:
                self._wake = lambda: self._carry_out(host)
                self._loop = asyncio.get_running_loop()
            started.set_result(None)
            self._carry_out(host)
            await host.closed.wait()
            await host.aclose()
        finally:
            with self._lock:
                self._loop = None
            await asyncio.to_thread(close_agent, agent, self._buffer)

    def _carry_out(self, host: PushHost) -> None:
        with self._lock:
            commands, self._commands = self._commands, deque()
        for command in commands:
            host.handle(command)


class LocalEvent:
    """A `LocalEvent` happens when `set` is called. Threads that see it also see what was written before it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Notes that the work is done. Idempotent."""
        self._event.set()

    def query(self) -> bool:
        """Returns whether the event was set."""
        return self._event.is_set()


def _event_of(filled: Filled) -> Event | None:
    event: Event | None = filled.event
    return event
