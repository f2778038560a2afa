"""The way from pages to bytes: what one rank copies to another when it writes a page, or some of its layers.

A *span* is one run of bytes: (offset in the writer's slab, offset in the reader's slab, length). Where both sides are
divided alike a page is one span; where they are not, there is one per layer, keys and values, and run of heads. The
table for one page is made once per pair of ranks; a transfer of many pages is that table, shifted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from transfer.agents.base import Spans
from transfer.agents.spans import merge
from transfer.errors import GeometryError
from transfer.plan.feeds import writers_of
from transfer.plan.layout import Part, RankLayout
from transfer.plan.placement import Placement, Rows, in_pages
from transfer.plan.ranks import heads_between
from transfer.plan.tags import TAG_SLOTS


@dataclass(frozen=True)
class SpanMap:
    """A `SpanMap` tells what the rank `ours` writes to the rank `theirs`, of the same model.

    `placement` says where our pages lie. With None they lie one behind the other, as theirs do.
    """

    ours: RankLayout
    theirs: RankLayout
    placement: Placement | None = None
    _slices: dict[tuple[int, int, int], Spans] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<SpanMap rank {self.ours.rank} → {self.theirs.rank}, {self.page_bytes} bytes per page>"

    @cached_property
    def page_bytes(self) -> tuple[int, ...]:
        """Holds, per group, the bytes that travel with each page; for a ``linear`` group, with all of its pages."""
        groups = range(len(self.ours.groups))
        return tuple(int(self._slice(group, 0, self.num_layers(group))[:, 2].sum()) for group in groups)

    @cached_property
    def tag_slot(self) -> int:
        """The slot of this rank's tags in the slab of `theirs` (`transfer.plan.tags`)."""
        writers = sorted(writers_of(self.ours.kv, self.ours.rank.size, self.theirs.rank))
        return writers.index(self.ours.rank.index) % TAG_SLOTS

    def num_layers(self, group: int) -> int:
        return len(self.ours.groups[group].layers)

    def spans(
        self,
        group: int,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        first_layer: int = 0,
        end_layer: int | None = None,
        *,
        blocks: Sequence[int] | None = None,
    ) -> Spans:
        """Returns the spans that copy layers `first_layer` to `end_layer` (of the group, by default all) of local page
        i to remote page i.

        Neighbouring runs of one page are one span already. For a ``linear`` group the layers mean nothing, since its
        state runs over its pages. There `blocks` says which of the state's pages these are, by default all of them.
        Raises `GeometryError` for layers and pages that the group does not have.
        """
        if len(local_pages) != len(remote_pages):
            raise GeometryError(f"{len(local_pages)} pages cannot be written to {len(remote_pages)}")
        if self.ours.groups[group].group.kind == "linear":
            return self._state_spans(group, local_pages, remote_pages, blocks)
        table = self._slice(group, first_layer, self.num_layers(group) if end_layer is None else end_layer)
        stride, num_pieces = self._places[group].stride, self._places[group].pages_per_block
        if num_pieces > 1:
            return self._piece_spans(table, stride, num_pieces, local_pages, remote_pages)
        if len(table) == len(local_pages) == 1:  # half the time of the array operations, which a small push waits for
            row = table[0].tolist()
            ours, theirs = local_pages[0] * stride, remote_pages[0] * self.theirs.page_bytes
            return np.array([(ours + row[0], theirs + row[1], row[2])], dtype=np.int64)
        local = np.asarray(local_pages, dtype=np.int64)[:, None] * stride + table[None, :, 0]
        remote = np.asarray(remote_pages, dtype=np.int64)[:, None] * self.theirs.page_bytes + table[None, :, 1]
        sizes = np.broadcast_to(table[None, :, 2], local.shape)
        return np.stack((local.ravel(), remote.ravel(), sizes.ravel()), axis=1)

    def _piece_spans(
        self, table: Spans, stride: int, num_pieces: int, local_pages: Sequence[int], remote_pages: Sequence[int]
    ) -> Spans:
        """Returns the spans where a block has several pages. The piece of a row for the next page of the block lies
        right behind."""
        blocks, pieces = np.divmod(np.asarray(local_pages, dtype=np.int64)[:, None], num_pieces)
        sizes = np.broadcast_to(table[None, :, 2], (len(local_pages), len(table)))
        local = blocks * stride + pieces * sizes + table[None, :, 0]
        remote = np.asarray(remote_pages, dtype=np.int64)[:, None] * self.theirs.page_bytes + table[None, :, 1]
        return np.stack((local.ravel(), remote.ravel(), sizes.ravel()), axis=1)

    @cached_property
    def _places(self) -> Placement:
        return in_pages(self.ours) if self.placement is None else self.placement

    def _slice(self, group: int, first: int, end: int) -> Spans:
        """Returns the rows of one page for layers `first` to `end`, merged. They are kept, since the same few are asked
        for again."""
        key = group, first, end
        if key not in self._slices:
            if not 0 <= first < end <= self.num_layers(group):
                raise GeometryError(f"group {group} has {self.num_layers(group)} layers, not {first} to {end}")
            parts, place = self.ours.groups[group].parts, self._places[group]
            trios = list(zip(parts, self.theirs.groups[group].parts, place.offsets, strict=True))
            if place.pages_per_block > 1:
                cut = zip(trios, place.rows, strict=True)
                moves = [
                    self._pieces(*trio, place.pages_per_block, rows)
                    for trio, rows in cut
                    if first <= trio[0].layer < end
                ]
                self._slices[key] = _rows(chain.from_iterable(moves))  # unmerged: each row has a stride of its own
            else:
                whole = (self._move(*trio) for trio in trios if first <= trio[0].layer < end)
                self._slices[key] = merge(_rows(move for move in whole if move is not None))
        return self._slices[key]

    def _move(self, ours: Part, theirs: Part, offset: int) -> tuple[int, int, int] | None:
        """Returns what is copied of one part, which begins `offset` bytes into our memory in page 0."""
        heads = heads_between(ours.num_heads, self.ours.rank, self.theirs.rank)
        if not heads:
            return None
        local = offset + (heads.start - ours.heads.start) * ours.head_bytes
        remote = theirs.offset + (heads.start - theirs.heads.start) * theirs.head_bytes
        return local, remote, len(heads) * ours.head_bytes

    def _pieces(
        self, ours: Part, theirs: Part, offset: int, num_pieces: int, rows: Sequence[Rows]
    ) -> Iterator[tuple[int, int, int]]:
        """Yields what is copied of one part in the first page of block 0: one piece of each row of each head."""
        for head in heads_between(ours.num_heads, self.ours.rank, self.theirs.rank):
            local = offset + (head - ours.heads.start) * ours.head_bytes * num_pieces
            remote = theirs.offset + (head - theirs.heads.start) * theirs.head_bytes
            for num, token_bytes in rows:
                size = token_bytes * self.ours.chunk_size
                for _ in range(num):
                    yield local, remote, size
                    local, remote = local + size * num_pieces, remote + size

    def _state_spans(
        self, group: int, local_pages: Sequence[int], remote_pages: Sequence[int], blocks: Sequence[int] | None
    ) -> Spans:
        size, page = self.ours.groups[group].num_bytes, self.ours.page_bytes
        num_pages = self.ours.groups[group].group.state_pages
        blocks = range(num_pages) if blocks is None else blocks
        if len(blocks) != len(local_pages) or not all(0 <= block < num_pages for block in blocks):
            raise GeometryError(f"group {group} has {num_pages} pages of state, and {len(local_pages)} are to be sent")
        rows = zip(blocks, local_pages, remote_pages, strict=True)
        return _rows((ours * page, theirs * page, min(page, size - block * page)) for block, ours, theirs in rows)


def _rows(moves: Iterable[tuple[int, int, int]]) -> Spans:
    return np.array(list(moves), dtype=np.int64).reshape(-1, 3)
