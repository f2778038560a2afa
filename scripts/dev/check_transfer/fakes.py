"""The stand-ins between the transfer's roles and the machine while they are searched: time, sockets, signals and
writes.

The roles themselves are the real ones. `installed` puts these things where the roles look for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import zmq

from pdproxy.simulate.loop import VirtualLoop
from transfer import wire
from transfer.agents.base import Event, Region, Spans, Tag, WriteReceipt
from transfer.errors import PeerLost
from transfer.plan.spans import SpanMap
from transfer.roles import rank_push, rank_slab, receiver, sender, session

HEARTBEAT_S = 1.0
PAGE_BYTES = 2
"""The bytes of a page on each rank of the decoder: those of one head."""
LOCAL_PAGES = 8
"""The number of local pages per attempt. Attempt number n is written from the local pages from n times this on, so a
write shows whose it is."""


class SteppedLoop(VirtualLoop):
    """A loop that runs what is ready, and lets time pass, only when it is told to.

    Mutable state: the tasks made so far, so that a world can be taken down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[asyncio.Task[Any]] = []

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        self.tasks.append(task)
        return task

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)

    def settle(self) -> None:
        while self._agenda.num_ready:
            self._agenda.turn()

    def timers(self) -> list[tuple[float, str]]:
        """Returns when timers are due, and what each of them calls."""
        return [
            (due, str(getattr(timer.callback, "__qualname__", "")))
            for due, alike in self._agenda._timers.items()
            for timer in alike
            if not timer.is_cancelled
        ]

    def pass_time(self, until: float) -> None:
        self._agenda.now = until
        self._agenda.call_soon(_nothing)
        self.settle()


def _nothing() -> None:
    """Does nothing, and so gives the loop a turn."""


class Raw:
    """`Raw` takes the options of a socket, and forgets all of them."""

    def set(self, option: int, value: object) -> None: ...

    def connect(self, address: str) -> None: ...

    def bind(self, address: str) -> None: ...


class Context:
    """A `Context` stands for a ZMQ context, and knows whose it is. Mutable state: `owner`, set by the world."""

    owner: Sending | None = None


@dataclass(eq=False)
class Connection:
    """A `Connection` is one session's connection to the receiver, with one queue per direction.

    Mutable state: the queues; `is_over` (the sender's end is closed or dead, and what it sent before may still come);
    `is_cut` (nothing comes through any more).
    """

    name: bytes
    session: session.Session
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    is_over: bool = False
    is_cut: bool = False

    def shut(self) -> None:
        self.is_over = True
        self.down.clear()


@dataclass(eq=False)
class Write:
    """A `Write` is bytes on their way into `pages` of the rank whose agent's epoch is `slab`.

    Where `is_orphaned` is True, nobody at the sender waits for its end any more.
    """

    attempt: str
    slab: str
    pages: tuple[int, ...]
    future: Future[WriteReceipt]
    tag: Tag | None = None
    is_orphaned: bool = False


class Sending:
    """A `Sending` is one sender's process, a rank of a prefiller. Mutable state: its connections, its writes under way,
    whether it is dead."""

    def __init__(self, number: int, rank: int, page_bytes: int, fabric: Fabric) -> None:
        self.rank = rank
        self.page_bytes = page_bytes
        self.epoch = f"s{number + 1}"
        self.fabric = fabric
        self.connections: list[Connection] = []
        self.writes: list[Write] = []
        self.is_dead = self.is_told = False
        self.role: sender.Sender


class Fabric:
    """A `Fabric` is everything between the roles of one world. `current` is the one that is searched now: one at a
    time.

    Mutable state: all of it. `problems` are exceptions that nobody handles.
    """

    current: ClassVar[Fabric]

    def __init__(self) -> None:
        self.loop = SteppedLoop()  # type: ignore[abstract]
        self.receiver: receiver.Receiver
        self.signals: list[wire.Signal] = []
        self.problems: list[str] = []
        self.by_name: dict[bytes, Connection] = {}
        self.senders: list[Sending] = []
        self.hear: Callable[[list[bytes]], None]

    @property
    def writes(self) -> list[Write]:
        return [write for one in self.senders for write in one.writes]

    def has_undelivered_bytes(self, slab: str | None = None) -> bool:
        """Returns whether something is still on its way to that rank; with None, to any rank."""
        return any(write.is_orphaned and slab in (None, write.slab) for write in self.writes)


