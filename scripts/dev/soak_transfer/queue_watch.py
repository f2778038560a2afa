"""The watch looks at every grant of a receiver: the first to come must be served first.

First come first served bounds the waiting, in grants: an attempt that finds n waiting on its arrival sees n others
granted before it, at most (fewer where some of them give up).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from transfer.memory.reservations import Grant, Holding, Reservation, Reservations


@dataclass(frozen=True, slots=True)
class _Ticket:
    num_ahead: int
    """Counts the attempts that waited when it came."""
    num_granted: int
    """Counts the grants there had been when it came."""
    came_at: float


class WatchedReservations(Reservations):
    """`WatchedReservations` are reservations as any, which keep count. `on_grant` is told which attempts have been
    granted.

    Mutable state: `_waiting` (by attempt, in order of arrival), and the public counts.
    """

    def __init__(self, num_pages: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(num_pages)
        self.on_grant: Callable[[str], None] = lambda attempt: None
        self.num_granted = 0
        self.num_overtaken = 0
        """Counts the grants to attempts that were not the first of those that waited, or had waited for more than the
        bound."""
        self.longest_wait = 0
        """The longest wait, in grants to others."""
        self.longest_wait_s = 0.0
        self.longest_queue = 0
        """The bound: the most attempts that any attempt found ahead of itself."""
        self.longest_stall_s = 0.0
        """The most seconds for which no attempt was granted anything while one waited."""
        self._waiting: dict[str, _Ticket] = {}
        self._clock = clock
        self._progress_at = clock()

    def request(
        self, wanted: Reservation, rank: int = 0, identity: bytes = b"", *, windowed: bool = False
    ) -> Grant | None:
        is_new = self.get(wanted.attempt) is None
        grant = super().request(wanted, rank, identity, windowed=windowed)
        if is_new:
            self._forget_those_who_left()
            if not self._waiting:
                self._progress_at = self._clock()
            self._waiting[wanted.attempt] = _Ticket(len(self._waiting), self.num_granted, self._clock())
            self.longest_queue = max(self.longest_queue, len(self._waiting) - 1)
        return grant

    def pump(self) -> list[Grant]:
        grants = super().pump()
        pending = {grant.reservation.attempt for grant in grants}
        for grant in grants:
            self._note(grant.reservation.attempt, pending)
        for grant in grants:
            self.on_grant(grant.reservation.attempt)
        return grants

    def stalled_s(self) -> float:
        """Returns for how many seconds nobody was granted anything although somebody waits; 0 where nobody waits."""
        self._forget_those_who_left()
        return self._clock() - self._progress_at if self._waiting else 0.0

    def _note(self, attempt: str, pending: set[str]) -> None:
        self._forget_those_who_left(pending)
        first = next(iter(self._waiting))
        ticket = self._waiting.pop(attempt)
        pending.discard(attempt)
        wait, now = self.num_granted - ticket.num_granted, self._clock()
        self.num_overtaken += first != attempt or wait > ticket.num_ahead
        self.longest_wait = max(self.longest_wait, wait)
        self.longest_wait_s = max(self.longest_wait_s, now - ticket.came_at)
        self.longest_stall_s = max(self.longest_stall_s, now - self._progress_at)
        self.num_granted += 1
        self._progress_at = now

    def _forget_those_who_left(self, pending: set[str] | frozenset[str] = frozenset()) -> None:
        """Forgets attempts, from the front on, that neither wait any more nor are among those that are just being
        granted."""
        while self._waiting:
            attempt = next(iter(self._waiting))
            known = self.get(attempt)
            if attempt in pending or (known is not None and known.holding is Holding.QUEUED):
                return
            del self._waiting[attempt]
