"""The arrangement of layers in pages: which layers share one, and how many pages a prompt occupies.

Layers whose KV is kept differently cannot share a page: a windowed layer keeps only the tail of a prompt, a full one
keeps everything. So layers of one kind and window form *page groups*, and a page is one chunk of one group. All groups
are (about) as large as the smallest kind, so that equal pages serve all of them and one pool of pages is enough: the
arrangement of vLLM's hybrid KV cache manager, which counts layers where bytes are counted here. Where all layers are
alike there is one group, and a page is one chunk of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transfer.geometry.checks import not_negative, positive
from transfer.geometry.groups import LayerGroup
from transfer.geometry.prompts import block_counts

_ENDLESS = 1 << 60
"""A number of tokens that is more than any prompt has."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """A `PageGroup` is a group of layers that share pages. A `linear` group has one state per sequence instead of
    tokens, over `state_pages`."""

    kind: str
    """The kind of the layers, one of `KINDS`."""
    num_layers: int
    window: int | None = None
    state_pages: int = 0

    def blocks(self, num_tokens: int, chunk_size: int) -> tuple[int, int]:
        """Returns the `(null, real)` blocks of a prompt. Null ones lie in front and hold no memory."""
        if self.kind == "linear":
            return 0, self.state_pages if num_tokens else 0
        return block_counts(self.kind, num_tokens, self.window, chunk_size)


def page_groups(layers: Sequence[LayerGroup], chunk_size: int) -> tuple[PageGroup, ...]:
    """Cuts `layers` (as `KvGeometry.groups` has them, one entry per kind and window) into page groups. Returns these in
    the order of the layers, with `linear` groups last.

    The last group of a kind may have fewer layers than the others; its pages are then not full.
    """
    smallest, page = _smallest(layers), group_page_bytes(layers, chunk_size)
    groups = []
    for layer in layers:
        if layer.kind == "linear":
            continue
        count = _layers_per_group(layer, smallest)
        whole, rest = divmod(layer.num_layers, count)
        counts = [count] * whole + [rest] * bool(rest)
        groups += [PageGroup(layer.kind, count, layer.window) for count in counts or [0]]
    for layer in layers:
        if layer.kind == "linear":
            pages = -(-layer.bytes_per_sequence // page) if page else 1
            groups.append(PageGroup("linear", layer.num_layers, state_pages=pages))
    return tuple(groups)


def group_page_bytes(layers: Sequence[LayerGroup], chunk_size: int) -> int:
    """Returns the bytes of a page that holds one chunk of any page group: those of the largest. It is 0 where no layer
    keeps tokens.

    Layers of one kind are taken to be of equal size.
    """
    smallest = _smallest(layers)
    per_token = [
        layer.bytes_per_token * _layers_per_group(layer, smallest) // max(1, layer.num_layers)
        for layer in layers
        if layer.kind != "linear"
    ]
    return max(per_token, default=0) * positive("chunk_size", chunk_size)


def _smallest(layers: Sequence[LayerGroup]) -> int:
    """Returns the bytes that a token has in the kind that has the fewest."""
    return min((layer.bytes_per_token for layer in layers if layer.kind != "linear"), default=0)


def _layers_per_group(layer: LayerGroup, smallest: int) -> int:
    """Returns how many layers of this kind are together not larger than the smallest kind; at least one."""
    return max(1, layer.num_layers * smallest // max(1, layer.bytes_per_token))


def num_pages(groups: Sequence[PageGroup], num_tokens: int, chunk_size: int) -> int:
    """Returns the pages that a prompt of `num_tokens` tokens occupies on one rank, over all groups."""
    return sum(group.blocks(num_tokens, chunk_size)[1] for group in groups)


def most_pages(groups: Sequence[PageGroup], num_tokens: int, chunk_size: int) -> int:
    """Returns enough pages for every prompt of up to `num_tokens` tokens, however a window's tail lies in its blocks.

    The result never falls as `num_tokens` grows. That of `num_pages` does: a longer prompt's tail may lie better.
    """
    return sum(_most_blocks(group, num_tokens, chunk_size) for group in groups)


def max_prompt_tokens(groups: Sequence[PageGroup], pages: int, chunk_size: int) -> int | None:
    """Returns a length in tokens such that every prompt up to it fits into `pages` pages; None where every prompt does.

    It is exact where no layer is windowed. A window's tail takes one page more or less depending on how it lies in its
    pages; here it always takes the most.
    """
    if most_pages(groups, _ENDLESS, chunk_size) <= not_negative("pages", pages):
        return None
    low, high = 0, max(1, pages) * chunk_size
    while low < high:
        middle = (low + high + 1) // 2
        if most_pages(groups, middle, chunk_size) <= pages:
            low = middle
        else:
            high = middle - 1
    return low


def _most_blocks(group: PageGroup, num_tokens: int, chunk_size: int) -> int:
    """Returns the most blocks that `group` keeps of any prompt of up to `num_tokens` tokens."""
    whole = -(-num_tokens // chunk_size)
    if group.kind == "linear":
        return group.state_pages
    if group.window is None:
        return whole
    kept = group.window - 1
    if group.kind == "chunked" and group.window % chunk_size == 0:  # the running chunk begins with a block
        return min(whole, -(-kept // chunk_size))
    # The tail may begin with the last token of a block.
    return min(whole, -(-max(0, kept - 1) // chunk_size) + 1)
