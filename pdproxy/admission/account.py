"""Places, the pages of one memory of one engine process there, and who holds them: a lease each."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import Any

from pdproxy.admission.custody import CUSTODY_STEPS, PROOFS, Custody, Evidence, Way
from pdproxy.admission.drain import DrainRate
from pdproxy.errors import IllegalTransition, IntegrityError

_RESERVED, _FILLING, _READY, _RETURNED = Custody.RESERVED, Custody.FILLING, Custody.READY, Custody.RETURNED


class Place:
    """Where an engine runs, as the kernel knows it. `is_owner`: the KV goes through its memory.

    Mutable state, all of it the kernel's: the models served (none: any); whether new attempts may go there, since when
    or until when not, and how many of them; whether it answers; the process there now, by its epoch, with its account.
    """

    def __init__(self, name: str, *, is_owner: bool, models: frozenset[str] = frozenset()) -> None:
        self.name = name
        self.is_owner = is_owner
        self.models = models
        self.shape: Hashable = None
        """Equal at places where every demand takes as many pages."""
        self.is_open = False
        self.trials: int | None = None
        """Attempts that may still go there before it closes by itself; None: any number."""
        self.is_up = False
        self.incarnation: str | None = None
        self.account: Account | None = None
        self.on_trial: dict[str, None] = {}
        """Attempts that were let in by number and have sent nothing there yet."""
        self.is_moved = False
        """The process that ran here belongs to another place now, and is heard there."""
        self.watched_by: tuple[dict[Any, None], ...] = ()
        """The place is put into each of these whenever its load changes."""

    def bound(self) -> None:
        """An attempt was granted this place, and will say `unbound`."""

    def unbound(self, attempt: str) -> None:
        """Tells that `attempt` has no use for this place any more."""
        self.on_trial.pop(attempt, None)

    def touch(self) -> None:
        """Its load has changed."""
        for touched in self.watched_by:
            touched[self] = None

    def serves(self, model: str | None) -> bool:
        """A place that names no models is taken to serve any."""
        return model is None or not self.models or model in self.models


class Lease:
    """Pages of one attempt in one account. Only the kernel makes it, and only the kernel gives it back.

    Mutable state: the pages held; their custody; as an orphan, its way and when something is due about it.
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
        """Pages may be filling, or lie unread: a request that ends now leaves an orphan."""
        return self.custody is _FILLING or self.custody is _READY

    def step(self, custody: Custody) -> None:
        """The pages are in `custody` now; they come back by `Account.take_back` only. Raises `IllegalTransition`, and
        changes nothing, where the table forbids it."""
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
        """The evidence that an orphan waits for, in words, for whoever looks at it."""
        if self.way is None:
            return ""
        if self.way.errand is not None:
            return f"{Evidence.ERRAND_DONE} or {Evidence.LEASE_OVER}"
        return Evidence.ERRAND_DONE if self.way.is_closing else Evidence.LEASE_OVER

    def __repr__(self) -> str:
        return f"<Lease {self.attempt}: {self.pages} pages, {self.custody}>"


class Account:
    """`capacity` pages at `place`. `concurrent` of them, where given, may be held at once by more than one attempt.

    Granted less returned is held, and held is what the open leases add up to. `is_limited` False grants everything and
    keeps the ledger all the same. A lease of more than `concurrent` pages runs alone.

    Mutable state: capacity; pages held, and by whom; foreign pages, which the engine says are in use beyond those, and
    what the look before said; what was held when the capacity fell below it, until that has drained; counts.
    """

    __slots__ = (
        "_concurrent",
        "_found_until",
        "_inherited",
        "_is_limited",
        "_last_excess",
        "capacity",
        "drain",
        "foreign",
        "granted_total",
        "held",
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
        self, place: Place, capacity: int, now: float, *, concurrent: int | None = None, is_limited: bool = True
    ) -> None:
        if capacity < 1 or (concurrent is not None and concurrent < 1):
            raise ValueError(f"no room for a page: capacity {capacity}, concurrent {concurrent}")
        self.place = place
        self.capacity = capacity
        self._concurrent = concurrent
        self._is_limited = is_limited
        self.held = 0
        self.granted_total = 0
        self.leases: dict[Lease, None] = {}
        self.foreign = 0
        self.occupied: int | None = None
        self._last_excess: int | None = None
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
        """Pages that may be held at once by more than one attempt, as far as the options say."""
        return self.capacity if self._concurrent is None else min(self._concurrent, self.capacity)

    @property
    def is_limited(self) -> bool:
        return self._is_limited

    @property
    def orphans(self) -> list[Lease]:
        """Leases whose request is over, while the pages are not known to be free."""
        return [lease for lease in self.leases if lease.custody is Custody.ORPHANED]

    def fits(self, pages: int) -> bool:
        """Whether so many pages are free now."""
        if not self._is_limited or pages == 0 or self.held + pages <= self.limit:
            return True
        return self.held == 0 and pages <= self.capacity - self.foreign

    def excess(self, pages: int) -> int:
        """How many pages have to come back before so many are free; 0 where they are."""
        if self.fits(pages):
            return 0
        return self.held + pages - self.limit if pages <= self.limit else max(self.held, pages - self.limit)

    # ── the ledger ──────────────────────────────────────────────────────────────────────────────────────────────────

    def issue(self, attempt: str, pages: int, now: float) -> Lease:
        """Grant `pages`. The caller knows that they fit, and answers for them from here."""
        self.drain.measure(self.held, now)
        lease = Lease(attempt, self, pages)
        self.leases[lease] = None
        self.granted_total += pages
        self.held += pages
        if self.place.watched_by:
            self.place.touch()
        return lease

    def take_back(self, lease: Lease, evidence: Evidence, now: float) -> bool:
        """The lease's pages are free. False, and nothing changes, where they came back before.

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
        """The engine said that the attempt takes `pages` only. Whether that was fewer than were held.

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
    ) -> bool:
        """The engine's own numbers at this look; `occupied` None where it does not say. Whether the limit changed.
        `returned_before` is `returned_total` as it was when the look began: what was held at any moment since counts.

        Pages in use beyond those held are somebody else's: another proxy's, or those of this one before it was started
        again. The first look at a process counts at once, for nothing of ours is there. For `lease_s` after it, within
        which whoever left them there must have lost them, they come off by proof only: leased pages that are not filled
        yet must not hide them. Later they lower the limit as long as two looks in a row find them, since one look may
        come between the evidence and the moment in which the engine lets go.
        """
        if capacity < 1:
            raise ValueError(f"a memory for KV has at least one page, not {capacity}")
        before = self.limit
        self.capacity, self.occupied = capacity, occupied
        if occupied is None:
            self.foreign, self._last_excess = 0, None
        else:
            returned = self.returned_total if returned_before is None else returned_before
            excess = min(max(0, occupied - (self.granted_total - returned)), capacity)
            last, self._last_excess = self._last_excess, excess
            if last is None:
                self.foreign, self._found_until = excess, now + lease_s
            else:
                unproven = min(self.foreign, occupied - self._num_filled) if now < self._found_until else 0
                self.foreign = max(min(excess, last), unproven)
        self._set_limit()
        return self.limit != before

    @property
    def _num_filled(self) -> int:
        """Pages that certainly hold KV of ours."""
        return sum(lease.pages for lease in self.leases if lease.custody is _READY)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when the leases do not add up to what is held, or more is held than may be."""
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
