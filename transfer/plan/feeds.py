"""Which ranks of a prefiller write to a rank of a decoder, over all layers of a model.

Layers may differ in their numbers of heads, and with them in who writes to whom; a rank waits for all of them.
"""

from __future__ import annotations

from functools import lru_cache

from transfer.plan.layout import KvLayout
from transfer.plan.ranks import Rank, heads_of, writer_of


def writers_of(layout: KvLayout, writers: int, reader: Rank) -> frozenset[int]:
    """The sender ranks, of `writers`, that write to `reader`. Raises `GeometryError` for an uneven division."""
    return _writers(layout.head_counts, writers, reader)


@lru_cache(maxsize=1024)
def _writers(head_counts: frozenset[int], writers: int, reader: Rank) -> frozenset[int]:
    return frozenset(
        writer_of(head, num_heads, writers, reader) for num_heads in head_counts for head in heads_of(num_heads, reader)
    )
