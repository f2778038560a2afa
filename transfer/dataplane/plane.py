"""A prefiller's end of the transfer without an event loop. Any thread opens pushes, fills them and finishes them.

    plane = DataPlane(InProcess(...))                    or DataPlane(OwnProcess(...)): a process of its own
    plane.start().result()                               the slab is registered
    push = plane.open(params, num_tokens=...)            returns at once
    push.granted.result()                                pages are reserved at the decoder, or an error says why not
    push.layers_filled(ordinal, page, first, end)        as they are computed; returns at once, whatever the others do
    push.finish().result()                               every byte is at the decoder, and the decoder has been told
    push.drain().result()                                what was filled so far has been read
    push.abort(reason)                                   or: no more; returns at once
    push.ended.result()                                  no write of the push can land any more
    plane.close()

Four parts, two of which may be in another process:

    caller ─ DataPlane, PlanePush ─ Backend (InProcess or OwnProcess) ── commands ─▶ PushHost ─ Sender ─ agent
                      ▲──────── Listener.reported, .lost ──────────── reports ◀──────┘

Commands are carried out in the order in which they were sent. Of one push the reports come in this order: `Granted` or
`Failed`, then `Finished` or `Failed`, then `Ended`, which is always the last one. `Drained` comes between any two.

What must always hold: the futures of every push are done in the end, also when the data plane's process dies, stands
still or talks nonsense; `finished` is done only when the decoder has been told, or never will be; and `ended` is done
only when none of the push's writes can land any more. A violation would be seen as a caller that waits for ever, or as
pages that are written anew while they are still being sent.

Why a process: an engine's worker is busy Python, and every time that another thread of its process has something to do,
that thread waits for the interpreter lock, up to 5 ms a time. In a process of its own the data plane waits for nobody:
to tell it of a filled layer costs the caller one system call, in which the lock is kept.

Callbacks of the futures run on a thread of the data plane, which does nothing else meanwhile: they must not wait.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from operator import index
from typing import Any, Protocol

from transfer import wire
from transfer.agents.base import Event
from transfer.dataplane.messages import (
    Abort,
    Command,
    Drain,
    Drained,
    Ended,
    Failed,
    Filled,
    Finish,
    Finished,
    Granted,
    Open,
    Report,
)
from transfer.errors import AttemptLost, TransferError
from transfer.plan.blocks import PageTable, page_table
from transfer.plan.layout import RankLayout
from transfer.plan.runs import numbers_of

log = logging.getLogger(__name__)

CLOSING = "the prefiller is shutting down"


class Listener(Protocol):
    """A `Listener` hears from a backend. Both methods are called on one thread of the backend's."""

    def reported(self, report: Report) -> None: ...

    def lost(self, reason: str, *, for_good: bool) -> None:
        """Tells that the process or thread that carried out the commands is dead. No write of it is under way any more.
        Where `for_good` is False, another one will carry out the next commands."""


class Backend(Protocol):
    """A `Backend` carries commands out. Its methods may be called from any thread."""

    layout: RankLayout

    @property
    def is_well(self) -> bool:
        """Is False where commands are not carried out and are not known to be carried out soon."""
        ...

    def start(self, listener: Listener, started: Future[None]) -> None:
        """Starts the backend, and returns at once. `started` is done when pushes can be carried out, and raises a
        `TransferError` where they cannot. Called once, and not after `close`."""
        ...

    def prepare(self, command: Command) -> Any:
        """Returns what `send` takes. Raises `TransferError` for a command that cannot be told."""
        ...

    def send(self, prepared: Any) -> None:
        """Sends a command, and returns at once. Commands are carried out in the order in which they were sent, or
        answered by `lost`."""
        ...

    def forget(self) -> None:
        """Drops the commands that nobody has begun to carry out: the pushes that they are for have been lost."""
        ...

    def event(self) -> Event:
        """Returns an event that this backend can ask about. The event's `set` makes it happen."""
        ...

    def mark(self, event: Event) -> dict[str, Any]:
        """Returns the fields of `Filled` that name the event. Raises `TransferError` for an event that cannot be
        asked."""
        ...

    def close(self) -> None:
        """Ends everything, and waits for it, except on the backend's own thread. Idempotent."""
        ...


