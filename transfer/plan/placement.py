"""The places of a rank's pages in its memory: one behind the other, or as an engine has laid out a KV cache of its own.

An engine may keep each layer's KV in a run of memory of its own, or a page of all layers together, or a few layers of
each group in the same bytes. In all of these the parts of a page are a constant number of bytes apart from those of the
next page. That number, and where the parts of page 0 begin, is all that a writer has to know.

Where an engine's blocks have several pages' tokens, the pages of a block lie in one another: a head has *rows* that run
over all tokens of the block, and a page is one piece of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from transfer.plan.layout import RankLayout


class Rows(NamedTuple):
    """`Rows` are neighbouring rows of a head: `num` of them, with `token_bytes` bytes for each token."""

    num: int
    token_bytes: int


class GroupPlace(NamedTuple):
    """A `GroupPlace` tells where the pages of one group lie. Page p is piece ``p % pages_per_block`` of block
    ``p // pages_per_block``."""

    stride: int
    """The bytes from a part of one block to the same part of the next block."""
    offsets: tuple[int, ...]
    """The bytes from the beginning of the region to each part of block 0, in the order of `GroupLayout.parts`."""
    pages_per_block: int = 1
    rows: tuple[tuple[Rows, ...], ...] = ()
    """The rows of a head, in order, for each part. It is empty where a block is one page."""


Placement: TypeAlias = Sequence[GroupPlace]
"""The places of all groups of a `RankLayout`, in order."""


def in_pages(layout: RankLayout) -> Placement:
    """Returns the placement of a slab whose pages lie one behind the other, as `PagedBuffer` has them."""
    return tuple(GroupPlace(layout.page_bytes, tuple(part.offset for part in group.parts)) for group in layout.groups)
