"""Tags are 16 bytes beside every page that say which attempt has written it. They are sent in the same transfer as the
page.

What must always hold: what an engine reads from a page was written there by the attempt that it asked for. The owner of
the pages ensures that (`transfer.roles.receiver`); tags show whether it was so. A write that lands where it should not
leaves its own tag behind its bytes.

They lie behind the pages of a slab, slot by slot and then page by page: those of neighbouring pages are one run.

    slab = page 0, page 1, …; slot 0: tag of page 0, tag of page 1, …; slot 1: …

A page that several sender ranks write has a slot for each, in order of their ranks: so a rank that writes late is seen
even if the others were in time. Where there are more ranks than slots they go round, and two ranks that share a slot
write the same bytes there. A rank tags every page that it fills for an attempt, also one of which it holds no heads,
with the last piece of it: layers that were sent before carry none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from transfer.agents.base import TAG_BYTES, TAG_COPIES, Spans
from transfer.agents.spans import merge

TAG_SLOTS = 8
"""The number of tags that lie beside each page."""


def tag_of(attempt: str) -> bytes:
    """Returns the tag of an attempt's pages. Both sides know it without being told."""
    return hashlib.blake2b(attempt.encode(), digest_size=TAG_BYTES).digest()


def slab_bytes(num_pages: int, page_bytes: int) -> int:
    """Returns the bytes of a slab: its pages, and the tags behind them."""
    return num_pages * (page_bytes + TAG_SLOTS * TAG_BYTES)


def tag_spans(slot: int, pages: Sequence[int], num_pages: int, page_bytes: int) -> Spans:
    """Returns the spans of the tags of these pages, in a slab of `num_pages` pages: see `transfer.agents.base.Tag`."""
    first = num_pages * page_bytes + slot * num_pages * TAG_BYTES
    if len(pages) == 1:  # a small push waits for it
        return np.array([(0, first + int(pages[0]) * TAG_BYTES, TAG_BYTES)], dtype=np.int64)
    there = np.sort(np.asarray(pages, dtype=np.int64)) * TAG_BYTES + first
    here = np.arange(len(there), dtype=np.int64) % TAG_COPIES * TAG_BYTES
    return merge(np.stack((here, there, np.full_like(there, TAG_BYTES)), axis=1))
