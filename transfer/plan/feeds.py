"""The pairs of ranks that write to each other: which ranks of a prefiller write to which ranks of a decoder, over all
layers of a model.

Layers may differ in their numbers of heads, and so in which ranks write to which.
"""

from __future__ import annotations

from functools import lru_cache

from transfer.plan.layout import KvLayout
from transfer.plan.ranks import Rank, heads_of, writer_of


def writers_of(layout: KvLayout, writers: int, reader: Rank) -> frozenset[int]:
    """Returns the sender ranks, of `writers`, that write to `reader`. Raises `GeometryError` for an uneven division."""
    return _writers(layout.head_counts, writers, reader)


def all_writers(layout: KvLayout, writers: int, readers: int) -> frozenset[int]:
    """Returns the sender ranks, of `writers`, that write to any of `readers` ranks. Raises as `writers_of` does."""
    return _all_writers(layout.head_counts, writers, readers)


def readers_of(layout: KvLayout, writer: Rank, readers: int) -> list[int]:
    """Returns the ranks, of `readers`, to which `writer` writes, in ascending order. Raises as `writers_of` does."""
    return [index for index in range(readers) if writer.index in writers_of(layout, writer.size, Rank(readers, index))]


@lru_cache(maxsize=1024)
def _writers(head_counts: frozenset[int], writers: int, reader: Rank) -> frozenset[int]:
    return frozenset(
        writer_of(head, num_heads, writers, reader) for num_heads in head_counts for head in heads_of(num_heads, reader)
    )


@lru_cache(maxsize=64)
def _all_writers(head_counts: frozenset[int], writers: int, readers: int) -> frozenset[int]:
    return frozenset().union(*(_writers(head_counts, writers, Rank(readers, index)) for index in range(readers)))
