"""Which pages of a slab are free. Integers only: no memory, no torch, no time.

Pages are handed out as runs of neighbours where there are any, because NIXL merges neighbouring pages into one large
copy (64 KiB pages side by side travel at the speed of 1 MiB ones).
"""

from __future__ import annotations

from collections.abc import Iterable

from transfer.errors import IntegrityError


class PagePool:
    """`num_pages` pages, each free or held by the caller that allocated it.

    Mutable state: `_free`, the set of free indexes. Everything else is held by someone.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages must not be negative, got {num_pages}")
        self.num_pages = num_pages
        self._free = set(range(num_pages))

    def __repr__(self) -> str:
        return f"<PagePool {self.num_held}/{self.num_pages} held>"

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` page indexes, neighbours first. Raises `ValueError`, taking nothing, when `can_allocate` says no."""
        if count < 0 or not self.can_allocate(count):
            raise ValueError(f"cannot allocate {count} pages, {self.num_free} of {self.num_pages} are free")
        pages = _longest_runs(sorted(self._free), count)
        self._free.difference_update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises `IntegrityError`, and changes nothing, if one is already free or unknown."""
        returned = list(pages)
        wrong = [p for p in returned if p in self._free or not 0 <= p < self.num_pages]
        if wrong or len(set(returned)) != len(returned):
            raise IntegrityError(f"pages given back that were not held: {wrong or returned}")
        self._free.update(returned)


def _longest_runs(free: list[int], count: int) -> list[int]:
    """`count` of the sorted `free` indexes: from the smallest run that holds them all, else longest runs first."""
    runs: list[list[int]] = []
    for page in free:
        if runs and page == runs[-1][-1] + 1:
            runs[-1].append(page)
        else:
            runs.append([page])
    fitting = [run for run in runs if len(run) >= count]
    if fitting:
        return min(fitting, key=len)[:count]
    picked: list[int] = []
    for run in sorted(runs, key=len, reverse=True):
        picked += run[: count - len(picked)]
    return picked
