"""Waiters by priority and, within a priority, by arrival; and who of them all has been there longest.

One `WaitingLine` per priority in use. A look costs O(log n) plus a glance at each of those priorities, of which the
operator's limits allow only so many; where all are equally urgent there is one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from pdproxy.admission.line import InLine, WaitingLine


class Urgent(InLine, Protocol):
    """Something that can stand in a `PriorityLine`, equal to and hashed as nothing but itself."""

    @property
    def priority(self) -> int:
        """Higher goes first. Does not change while it waits."""


W = TypeVar("W", bound=Urgent)


class PriorityLine(Generic[W]):
    """The most urgent first, among equals first come, first seen."""

    def __init__(self) -> None:
        # State: a line per priority in use; those priorities, negated, in order; everybody in order of arrival.
        self._lines: dict[int, WaitingLine[W]] = {}
        self._negated: list[int] = []
        self._arrived: OrderedDict[W, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[W]:
        """In order of arrival."""
        return iter(self._arrived)

    @property
    def head(self) -> W:
        """The earliest of the most urgent. Only while there is anybody."""
        return self._lines[-self._negated[0]].head

    @property
    def earliest(self) -> W:
        """Who has waited longest, however urgent. O(1). Only while there is anybody."""
        return next(iter(self._arrived))

    def first_within(self, pages: int) -> W | None:
        """The earliest of the most urgent that need at most `pages`."""
        for negated in self._negated:
            waiter = self._lines[-negated].first_within(pages)
            if waiter is not None:
                return waiter
        return None

    def append(self, waiter: W) -> None:
        """To the end of its priority's line."""
        line = self._lines.get(waiter.priority)
        if line is None:
            line = self._lines[waiter.priority] = WaitingLine()
            insort(self._negated, -waiter.priority)
        line.append(waiter)
        self._arrived[waiter] = None

    def remove(self, waiter: W) -> None:
        """Out of the line, from wherever it stands."""
        line = self._lines[waiter.priority]
        line.remove(waiter)
        del self._arrived[waiter]
        if not line:
            del self._lines[waiter.priority]
            del self._negated[bisect_left(self._negated, -waiter.priority)]
