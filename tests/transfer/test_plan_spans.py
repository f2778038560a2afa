"""Bytes, not plans: pages filled on every writer, copied span by span, and read element by element on every reader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from transfer.agents.base import Spans
from transfer.agents.spans import merge
from transfer.errors import GeometryError
from transfer.geometry import LayerGroup, group_page_bytes
from transfer.plan.feeds import all_writers, readers_of, writers_of
from transfer.plan.layout import GroupLayout, KvLayout, LayerKv, Part, RankLayout
from transfer.plan.ranks import Rank
from transfer.plan.spans import SpanMap

CHUNK = 4
NOTHING = -1
"""In what nobody has written."""

PAGES = 3
"""That travel, of each group."""
LOCAL, REMOTE = (4, 0, 2), (1, 5, 3)
"""Where they lie: apart, and in another order on the other side."""
NUM_SLOTS = 6

Buffer = np.ndarray[Any, np.dtype[np.int64]]


def uniform(num_heads: int) -> KvLayout:
    return KvLayout((LayerKv(num_heads, 3, 3),) * 3, CHUNK, 8, "int64")


LATENT = KvLayout((LayerKv(1, 5, 0, "mla"),) * 3, CHUNK, 8, "int64")
MIXED = KvLayout(
    (
        LayerKv(8, 3, 2, "sliding", 16),
        LayerKv(2, 4, 3),
        LayerKv(8, 3, 2, "sliding", 16),
        None,
        LayerKv(2, 4, 3),
        LayerKv(8, 3, 2, "sliding", 16),
        LayerKv(4, 2, 2, "chunked", 8),
    ),
    CHUNK,
    8,
    "int64",
)
"""Layers of three kinds with head counts and dims of their own, keys and values of unlike size, one without KV."""

DIVISIONS = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 1), (8, 2), (2, 8), (4, 4), (1, 8)]
MODELS = {**{f"{n} heads": uniform(n) for n in (1, 2, 4, 8)}, "latent": LATENT, "mixed": MIXED}

every_case = pytest.mark.parametrize(("model", "division"), [*product(MODELS, DIVISIONS)])


def value(layer: int, is_values: bool, head: int, token: int, dim: int, page: int) -> int:
    """Another one for every element of the model."""
    return ((((page * 20 + layer) * 2 + is_values) * 10 + head) * 10 + token) * 10 + dim


def block(group: GroupLayout, part: Part, page: int) -> Buffer:
    """What belongs into a part: elements [heads, tokens, dims], of the model's own numbering of layers and heads."""
    dims = part.head_bytes // (CHUNK * 8)
    return np.array(
        [
            [
                [value(group.layers[part.layer], part.is_values, head, token, dim, page) for dim in range(dims)]
                for token in range(CHUNK)
            ]
            for head in part.heads
        ],
        dtype=np.int64,
    )