class PlanePush:
    """A `PlanePush` is one attempt on its way to a decoder. Methods may be called from any thread.

    Mutable state: `_events`, which are kept as long as they may be asked about, `_drains`, which nobody has answered,
    what was granted, and why the push failed. The futures are set once, on the backend's thread.
    """

    def __init__(self, plane: DataPlane, number: int, attempt: str, table: PageTable) -> None:
        self.attempt = attempt
        self.table = table
        """Tells which page of the attempt is which block of which layer group."""
        self.granted: Future[None] = _uncancellable()
        """Is done when pages are reserved. Raises what `Sender.open` raises."""
        self.finished: Future[tuple[int, float]] = _uncancellable()
        """Is done when this push is over. The result of a push that has succeeded is its bytes and the seconds during
        which a write was under way. Raises `AttemptLost` where the push has not succeeded; then the decoder will not be
        told any more."""
        self.failed: Future[str] = _uncancellable()
        """Is done when this push is over without having succeeded; the result is the reason. For a push that succeeds
        it is never done, so it can be waited for beside something else."""
        self.ended: Future[None] = _uncancellable()
        """Is done when no write of this push can land any more."""
        self.num_cached = 0
        """Counts the pages at the front which take none of the decoder's buffer: its own KV cache has them."""
        self._plane = plane
        self._number = number
        self._present: frozenset[int] = frozenset()
        self._events: list[Event] = []
        self._drains: deque[Future[None]] = deque()
        self._error: TransferError | None = None

    def __repr__(self) -> str:
        state = self.failure or ("finished" if self.finished.done() else "open")
        return f"<PlanePush {self.attempt[:8]} {state}>"

    @property
    def failure(self) -> str | None:
        """Returns why the push failed, or None while it has not."""
        return self.failed.result() if self.failed.done() else None

    @property
    def error(self) -> TransferError | None:
        """Returns why the push failed, or None while it has not."""
        return self._error

    def is_present(self, ordinal: int) -> bool:
        """Returns whether the decoder has this page's bytes already, on every rank. Then filling it changes nothing."""
        return ordinal in self._present

    @property
    def num_sent(self) -> int:
        """Counts the pages whose bytes travel to some rank once they are filled."""
        return len(self.table) - len(self._present)

    def page_filled(self, ordinal: int, local_page: int, *, after: Event | None = None) -> None:
        """Says that a page is filled: see `Push.page_filled`. A fault in the page or its layers fails this push, and
        `failure` says so.

        Raises `TransferError`, and changes nothing, before `granted` is done, and for an `after` which the data plane
        cannot ask.
        """
        self.pages_filled([ordinal], [local_page], after=after)

    def layers_filled(
        self, ordinal: int, local_page: int, first_layer: int, end_layer: int, *, after: Event | None = None
    ) -> None:
        """Does the same as `page_filled` for layers `first_layer` to `end_layer` of the page's group, counted from
        0."""
        self.pages_filled([ordinal], [local_page], first_layer, end_layer, after=after)

    def pages_filled(
        self,
        ordinals: Sequence[int],
        local_pages: Sequence[int],
        first_layer: int = 0,
        end_layer: int | None = None,
        *,
        after: Event | None = None,
    ) -> None:
        """Does the same as `page_filled` or `layers_filled` for many pages of one layer group."""
        self._check_granted()
        mark = {} if after is None else self._plane.mark(after)
        if after is not None:
            self._events.append(after)
        end = None if end_layer is None else index(end_layer)
        ours, theirs = list(map(index, local_pages)), list(map(index, ordinals))
        self._plane.send(Filled(self._number, theirs, ours, index(first_layer), end, **mark))

    def finish(self) -> Future[tuple[int, float]]:
        """Asks to tell the decoder when all pages are there. Returns `finished`.

        Raises `TransferError` before `granted` is done.
        """
        self._check_granted()
        self._plane.send(Finish(self._number))
        return self.finished

    def drain(self) -> Future[None]:
        """Returns a future that is done when nothing that was filled so far is read any more. Then its memory may be
        used again although the push goes on."""
        drained: Future[None] = _uncancellable()
        self._drains.append(drained)
        self._plane.send(Drain(self._number))
        if self.ended.done():  # perhaps before that: then nobody answers
            _settle(drained, None)
        return drained

    def abort(self, reason: str) -> None:
        """Asks for an end, which is possible also while pages are still asked for. Has no effect on a push that is
        over.

        Returns at once: until `finished` is done, a write may still be posted, and the decoder may still be told of
        success.
        """
        self._plane.send(Abort(self._number, str(reason)))

    def _check_granted(self) -> None:
        if not self.granted.done():
            raise TransferError(f"{self!r} has no pages yet: wait for `granted`")

    # ── the plane's side ────────────────────────────────────────────────────────────────────────────────────────────

    def reported(self, report: Granted | Failed | Finished | Drained | Ended) -> None:
        match report:
            case Granted():
                self.num_cached = report.num_cached
                self._present = frozenset(numbers_of(report.present))
                _settle(self.granted, None)
            case Failed():
                self.fail(report.error)
            case Finished():
                _settle(self.finished, (report.num_bytes, report.seconds))
            case Drained():
                if self._drains:
                    _settle(self._drains.popleft(), None)
            case Ended():
                self.end()

    def fail(self, error: TransferError) -> None:
        """Notes that the push is over without having succeeded. Idempotent, and without effect on a push that has
        succeeded."""
        if self.finished.done():
            return
        self._error = error
        _settle(self.failed, str(error))
        _settle(self.granted, error)
        lost = error if isinstance(error, AttemptLost) else AttemptLost(f"attempt {self.attempt}: {error}")
        _settle(self.finished, lost)

    def end(self) -> None:
        """Notes that nothing of the push is under way. Idempotent."""
        self._events.clear()
        _settle(self.ended, None)
        while self._drains:
            _settle(self._drains.popleft(), None)


