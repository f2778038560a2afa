"""The weighted semaphore in front of one decoder's PD buffer, counted in that buffer's pages.

Many requests that each hold a part of the buffer, none enough to start, stop everything for ever; so a request gets all
of its pages or waits. Who waits is served in order: the more urgent first, among equals the earlier. Two bounds keep
everybody moving:

* while the one whose turn it is does not fit, others that fit may pass it, at most `max_overtakes` times;
* the one that has waited longest may be passed, because others are more urgent, at most `max_passes` times; then it is
  its turn, whatever its priority. So among equals nobody is passed more than `max_overtakes` times once it is first,
  and in any mix of priorities nobody is passed more than `max_passes + max_overtakes` times once it has waited longest.
  While n others have waited longer, it is n + 1 times that at most.

No I/O. Every change of state is a plain function, and grants happen *before* the waiter is woken, so nobody can slip in
between; a waiter that was cancelled meanwhile hands its grant on when it finds out. After each such function nobody is
waiting who could go: `check_integrity` says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pdproxy.admission.base import AdmissionStatistics
from pdproxy.admission.drain import DrainRate
from pdproxy.admission.lease import Ledger, PageLease
from pdproxy.admission.priority_line import PriorityLine
from pdproxy.errors import AdmissionError, IntegrityError, NeverFits, QueueFull, QueueTimeout

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0
RETRY_AFTER_UNKNOWN_S = 5.0
"""Said while no page has ever come back."""


class _Waiter:
    """One `acquire` in line: its lease, ready to be granted, and the future that wakes it either way."""

    __slots__ = ("lease", "overtakes", "passes", "place", "priority", "refusal", "timer", "woken")

    def __init__(self, lease: PageLease, priority: int, woken: asyncio.Future[None]) -> None:
        self.lease = lease
        self.priority = priority
        self.woken = woken
        self.timer: asyncio.TimerHandle | None = None
        self.refusal: AdmissionError | None = None
        self.overtakes = 0
        """How often it was passed while it was its turn."""
        self.passes = 0
        """How often it was passed while it had waited longest, and it was not yet its turn."""
        self.place = -1

    @property
    def pages(self) -> int:
        return self.lease.pages

    def wake(self) -> None:
        """Its lease or its refusal is there. One that was cancelled meanwhile is already awake."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.woken.done():
            self.woken.set_result(None)


