"""What the orchestrator may ask of an admission, whichever stands behind it.

A *lease* is slots held by one attempt on one decoder. `Admission.acquire` makes the caller its owner; the owner settles
it with `release`, once or as often as it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Lease(Protocol):
    """Pages held by one attempt. Plain calls, so that a lease can be settled from any `finally` or callback."""

    @property
    def attempt(self) -> str: ...

    @property
    def pages(self) -> int:
        """Pages held now; 0 after `release`."""

    @property
    def is_released(self) -> bool: ...

    def release(self) -> None:
        """Give everything back. The second call, and every later one, does nothing."""

    def shrink(self, pages: int) -> None:
        """Keep only `pages` of what is held and give the rest back; nothing on a released lease.

        Raises `ValueError` when `pages` is negative or more than is held.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStatistics:
    """One moment of one admission. `granted_total - returned_total == held`, always."""

    name: str
    capacity: int | None
    """Pages of the PD buffer; None where nothing is limited."""
    concurrent_pages: int | None
    """Pages that may be held at once by more than one attempt."""
    held: int
    num_leases: int
    granted_total: int
    returned_total: int
    num_waiting: int = 0
    waiting_pages: int = 0
    num_overtakes: int = 0
    """How often a smaller request was let past a head that did not fit."""
    num_passes: int = 0
    """How often a more urgent request, or one behind it, went before the one that had waited longest."""
    num_never_fits: int = 0
    num_queue_full: int = 0
    num_queue_timeouts: int = 0
    num_abandoned: int = 0
    """Waiters that left by themselves, while queued or in the instant after their grant."""
    drain_pages_per_s: float = 0.0


class Admission(Protocol):
    """Grants the pages of one decoder."""

    @property
    def name(self) -> str: ...

    @property
    def held(self) -> int:
        """Pages granted and not yet returned."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def waiting_pages(self) -> int:
        """Pages that are waited for."""

    on_change: Callable[[], object] | None
    """Called whenever pages held or waited for have changed, where somebody wants to know; must not raise."""

    def try_acquire(self, pages: int, *, attempt: str, priority: int = 0) -> Lease | None:
        """The lease where it can be had at once, without breaking the order; None: it has to be waited for in
        `acquire`. The caller owns the lease. Raises `NeverFits`.
        """

    async def acquire(self, pages: int, *, deadline: float, attempt: str, priority: int = 0) -> Lease:
        """Wait for `pages` until `deadline` (absolute, on the admission's clock). The caller owns the lease.

        Of those who wait, a higher `priority` goes first, within bounds.

        Raises `NeverFits`, `QueueFull` or `QueueTimeout`; then, and when cancelled, nothing is held.
        """

    def resize(self, capacity: int) -> None:
        """The decoder's buffer has `capacity` pages from now on."""

    def statistics(self) -> AdmissionStatistics: ...

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless everything counted adds up."""
