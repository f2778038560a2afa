"""A slab seen layer by layer: every byte is where the plan says, on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from transfer.errors import GeometryError
from transfer.memory.views import layer_views
from transfer.plan.layout import KvLayout, LayerKv, RankLayout

CHUNK = 4
NUM_PAGES = 3
FULL, UNEVEN = LayerKv(4, 8, 8), LayerKv(4, 6, 4)
SLIDING = LayerKv(4, 8, 8, "sliding", 6)


def layout_of(*layers: LayerKv | None, dtype: str = "float32") -> KvLayout:
    return KvLayout(layers, CHUNK, getattr(torch, dtype).itemsize, dtype)


def new_slab(layout: RankLayout) -> torch.Tensor:
    return torch.full((NUM_PAGES, layout.page_bytes), 0xA5, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_every_byte_of_a_page_belongs_to_one_layer(dtype: str) -> None:
    layout = layout_of(FULL, None, UNEVEN, dtype=dtype).of_rank()
    slab = new_slab(layout)
    views = layer_views(slab, layout)
    assert [v if v is None else (v.group, v.position, *v.keys.shape[1:], v.values.shape[3]) for v in views] == [
        (0, 0, 4, CHUNK, 8, 8),
        None,
        (0, 1, 4, CHUNK, 6, 4),
    ]
    for mark, view in enumerate((v for v in views if v), start=1):
        for tensor in (view.keys, view.values):
            assert tensor.dtype == getattr(torch, dtype)
            assert (tensor.contiguous().view(torch.uint8) == 0xA5).all(), "written by another layer"
            tensor.fill_(float(mark))
    assert set(slab.view(getattr(torch, dtype)).flatten().tolist()) == {1.0, 2.0}, "no byte is left over"


def test_groups_share_the_pages_but_not_within_a_group() -> None:
    layout = layout_of(SLIDING, FULL, SLIDING, SLIDING).of_rank()
    views = [v for v in layer_views(new_slab(layout), layout) if v]
    assert [(v.group, v.position) for v in views] == [(1, 0), (0, 0), (2, 0), (3, 0)]
    views[0].keys[1] = 7.0
    assert (views[1].keys[1] == 7.0).all()
    assert not (views[1].keys[2] == 7.0).any()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_view_is_the_part_that_the_plan_tells_of(size: int) -> None:
    """What is written through a view is found in the page at the part's offset, head by head."""
    kv = layout_of(FULL, UNEVEN)
    for index in range(size):
        layout = kv.of_rank(size, index)
        slab = new_slab(layout)
        views = layer_views(slab, layout)
        for part in layout.groups[0].parts:
            view = views[part.layer]
            assert view is not None
            tensor = view.values if part.is_values else view.keys
            assert tensor.shape[1] == len(part.heads)
            for position in range(len(part.heads)):
                tensor[2, position] = 100 * part.layer + 10 * part.is_values + position
                at = part.offset + position * part.head_bytes
                written = slab[2, at : at + part.head_bytes].view(torch.float32)
                assert (written == 100 * part.layer + 10 * part.is_values + position).all()


def test_values_without_elements_are_an_empty_view() -> None:
    layout = layout_of(LayerKv(1, 12, 0, "mla")).of_rank()
    (view,) = layer_views(new_slab(layout), layout)
    assert view is not None
    assert (view.keys.shape, view.values.shape) == ((NUM_PAGES, 1, CHUNK, 12), (NUM_PAGES, 1, CHUNK, 0))


def test_states_are_no_views() -> None:
    layout = layout_of(FULL, LayerKv(0, 0, 0, "linear", state_bytes=100)).of_rank()
    assert [view is None for view in layer_views(new_slab(layout), layout)] == [False, True]


def test_a_slab_of_another_layout_is_refused() -> None:
    layout = layout_of(FULL).of_rank()
    with pytest.raises(GeometryError, match="cannot be seen"):
        layer_views(new_slab(layout)[:, :-4], layout)
    with pytest.raises(GeometryError, match="cannot be seen"):
        layer_views(new_slab(layout).view(torch.float32), layout)


@pytest.mark.parametrize("dtype", ["float12", "nn", "float16"])
def test_a_dtype_that_torch_has_not_is_refused(dtype: str) -> None:
    layout = replace(layout_of(FULL), dtype=dtype).of_rank()
    with pytest.raises(GeometryError, match=f"torch has no '{dtype}' of 4 bytes"):
        layer_views(new_slab(layout), layout)
