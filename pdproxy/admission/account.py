"""The module holds places, the page accounts of the engine processes there, and the leases of pages.

An account counts the pages of one memory of one engine process. Each holder of pages has one lease of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import Any, Final

from pdproxy.admission.custody import CUSTODY_STEPS, PROOFS, Custody, Evidence, Way
from pdproxy.admission.drain import DrainRate
from pdproxy.admission.residency import Residency
from pdproxy.admission.revision import ANY, Revision
from pdproxy.errors import IllegalTransition, IntegrityError

_RESERVED: Final = Custody.RESERVED
_FILLING: Final = Custody.FILLING
_READY: Final = Custody.READY
_RETURNED: Final = Custody.RETURNED


class Place:
    """A `Place` is an instance as the kernel knows it. `is_owner` says that the KV goes through its memory, `is_writer`
    that it writes answers.

    Mutable state, which only the kernel changes: the models served (an empty set means any model); whether new attempts
    may go there, and how many; whether the engine answers; the process there now, by its epoch, with its revision, its
    account and the answers in its KV cache.
    """

    def __init__(
        self, name: str, *, is_owner: bool, is_writer: bool = False, models: frozenset[str] = frozenset()
    ) -> None:
        self.name = name
        self.is_owner = is_owner
        self.is_writer = is_writer
        self.serves_alone = False
        """Tells that requests may be answered by this place alone while there is nobody on the other side."""
        self.models = models
        self.revision: Revision = ANY
        """The terms which the process there must have in common with its counterpart."""
        self.shape: Hashable = None
        """A value that is equal for two places where every demand takes the same number of pages at both."""
        self.is_open = False
        self.is_expected = True
        """Tells that it is not known yet whether this place will open in a moment."""
        self.trials: int | None = None
        """The number of attempts that may still go to the place before it closes by itself; None means any number."""
        self.is_up = False
        self.incarnation: str | None = None
        self.account: Account | None = None
        self.residency = Residency()
        self.on_trial: dict[str, None] = {}
        """The attempts that were let in by number and have sent nothing to the place yet."""
        self.is_moved = False
        """True where the process which ran here belongs to another place now, and is heard there."""
        self.watched_by: tuple[dict[Any, None], ...] = ()
        """Dicts of changed places. The place is put into each of them whenever its load changes."""

    @property
    def is_guarded(self) -> bool:
        """Tells whether attempts wait for room in the KV cache in which this place writes answers."""
        return self.is_writer and self.residency.limit < inf

    @property
    def is_scarce(self) -> bool:
        """Tells whether there is anything at this place that an attempt may have to wait for."""
        return self.account is not None or self.is_guarded

    def bound(self, attempt: str, num_tokens: int) -> None:
        """Takes note that `attempt`, of whose prompt so many tokens are read here, is bound to this place. A call of
        `unbound` follows later. Must not call the kernel."""

    def unbound(self, attempt: str) -> None:
        """Takes note that `attempt` has no use for this place any more."""
        self.on_trial.pop(attempt, None)

    def touch(self) -> None:
        """Tells all watchers that the load of this place has changed."""
        for touched in self.watched_by:
            touched[self] = None

    def serves(self, model: str | None) -> bool:
        """Tells whether the place serves `model`. A place that names no models serves any; None stands for any
        model.
        """
        return model is None or not self.models or model in self.models


class Lease:
    """A `Lease` is pages of one attempt in one account. Only the kernel makes it, and only the kernel gives it back.

    Mutable state: the pages held; their custody; for an orphan, its way and the times at which something is due about
    it.
    """

    __slots__ = (
        "account",
        "attempt",
        "custody",
        "freed_by",
        "is_busy",
        "look_at",
        "next_at",
        "over_at",
        "pages",
        "pause_s",
        "since",
        "way",
    )

    def __init__(self, attempt: str, account: Account, pages: int) -> None:
        self.attempt = attempt
        self.account = account
        self.pages = pages
        self.custody = _RESERVED
        self.freed_by: Evidence | None = None
        self.way: Way | None = None
        self.since = self.next_at = self.look_at = self.over_at = inf
        self.pause_s = 0.0
        self.is_busy = False

    @property
    def is_returned(self) -> bool:
        return self.custody is _RETURNED

    @property
    def is_at_risk(self) -> bool:
        """Tells whether pages may be filling, or lie unread. A request that ends now leaves an orphan then."""
        return self.custody is _FILLING or self.custody is _READY

    def step(self, custody: Custody) -> None:
        """Puts the pages into the state `custody`. Pages come back by `Account.take_back` only.

        Raises `IllegalTransition`, and changes nothing, where the table forbids the step.
        """
        if custody not in CUSTODY_STEPS[self.custody] or custody is _RETURNED:
            allowed = ", ".join(sorted(CUSTODY_STEPS[self.custody] - {_RETURNED})) or "nothing"
            raise IllegalTransition(
                f"custody: {self.custody} → {custody} is not a step (possible: {allowed}); {self!r}"
            )
        self.custody = custody

    def check_proof(self, evidence: Evidence) -> None:
        """Raises `IllegalTransition` where `evidence` proves nothing about pages in this state."""
        if evidence not in PROOFS[self.custody]:
            counts = ", ".join(sorted(PROOFS[self.custody])) or "nothing"
            raise IllegalTransition(f"{evidence} frees no pages that are {self.custody} (it takes: {counts}); {self!r}")

    @property
    def awaits(self) -> str:
        """Returns the evidence that an orphan waits for, in words for people; empty where the lease has no way yet."""
        if self.way is None:
            return ""
        if self.way.errand is not None:
            return f"{Evidence.ERRAND_DONE} or {Evidence.LEASE_OVER}"
        return Evidence.ERRAND_DONE if self.way.is_closing else Evidence.LEASE_OVER

    def __repr__(self) -> str:
        return f"<Lease {self.attempt}: {self.pages} pages, {self.custody}>"


class Account:
    """An `Account` counts the `capacity` pages at `place`. Several attempts together may hold at most `concurrent` of
    them, where `concurrent` is given.

    The pages held are the pages granted less the pages returned. They are also the sum over the open leases. With
    `is_limited` False the account grants everything and keeps the ledger all the same. A lease of more than
    `concurrent` pages runs alone.

    Before the time `sure_at` nothing is granted: others may hold pages until then that they claim later. The first look
    that begins after it tells what remains in use by nobody who is known.

    Mutable state: the capacity; the pages held, and by whom; whether that first look has come; foreign pages, which the
    engine says are in use beyond those held, and what the look before said; how many of those that the first look
    found may still be there, and until when; the number that was held when the limit fell below it, until that has
    drained; counts.
    """

    __slots__ = (
        "_concurrent",
        "_found_until",
        "_inherited",
        "_is_limited",
        "_last_excess",
        "_num_found",
        "_sure_at",
        "capacity",
        "drain",
        "foreign",
        "granted_total",
        "held",
        "is_sure",
        "leases",
        "limit",
        "num_abandoned",
        "num_never_fits",
        "num_overtakes",
        "num_passes",
        "num_queue_full",
        "num_queue_timeouts",
        "occupied",
        "place",
    )

    def __init__(
        self,
        place: Place,
        capacity: int,
        now: float,
        *,
        concurrent: int | None = None,
        is_limited: bool = True,
        sure_at: float = -inf,
    ) -> None:
        if capacity < 1 or (concurrent is not None and concurrent < 1):
            raise ValueError(f"no room for a page: capacity {capacity}, concurrent {concurrent}")
        self.place = place
        self.capacity = capacity
        self._concurrent = concurrent
        self._is_limited = is_limited
        self._sure_at = sure_at
        self.is_sure = sure_at == -inf
        self.held = 0
        self.granted_total = 0
        self.leases: dict[Lease, None] = {}
        self.foreign = 0
        self.occupied: int | None = None
        self._last_excess: int | None = None
        self._num_found = 0
        self._found_until = -inf
        self._inherited = 0
        self.drain = DrainRate(now)
        self.num_overtakes = self.num_passes = self.num_never_fits = 0
        self.num_queue_full = self.num_queue_timeouts = self.num_abandoned = 0
        self._set_limit()

    def _set_limit(self) -> None:
        free_of_others = self.capacity - self.foreign
        self.limit = free_of_others if self._concurrent is None else min(self._concurrent, free_of_others)
        self._inherited = self.held if self.held > self.limit else 0

    @property
    def returned_total(self) -> int:
        return self.granted_total - self.held

    @property
    def concurrent_pages(self) -> int:
        """Returns how many pages several attempts may hold together, as far as the options say."""
        return self.capacity if self._concurrent is None else min(self._concurrent, self.capacity)

    @property
    def is_limited(self) -> bool:
        return self._is_limited

    @property
    def orphans(self) -> list[Lease]:
        """Returns the leases whose request is over, while the pages are not known to be free."""
        return [lease for lease in self.leases if lease.custody is Custody.ORPHANED]

    def fits(self, pages: int) -> bool:
        """Tells whether so many pages are free now."""
        if not self._is_limited or pages == 0:
            return True
        if not self.is_sure:
            return False
        return self.held + pages <= self.limit or (self.held == 0 and pages <= self.capacity - self.foreign)

    @property
    def room(self) -> float:
        """Returns the most pages that one lease could have now."""
        if not self._is_limited:
            return inf
        if not self.is_sure:
            return 0
        return self.limit - self.held if self.held else max(self.limit, self.capacity - self.foreign)

    def fits_beside(self, pages: int, others: int) -> bool:
        """Tells whether so many pages are free now, and `others` besides."""
        return not self._is_limited or (self.is_sure and self.held + pages + others <= self.limit)

    def excess(self, pages: int) -> int:
        """Returns how many pages must come back before `pages` are free; 0 where they are free already."""
        if self.fits(pages):
            return 0
        return self.held + pages - self.limit if pages <= self.limit else max(self.held, pages - self.limit)

    # ── the ledger ──────────────────────────────────────────────────────────────────────────────────────────────────

    def issue(self, attempt: str, pages: int, now: float) -> Lease:
        """Grants `pages` and returns their lease. The caller knows that they fit, and answers for them from here."""
        self.drain.measure(self.held, now)
        lease = Lease(attempt, self, pages)
        self.leases[lease] = None
        self.granted_total += pages
        self.held += pages
        if self.place.watched_by:
            self.place.touch()
        return lease

    def claim(self, attempt: str, pages: int, now: float) -> Lease:
        """Returns a lease of pages that the attempt held before this account was kept here. They may be more than there
        is room for, because they were counted as foreign."""
        lease = self.issue(attempt, pages, now)
        if self.held > self.limit:
            self._inherited = self.held
        return lease

    def take_back(self, lease: Lease, evidence: Evidence, now: float) -> bool:
        """Takes the lease's pages back, which are free now. Returns False, and changes nothing, where they came back
        before.

        Raises `IllegalTransition` where `evidence` proves nothing in the lease's state.
        """
        if lease.custody is _RETURNED:
            return False
        lease.check_proof(evidence)
        lease.custody = _RETURNED
        lease.freed_by = evidence
        pages, lease.pages = lease.pages, 0
        del self.leases[lease]
        self._return(pages, now)
        return True

    def shrink(self, lease: Lease, pages: int, now: float) -> bool:
        """Keeps only `pages` of the lease, because the engine said that the attempt takes no more. Returns whether any
        page came back.

        Raises `ValueError` for a negative number.
        """
        if pages < 0:
            raise ValueError(f"a lease cannot have {pages} pages")
        surplus = lease.pages - pages
        if surplus <= 0 or lease.custody is _RETURNED:
            return False
        lease.pages = pages
        self._return(surplus, now)
        return True

    def _return(self, pages: int, now: float) -> None:
        self.drain.measure(self.held, now)
        self.drain.count(pages)
        self.held -= pages
        if self.held <= self.limit:
            self._inherited = 0
        if self.place.watched_by:
            self.place.touch()

    # ── what the engine says ────────────────────────────────────────────────────────────────────────────────────────

    def heard(
        self,
        capacity: int,
        occupied: int | None,
        now: float = 0.0,
        returned_before: int | None = None,
        lease_s: float = 0.0,
        asked_at: float = inf,
    ) -> bool:
        """Takes the engine's own numbers at this look, which began at `asked_at`. Returns whether anything else fits
        than before. Raises `ValueError` for a `capacity` below 1.

        `occupied` is None where the engine does not say it. Then all that may have been claimed and was not counts as
        foreign for `lease_s` seconds, after which the engine has dropped it. `returned_before` is `returned_total` as
        it was when the look began: pages that were held at any moment since then count as held.

        Pages in use beyond those held belong to somebody else: to another proxy, or to this proxy before its restart.
        The first look at a process counts at once. Where pages may be claimed, it is the first look after that time,
        and all that is in use counts: claims could hide pages of somebody who claims nothing. The process which left
        these pages there must have lost them within `lease_s` seconds after that look. During this time all of them are
        taken to be still there that can be among those in use, however many are leased: a leased page may not be filled
        yet, or may have been let go of already, and would hide one of them. So up to half of a busy memory stays unused
        then. Otherwise pages lower the limit as long as two looks in a row find them: one look alone may come between
        the evidence and the moment at which the engine lets go.
        """
        if capacity < 1:
            raise ValueError(f"a memory for KV has at least one page, not {capacity}")
        before = (self.limit, self.capacity - self.foreign, self.is_sure)  # the second is for whoever is alone
        self.capacity, self.occupied = capacity, occupied
        becomes_sure = not self.is_sure and asked_at >= self._sure_at
        self.is_sure = self.is_sure or becomes_sure
        if not self.is_sure:
            self.foreign, self._last_excess = 0, None
        elif occupied is None:
            self._last_excess = None
            if becomes_sure:
                self.foreign, self._found_until = max(0, capacity - self.held), now + lease_s
            elif now >= self._found_until:
                self.foreign = 0
        else:
            returned = self.returned_total if returned_before is None else returned_before
            ours = 0 if becomes_sure else self.granted_total - returned
            excess = min(max(0, occupied - ours), capacity)
            last, self._last_excess = self._last_excess, excess
            if last is None:
                self.foreign = self._num_found = excess
                self._found_until = now + lease_s
            else:
                self._num_found = min(self._num_found, occupied) if now < self._found_until else 0
                self.foreign = max(min(excess, last), self._num_found)
        self._set_limit()
        return (self.limit, self.capacity - self.foreign, self.is_sure) != before

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when the leases do not add up to the pages held, or more pages are held
        than may be.
        """
        open_pages = sum(lease.pages for lease in self.leases)
        if open_pages != self.held or any(lease.is_returned for lease in self.leases):
            raise IntegrityError(
                f"granted {self.granted_total} - returned {self.returned_total} = {self.held} pages, "
                f"but {len(self.leases)} leases hold {open_pages}"
            )
        is_alone = sum(lease.pages > 0 for lease in self.leases) <= 1
        most = max(self.capacity - self.foreign if is_alone else self.limit, self._inherited)
        if self._is_limited and self.held > most:
            raise IntegrityError(f"{self!r}: more than {most} pages held")

    def __repr__(self) -> str:
        foreign = f", {self.foreign} foreign" if self.foreign else ""
        return f"<Account {self.place.name}: {self.held}/{self.limit} pages held by {len(self.leases)}{foreign}>"
