"""An attempt's page table: it tells which block of which group is which page of the attempt.

Blocks are positional: block b of a group holds tokens b·chunk to (b+1)·chunk. The blocks that nobody will read, in
front of a window, are null blocks and have no page. The pages of an attempt are one flat list, in the order in which a
prompt is read: block by block, and within a block group by group. An *ordinal* is an index into that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from transfer.errors import GeometryError
from transfer.geometry import PageGroup

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class PageAt(NamedTuple):
    """A `PageAt` tells where in the prompt an ordinal is. For a ``linear`` group `block` counts the pages of its
    state."""

    group: int
    block: int


@dataclass(frozen=True)
class PageTable:
    """A `PageTable` is the page table of a prompt of `num_tokens` tokens. Make it with `page_table`."""

    groups: tuple[PageGroup, ...]
    num_tokens: int
    chunk_size: int
    null_blocks: tuple[int, ...]
    """Counts, per group, the null blocks at the front."""
    real_blocks: tuple[int, ...]
    """Counts, per group, the blocks that follow the null ones."""

    def __len__(self) -> int:
        return sum(self.real_blocks)

    def __repr__(self) -> str:
        return f"<PageTable {self.num_tokens} tokens, {len(self)} pages in {len(self.groups)} groups>"

    @property
    def num_blocks(self) -> int:
        """The number of chunks of the prompt, null ones included."""
        return -(-self.num_tokens // self.chunk_size)

    @cached_property
    def pages(self) -> tuple[PageAt, ...]:
        """Holds the pages by ordinal. States come last: they are complete when the prompt has been read."""
        return tuple(map(PageAt, self.group_of.tolist(), self.block_of.tolist()))

    @property
    def group_of(self) -> Indices:
        """The group of each page, int64 ``[len(self)]``."""
        return self._places[0]

    @property
    def block_of(self) -> Indices:
        """The block within its group of each page, int64 ``[len(self)]``."""
        return self._places[1]

    @cached_property
    def _ordinals(self) -> dict[PageAt, int]:
        return {page: ordinal for ordinal, page in enumerate(self.pages)}

    def ordinal(self, group: int, block: int) -> int | None:
        """Returns the ordinal of a block, or None for a null block. Raises `GeometryError` for a block behind the
        prompt's end."""
        found = self._ordinals.get(PageAt(group, block))
        if found is None and not 0 <= block < self.null_blocks[group]:
            raise GeometryError(f"{self!r} has no block {block} of group {group}")
        return found

    @cached_property
    def _places(self) -> tuple[Indices, Indices]:
        """Returns the group and the block of each page. It uses whole-array operations: a long prompt has 100,000
        pages, and an event loop waits for this."""
        with_tokens = [index for index, group in enumerate(self.groups) if group.kind != "linear"]
        groups, blocks = _joined([(g, self.null_blocks[g], self.num_blocks) for g in with_tokens])
        if len(with_tokens) > 1:
            order = np.lexsort((groups, blocks))
            groups, blocks = groups[order], blocks[order]
        if len(with_tokens) == len(self.groups):
            return groups, blocks
        states = [(g, 0, self.real_blocks[g]) for g, group in enumerate(self.groups) if group.kind == "linear"]
        of_states, their_blocks = _joined(states)
        return np.concatenate((groups, of_states)), np.concatenate((blocks, their_blocks))


def _joined(parts: Sequence[tuple[int, int, int]]) -> tuple[Indices, Indices]:
    """Returns the groups and blocks of all parts (group, first block, end of blocks), one behind the other."""
    if not parts:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    groups = [np.full(end - first, group, dtype=np.int64) for group, first, end in parts]
    blocks = [np.arange(first, end, dtype=np.int64) for _, first, end in parts]
    return (groups[0], blocks[0]) if len(parts) == 1 else (np.concatenate(groups), np.concatenate(blocks))


def page_table(groups: Sequence[PageGroup], num_tokens: int, chunk_size: int) -> PageTable:
    """Returns the page table of a prompt. Raises `GeometryError` for a prompt without tokens."""
    if num_tokens < 1:
        raise GeometryError(f"a prompt of {num_tokens} tokens has no KV")
    blocks = [group.blocks(num_tokens, chunk_size) for group in groups]
    nulls, reals = tuple(null for null, _ in blocks), tuple(real for _, real in blocks)
    return PageTable(tuple(groups), num_tokens, chunk_size, nulls, reals)
