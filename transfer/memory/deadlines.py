"""`Deadlines` finds the thing whose time runs out next. Most things are over long before their time. There is no clock
in here: the caller tells the time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
SPARE = 64
"""The number of entries that the heap may have before its first sweep. Later it may have twice those that were live at
the last sweep, and this many more."""


class Deadlines(Generic[T]):
    """`Deadlines` holds things with a time each. A thing for which `is_live` returns False is over for good. It is
    dropped when it comes up.

    Mutable state: `_heap` of (time, number of arrival, thing); `_num_added`; `_sweep_at`, the length at which the heap
    is swept next: twice what was live at the last sweep, and `SPARE` more. So it is never much longer than what is
    live.
    """

    def __init__(self, is_live: Callable[[T], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int, T]] = []
        self._num_added = 0
        self._sweep_at = SPARE

    def __repr__(self) -> str:
        return f"<Deadlines {len(self._heap)} entries, next {self.next()}>"

    def __len__(self) -> int:
        """Returns how many entries are kept, over or not."""
        return len(self._heap)

    def add(self, at: float, thing: T) -> None:
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[2])]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + SPARE
        self._num_added += 1
        heapq.heappush(self._heap, (at, self._num_added, thing))

    def next(self) -> float | None:
        """Returns the earliest time of a live thing, or None where there is none."""
        while self._heap and not self._is_live(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[T]:
        """Returns the live things whose time is `now` or before, earliest first. They stay until they are over."""
        found = []
        while (at := self.next()) is not None and at <= now:
            found.append(heapq.heappop(self._heap))
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [thing for _, _, thing in found]
