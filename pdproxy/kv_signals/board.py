"""The KV-ready board knows who waits for which attempt's KV, and what has been said about it.

An attempt is expected *before* its prefill leg is sent, so no signal can come too early. A signal for an attempt that
nobody expects is late or a stranger's, and is only counted. An attempt's id is told to the engines that serve it and to
nobody else, so that a stranger cannot speak about it. Ranks are counted as a set, so that one rank speaking twice is
never taken for two. The board does no I/O: a receiver calls `KvBoard.deliver`, which costs the same however many wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from pdproxy.aio.callback_event import CallbackEvent
from pdproxy.errors import DeadlineExceeded, IntegrityError, KvFailed
from pdproxy.ids import shown
from transfer import wire


@dataclass(slots=True, kw_only=True)
class KvFacts:
    """`KvFacts` are what the ranks' `KvReady` said, taken together; all zero where they say nothing but "ready"
    (`ProxyNotif`).
    """

    num_pages: int = 0
    """The number of pages over all ranks."""
    rank_pages: int = 0
    """The number of pages on the fullest rank, which is the number that a lease counts."""
    num_bytes: int = 0
    """The number of bytes over all ranks."""
    transfer_s: float = 0.0
    """The time, in seconds, that the slowest rank took."""


@dataclass(slots=True, kw_only=True)
class BoardStatistics:
    """`BoardStatistics` count what happens. `num_signals` is the sum of the six that follow it; `num_expected` is open
    + released + dropped.
    """

    num_open: int = 0
    """The number of expectations on the board."""
    num_waiting: int = 0
    """The number of open expectations that a request waits for until they are ready."""
    num_expected: int = 0
    num_released: int = 0
    num_dropped: int = 0
    num_lost: int = 0
    """The number of expectations whose decoder has gone while they were open."""
    num_signals: int = 0
    num_taken: int = 0
    num_duplicates: int = 0
    num_unexpected: int = 0
    """The number of signals for an attempt that is unknown, or no longer on the board."""
    num_stale: int = 0
    """The number of signals from another epoch than the expected one: from a process that was restarted."""
    num_foreign_ranks: int = 0
    num_senseless: int = 0
    """The number of `ProxyNotif` signals with an unknown status."""


class Expectation:
    """An `Expectation` is one attempt's place on the board, and the only handle on it. Its holder ends it with `drop`.

    `KvBoard.expect` makes it. It stays on the board when the coroutine that waited has gone, until every rank has
    released its pages or somebody drops it.
    """

    __slots__ = (
        "_board",
        "_callbacks",
        "_epochs",
        "_failed_ranks",
        "_granted_pages",
        "_is_dropped",
        "_num_nameless",
        "_on_granted",
        "_ready_ranks",
        "_released_ranks",
        "_waiter",
        "attempt",
        "failed",
        "released",
    )

    def __init__(self, board: KvBoard, attempt: str, epochs: Mapping[int, str | None]) -> None:
        self.attempt = attempt
        self.released = CallbackEvent()
        """The event is set when every rank has said `KvReleased`: custody has ended, and no late write can touch the
        pages.
        """
        self.failed = CallbackEvent()
        """The event is set as soon as the KV cannot be had any more; `failure` says why.

        It may be set long before anybody waits in `ready`, so that a prefill leg can be raced against it.
        """
        self._board = board
        self._epochs = epochs
        # State: what was said, by rank, and how many ready notifications did not say which rank they are from; the
        # future of the one who waits in `ready`; whom to call on grant and on release; whether it is over.
        self._granted_pages: dict[int, int] = {}
        self._on_granted: Callable[[int], None] | None = None
        self._ready_ranks: dict[int, wire.KvReady | None] = {}
        self._failed_ranks: dict[int, str] = {}
        self._released_ranks: dict[int, str] = {}
        self._num_nameless = 0
        self._waiter: asyncio.Future[None] | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._is_dropped = False

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_ready(self) -> bool:
        """Tells whether every rank holds all of the attempt's KV, and none has let go of it before that."""
        return not self._failed_ranks and len(self._ready_ranks) + self._num_nameless >= len(self._epochs)

    @property
    def failure(self) -> str | None:
        """Returns why the KV will never be ready, or None."""
        if self._failed_ranks:
            rank, reason = next(iter(self._failed_ranks.items()))
            return f"the decoder's rank {rank} will not have it: {reason}"
        return "the attempt was given up" if self._is_dropped and not self.is_ready else None

    async def ready(self, deadline: float) -> KvFacts:
        """Waits until every rank has said ready, and returns what they said. One caller at a time.

        Raises `KvFailed` as soon as any rank cannot have the KV any more, and `DeadlineExceeded` at `deadline`
        (absolute, in seconds on the board's clock). To wait costs one future and one timer.
        """
        if not self._is_settled:
            waiter, timer = self._waits_until(deadline)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self.is_ready:
            return self._facts()
        if (failure := self.failure) is not None:
            raise KvFailed(f"the KV cache of this request did not reach the decoder: {failure}")
        num_ready = len(self._ready_ranks) + self._num_nameless
        raise DeadlineExceeded(
            f"the KV cache of this request did not reach the decoder in time: "
            f"{num_ready} of {len(self._epochs)} ranks have it"
        )

    def _waits_until(self, deadline: float) -> tuple[asyncio.Future[None], asyncio.TimerHandle]:
        """Returns the future that wakes the waiter, and the timer that wakes it at `deadline` at the latest.

        Raises `RuntimeError` where somebody waits already.
        """
        if self._waiter is not None:
            raise RuntimeError(f"somebody waits for attempt {shown(self.attempt)} already")
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        return waiter, loop.call_later(max(0.0, deadline - self._board.now()), self._wake)

    @property
    def _is_settled(self) -> bool:
        return self.is_ready or bool(self._failed_ranks) or self._is_dropped

    @property
    def is_awaited(self) -> bool:
        """Tells whether somebody is in `ready` and has not been woken."""
        return self._waiter is not None and not self._waiter.done()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _facts(self) -> KvFacts:
        facts = KvFacts()
        for told in self._ready_ranks.values():
            if told is not None:
                facts.num_pages += told.num_pages
                facts.rank_pages = max(facts.rank_pages, told.num_pages)
                facts.num_bytes += told.num_bytes
                facts.transfer_s = max(facts.transfer_s, told.transfer_s)
        return facts

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_pages(self) -> bool:
        """Tells whether some rank has said that pages were reserved for the attempt."""
        return bool(self._granted_pages)

    def on_granted(self, callback: Callable[[int], None]) -> None:
        """Has `callback` called once, when every rank has said that it takes fewer pages than the prompt has.

        It gets the number of pages on the fullest rank, and must not raise.
        """
        self._on_granted = callback

    def on_released(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once, when every rank has released; at once if they have. It must not raise.

        This is how a lease finds its way back when the request's coroutine has moved on. Raises `RuntimeError` once the
        expectation was dropped, because the callback would never be called.
        """
        if self.released.is_set():
            callback()
        elif self._is_dropped:
            raise RuntimeError(f"{self!r} hears of no release any more")
        else:
            self._callbacks.append(callback)

    def drop(self) -> None:
        """Takes the expectation off the board: a signal about the attempt is late from now on. Idempotent. Callbacks
        are forgotten.
        """
        if not self._is_dropped:
            self._is_dropped = True
            self._callbacks.clear()
            self._on_granted = None
            self._board._forget(self)
            self._wake()

    def _hear_granted(self, rank: int, num_pages: int) -> bool:
        """Takes note of the pages that `rank` takes. Returns False where the rank has spoken before, because that says
        nothing new.
        """
        if any(rank in heard for heard in (self._granted_pages, self._ready_ranks, self._failed_ranks)):
            return False
        self._granted_pages[rank] = num_pages
        if len(self._granted_pages) == len(self._epochs) and self._on_granted is not None:
            callback, self._on_granted = self._on_granted, None
            callback(max(self._granted_pages.values()))
        return True

    def _hear_ready(self, rank: int | None, signal: wire.KvReady | None) -> bool:
        if rank is None:
            if len(self._ready_ranks) + self._num_nameless >= len(self._epochs):
                return False
            self._num_nameless += 1
        elif rank in self._ready_ranks or rank in self._failed_ranks:
            return False
        else:
            self._ready_ranks[rank] = signal
        if self.is_ready:
            self._wake()
        return True

    def _hear_failed(self, rank: int, reason: str) -> bool:
        """Takes note that `rank` failed. Returns False where that says nothing new: after the attempt was ready, the KV
        had been there.
        """
        if self.is_ready or rank in self._failed_ranks:
            return False
        self._fail(rank, reason)
        return True

    def _hear_gone(self, epoch: str, reason: str) -> bool:
        """Takes note that the process `epoch` has gone, with all that its ranks held. Returns whether any rank was
        lost.

        It makes no difference that a rank was ready.
        """
        gone = [rank for rank, known in self._epochs.items() if known == epoch]
        lost = [rank for rank in gone if rank not in self._failed_ranks and rank not in self._released_ranks]
        for rank in lost:
            self._fail(rank, reason)
        return bool(lost)

    def _fail(self, rank: int, reason: str) -> None:
        self._failed_ranks[rank] = reason
        self.failed.set()
        self._wake()

    def _hear_released(self, rank: int, reason: str) -> bool:
        if rank in self._released_ranks:
            return False
        self._released_ranks[rank] = reason
        self._hear_failed(rank, f"released before it was ready: {reason}")
        if len(self._released_ranks) == len(self._epochs):
            self._end_custody()
        return True

    def _end_custody(self) -> None:
        self._board._forget(self)
        self.released.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _knows_rank(self, rank: int) -> bool:
        return rank in self._epochs

    def _knows_epoch(self, rank: int, epoch: str) -> bool:
        return self._epochs[rank] in (None, epoch)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when what was heard and what was done about it differ."""
        ranks = self._epochs.keys()
        if (
            not (
                self._granted_pages.keys()
                | self._ready_ranks.keys()
                | self._failed_ranks.keys()
                | self._released_ranks.keys()
            )
            <= ranks
        ):
            raise IntegrityError(f"{self!r}: a foreign rank was heard")
        if self.failed.is_set() != bool(self._failed_ranks):
            raise IntegrityError(f"{self!r}: failed, and that was not told, or told without being so")
        if self._is_settled and self.is_awaited:
            raise IntegrityError(f"{self!r}: settled, and its waiter was not woken")
        if self.released.is_set() != (len(self._released_ranks) == len(ranks)):
            raise IntegrityError(f"{self!r}: {len(self._released_ranks)} ranks released")

    def __repr__(self) -> str:
        num_ready, num_released = len(self._ready_ranks) + self._num_nameless, len(self._released_ranks)
        num_ranks = len(self._epochs)
        counts = f"{num_ready}/{num_ranks} ready, {len(self._failed_ranks)} failed, {num_released}/{num_ranks} released"
        return f"<Expectation {shown(self.attempt)}: {counts}{', dropped' if self._is_dropped else ''}>"


class KvBoard:
    """A `KvBoard` holds everything that the proxy expects to hear about KV. `clock` gives seconds; deadlines
    are on it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self.pass_on: Callable[[wire.AnySignal], bool] = lambda signal: False
        """Called with a signal that nobody here expects. Returns True where somebody else may. Must not raise."""
        # State: the open expectations by attempt, and counters.
        self._open: dict[str, Expectation] = {}
        self._count = BoardStatistics()

    def expect(
        self, attempt: str, ranks: Iterable[int], *, epoch: str | Mapping[int, str] | None = None
    ) -> Expectation:
        """Returns an expectation: from now on signals about `attempt` from these ranks are heard. The caller owns it.

        It must be called before the prefill leg is sent. With `epoch` (of the decoder, or of each rank) signals of any
        other epoch are ignored. Raises `ValueError` for an attempt already expected, or without ranks.
        """
        if epoch is None or isinstance(epoch, str):
            epochs = dict.fromkeys(ranks, epoch)
        else:
            epochs = {rank: epoch.get(rank) for rank in ranks}
        if not epochs or attempt in self._open:
            raise ValueError(f"attempt {shown(attempt)}: {'already expected' if epochs else 'no ranks to expect'}")
        self._open[attempt] = expectation = Expectation(self, attempt, epochs)
        self._count.num_expected += 1
        return expectation

    def deliver(self, signal: wire.AnySignal) -> None:
        """Takes a signal. It never raises for what a peer may send, and never waits."""
        attempt = signal.attempt or signal.req_id if isinstance(signal, wire.ProxyNotif) else signal.attempt
        if attempt not in self._open and self.pass_on(signal):
            return
        self._count.num_signals += 1
        if isinstance(signal, wire.ProxyNotif):
            self._deliver_notification(signal)
        else:
            self._deliver_signal(signal)

    def knows(self, signal: wire.AnySignal) -> bool:
        """Tells whether the attempt that the signal is about is expected here."""
        if isinstance(signal, wire.ProxyNotif):
            return (signal.attempt or signal.req_id) in self._open
        return signal.attempt in self._open

    def fail_epoch(self, epoch: str, reason: str) -> int:
        """Fails the attempts of the decoder process `epoch`, which has certainly gone: nobody need wait for KV there
        any longer.

        Returns how many attempts that concerns. Their expectations stay open, failed, until they are dropped.
        """
        num_lost = sum(expectation._hear_gone(epoch, reason) for expectation in list(self._open.values()))
        self._count.num_lost += num_lost
        return num_lost

    def _deliver_signal(self, signal: wire.Signal) -> None:
        expectation = self._find(signal.attempt, signal.rank)
        if expectation is None:
            return
        if not expectation._knows_epoch(signal.rank, signal.epoch):
            self._count.num_stale += 1
        elif isinstance(signal, wire.KvGranted):
            self._tally(expectation._hear_granted(signal.rank, signal.num_pages))
        elif isinstance(signal, wire.KvReady):
            self._tally(expectation._hear_ready(signal.rank, signal))
        elif isinstance(signal, wire.KvFailed):
            reason = signal.reason.replace(signal.attempt, shown(signal.attempt))  # it may end up in a client's error
            self._tally(expectation._hear_failed(signal.rank, reason))
        else:
            self._tally(expectation._hear_released(signal.rank, signal.reason))

    def _deliver_notification(self, signal: wire.ProxyNotif) -> None:
        """Takes LMCache's signal. Without a status it means ready. Its ``req_id`` is the attempt's id, since the proxy
        gave it.
        """
        expectation = self._find(signal.attempt or signal.req_id, signal.rank)
        if expectation is None:
            return
        status = (signal.status or "ready").lower()
        if status == "ready":
            self._tally(expectation._hear_ready(signal.rank, None))
        elif status == "failed":
            rank = next(iter(expectation._epochs)) if signal.rank is None else signal.rank
            self._tally(expectation._hear_failed(rank, "the prefiller could not deliver it"))
        else:
            self._count.num_senseless += 1

    def _find(self, attempt: str, rank: int | None) -> Expectation | None:
        """Returns the expectation that the signal is for; None, and counts the signal, where there is none."""
        expectation = self._open.get(attempt)
        if expectation is None:
            self._count.num_unexpected += 1
        elif rank is not None and not expectation._knows_rank(rank):
            self._count.num_foreign_ranks += 1
            return None
        return expectation

    def _tally(self, is_news: bool) -> None:
        if is_news:
            self._count.num_taken += 1
        else:
            self._count.num_duplicates += 1

    def _forget(self, expectation: Expectation) -> None:
        """Takes an expectation that is over off the board. The expectation calls this itself, before it
        tells anyone.
        """
        if self._open.get(expectation.attempt) is not expectation:
            return
        del self._open[expectation.attempt]
        if expectation._is_dropped:
            self._count.num_dropped += 1
        else:
            self._count.num_released += 1

    def statistics(self) -> BoardStatistics:
        """Returns a copy of the counts at this moment."""
        num_waiting = sum(expectation.is_awaited for expectation in self._open.values())
        return replace(self._count, num_open=len(self._open), num_waiting=num_waiting)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless all counts add up and nobody waits for what was said already."""
        count = self._count
        ended = count.num_released + count.num_dropped
        if count.num_expected != len(self._open) + ended:
            raise IntegrityError(f"{self!r}: {count.num_expected} expected, {ended} ended")
        heard = count.num_taken + count.num_duplicates + count.num_unexpected
        ignored = count.num_stale + count.num_foreign_ranks + count.num_senseless
        if count.num_signals != heard + ignored:
            raise IntegrityError(f"{self!r}: {count.num_signals} signals, {heard} heard, {ignored} ignored")
        for expectation in self._open.values():
            expectation.check_integrity()

    def __repr__(self) -> str:
        count = self._count
        return f"<KvBoard {len(self._open)} of {count.num_expected} open, {count.num_signals} signals>"
