"""The module holds what one process of the proxy counts, and makes the figures of several processes one.

Figures are plain JSON. Numbers add up, lists are joined, and objects are added member by member. What is *counted* only
grows, and is kept when its process has ended; what is *present* goes with the process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

Parts = dict[str, Any]


class Figures(msgspec.Struct):
    """`Figures` are one process's, each part by the name of the page that shows it."""

    counted: Parts = {}
    present: Parts = {}


def added(one: Any, other: Any) -> Any:
    """Returns the sum of two figures of the same form. Of what cannot be added, the first counts."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = dict(one)
        for name, value in other.items():
            both[name] = added(both[name], value) if name in both else value
        return both
    if isinstance(one, list) and isinstance(other, list):
        return one + other
    is_number = isinstance(one, int | float) and isinstance(other, int | float)
    return one + other if is_number and not isinstance(one, bool) else one


class Elsewhere:
    """`Elsewhere` holds the figures of the proxy's other processes. A proxy of one process has none.

    Mutable state: the latest figures of each process, and what those have counted that have ended.
    """

    def __init__(self) -> None:
        self.latest: dict[Any, Figures] = {}
        self._ended: Parts = {}
        self.num_lost = 0
        """Counts the processes that ended and had to be replaced."""
        self.refresh: Callable[[], Awaitable[None]] | None = None
        """Has the latest figures told, as far as that takes little time; None where there are no others."""
        self.workers: Callable[[], list[dict[str, Any]]] = list
        """Returns what the status page shows of the other processes."""
        self.replica: Callable[[], dict[str, Any] | None] = lambda: None
        """Returns what the status page shows of this replica; None where there is one proxy."""

    @property
    def has_any(self) -> bool:
        """Tells whether there are figures of other processes."""
        return bool(self.latest or self._ended)

    async def look(self) -> None:
        """Brings the figures up to date."""
        if self.refresh is not None:
            await self.refresh()

    def end(self, process: Any) -> None:
        """Keeps what a process has counted that has ended."""
        figures = self.latest.pop(process, None)
        if figures is not None:
            self._ended = added(self._ended, figures.counted)

    def counted(self, part: str, own: Any) -> Any:
        """Returns the sum of what this process has counted, its `own`, and what all others have."""
        return _sum(own, (self._ended, *(figures.counted for figures in self.latest.values())), part)

    def present(self, part: str, own: Any) -> Any:
        """Returns the sum of what is present here, this process's `own`, and in all others."""
        return _sum(own, (figures.present for figures in self.latest.values()), part)


def _sum(own: Any, others: Iterable[Parts], part: str) -> Any:
    for other in others:
        if part in other:
            own = added(own, other[part])
    return own
