"""Waiters in order of arrival, and quickly the first among them that is small enough.

Bounded overtaking asks, whenever pages come back, for the earliest waiter that fits into what is free. A scan would
make one burst of n waiters cost n² looks; a tree over the places in line, each node knowing the least pages below it,
answers in log n. Leaving from the middle (a cancelled waiter) costs the same and leaves nothing behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

MIN_PLACES = 16
_EMPTY = sys.maxsize
"""What an empty place needs: more than anyone has."""


class InLine(Protocol):
    """Something that can stand in a `WaitingLine`; `place` belongs to the line and is -1 outside of it."""

    place: int

    @property
    def pages(self) -> int: ...


W = TypeVar("W", bound=InLine)


class WaitingLine(Generic[W]):
    """First come, first seen. `append`, `remove` and `first_within` are O(log n), `append` amortised."""

    def __init__(self) -> None:
        self._clear(MIN_PLACES)

    def _clear(self, num_places: int) -> None:
        # State: `_waiters` by place, those before `_first_place` gone; `_least`, a binary heap-shaped tree of minima
        # whose leaves are those places.
        self._num_places = num_places
        self._waiters: list[W | None] = [None] * num_places
        self._least = [_EMPTY] * (2 * num_places)
        self._first_place = 0
        self._next_place = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[W]:
        """In order of arrival."""
        return (waiter for waiter in self._waiters if waiter is not None)

    @property
    def head(self) -> W:
        """The earliest waiter. Only while there is one; O(1) amortised, for each place is passed once."""
        while (waiter := self._waiters[self._first_place]) is None:
            self._first_place += 1
        return waiter

    def first_within(self, pages: int) -> W | None:
        """The earliest waiter that needs at most `pages`."""
        if self._least[1] > pages:
            return None
        node = 1
        while node < self._num_places:
            node *= 2
            if self._least[node] > pages:
                node += 1
        return self._waiters[node - self._num_places]

    def append(self, waiter: W) -> None:
        """To the end of the line. A waiter stands in one line, once, and does not change its pages there."""
        if self._next_place == self._num_places:
            self._close_ranks()
        waiter.place = self._next_place
        self._next_place += 1
        self._count += 1
        self._waiters[waiter.place] = waiter
        self._need_less(waiter.place, waiter.pages)

    def remove(self, waiter: W) -> None:
        """Out of the line, from wherever it stands."""
        if self._count == 1:
            self._clear(MIN_PLACES)
        else:
            self._count -= 1
            self._waiters[waiter.place] = None
            self._empty(waiter.place)
        waiter.place = -1

    def _need_less(self, place: int, pages: int) -> None:
        """An empty place was taken."""
        least = self._least
        node = place + self._num_places
        while node and least[node] > pages:
            least[node] = pages
            node //= 2

    def _empty(self, place: int) -> None:
        least = self._least
        node = place + self._num_places
        least[node] = _EMPTY
        while node > 1:
            node //= 2
            smaller = min(least[2 * node], least[2 * node + 1])
            if least[node] == smaller:
                return
            least[node] = smaller

    def _close_ranks(self) -> None:
        """Every place was given out once: line up anew, with at least as many free places as taken ones."""
        waiters = list(self)
        num_places = MIN_PLACES
        while num_places < 2 * len(waiters):
            num_places *= 2
        self._clear(num_places)
        self._count = self._next_place = len(waiters)
        for place, waiter in enumerate(waiters):
            waiter.place = place
            self._waiters[place] = waiter
            self._least[num_places + place] = waiter.pages
        for node in range(num_places - 1, 0, -1):
            self._least[node] = min(self._least[2 * node], self._least[2 * node + 1])
