"""The need of a sequence for pages of the KV cache, before it starts: exactly the pages whose tokens somebody will
read.

Blocks are positional in every page group. Null blocks, in front of a window, hold no page. Behind them a group that
keeps everything has a page per block; a windowed one has no more pages than its window and one more chunk touch, and
goes round in them: block b lies where block b − n lay, whose tokens are out of the window by then. So nothing is ever
given back while a sequence runs, and a long answer does not make a windowed group grow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from transfer.errors import IntegrityError
from transfer.geometry import PageGroup
from transfer.plan.blocks import PageTable

BlockTable: TypeAlias = list[int | None]
"""The cache page of each block of one group, None for a null block. A page may be there again, further on."""


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """A `CacheNeed` counts `num_blocks` blocks in every group; per group, `null_blocks` without a page and
    `group_pages` for the others."""

    num_blocks: int
    null_blocks: tuple[int, ...]
    group_pages: tuple[int, ...]

    @property
    def num_pages(self) -> int:
        return sum(self.group_pages)

    def tables(self, pages: Sequence[int]) -> list[BlockTable]:
        """Puts `num_pages` pages where they belong. Returns one table per group.

        Pages are in the order in which they will be filled (block by block, group by group), as those at the peer are.
        So neighbours here are neighbours there, too, and travel as one. A prompt's pages stay where they are when more
        follow them for its answer.
        """
        free = iter(pages)
        tables: list[BlockTable] = [[] for _ in self.null_blocks]
        for block in range(self.num_blocks):
            for table, num_null, num_pages in zip(tables, self.null_blocks, self.group_pages, strict=True):
                if block < num_null:
                    table.append(None)
                else:
                    table.append(next(free) if block < num_null + num_pages else table[block - num_pages])
        return tables


def cache_need(groups: Sequence[PageGroup], chunk_size: int, num_tokens: int, num_received: int = 0) -> CacheNeed:
    """Returns the need of a sequence of up to `num_tokens` tokens, the first `num_received` of which are not read here.

    Those arrive as the pages of `transfer.plan.blocks.page_table`: its null blocks are null here too.
    """
    num_blocks = -(-max(num_tokens, num_received) // chunk_size)
    nulls = tuple(group.blocks(num_received, chunk_size)[0] if num_received else 0 for group in groups)
    pages = (_most_pages(group, num_blocks - null, chunk_size) for group, null in zip(groups, nulls, strict=True))
    return CacheNeed(num_blocks, nulls, tuple(pages))


def cache_page(prompt_pages: PageTable, tables: Sequence[BlockTable], ordinal: int) -> int:
    """Returns the page in `tables` for page `ordinal` of a prompt. Raises `IntegrityError` if it is null there."""
    at = prompt_pages.pages[ordinal]
    page = tables[at.group][at.block]
    if page is None:
        raise IntegrityError(f"there is no page for block {at.block} of group {at.group} of {prompt_pages!r}")
    return page


def max_cached_tokens(groups: Sequence[PageGroup], num_pages: int, chunk_size: int) -> int | None:
    """Returns the length of the longest sequence that `num_pages` cache pages can hold; None where every one fits."""
    if all(group.window for group in groups) and _pages_of(groups, 1 << 60, chunk_size) <= num_pages:
        return None
    blocks = bisect_right(range(num_pages + 1), num_pages, key=lambda count: _pages_of(groups, count, chunk_size))
    return (blocks - 1) * chunk_size


def _pages_of(groups: Sequence[PageGroup], num_blocks: int, chunk_size: int) -> int:
    return sum(_most_pages(group, num_blocks, chunk_size) for group in groups)


def _most_pages(group: PageGroup, num_blocks: int, chunk_size: int) -> int:
    """Returns how many pages hold all that is read at once: a chunk being read, or one token, and the window before
    it."""
    if group.window is None:
        return num_blocks
    return min(num_blocks, -(-(group.window - 1) // chunk_size) + 1)
