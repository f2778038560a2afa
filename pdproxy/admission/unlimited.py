"""Admission switched off: everything is granted at once, and the ledger is kept all the same."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.admission.base import AdmissionStatistics
from pdproxy.admission.lease import Ledger, PageLease


class Unlimited:
    """Implements `base.Admission`. Nothing waits; the decoder's receiver is then the only guard of its buffer."""

    num_waiting = 0
    waiting_pages = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_change: Callable[[], object] | None = None
        self._ledger = Ledger()

    @property
    def held(self) -> int:
        return self._ledger.held

    async def acquire(self, pages: int, *, deadline: float, attempt: str, priority: int = 0) -> PageLease:
        """Granted, without a look at `deadline` or `priority` and without a task switch."""
        return self.try_acquire(pages, attempt=attempt, priority=priority)

    def try_acquire(self, pages: int, *, attempt: str, priority: int = 0) -> PageLease:
        lease = PageLease(attempt, pages, self._take_back)
        self._ledger.enter(lease)
        if self.on_change is not None:
            self.on_change()
        return lease

    def _take_back(self, lease: PageLease, pages: int) -> None:
        self._ledger.take_back(lease, pages)
        if self.on_change is not None:
            self.on_change()

    def resize(self, capacity: int) -> None:
        """Nothing depends on the capacity here."""

    def statistics(self) -> AdmissionStatistics:
        ledger = self._ledger
        return AdmissionStatistics(
            name=self.name,
            capacity=None,
            concurrent_pages=None,
            held=ledger.held,
            num_leases=len(ledger.leases),
            granted_total=ledger.granted_total,
            returned_total=ledger.returned_total,
        )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when the ledger does not balance."""
        self._ledger.check_integrity()

    def __repr__(self) -> str:
        return f"<Unlimited {self.name}: {self.held} pages held by {len(self._ledger.leases)} leases>"