class PageBudget:
    """Grants the `capacity` pages of the PD buffer `name`. Implements `base.Admission`.

    `concurrent_pages` makes the budget smaller than the buffer: a request above it, but within `capacity`, waits until
    nothing else is held and then runs alone. At most `max_queue` requests wait. With `max_passes` 0 priorities count
    for nothing. `clock` gives seconds; deadlines are on it, and the event loop's clock must run at the same pace.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        *,
        concurrent_pages: int | None = None,
        max_overtakes: int = 16,
        max_passes: int = 32,
        max_queue: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if capacity < 1 or (concurrent_pages is not None and concurrent_pages < 1):
            raise ValueError(f"no room for a page: capacity {capacity}, concurrent_pages {concurrent_pages}")
        self.name = name
        self._capacity = capacity
        self._concurrent_pages = concurrent_pages
        self._max_overtakes = max_overtakes
        self._max_passes = max_passes
        self._max_queue = max_queue
        self.on_change: Callable[[], object] | None = None
        self._clock = clock
        # State: what is held (the ledger) of how much, who waits (the line and its sum of pages, 0 when nobody does).
        # `_inherited` is what a smaller capacity found held beyond it, until that has drained. Everything below it is
        # only measured.
        self._limit = capacity if concurrent_pages is None else min(concurrent_pages, capacity)
        self._ledger = Ledger()
        self._line: PriorityLine[_Waiter] = PriorityLine()
        self._waiting_pages = 0
        self._inherited = 0
        self._drain = DrainRate(clock())
        self._num_overtakes = 0
        self._num_passes = 0
        self._num_never_fits = 0
        self._num_queue_full = 0
        self._num_queue_timeouts = 0
        self._num_abandoned = 0

    @property
    def capacity(self) -> int:
        """Pages of the whole buffer."""
        return self._capacity

    @property
    def concurrent_pages(self) -> int:
        """Pages that may be held at once by more than one attempt: the budget."""
        return self._limit

    @property
    def held(self) -> int:
        """Pages granted and not yet returned."""
        return self._ledger.held

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def waiting_pages(self) -> int:
        """Pages that are waited for."""
        return self._waiting_pages

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def acquire(self, pages: int, *, deadline: float, attempt: str, priority: int = 0) -> PageLease:
        """The lease of `pages` for `attempt`; the caller owns it. Without a task switch when the pages are there.
        A higher `priority` goes first.

        Raises `NeverFits` and `QueueFull` at once, `QueueTimeout` at `deadline`; then, and when cancelled, nothing is
        held. A page count below 1 is a `ValueError`.
        """
        lease = self.try_acquire(pages, attempt=attempt, priority=priority)
        if lease is not None:
            return lease
        waiter = self._line_up(pages, deadline, attempt, priority)
        try:
            await waiter.woken
        except BaseException:
            self._abandon(waiter)
            raise
        if waiter.refusal is not None:
            raise waiter.refusal
        return waiter.lease

    def try_acquire(self, pages: int, *, attempt: str, priority: int = 0) -> PageLease | None:
        """The lease if it can be had at this instant without breaking the order, else None. Raises `NeverFits`."""
        if pages < 1:
            raise ValueError(f"a lease is of at least one page, not {pages}")
        if pages > self._capacity:
            self._num_never_fits += 1
            raise NeverFits(pages, self._capacity)
        if not self._fits(pages) or (self._waiting_pages and not self._may_pass(priority)):
            return None
        lease = PageLease(attempt, pages, self._take_back)
        self._issue(lease)
        if self._waiting_pages:
            self._grant_waiting()  # it may just have become the turn of the one that has waited longest
        return lease

    def _may_pass(self, priority: int) -> bool:
        """May a newcomer that fits go before everybody who waits? If so that is counted."""
        turn = self._turn
        if turn.passes < self._max_passes and turn.priority < priority:
            self._count_passing(None, None)  # the turn is the newcomer's
            return True
        if turn.overtakes >= self._max_overtakes:
            return False
        self._count_passing(turn, None)
        return True

    def _line_up(self, pages: int, deadline: float, attempt: str, priority: int) -> _Waiter:
        if len(self._line) >= self._max_queue:
            self._num_queue_full += 1
            message = f"{len(self._line)} requests already wait for room on the decoder; try again later"
            raise QueueFull(message, retry_after_s=self._retry_after_s(pages))
        patience_s = deadline - self._clock()
        if patience_s <= 0:
            raise self._queue_timeout(pages)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(PageLease(attempt, pages, self._take_back), priority, loop.create_future())
        waiter.timer = loop.call_later(patience_s, self._time_out, waiter)
        if self._waiting_pages and (head := self._line.head).priority < priority:
            # Where pages are being saved up for the head, they are saved up for the one before it from now on.
            waiter.overtakes = head.overtakes
        self._line.append(waiter)
        self._waiting_pages += pages
        if self.on_change is not None:
            self.on_change()
        return waiter

    # ── granting ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fits(self, pages: int) -> bool:
        held = self._ledger.held
        return held + pages <= self._limit or held == 0

    @property
    def _turn(self) -> _Waiter:
        """Whose turn it is while somebody waits, whether it fits or not: the most urgent, or who has been passed often
        enough."""
        longest = self._line.earliest
        return longest if longest.passes >= self._max_passes else self._line.head

    def _next_waiter(self, turn: _Waiter) -> _Waiter | None:
        """Who is granted next: whose `turn` it is if it fits, else the first that does while that one may be passed."""
        if self._fits(turn.pages):
            return turn
        if turn.overtakes >= self._max_overtakes:
            return None
        return self._line.first_within(self._limit - self._ledger.held)

    def _count_passing(self, turn: _Waiter | None, going: _Waiter | None) -> None:
        """`going`, or a newcomer, goes now: it passes whose `turn` it is, and else the one that has waited longest."""
        longest = self._line.earliest
        if turn is not None and turn is not going:
            turn.overtakes += 1
            self._num_overtakes += 1
        if longest is not going and longest is not turn:
            longest.passes += 1
            self._num_passes += 1

    def _grant_waiting(self) -> None:
        """To whoever may go, until nobody may."""
        while self._waiting_pages:
            turn = self._turn
            going = self._next_waiter(turn)
            if going is None:
                return
            self._count_passing(turn, going)
            self._leave(going)
            self._issue(going.lease)
            going.wake()

    def _issue(self, lease: PageLease) -> None:
        """From here the lease is its waiter's, or its caller's, to give back."""
        ledger = self._ledger
        self._drain.measure(ledger.held, self._clock())
        ledger.enter(lease)
        if self.on_change is not None:
            self.on_change()

    def _take_back(self, lease: PageLease, pages: int) -> None:
        ledger, drain = self._ledger, self._drain
        drain.measure(ledger.held, self._clock())
        drain.count(pages)
        ledger.take_back(lease, pages)
        if ledger.held <= self._limit:
            self._inherited = 0
        if self.on_change is not None:
            self.on_change()
        if self._waiting_pages:
            self._grant_waiting()

    # ── leaving ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _leave(self, waiter: _Waiter) -> None:
        self._line.remove(waiter)
        self._waiting_pages -= waiter.pages
        if self.on_change is not None:
            self.on_change()

    def _abandon(self, waiter: _Waiter) -> None:
        """Its coroutine is going away: hand a grant on, or leave and let those behind be looked at again."""
        waiter.wake()
        if waiter.refusal is None:
            self._num_abandoned += 1
        if waiter.lease in self._ledger.leases:
            waiter.lease.release()
        elif waiter.place >= 0:
            self._leave(waiter)
            self._grant_waiting()

    def _refuse(self, waiter: _Waiter, refusal: AdmissionError) -> None:
        self._leave(waiter)
        waiter.refusal = refusal
        waiter.wake()

    def _time_out(self, waiter: _Waiter) -> None:
        self._refuse(waiter, self._queue_timeout(waiter.pages))
        self._grant_waiting()

    def _queue_timeout(self, pages: int) -> QueueTimeout:
        self._num_queue_timeouts += 1
        message = "the decoder had no room for this request in time; try again later"
        return QueueTimeout(message, retry_after_s=self._retry_after_s(pages))

    def _retry_after_s(self, pages: int) -> float:
        """When one that comes back would get `pages`: everything that waits now will then have been ahead of it."""
        if not self._drain.is_known:
            return RETRY_AFTER_UNKNOWN_S
        self._drain.measure(self._ledger.held, self._clock())
        rate = self._drain.per_second(max(1, self._ledger.held))
        wait_s = (self._waiting_pages + pages) / rate if rate > 0.0 else RETRY_AFTER_MAX_S
        return min(max(wait_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)

    # ── the decoder changed ─────────────────────────────────────────────────────────────────────────────────────────

    def resize(self, capacity: int) -> None:
        """The buffer has `capacity` pages from now on.

        Below what is held: nothing is taken away, and nothing granted until it fits again. Waiters that can never fit
        any more get `NeverFits`. Raises `ValueError` below 1.
        """
        if capacity < 1:
            raise ValueError(f"a PD buffer has at least one page, not {capacity}")
        self._capacity = capacity
        self._limit = capacity if self._concurrent_pages is None else min(self._concurrent_pages, capacity)
        self._inherited = self.held if self.held > self._limit else 0
        for waiter in [waiter for waiter in self._line if waiter.pages > capacity]:
            self._num_never_fits += 1
            self._refuse(waiter, NeverFits(waiter.pages, capacity))
        self._grant_waiting()

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def statistics(self) -> AdmissionStatistics:
        ledger = self._ledger
        self._drain.measure(ledger.held, self._clock())
        return AdmissionStatistics(
            name=self.name,
            capacity=self._capacity,
            concurrent_pages=self.concurrent_pages,
            held=ledger.held,
            num_leases=len(ledger.leases),
            granted_total=ledger.granted_total,
            returned_total=ledger.returned_total,
            num_waiting=len(self._line),
            waiting_pages=self._waiting_pages,
            num_overtakes=self._num_overtakes,
            num_passes=self._num_passes,
            num_never_fits=self._num_never_fits,
            num_queue_full=self._num_queue_full,
            num_queue_timeouts=self._num_queue_timeouts,
            num_abandoned=self._num_abandoned,
            drain_pages_per_s=self._drain.per_second(ledger.held),
        )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless the ledger balances, the limits hold and nobody waits who could go."""
        self._ledger.check_integrity()
        waiters = list(self._line)
        if len(waiters) != len(self._line) or sum(w.pages for w in waiters) != self._waiting_pages:
            raise IntegrityError(f"{self!r}: {len(waiters)} in line for {sum(w.pages for w in waiters)} pages")
        alone = sum(lease.pages > 0 for lease in self._ledger.leases) <= 1
        limit = max(self._capacity if alone else self._limit, self._inherited)
        if self.held > limit:
            raise IntegrityError(f"{self!r}: more than {limit} pages held")
        if waiters and (waiter := self._next_waiter(self._turn)) is not None:
            raise IntegrityError(f"{self!r}: {waiter.lease!r} could go and was not woken")

    def __repr__(self) -> str:
        held_by = f"{self.held}/{self.concurrent_pages} pages held by {len(self._ledger.leases)} leases"
        return f"<PageBudget {self.name}: {held_by}, {len(self._line)} waiting for {self._waiting_pages}>"
