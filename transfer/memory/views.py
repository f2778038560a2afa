"""A slab of pages, seen layer by layer. It shows where a model's keys and values are in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transfer.errors import GeometryError
from transfer.plan.layout import GroupLayout, Part, RankLayout


@dataclass(frozen=True, slots=True)
class LayerViews:
    """`LayerViews` is one layer's part of every page of a slab: ``[num_pages, heads, chunk_size, dim]`` each.

    All page groups share the pages of a slab. These bytes are the layer's only in those pages that were given to layer
    group `group`.
    """

    group: int
    """The index of the layer's page group."""
    position: int
    """The index of the layer among the group's layers."""
    keys: torch.Tensor
    values: torch.Tensor


def layer_views(pages: torch.Tensor, layout: RankLayout) -> list[LayerViews | None]:
    """Returns one entry per layer of the model; None for a layer that keeps nothing per token (shared KV, states).

    `pages` is a slab as `PagedBuffer` has it, uint8 ``[num_pages, page_bytes]``; the views share its memory. Raises
    `GeometryError` where the slab's pages are not of this layout.
    """
    dtype = _dtype(layout)
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != layout.page_bytes:
        raise GeometryError(f"pages of {layout.page_bytes} bytes cannot be seen in {pages.dtype} {list(pages.shape)}")
    elements = pages.view(dtype)
    views: list[LayerViews | None] = [None] * len(layout.kv.layers)
    for index, group in enumerate(layout.groups):
        if group.group.kind == "linear":
            continue
        for position, layer in enumerate(group.layers):
            keys, values = (_view(elements, layout, group, position, is_values) for is_values in (False, True))
            views[layer] = LayerViews(index, position, keys, values)
    return views


def _view(
    elements: torch.Tensor, layout: RankLayout, group: GroupLayout, position: int, is_values: bool
) -> torch.Tensor:
    part = next((p for p in group.parts if (p.layer, p.is_values) == (position, is_values)), None)
    if part is None:  # keys or values have no elements here: the other of the two has them all
        return elements.new_empty((len(elements), 1, layout.chunk_size, 0))
    return _cut(elements, part, layout.chunk_size)


def _cut(elements: torch.Tensor, part: Part, chunk_size: int) -> torch.Tensor:
    size = elements.element_size()
    flat = elements[:, part.offset // size : (part.offset + part.num_bytes) // size]
    return flat.view(len(elements), len(part.heads), chunk_size, part.head_bytes // size // chunk_size)


def _dtype(layout: RankLayout) -> torch.dtype:
    dtype = getattr(torch, layout.kv.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != layout.kv.element_bytes:
        raise GeometryError(f"torch has no {layout.kv.dtype!r} of {layout.kv.element_bytes} bytes")
    return dtype
