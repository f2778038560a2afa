"""The lease and the ledger it is written in: every page granted is returned exactly once, and both are counted."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.errors import IntegrityError


class PageLease:
    """Pages of one attempt; made before they are granted, so that granting cannot fail. Implements `base.Lease`."""

    __slots__ = ("_give_back", "attempt", "is_released", "pages")

    def __init__(self, attempt: str, pages: int, give_back: Callable[[PageLease, int], None]) -> None:
        self.attempt = attempt
        self.pages = pages
        self.is_released = False
        self._give_back = give_back

    def release(self) -> None:
        """Give everything back; idempotent."""
        if self.is_released:
            return
        self.is_released = True
        pages, self.pages = self.pages, 0
        self._give_back(self, pages)

    def shrink(self, pages: int) -> None:
        """Keep only `pages`; `ValueError` when negative or more than is held, nothing on a released lease."""
        if self.is_released:
            return
        if not 0 <= pages <= self.pages:
            raise ValueError(f"cannot shrink a lease of {self.pages} pages to {pages}")
        surplus, self.pages = self.pages - pages, pages
        if surplus:
            self._give_back(self, surplus)

    def __repr__(self) -> str:
        state = "released" if self.is_released else f"{self.pages} pages"
        return f"<PageLease {self.attempt}: {state}>"


class Ledger:
    """Granted less returned is held, and held is what the open leases add up to."""

    __slots__ = ("granted_total", "held", "leases")

    def __init__(self) -> None:
        # State: what was ever granted, what of it is held, and the leases that hold it.
        self.granted_total = 0
        self.held = 0
        self.leases: set[PageLease] = set()

    @property
    def returned_total(self) -> int:
        return self.granted_total - self.held

    def enter(self, lease: PageLease) -> None:
        """The lease's pages are granted."""
        self.leases.add(lease)
        self.granted_total += lease.pages
        self.held += lease.pages

    def take_back(self, lease: PageLease, pages: int) -> None:
        """`pages` of the lease came back: all that was left if it is released, else its surplus."""
        if lease.is_released:
            self.leases.remove(lease)
        self.held -= pages

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when the leases do not add up to what is held."""
        open_pages = sum(lease.pages for lease in self.leases)
        if open_pages != self.held or any(lease.is_released for lease in self.leases):
            raise IntegrityError(
                f"granted {self.granted_total} - returned {self.returned_total} = {self.held} pages, "
                f"but {len(self.leases)} leases hold {open_pages}"
            )
