"""`PageTags` tells whether pages still hold what their attempt wrote. This is the receiver's side of
`transfer.plan.tags`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from transfer.agents.base import TAG_BYTES
from transfer.plan.runs import numbers_of, runs_of
from transfer.plan.tags import TAG_SLOTS
from transfer.wire import WrittenPages

FEW = 4
"""The most pages that are looked at one by one."""


class PageTags:
    """`PageTags` holds the tags of one rank's slab, uint8 ``[TAG_SLOTS, num_pages, TAG_BYTES]``, and what they should
    be.

    `num_writers` returns how many of a prefiller's ranks write to this slab, for a prefiller with that number of ranks.
    Mutable state: `_expected` (per page the tag of the attempt that wrote it last, as far as it is complete) and
    `_num_senders` (the number of ranks of that attempt's prefiller, 0 for a page that was never complete). `wrong` may
    be called on any thread for pages that are being read, because neither of the two changes for these.
    """

    def __init__(self, tags: torch.Tensor, num_writers: Callable[[int], int]) -> None:
        self._tags = tags
        self._num_writers = num_writers
        self._host = tags.numpy() if tags.device.type == "cpu" else None
        num_pages = tags.shape[1]
        self._expected = np.zeros((num_pages, TAG_BYTES), dtype=np.uint8)
        self._num_senders = np.zeros(num_pages, dtype=np.int64)

    def __repr__(self) -> str:
        return f"<PageTags of {len(self._num_senders)} pages>"

    def expect(self, pages: Sequence[int], tag: bytes, num_senders: int) -> None:
        """Notes that these pages are complete, written by the attempt with this tag, from a prefiller of `num_senders`
        ranks, and by nobody else."""
        which = np.asarray(pages, dtype=np.int64)
        self._expected[which] = np.frombuffer(tag, dtype=np.uint8)
        self._num_senders[which] = num_senders

    def who_wrote(self, pages: Sequence[int]) -> list[WrittenPages]:
        """Returns these pages in their order, with what is expected of each. Equal neighbours are told together."""
        which = np.asarray(pages, dtype=np.int64)
        expected, num_senders = self._expected[which], self._num_senders[which]
        is_other = (expected[1:] != expected[:-1]).any(axis=1) | (num_senders[1:] != num_senders[:-1])
        firsts = [0, *(np.flatnonzero(is_other) + 1).tolist()] if len(which) else []
        return [
            WrittenPages(
                pages=runs_of(which[first:end].tolist()),
                tag=expected[first].tobytes(),
                num_senders=int(num_senders[first]),
            )
            for first, end in pairwise([*firsts, len(which)])
        ]

    def expect_all(self, written: Sequence[WrittenPages]) -> list[int]:
        """Notes what another rank's `who_wrote` says of the pages with the same numbers. Returns the pages in their
        order."""
        pages: list[int] = []
        for one in written:
            alike = numbers_of(one.pages)
            self.expect(alike, one.tag, one.num_senders)
            pages += alike
        return pages

    def wrong(self, pages: Sequence[int]) -> list[int]:
        """Returns those of these pages that lack a writer's tag, or that somebody else has written since."""
        if self._host is not None and len(pages) <= FEW:  # a tenth of the time of the array operations
            return [page for page in pages if not self._is_right(page)]
        which = np.asarray(pages, dtype=np.int64)
        sizes, of_size = np.unique(self._num_senders[which], return_inverse=True)
        slots_of = np.array([self._num_slots(int(size)) for size in sizes], dtype=np.int64)
        num_slots, expected = slots_of[of_size], self._expected[which]
        is_wrong = np.zeros(len(which), dtype=np.bool_)
        for slot in range(int(slots_of.max(initial=0))):
            is_wrong |= (num_slots > slot) & (self._found(slot, which) != expected).any(axis=1)
        return [int(page) for page in which[is_wrong]]

    def _num_slots(self, num_senders: int) -> int:
        """Returns how many tags a page must have. Nothing is expected of a page that was never complete."""
        return min(self._num_writers(num_senders), TAG_SLOTS) if num_senders else 0

    def _is_right(self, page: int) -> bool:
        assert self._host is not None
        expected, num_slots = self._expected[page].tobytes(), self._num_slots(int(self._num_senders[page]))
        return all(self._host[slot, page].tobytes() == expected for slot in range(num_slots))

    def _found(self, slot: int, which: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self._host is not None:
            found: np.ndarray[Any, np.dtype[np.uint8]] = self._host[slot, which]
            return found
        return self._tags[slot, torch.from_numpy(which).to(self._tags.device)].cpu().numpy()
