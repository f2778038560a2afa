"""Layers that are sent together: neighbours, all of them once, and neither too small nor too late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.engine.layer_writes import MIN_WRITE_BYTES, layer_writes
from transfer.plan.layout import GroupLayout, KvLayout, LayerKv


def group_of(*layer_kib: int) -> GroupLayout:
    """Layers of so many KiB in a page."""
    layers = tuple(LayerKv(1, kib, 0) for kib in layer_kib)
    return KvLayout(layers, chunk_size=512, element_bytes=2).of_rank().groups[0]


@pytest.mark.parametrize(
    ("layer_kib", "expected"),
    [
        ([16, 16, 16], [(0, 3)]),  # the whole page is small
        ([64] * 8, [(0, 4), (4, 8)]),
        ([100] * 8, [(0, 3), (3, 6), (6, 8)]),  # what is left goes by itself
        ([256, 512, 8, 300], [(0, 1), (1, 2), (2, 4)]),
    ],
)
def test_by_itself_as_few_layers_as_make_256_kib(layer_kib: list[int], expected: list[tuple[int, int]]) -> None:
    assert [(layers.start, layers.stop) for layers in layer_writes(group_of(*layer_kib))] == expected


def test_as_many_layers_as_are_asked_for() -> None:
    group = group_of(*[512] * 5)
    assert [len(layers) for layers in layer_writes(group, 1)] == [1] * 5
    assert [len(layers) for layers in layer_writes(group, 2)] == [2, 2, 1]
    assert [len(layers) for layers in layer_writes(group, 100)] == [5]


@given(st.lists(st.integers(1, 600), min_size=1, max_size=20), st.none() | st.integers(1, 30))
def test_every_layer_is_in_one_write_in_order(layer_kib: list[int], layers_per_write: int | None) -> None:
    writes = layer_writes(group_of(*layer_kib), layers_per_write)
    assert [layer for layers in writes for layer in layers] == list(range(len(layer_kib)))
    for layers in writes[:-1]:
        if layers_per_write is None:
            sizes = [layer_kib[layer] << 10 for layer in layers]
            assert sum(sizes[:-1]) < MIN_WRITE_BYTES <= sum(sizes)
        else:
            assert len(layers) == layers_per_write
