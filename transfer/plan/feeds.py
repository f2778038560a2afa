"""Which ranks of the other side a rank has to do with, over all layers of a model.

Layers may differ in their numbers of heads, and with them in who writes to whom; a rank shakes hands with all of them.
"""

from __future__ import annotations

from functools import lru_cache

from transfer.plan.layout import KvLayout
from transfer.plan.ranks import Rank, heads_between, heads_of, writer_of


def writers_of(layout: KvLayout, writers: int, reader: Rank) -> frozenset[int]:
    """The sender ranks, of `writers`, that write to `reader`. Raises `GeometryError` for an uneven division."""
    return _writers(layout.head_counts, writers, reader)


def readers_of(layout: KvLayout, writer: Rank, readers: int) -> frozenset[int]:
    """The receiver ranks, of `readers`, that `writer` writes to: possibly none. Raises as `writers_of` does."""
    return _readers(layout.head_counts, writer, readers)


@lru_cache(maxsize=1024)
def _writers(head_counts: frozenset[int], writers: int, reader: Rank) -> frozenset[int]:
    return frozenset(
        writer_of(head, num_heads, writers, reader) for num_heads in head_counts for head in heads_of(num_heads, reader)
    )


@lru_cache(maxsize=1024)
def _readers(head_counts: frozenset[int], writer: Rank, readers: int) -> frozenset[int]:
    pairs = [(num_heads, Rank(readers, reader)) for num_heads in head_counts for reader in range(readers)]
    return frozenset(reader.index for num_heads, reader in pairs if heads_between(num_heads, writer, reader))
