"""Numbers as runs of neighbours. In this form thousands of pages are named in a message.

Pages are granted as runs where there are any, so a message has a few pairs where it would have 100,000 numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np

Run: TypeAlias = tuple[int, int]
"""A run of neighbouring numbers: the first one, and how many there are."""


def runs_of(numbers: Sequence[int]) -> list[Run]:
    """Returns the shortest list of runs that gives these numbers in this order."""
    if len(numbers) < 2:
        return [(number, 1) for number in numbers]
    every = np.asarray(numbers, dtype=np.int64)
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(every) != 1) + 1))
    lengths = np.diff(firsts, append=len(every))
    return list(zip(every[firsts].tolist(), lengths.tolist(), strict=True))


def numbers_of(runs: Iterable[Run]) -> list[int]:
    """Returns the numbers of these runs, in order. Check `num_in` first where the runs come from a stranger."""
    return list(chain.from_iterable(range(first, first + count) for first, count in runs))


def num_in(runs: Iterable[Run]) -> int:
    """Returns how many numbers these runs have."""
    return sum(count for _, count in runs)


def are_within(runs: Iterable[Run], first: int, end: int) -> bool:
    """Returns whether no run is empty and all numbers are in `first` to `end` (which is excluded)."""
    return all(count > 0 and first <= start and start + count <= end for start, count in runs)
