"""The module runs the kernel on an event loop: each waiter has a future, and deadlines have timers.

The kernel makes the decisions. This module carries out the kernel's effects right after each of its functions and
before any other task runs. It makes a grant first and wakes its waiter then, so that nobody can slip in between. A
waiter that was cancelled in the meantime hands its grant back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from pdproxy.admission.account import Lease, Place
from pdproxy.admission.custody import Custody, Evidence, Way
from pdproxy.admission.grant import Grant, Granted, OpenPlaces, Settled
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.orphans import Job
from pdproxy.admission.revision import ANY, Revision
from pdproxy.admission.room import UNKNOWN_CACHE, KvCache, Room
from pdproxy.errors import NotReady, ProxyError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStatistics:
    """`AdmissionStatistics` shows one owner's account at one moment. `granted_total - returned_total == held` always
    holds.
    """

    name: str
    capacity: int | None
    """The number of pages of the memory that slots guard; None where nothing is limited."""
    concurrent_pages: int | None
    """The number of pages that several attempts together may hold at once; None where nothing is limited."""
    held: int
    num_leases: int
    granted_total: int
    returned_total: int
    num_waiting: int = 0
    """The owner's share of the requests that wait for any owner of its model; the shares of all owners add up to all
    of them.
    """
    waiting_pages: int = 0
    num_overtakes: int = 0
    """Counts how often pages of this owner were granted to another request than the one whose turn it was, because that
    one did not fit.
    """
    num_passes: int = 0
    """Counts how often a more urgent request, or one behind it, went before the one that had waited longest."""
    num_never_fits: int = 0
    num_queue_full: int = 0
    num_queue_timeouts: int = 0
    num_abandoned: int = 0
    """Counts the requests that left the queue by themselves."""
    drain_pages_per_s: float = 0.0
    foreign: int = 0
    """The number of pages that the engine says are in use and that no lease of this proxy explains."""
    occupied: int | None = None
    """The number of pages that the engine says are in use; None where it does not say."""
    orphaned: int = 0
    """The number of pages whose request is over and that are not known to be free."""
    num_overdue: int = 0
    """Counts the leases of orphaned pages that are older than the time after which the engine drops the pages by
    itself. The engine has not been heard since then.
    """


Told = Callable[[Grant | None, ProxyError | None], object]
"""A function that is told the grant of a demand that has waited, or the error with which it was refused."""


class Timer(Protocol):
    """A `Timer` goes off later, unless it is cancelled before."""

    def cancel(self) -> object: ...


class Waiter:
    """A `Waiter` is one demand in line: its grant or its error, whom that is told, and its timers."""

    __slots__ = ("error", "grant", "timers", "told", "woken")

    def __init__(self, woken: asyncio.Future[None]) -> None:
        self.woken = woken
        self.told: Told | None = None
        self.grant: Grant | None = None
        self.error: ProxyError | None = None
        self.timers: list[Timer] = []

    def result(self) -> Grant:
        """Returns the grant of a waiter that was woken. Raises the error with which it was refused."""
        if self.grant is None:
            assert self.error is not None
            raise self.error
        return self.grant

    def wake(self) -> None:
        for timer in self.timers:
            timer.cancel()
        if not self.woken.done():
            self.woken.set_result(None)
            if self.told is not None:
                self.told(self.grant, self.error)


class Admission:
    """`Admission` binds demands to places and takes leases back, as `kernel` decides.

    `clock` gives seconds, and the event loop's own clock must run at the same pace.

    Mutable state: the kernel's; who waits, by demand; the timer for places that open by themselves; an event for the
    reaper of orphans, which is set when there is one more orphan or one may have become due.
    """

    def __init__(self, kernel: Kernel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.kernel = kernel
        self._clock = clock
        self._waiters: dict[Demand, Waiter] = {}
        self._reopening: asyncio.TimerHandle | None = None
        self.orphans_changed = asyncio.Event()
        self.is_remote = False
        """True where another process admits, and answers for leases if this one ends."""
        self.may_send: Callable[[], bool] | None = None
        """Tells whether this process still answers for its leases; None where it always does."""
        self.term: int | None = None
        """The term of the leader that admits; None where there is one proxy. Engines that know terms begin nothing
        for a leader of a lower term than they have heard of."""
        self.on_settled: Callable[[Lease], object] = lambda lease: None
        """The function that is called with an orphan whose pages have come back. It must not raise."""

    @property
    def told_term(self) -> int | None:
        """The term that engines are told when they are looked at; None as long as others may claim pages.

        What holds pages by an older term has claimed them then, or nobody knows of it. An engine which knows the term
        begins nothing more of that kind. So its pages in use are all there are, and not only those that have been
        asked for by now: a prefill leg may wait for its turn for long.
        """
        return self.term if self._clock() >= self.kernel.claims_until else None

    @property
    def has_leader(self) -> bool:
        """Tells whether somebody admits. In the process that does it itself that is always so."""
        return True

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def bind_now(self, demand: Demand) -> Grant | None:
        """Returns the grant where it can be had at once; else None, and the caller must await `wait` in the same
        instant.

        Raises the same errors as `Kernel.arrive`, and those of `wait`.
        """
        waiter: Waiter | None = None
        try:
            grant = self.kernel.arrive(demand, self._clock())
            if grant is None:
                waiter = self._waiters[demand] = self._waiter(demand)
        finally:
            self._carry_out()
        if waiter is not None and waiter.woken.done():  # its arrival let it go, or made it hopeless
            return waiter.result()
        return grant

    def ask(self, demand: Demand, told: Told) -> Grant | None:
        """Returns the grant where it can be had at once; else None, and `told` is called later, unless the caller
        calls `leave` before. `told` must not raise, and must not call the admission. Raises as `bind_now` does.
        """
        grant = self.bind_now(demand)
        if grant is None:
            self._waiters[demand].told = told
        return grant

    def leave(self, demand: Demand) -> None:
        """Takes a demand that waits since `ask` out of the line. Nobody is told then. Does nothing where it does not
        wait."""
        waiter = self._waiters.get(demand)
        if waiter is not None:
            waiter.told = None
            self._abandon(demand, waiter)

    def resize(self, demand: Demand) -> None:
        """Asks anew how many pages a demand takes that waits. Does nothing where it does not wait."""
        self.kernel.resize(demand, self._clock())
        self._carry_out()

    def _waiter(self, demand: Demand) -> Waiter:
        loop, now = asyncio.get_running_loop(), self._clock()
        waiter = Waiter(loop.create_future())
        if demand.deadline < inf:
            waiter.timers.append(loop.call_later(demand.deadline - now, self._expire, demand))
        if demand.tied_until > -inf:
            waiter.timers.append(loop.call_later(max(0.0, demand.tied_until - now), self._untie, demand))
        return waiter

    async def wait(self, demand: Demand) -> Grant:
        """Waits until `demand` is granted, and returns its grant. The caller owns the grant's leases.

        Raises `QueueTimeout` at the demand's deadline, and `NeverFits` or `NotReady` where nobody can serve it any
        more. After an error, and when the caller is cancelled, nothing is held.
        """
        waiter = self._waiters[demand]
        try:
            await waiter.woken
        except BaseException:
            self._abandon(demand, waiter)
            raise
        return waiter.result()

    def _abandon(self, demand: Demand, waiter: Waiter) -> None:
        """Hands a grant back, or leaves the line, because the coroutine of `demand` is going away."""
        waiter.wake()
        self._waiters.pop(demand, None)
        self.kernel.cancel(demand, self._clock())
        if waiter.grant is not None:
            self.give_back(waiter.grant)
        self._carry_out()

    def give_back(self, grant: Grant) -> None:
        """Frees what a grant holds, for which nothing was sent and nothing will be."""
        for lease in grant.leases:
            self.free(lease, Evidence.NEVER_SENT)
        for place in grant.places:
            place.unbound(grant.demand.attempt)

    def _expire(self, demand: Demand) -> None:
        self.kernel.expire(demand, max(self._clock(), demand.deadline))
        self._carry_out()

    def _untie(self, demand: Demand) -> None:
        self.kernel.untie(demand, self._clock())
        self._carry_out()

    # ── leases ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def free(self, lease: Lease, evidence: Evidence) -> None:
        """Frees the pages of `lease`, and wakes the waiters that may go then. Raises the same errors as
        `Kernel.free`.
        """
        self.kernel.free(lease, evidence, self._clock())
        self._carry_out()

    def sent(self, lease: Lease, guard: Callable[[], Any]) -> None:
        """Takes note that something is about to be sent for the lease. `guard` returns the errand which would free its
        pages if this process ended now; None where there is none. To be called where the admission `is_remote`, or has
        `may_send`. Raises `NotReady` where nothing must be sent.
        """
        if self.may_send is not None and not self.may_send():
            raise NotReady("this replica of the proxy leads no longer; try again", retry_after_s=1.0)

    def claim(self, place: Place, attempt: str, pages: int, custody: Custody) -> Lease:
        """Returns a lease of pages that `attempt` holds already. Raises as `Kernel.claim` does."""
        return self.kernel.claim(place, attempt, pages, custody, self._clock())

    def shrink(self, lease: Lease, pages: int) -> None:
        """Keeps only `pages` of the lease, if it has more, and wakes the waiters that may go then."""
        self.kernel.shrink(lease, pages, self._clock())
        self._carry_out()

    def abandon(self, lease: Lease, way: Way) -> None:
        """Hands the lease over to the reaper, which frees its pages by `way`."""
        self.kernel.abandon(lease, way, self._clock())
        self.orphans_changed.set()

    def take_due(self) -> tuple[list[Job], float]:
        """Returns what is to be done about orphans now, and in how many seconds more is due, as far as is known."""
        now = self._clock()
        jobs = self.kernel.orphans.take_due(now)
        return jobs, max(0.0, self.kernel.orphans.next_due - now)

    def hurry(self, lease: Lease) -> None:
        """Lets the errand of `lease` begin now, because what it waited for has arrived."""
        self.kernel.orphans.hurry(lease, self._clock())
        self.orphans_changed.set()

    def errand_ended(self, lease: Lease, is_done: bool) -> None:
        """Takes note that the errand of `lease` has ended, and frees its pages where that proves them free."""
        self.kernel.errand_ended(lease, is_done, self._clock())
        self._carry_out()
        self.orphans_changed.set()

    def reside(self, place: Place, attempt: str, room: Room) -> None:
        """Counts an attempt at `place`, where its answer is written, which was granted elsewhere."""
        self.kernel.reside(place, attempt, room)

    def vacate(self, place: Place, attempt: str) -> None:
        """Counts an attempt no longer at `place`, and wakes the waiters that may go then. Idempotent."""
        if attempt in place.residency.stays:
            self.kernel.vacate(place, attempt, self._clock())
            self._carry_out()

    # ── places ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_needed(self, place: Place) -> bool:
        """Tells whether an orphan still depends on `place`. Such a place must not be forgotten."""
        return self.kernel.is_needed(place, self._clock())

    def now(self) -> float:
        """Returns the time on the admission's clock, in seconds."""
        return self._clock()

    def add(self, place: Place) -> None:
        """Takes `place` into the fleet, closed until it is opened."""
        self.kernel.add(place)

    def discard(self, place: Place) -> None:
        """Removes `place` for good, and refuses the demands that no place can serve any more."""
        self.kernel.discard(place, self._clock())
        self._carry_out()

    def open(self, place: Place, *, trials: int | None = None) -> None:
        """Lets new attempts go to `place`: `trials` of them, or any number."""
        self.kernel.open(place, self._clock(), trials=trials)
        self._carry_out()

    def close(self, place: Place, *, until: float = inf, trials: int | None = None, is_expected: bool = False) -> None:
        """Keeps new attempts from `place`, for good or until a time on the admission's clock; `Kernel.close` explains
        the rest."""
        self.kernel.close(place, self._clock(), until=until, trials=trials, is_expected=is_expected)
        self._carry_out()

    def move(self, old: Place, new: Place) -> None:
        """Gives the process at `old`, with its account and leases, to the place `new`."""
        self.kernel.move(old, new, self._clock())
        self._carry_out()

    def serve(self, place: Place, models: frozenset[str]) -> None:
        """Takes note that `place` serves these models from now on."""
        self.kernel.serve(place, models, self._clock())
        self._carry_out()

    def heard(
        self,
        place: Place,
        incarnation: str,
        *,
        shape: Hashable,
        capacity: int,
        occupied: int | None,
        asked_at: float,
        returned_before: int | None = None,
        lease_s: float = 0.0,
        cache: KvCache = UNKNOWN_CACHE,
        revision: Revision = ANY,
    ) -> None:
        """Takes note of a process's answer to a look that began at `asked_at`; `Kernel.heard` explains the numbers."""
        self.kernel.heard(
            place,
            incarnation,
            shape=shape,
            capacity=capacity,
            occupied=occupied,
            asked_at=asked_at,
            returned_before=returned_before,
            lease_s=lease_s,
            now=self._clock(),
            cache=cache,
            revision=revision,
        )
        self._carry_out()
        self.orphans_changed.set()

    # ── effects ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self) -> None:
        """Carries out what the kernel has left to be done: wakes waiters, and tells of orphans that are settled."""
        effects = self.kernel.effects
        if effects:
            self.kernel.effects = []  # before anybody is told, who may call the kernel again
            for effect in effects:
                if isinstance(effect, Granted):
                    waiter = self._waiters.pop(effect.grant.demand)
                    waiter.grant = effect.grant
                elif isinstance(effect, Settled):
                    self.on_settled(effect.lease)
                    continue
                else:
                    waiter = self._waiters.pop(effect.demand)
                    waiter.error = effect.error
                waiter.wake()
        if self._waiters:
            self._await_reopening()

    def _await_reopening(self) -> None:
        at = self.kernel.reopens_at
        if at == inf:
            return
        if self._reopening is not None:
            self._reopening.cancel()
        self._reopening = asyncio.get_running_loop().call_later(max(0.0, at - self._clock()), self._reopen, at)

    def _reopen(self, at: float) -> None:
        self._reopening = None
        self.kernel.advance(max(at, self._clock()))
        self._carry_out()

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        return self.kernel.num_waiting

    def open_places(self, model: str | None) -> OpenPlaces:
        """Returns the places that can be asked for `model` now. First opens the places whose time has come."""
        self.kernel.advance(self._clock())
        self._carry_out()
        return self.kernel.open_places(model)

    def statistics(self, place: Place) -> AdmissionStatistics:
        """Returns the statistics of an owner. An owner without an account now has zeros."""
        account = place.account
        if account is None:
            return AdmissionStatistics(
                name=place.name,
                capacity=0,
                concurrent_pages=0,
                held=0,
                num_leases=0,
                granted_total=0,
                returned_total=0,
            )
        num_waiting, waiting_pages = self._share_of_line(place)
        now, orphans = self._clock(), account.orphans
        account.drain.measure(account.held, now)
        return AdmissionStatistics(
            name=place.name,
            capacity=account.capacity if account.is_limited else None,
            concurrent_pages=account.concurrent_pages if account.is_limited else None,
            held=account.held,
            num_leases=len(account.leases),
            granted_total=account.granted_total,
            returned_total=account.returned_total,
            num_waiting=num_waiting,
            waiting_pages=waiting_pages,
            num_overtakes=account.num_overtakes,
            num_passes=account.num_passes,
            num_never_fits=account.num_never_fits,
            num_queue_full=account.num_queue_full,
            num_queue_timeouts=account.num_queue_timeouts,
            num_abandoned=account.num_abandoned,
            drain_pages_per_s=account.drain.per_second(account.held),
            foreign=account.foreign,
            occupied=account.occupied,
            orphaned=sum(lease.pages for lease in orphans),
            num_overdue=sum(lease.over_at < now for lease in orphans),
        )

    def _share_of_line(self, place: Place) -> tuple[int, int]:
        """Returns this place's share of the waiting requests, and of their pages.

        Each line that `place` can serve is split evenly among the places that can serve it, so that the shares add up.
        """
        num, pages = 0, 0
        for model in self.kernel.waiting_models():
            holders = self.kernel.holders(model).places
            index, of = holders.get(place), len(holders)
            if index is not None:
                all_num, all_pages = self.kernel.waiting(model)
                num += all_num // of + (index < all_num % of)
                pages += all_pages // of + (index < all_pages % of)
        return num, pages

    def check_integrity(self) -> None:
        """Raises `IntegrityError` where `Kernel.check_integrity` does."""
        self.kernel.check_integrity(self._clock())

    def __repr__(self) -> str:
        return f"<Admission of {len(self.kernel.places)} places, {self.num_waiting} waiting>"
