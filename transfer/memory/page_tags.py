"""Tells whether pages still hold what their attempt wrote: the receiver's side of `transfer.plan.tags`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from transfer.agents.base import TAG_BYTES
from transfer.plan.tags import TAG_SLOTS, tag_of

FEW = 4
"""Pages that are looked at one by one."""


class PageTags:
    """The tags of a slab, uint8 ``[TAG_SLOTS, num_pages, TAG_BYTES]``, and what they should be.

    Mutable state: `_expected` (per page the tag of whoever wrote it last, as far as it is complete) and `_num_slots`
    (how many writers that had, none for a page that was never complete). `wrong` may be called on any thread for pages
    that are being read, of which neither changes.
    """

    def __init__(self, tags: torch.Tensor) -> None:
        self._tags = tags
        self._host = tags.numpy() if tags.device.type == "cpu" else None
        num_pages = tags.shape[1]
        self._expected = np.zeros((num_pages, TAG_BYTES), dtype=np.uint8)
        self._num_slots = np.zeros(num_pages, dtype=np.int64)

    def __repr__(self) -> str:
        return f"<PageTags of {len(self._num_slots)} pages>"

    def expect(self, pages: Sequence[int], attempt: str, num_writers: int) -> None:
        """Note that these pages are complete, written by so many ranks of this attempt and by nobody else."""
        which = np.asarray(pages, dtype=np.int64)
        self._expected[which] = np.frombuffer(tag_of(attempt), dtype=np.uint8)
        self._num_slots[which] = min(num_writers, TAG_SLOTS)

    def wrong(self, pages: Sequence[int]) -> list[int]:
        """Returns those of these pages that lack a writer's tag, or that somebody else has written since."""
        if self._host is not None and len(pages) <= FEW:  # a tenth of the time of the array operations
            return [page for page in pages if not self._is_right(page)]
        which = np.asarray(pages, dtype=np.int64)
        num_slots, expected = self._num_slots[which], self._expected[which]
        is_wrong = np.zeros(len(which), dtype=np.bool_)
        for slot in range(int(num_slots.max())):
            is_wrong |= (num_slots > slot) & (self._found(slot, which) != expected).any(axis=1)
        return [int(page) for page in which[is_wrong]]

    def _is_right(self, page: int) -> bool:
        assert self._host is not None
        expected = self._expected[page].tobytes()
        return all(self._host[slot, page].tobytes() == expected for slot in range(self._num_slots[page]))

    def _found(self, slot: int, which: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self._host is not None:
            found: np.ndarray[Any, np.dtype[np.uint8]] = self._host[slot, which]
            return found
        return self._tags[slot, torch.from_numpy(which).to(self._tags.device)].cpu().numpy()
