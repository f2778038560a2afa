"""The places of a rank's pages in its memory: one behind the other, or as an engine has laid out a KV cache of its own.

An engine may keep each layer's KV in a run of memory of its own, or a page of all layers together, or a few layers of
each group in the same bytes. In all of these the parts of a page are a constant number of bytes apart from those of the
next page. That number, and where the parts of page 0 begin, is all that a writer has to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from transfer.plan.layout import RankLayout


class GroupPlace(NamedTuple):
    """A `GroupPlace` tells where the pages of one group lie."""

    stride: int
    """The bytes from a part of one page to the same part of the next page."""
    offsets: tuple[int, ...]
    """The bytes from the beginning of the region to each part of page 0, in the order of `GroupLayout.parts`."""


Placement: TypeAlias = Sequence[GroupPlace]
"""The places of all groups of a `RankLayout`, in order."""


def in_pages(layout: RankLayout) -> Placement:
    """Returns the placement of a slab whose pages lie one behind the other, as `PagedBuffer` has them."""
    return tuple(GroupPlace(layout.page_bytes, tuple(part.offset for part in group.parts)) for group in layout.groups)