class DataPlane:
    """A `DataPlane` holds a prefiller's pushes, which `backend` carries out. Call `start` first and `close` at the end.
    Methods are for any thread.

    Mutable state: `_pushes`, those that have not ended, by number, and `over`, both under `_lock`; `_is_started`.
    """

    def __init__(self, backend: Backend) -> None:
        self.over: str | None = None
        """The reason why no attempt can be opened any more, or None while it can."""
        self._backend = backend
        self._numbers = itertools.count()
        self._pushes: dict[int, PlanePush] = {}
        self._is_started = False
        # Reentrant: a garbage collector, or a signal handler, may have this thread abort a push in the middle.
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<DataPlane {self._backend!r}, {len(self._pushes)} pushes>"

    @property
    def layout(self) -> RankLayout:
        """The layout of this rank's pages."""
        return self._backend.layout

    @property
    def is_well(self) -> bool:
        """Tells whether pushes that are opened now can be expected to be carried out."""
        return self.over is None and self._backend.is_well

    def start(self) -> Future[None]:
        """Starts the backend, and returns at once. The future raises `TransferError` where the agent or its memory
        cannot be had, where this was called before, and after `close`."""
        started: Future[None] = _uncancellable()
        with self._lock:
            if self._is_started or self.over is not None:
                started.set_exception(TransferError("a data plane is started once, and not behind its close"))
                return started
            self._backend.start(self, started)
            self._is_started = True
        return started

    def open(self, params: wire.PushParams, *, num_tokens: int, keys: Sequence[bytes] = ()) -> PlanePush:
        """Begins a push, and returns at once. See `Sender.open` for what is given and what `granted` raises.

        The attempt's time, `params.timeout_s`, begins now. Raises `TransferError` for what cannot be told to another
        process, and `GeometryError` for a prompt without tokens.
        """
        layout, number = self.layout, next(self._numbers)
        table = page_table(layout.kv.groups, index(num_tokens), layout.chunk_size)
        push = PlanePush(self, number, params.attempt, table)
        deadline = time.monotonic() + params.timeout_s
        prepared = self._backend.prepare(Open(number, params, table.num_tokens, list(keys), deadline))
        with self._lock:  # both steps under the lock: the next process must not open a push that is lost
            over = self.over
            if over is None:
                self._pushes[number] = push
                self._backend.send(prepared)
        if over is not None:
            push.fail(TransferError(over))
            push.end()
        return push

    def event(self) -> Any:
        """Returns an event for `after`, for work that is not on a GPU. Its ``set()`` says that the work is done."""
        return self._backend.event()

    def close(self) -> None:
        """Fails the open pushes, lets writes under way end for a moment, and ends the backend. Waits for that, except
        where a future's callback calls it. Idempotent."""
        with self._lock:
            self.over = self.over or CLOSING
        self._backend.close()
        if not self._is_started:  # a started backend says so itself when nothing is under way any more
            self.lost(CLOSING, for_good=True)

    def mark(self, event: Event) -> dict[str, Any]:
        return self._backend.mark(event)

    def send(self, command: Command) -> None:
        self._backend.send(self._backend.prepare(command))

    # ── for the backend ─────────────────────────────────────────────────────────────────────────────────────────────

    def reported(self, report: Report) -> None:
        """Passes a report on to its push. See `Listener`."""
        assert isinstance(report, Granted | Failed | Finished | Drained | Ended)
        with self._lock:
            push = self._pushes.pop(report.number, None) if isinstance(report, Ended) else None
            push = push or self._pushes.get(report.number)
        if push is not None:
            push.reported(report)

    def lost(self, reason: str, *, for_good: bool) -> None:
        """Ends every push. See `Listener`."""
        with self._lock:
            pushes, self._pushes = list(self._pushes.values()), {}
            self._backend.forget()
            if for_good:
                self.over = self.over or reason
        for push in pushes:
            push.fail(TransferError(reason))
            push.end()


def _uncancellable() -> Future[Any]:
    """Returns a future that cannot be cancelled. A caller that stops waiting for it changes nothing."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(future: Future[Any], outcome: object) -> None:
    """Sets the result, or the error. The first outcome stays."""
    try:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        log.debug("%r came after the outcome was known", outcome)
