"""The module cuts time into even pieces, so that the report can draw and tell what happened in each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

T = TypeVar("T")
NICE_S = (0.25, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)


@dataclass(frozen=True, slots=True)
class Bins:
    """Bins are `num` pieces of time of `width_s` seconds each; the first begins at 0."""

    width_s: float
    num: int

    @classmethod
    def over(cls, span_s: float, most: int) -> Self:
        """Returns at most `most` pieces that cover `span_s` seconds; each has a length in which people think, if there
        is one long enough."""
        width_s = next((nice for nice in NICE_S if span_s <= nice * most), span_s / most)
        return cls(width_s, max(1, math.ceil(span_s / width_s)))

    def begin(self, index: int) -> float:
        return index * self.width_s

    def end(self, index: int) -> float:
        return (index + 1) * self.width_s

    def sorted_in(self, things: Iterable[T], when: Callable[[T], float]) -> Sequence[list[T]]:
        """Returns the things of each piece; what lies outside all pieces is left out."""
        pieces: list[list[T]] = [[] for _ in range(self.num)]
        for thing in things:
            index = math.floor(when(thing) / self.width_s)
            if 0 <= index < self.num:
                pieces[index].append(thing)
        return pieces