def slots(layout: RankLayout) -> list[Buffer]:
    """One slab per group, so that groups cannot hide each other's mistakes; each as elements."""
    return [np.full(NUM_SLOTS * layout.page_bytes // 8, NOTHING, dtype=np.int64) for _ in layout.groups]


def write_pages(layout: RankLayout, buffers: list[Buffer], pages: tuple[int, ...]) -> None:
    for group, buffer in zip(layout.groups, buffers, strict=True):
        for number, page in enumerate(pages):
            for part in group.parts:
                start = (page * layout.page_bytes + part.offset) // 8
                buffer[start : start + part.num_bytes // 8] = block(group, part, number).ravel()


def copy(spans: Spans, ours: Buffer, theirs: Buffer) -> None:
    """Plain bytes, from one slab to the other."""
    source, target = ours.view(np.uint8), theirs.view(np.uint8)
    for local, remote, size in spans.tolist():
        assert size > 0
        assert 0 <= local <= len(source) - size
        assert 0 <= remote <= len(target) - size
        target[remote : remote + size] = source[local : local + size]


def pairs(model: KvLayout, division: tuple[int, int]) -> Iterator[SpanMap]:
    """Every writer with every reader that it feeds."""
    writers, readers = division
    for writer in range(writers):
        for reader in range(readers):
            if writer in writers_of(model, writers, Rank(readers, reader)):
                yield SpanMap(model.of_rank(writers, writer), model.of_rank(readers, reader))


def transfer(model: KvLayout, division: tuple[int, int], *, by_layer: bool = False) -> list[list[Buffer]]:
    """The readers' slabs, after everybody has written."""
    writers, readers = division
    ours = [slots(model.of_rank(writers, index)) for index in range(writers)]
    theirs = [slots(model.of_rank(readers, index)) for index in range(readers)]
    for index, buffers in enumerate(ours):
        write_pages(model.of_rank(writers, index), buffers, LOCAL)
    for span_map in pairs(model, division):
        source, target = ours[span_map.ours.rank.index], theirs[span_map.theirs.rank.index]
        for group in range(len(model.groups)):
            for spans in group_spans(span_map, group, by_layer):
                copy(spans, source[group], target[group])
    return theirs


def group_spans(span_map: SpanMap, group: int, by_layer: bool) -> Iterator[Spans]:
    if not by_layer:
        yield span_map.spans(group, LOCAL, REMOTE)
        return
    for layer in range(span_map.num_layers(group)):
        yield span_map.spans(group, LOCAL, REMOTE, layer, layer + 1)


def expected(layout: RankLayout) -> list[Buffer]:
    """A reader's slabs as they must be, everything that is not written to included."""
    buffers = slots(layout)
    write_pages(layout, buffers, REMOTE)
    return buffers


# ── element by element ──────────────────────────────────────────────────────────────────────────────────────────────


@every_case
@pytest.mark.parametrize("by_layer", [False, True])
def test_every_reader_has_exactly_its_heads(model: str, division: tuple[int, int], by_layer: bool) -> None:
    layout = MODELS[model]
    for index, buffers in enumerate(transfer(layout, division, by_layer=by_layer)):
        for group, (ours, wanted) in enumerate(zip(buffers, expected(layout.of_rank(division[1], index)), strict=True)):
            assert np.array_equal(ours, wanted), f"rank {index}, group {group}"


@every_case
def test_no_byte_is_written_twice_and_none_is_missing(model: str, division: tuple[int, int]) -> None:
    layout = MODELS[model]
    for index in range(division[1]):
        theirs = layout.of_rank(division[1], index)
        feeding = [span_map for span_map in pairs(layout, division) if span_map.theirs.rank.index == index]
        assert {span_map.ours.rank.index for span_map in feeding} == writers_of(layout, division[0], theirs.rank)
        for group in range(len(layout.groups)):
            touched = np.zeros(theirs.page_bytes, dtype=np.int64)
            for span_map in feeding:
                for _, remote, size in span_map.spans(group, [0], [0]).tolist():
                    touched[remote : remote + size] += 1
            num_bytes = theirs.groups[group].num_bytes
            assert touched[:num_bytes].tolist() == [1] * num_bytes
            assert not touched[num_bytes:].any(), "the rest of a page that is not full"
            assert sum(span_map.page_bytes[group] for span_map in feeding) == num_bytes


@every_case
def test_a_pair_that_shares_nothing_has_no_spans(model: str, division: tuple[int, int]) -> None:
    layout, (writers, readers) = MODELS[model], division
    for writer, reader in product(range(writers), range(readers)):
        span_map = SpanMap(layout.of_rank(writers, writer), layout.of_rank(readers, reader))
        is_empty = not any(span_map.page_bytes)
        assert is_empty == (writer not in writers_of(layout, writers, Rank(readers, reader)))
        assert is_empty == (reader not in readers_of(layout, Rank(writers, writer), readers))
        assert is_empty or writer in all_writers(layout, writers, readers)
        if is_empty:
            assert span_map.spans(0, [1, 2], [3, 4]).shape == (0, 3)


@every_case
def test_layers_add_up_to_pages(model: str, division: tuple[int, int]) -> None:
    """Any cut into slices of layers moves the same bytes to the same places."""
    for span_map in pairs(MODELS[model], division):
        for group in range(len(span_map.ours.groups)):
            num_layers = span_map.num_layers(group)
            whole = bytes_moved(span_map.spans(group, LOCAL, REMOTE))
            for cut in range(1, num_layers):
                first = bytes_moved(span_map.spans(group, LOCAL, REMOTE, 0, cut))
                rest = bytes_moved(span_map.spans(group, LOCAL, REMOTE, cut))
                assert whole == first | rest
                assert not first & rest


def bytes_moved(spans: Spans) -> set[tuple[int, int]]:
    """Where each byte goes."""
    return {(local + i, remote + i) for local, remote, size in spans.tolist() for i in range(size)}


# ── what a span is ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1, 2, 8])
def test_divided_alike_a_page_is_one_span(size: int) -> None:
    rank = uniform(8).of_rank(size, size - 1)
    page = rank.page_bytes
    spans = SpanMap(rank, rank).spans(0, [4, 0], [1, 5])
    assert spans.tolist() == [[4 * page, page, page], [0, 5 * page, page]]


def test_otherwise_there_is_one_per_layer_keys_and_values() -> None:
    spans = SpanMap(uniform(8).of_rank(1, 0), uniform(8).of_rank(2, 1)).spans(0, [0], [0])
    assert len(spans) == 3 * 2
    assert len(SpanMap(uniform(8).of_rank(2, 1), uniform(8).of_rank(1, 0)).spans(0, [0], [0], 1, 2)) == 2


def test_neighbouring_pages_merge_into_one_span() -> None:
    rank = uniform(8).of_rank()
    spans = merge(SpanMap(rank, rank).spans(0, [2, 3, 4, 8], [0, 1, 2, 3]))
    page = rank.page_bytes
    assert spans.tolist() == [[2 * page, 0, 3 * page], [8 * page, 3 * page, page]]


@every_case
def test_merged_spans_move_the_same_bytes(model: str, division: tuple[int, int]) -> None:
    for span_map in pairs(MODELS[model], division):
        for group in range(len(span_map.ours.groups)):
            spans = span_map.spans(group, [2, 3, 4], [0, 1, 2])
            together = merge(spans)
            assert len(together) <= len(spans)
            assert bytes_moved(together) == bytes_moved(spans)


def test_offsets_beyond_four_gib() -> None:
    """Also where the page numbers come as 32-bit integers, as numpy makes them."""
    rank = KvLayout((LayerKv(8, 128, 128),) * 32, 256, 2, "bfloat16").of_rank()
    page = rank.page_bytes
    assert page == 32 << 20
    for pages in ([1000, 2000], np.array([1000, 2000], dtype=np.int32)):
        spans = SpanMap(rank, rank).spans(0, pages, pages)  # type: ignore[arg-type]
        assert spans.dtype == np.int64
        assert spans.tolist() == [[1000 * page, 1000 * page, page], [2000 * page, 2000 * page, page]]


def test_what_is_not_there() -> None:
    span_map = SpanMap(uniform(8).of_rank(), uniform(8).of_rank())
    for first, end in ((0, 4), (3, 3), (-1, 2), (2, 1)):
        with pytest.raises(GeometryError, match=f"3 layers, not {first} to {end}"):
            span_map.spans(0, [0], [0], first, end)
    with pytest.raises(GeometryError, match="2 pages cannot be written to 1"):
        span_map.spans(0, [0, 1], [0])


# ── layouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_mixed_model_is_cut_into_pages_of_about_one_size() -> None:
    """Full layers have 2·7 elements per token, sliding ones 8·5, the one chunked layer 4·4."""
    kinds = [(group.kind, group.num_layers) for group in MIXED.groups]
    assert kinds == [("full", 1), ("full", 1), ("sliding", 1), ("sliding", 1), ("sliding", 1), ("chunked", 1)]
    assert MIXED.layers_by_group == ((1,), (4,), (0,), (2,), (5,), (6,))
    assert [group.num_bytes for group in MIXED.of_rank().groups] == [
        elements * CHUNK * 8 for elements in (14, 14, 40, 40, 40, 16)
    ]
    assert MIXED.of_rank().page_bytes == 40 * CHUNK * 8
    assert MIXED.bytes_per_token == (2 * 14 + 3 * 40 + 16) * 8


def test_a_page_has_the_size_that_geometry_counts() -> None:
    gemma = KvLayout((*[LayerKv(8, 64, 64, "sliding", 1024)] * 5, LayerKv(8, 64, 64)) * 2, 16, 2)
    layers = [LayerGroup("full", 2, 2 * 2048), LayerGroup("sliding", 10, 10 * 2048, 1024)]
    assert [group.num_layers for group in gemma.groups] == [2] * 6
    assert gemma.of_rank().page_bytes == group_page_bytes(layers, 16)
    assert gemma.of_rank(4, 3).page_bytes == group_page_bytes(layers, 16) // 4
    assert gemma.of_rank(16, 0).page_bytes == group_page_bytes(layers, 16) // 8, "heads are repeated"
    assert gemma.layers_by_group[0] == (5, 11)
    assert gemma.layers_by_group[1] == (0, 1)


def test_one_kind_is_one_group() -> None:
    llama = KvLayout.uniform(
        num_layers=32, num_kv_heads=8, head_dim=128, chunk_size=256, dtype="bfloat16", element_bytes=2
    )
    assert len(llama.groups) == 1
    assert llama.of_rank().page_bytes == 33_554_432
    assert llama.of_rank(8, 7).page_bytes == 33_554_432 // 8
    assert llama.bytes_per_token == 131_072
    assert llama.describe_heads() == "32×8"


def test_what_is_told_in_the_handshake() -> None:
    assert MIXED.describe_heads() == "1×8,1×2,1×8,1×0,1×2,1×8,1×4"
    assert uniform(8).describe() == uniform(8).describe()
    others = [
        KvLayout((LayerKv(8, 3, 3),) * 2, CHUNK, 8),
        KvLayout((LayerKv(8, 3, 2),) * 3, CHUNK, 8),
        KvLayout((LayerKv(8, 3, 3, "sliding", 8),) * 3, CHUNK, 8),
        KvLayout((LayerKv(8, 3, 3, "sliding", 9),) * 3, CHUNK, 8),
        KvLayout((LayerKv(8, 3, 3), None, LayerKv(8, 3, 3), LayerKv(8, 3, 3)), CHUNK, 8),
    ]
    texts = {layout.describe() for layout in (uniform(8), *others)}
    assert len(texts) == 6


@pytest.mark.parametrize(("size", "heads"), [(3, 8), (16, 6)])
def test_a_rank_that_cannot_be(size: int, heads: int) -> None:
    with pytest.raises(GeometryError, match="neither divided over nor repeated"):
        uniform(heads).of_rank(size, 0)


@pytest.mark.parametrize(
    ("layers", "chunk_size", "element_bytes"),
    [((), 4, 2), ((None,), 4, 2), ((LayerKv(1, 0, 0, "linear", None, 10),), 4, 2)],
)
def test_a_model_without_kv(layers: tuple[LayerKv | None, ...], chunk_size: int, element_bytes: int) -> None:
    with pytest.raises(GeometryError, match="no layer of this model keeps KV"):
        KvLayout(layers, chunk_size, element_bytes)


@pytest.mark.parametrize(("chunk_size", "element_bytes"), [(0, 2), (4, 0)])
def test_a_page_of_nothing(chunk_size: int, element_bytes: int) -> None:
    with pytest.raises(GeometryError, match="is none"):
        KvLayout((LayerKv(1, 2, 2),), chunk_size, element_bytes)


# ── states ──────────────────────────────────────────────────────────────────────────────────────────────────────────

WITH_STATES = KvLayout(
    (LayerKv(2, 4, 4), LayerKv(1, 0, 0, "linear", None, 700), LayerKv(1, 0, 0, "linear", None, 500)), CHUNK, 8
)


def test_states_run_over_pages_of_the_common_size() -> None:
    rank = WITH_STATES.of_rank()
    states = rank.groups[1]
    assert (rank.page_bytes, states.num_bytes, states.group.state_pages) == (512, 1200, 3)
    assert [(part.offset, part.num_bytes) for part in states.parts] == [(0, 700), (700, 500)]
    span_map = SpanMap(rank, rank)
    assert span_map.page_bytes == (512, 1200)
    everything = [[4 * 512, 512, 512], [0, 5 * 512, 512], [2 * 512, 3 * 512, 176]]
    assert span_map.spans(1, LOCAL, REMOTE).tolist() == everything
    one_by_one = [span_map.spans(1, [LOCAL[i]], [REMOTE[i]], blocks=[i]).tolist() for i in range(3)]
    assert [row for rows in one_by_one for row in rows] == everything
    assert span_map.spans(1, [LOCAL[2], LOCAL[0]], [3, 1], blocks=[2, 0]).tolist() == [everything[2], everything[0]]


def test_pages_of_a_state_that_are_not_there() -> None:
    rank = WITH_STATES.of_rank()
    for pages, blocks in (([0], None), ([0], [3]), ([0], [-1]), ([0, 1], [0])):
        with pytest.raises(GeometryError, match="3 pages of state"):
            SpanMap(rank, rank).spans(1, pages, pages, blocks=blocks)


def test_states_are_not_divided() -> None:
    with pytest.raises(GeometryError, match="states"):
        WITH_STATES.of_rank(2, 0)


def test_states_beside_unlike_layers_of_one_kind_are_refused() -> None:
    """Geometry takes layers of one kind for equal; where they are not, it would count other pages than there are."""
    states = LayerKv(1, 0, 0, "linear", None, 4000)
    odd = (LayerKv(3, 4, 4), LayerKv(3, 4, 4), LayerKv(9, 4, 4), LayerKv(1, 4, 4, "sliding", 8), states)
    with pytest.raises(GeometryError, match="layers of one kind differ"):
        KvLayout(odd, CHUNK, 8).of_rank()