class Socket:
    """A `Socket` stands for `ControlSocket`. A sender's has a `Connection`, the receiver's has all of them."""

    def __init__(self, context: Context, kind: int, on_message: Callable[[list[bytes]], None]) -> None:
        self.raw = Raw()
        self.is_closed = False
        self._fabric = Fabric.current
        self._connection: Connection | None = None
        self._owner = context.owner
        if self._owner is None:
            Fabric.current.hear = on_message
        else:
            name = f"{self._owner.epoch}/{len(self._owner.connections) + 1}".encode()
            self._connection = Connection(name, on_message.__self__)  # type: ignore[attr-defined]
            self._owner.connections.append(self._connection)
            Fabric.current.by_name[name] = self._connection

    def listen(self) -> None: ...

    def send(self, frames: list[bytes]) -> bool:
        if self._connection is None:
            there = self._fabric.by_name[frames[0]]
            if there.is_over or there.is_cut:
                return False
            there.down.append(frames[1])
        elif not (self._connection.is_over or self._connection.is_cut):
            self._connection.up.append(frames[0])
        return True

    def close(self, linger_ms: int) -> None:
        self.is_closed = True
        if self._connection is not None:
            self._connection.shut()


class Agent:
    """An `Agent` is a `TransferAgent` whose writes wait until the search lets them land, or breaks them."""

    def __init__(self, epoch: str, owner: Sending | None = None) -> None:
        self.epoch = epoch
        self._owner = owner

    def register(self, region: Region) -> Future[None]:
        return _done(None)

    def metadata(self) -> Future[bytes]:
        return _done(b"")

    def connect(self, peer: str, metadata: bytes, region: Region) -> Future[None]:
        return _done(None)

    def disconnect(self, peer: str) -> Future[None]:
        return _done(None)

    def prepare(self, tag: bytes) -> None: ...

    def write(
        self,
        peer: str,
        spans: Spans,
        *,
        not_after: Callable[[], float],
        after: Event | None = None,
        tag: Tag | None = None,
    ) -> Future[WriteReceipt]:
        future: Future[WriteReceipt] = Future()
        owner = self._owner
        assert owner is not None
        if owner.fabric.loop.time() > not_after():
            future.set_exception(PeerLost("too long since the receiver was heard"))
        elif not owner.is_dead:
            attempt = "abcdefgh"[int(spans[0, 0]) // owner.page_bytes // LOCAL_PAGES]
            runs = [(start // PAGE_BYTES, -(-(start + size) // PAGE_BYTES)) for _, start, size in spans.tolist()]
            pages = tuple(sorted({page for run in runs for page in range(*run)}))
            owner.writes.append(Write(attempt, peer, pages, future, tag))
        return future

    def close(self) -> bool:
        return True


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Signals:
    """`Signals` stands for `Notifier`, and keeps what the receiver tells."""

    def tell(self, address: str | None, signal: wire.Signal) -> None:
        Fabric.current.signals.append(signal)


class Log:
    """A `Log` stands for a module's logger. An exception that was caught only to be logged is a finding."""

    def debug(self, *_: object) -> None: ...

    info = warning = debug

    def exception(self, text: str, *_: object) -> None:
        Fabric.current.problems.append(text)

    error = exception


class Zmq:
    """`Zmq` has the constants of `zmq`, and contexts without threads."""

    Context = Context

    def __getattr__(self, name: str) -> Any:
        return getattr(zmq, name)


@contextmanager
def installed() -> Iterator[None]:
    """Replaces what the roles use of the machine, for as long as this context is entered."""
    clock = SimpleNamespace(monotonic=lambda: Fabric.current.loop.time())
    places: dict[Any, dict[str, Any]] = {
        receiver: {
            "ControlSocket": Socket,
            "Notifier": Signals,
            "zmq": Zmq(),
            "log": Log(),
            "_notify_hosts": lru_cache(receiver._notify_hosts),
            "notice_dead_hosts": lambda socket, timeout_s: None,
        },
        rank_slab: {
            "log": Log(),
            # Otherwise time would pass in steps of a hundredth of a second while anything is undelivered.
            "UNDELIVERED_LOOK_S": HEARTBEAT_S,
        },
        rank_slab.RankSlab: {
            "is_delivered": property(lambda self: not Fabric.current.has_undelivered_bytes(self.agent.epoch)),
        },
        session: {
            "ControlSocket": Socket,
            "zmq": Zmq(),
            "log": Log(),
            "time": clock,
            "own_process": lambda: None,
            "SpanMap": lru_cache(SpanMap),
        },
        sender: {"Notifier": Signals, "zmq": Zmq()},
        rank_push: {"log": Log()},
    }
    with ExitStack() as stack:
        for module, names in places.items():
            for name, fake in names.items():
                stack.enter_context(patch.object(module, name, fake))
        yield
