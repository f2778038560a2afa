"""Free pages as runs of neighbours. With them a request finds the run it wants without looking at every free page.

The distinct lengths of runs add up to no more than the pages there are, so n pages have at most √(2n) of them (447 for
100,000): a sorted list of lengths is short whatever the fragmentation, and everything else is a dictionary.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from transfer.errors import IntegrityError


class FreeRuns:
    """`FreeRuns` is a set of integers that knows its runs.

    Mutable state: `_length_from` (first page → length) and `_length_to` (last page → length), one entry per run each;
    `_firsts` (length → first pages, the latest added last); `_lengths`, its keys in order; `_num_pages`.
    """

    def __init__(self, num_pages: int) -> None:
        self._length_from: dict[int, int] = {}
        self._length_to: dict[int, int] = {}
        self._firsts: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []
        self._num_pages = 0
        self._add_run(0, num_pages)

    def __len__(self) -> int:
        return self._num_pages

    def __iter__(self) -> Iterator[int]:
        for first, length in self._length_from.items():
            yield from range(first, first + length)

    def __repr__(self) -> str:
        longest = self._lengths[-1] if self._lengths else 0
        return f"<FreeRuns {self._num_pages} pages in {len(self._length_from)} runs, the longest has {longest}>"

    def add(self, pages: Iterable[int]) -> None:
        """Adds pages that are free now. They must not have been free before."""
        ordered = sorted(pages)
        if ordered and ordered[-1] - ordered[0] == len(ordered) - 1:
            self._add_run(ordered[0], len(ordered))
            return
        first = length = 0
        for page in ordered:
            if length and page == first + length:
                length += 1
                continue
            self._add_run(first, length)
            first, length = page, 1
        self._add_run(first, length)

    def take(self, count: int) -> list[int]:
        """Takes `count` pages, at most as many as there are: the smallest run that holds them all, else the longest
        runs. Returns them.

        Each run ascends. When the longest runs are used up, the rest comes from the smallest run that holds it.
        """
        pages: list[int] = []
        while (missing := count - len(pages)) > 0:
            at = min(bisect_left(self._lengths, missing), len(self._lengths) - 1)
            pages += self._take_from(self._lengths[at], missing)
        return pages

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless the tables agree and no two runs touch."""
        pages = list(self)
        runs = sorted((first, first + length - 1) for first, length in self._length_from.items())
        by_last = sorted((last - length + 1, last) for last, length in self._length_to.items())
        by_length = sorted((first, first + n - 1) for n, firsts in self._firsts.items() for first in firsts)
        touching = {last + 1 for _, last in runs} & {first for first, _ in runs}
        if not runs == by_last == by_length or sorted(self._firsts) != self._lengths or touching:
            raise IntegrityError(f"the tables of free runs differ: {self!r}")
        if not len(pages) == len(set(pages)) == self._num_pages:
            raise IntegrityError(f"{len(pages)} pages in runs, {self._num_pages} counted")

    def _add_run(self, first: int, length: int) -> None:
        """Adds a run and joins it to its neighbours on both sides."""
        if not length:
            return
        self._num_pages += length
        if before := self._length_to.get(first - 1):
            self._remove(first - before, before)
            first, length = first - before, length + before
        if behind := self._length_from.get(first + length):
            self._remove(first + length, behind)
            length += behind
        self._insert(first, length)

    def _take_from(self, length: int, count: int) -> range:
        """Takes the first `count` pages (all, if it has fewer) of the run of this length that was added last. Returns
        them."""
        first = next(reversed(self._firsts[length]))
        self._remove(first, length)
        if length > count:
            self._insert(first + count, length - count)
        taken = range(first, first + min(count, length))
        self._num_pages -= len(taken)
        return taken

    def _insert(self, first: int, length: int) -> None:
        self._length_from[first] = length
        self._length_to[first + length - 1] = length
        firsts = self._firsts.get(length)
        if firsts is None:
            firsts = self._firsts[length] = {}
            insort(self._lengths, length)
        firsts[first] = None

    def _remove(self, first: int, length: int) -> None:
        del self._length_from[first]
        del self._length_to[first + length - 1]
        firsts = self._firsts[length]
        del firsts[first]
        if not firsts:
            del self._firsts[length]
            del self._lengths[bisect_left(self._lengths, length)]
