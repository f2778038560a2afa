"""The module keeps orphans: leases whose request is over while their pages are not known to be free. It knows what is
to be done about each orphan, and when.

The caller carries out the jobs of `Orphans.take_due` and reports the end of each errand to the kernel, which frees the
pages. This module frees no pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

from pdproxy.admission.account import Lease, Place
from pdproxy.admission.custody import Way

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
MAX_ERRANDS: Final = 8
"""The most errands that one place is asked to do at once: an outage must not become a storm."""


@dataclass(frozen=True, slots=True)
class Job:
    """A `Job` is something to be done about an orphan: its way's errand, or (where `lease` is None) a look at
    `place`.
    """

    place: Any
    lease: Lease | None


class Orphans:
    """`Orphans` keeps the orphaned leases. Every `now` is in seconds on the kernel's clock.

    Mutable state: the leases; the leases that have an errand, by the place where it is done (None: must be made anew).
    """

    __slots__ = ("_by_target", "_leases")

    def __init__(self) -> None:
        self._leases: dict[Lease, None] = {}
        self._by_target: dict[Place, dict[Lease, None]] | None = None

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases)

    def __contains__(self, lease: Lease) -> bool:
        return lease in self._leases

    def add(self, lease: Lease, way: Way, now: float) -> None:
        """Takes `lease` in. Its pages are to be freed by `way`."""
        if way.target is not None and way.target.is_owner:  # which may have another name by now
            way = replace(way, target=lease.account.place)
        lease.way, lease.since = way, now
        lease.over_at = lease.look_at = now + way.over_after_s
        lease.next_at = now + way.not_before_s if way.errand is not None else inf
        self._leases[lease] = None
        if self._by_target is not None:
            self._note_target(self._by_target, lease)

    def remove(self, lease: Lease) -> bool:
        """Lets `lease` go. Returns whether it was here."""
        if lease not in self._leases:
            return False
        del self._leases[lease]
        if self._by_target is not None and lease.way is not None and lease.way.errand is not None:
            self._by_target[lease.way.target].pop(lease, None)
        return True

    def moved(self, old: Place, new: Place) -> None:
        """Moves the errands that were to be done at `old` to `new`."""
        for lease in self._leases:
            if lease.way is not None and lease.way.target is old:
                lease.way = replace(lease.way, target=new)
        self._by_target = None

    def is_target(self, place: Place) -> bool:
        """Tells whether an errand has to be done at `place`."""
        return any(lease.way is not None and lease.way.target is place for lease in self._leases)

    @property
    def next_due(self) -> float:
        """Returns the time at which `take_due` next has something to hand out; infinite where nothing is known to
        become due.
        """
        due = inf
        for lease in self._leases:
            if not lease.is_busy:
                due = min(due, lease.next_at)
            due = min(due, lease.look_at)
        return due

    def take_due(self, now: float) -> list[Job]:
        """Returns what should be done now. The caller owns an errand that was handed out until the kernel hears of its
        end.
        """
        jobs: dict[Job, None] = {}
        num_errands: dict[Place, int] = {}
        for lease in self._leases:
            if lease.is_busy and lease.way is not None:
                num_errands[lease.way.target] = num_errands.get(lease.way.target, 0) + 1
        for lease in self._leases:
            way = lease.way
            if way is None:
                continue
            if lease.look_at <= now:
                lease.look_at = now + MAX_PAUSE_S
                jobs[Job(lease.account.place, None)] = None
            if lease.next_at > now or lease.is_busy:
                continue
            num_there = num_errands.get(way.target, 0)
            if not way.target.is_up or num_there >= MAX_ERRANDS:
                lease.next_at = inf  # until it is heard, or one of its errands has ended
                continue
            num_errands[way.target] = num_there + 1
            lease.is_busy = True
            jobs[Job(way.target, lease)] = None
        return list(jobs)

    def hurry(self, lease: Lease, now: float) -> None:
        """Lets the errand of `lease` begin at once, because what it waited for has arrived."""
        if not lease.is_busy:
            lease.next_at = min(lease.next_at, now)

    def heard(self, place: Place, now: float) -> None:
        """Takes note that `place` answers, or that one of its errands has ended. Errands that it had no room for, or
        could not do, become due.
        """
        if self._by_target is None:
            self._by_target = {}
            for lease in self._leases:
                self._note_target(self._by_target, lease)
        for lease in self._by_target.get(place, ()):
            if lease.next_at == inf and not lease.is_busy:
                lease.next_at = now

    def errand_ended(self, lease: Lease, is_done: bool, now: float) -> bool:
        """Takes note that the errand of `lease` has ended. Returns whether that proves the pages free.

        `is_done` says that, by the engine's word, the pages are free or will be. That is no proof where another engine
        was asked than the one which has the pages. The engine that was asked passes the errand on, and the engine with
        the pages may be frozen. The latter must be heard after that.
        """
        lease.is_busy = False
        way = lease.way
        if way is None:
            return False
        if not is_done:
            lease.pause_s = min(max(lease.pause_s * 2, FIRST_PAUSE_S), MAX_PAUSE_S)
            lease.next_at = now + lease.pause_s
        self.heard(way.target, now)
        if lease.is_returned or not is_done:
            return False
        if way.target is lease.account.place:
            return True
        lease.way = replace(way, errand=None, target=None, is_closing=True, is_told=True)
        lease.over_at = lease.look_at = min(lease.over_at, now + way.settles_after_s)
        lease.next_at = inf
        self._by_target = None
        return False

    def _note_target(self, by_target: dict[Place, dict[Lease, None]], lease: Lease) -> None:
        if lease.way is not None and lease.way.errand is not None:
            by_target.setdefault(lease.way.target, {})[lease] = None
