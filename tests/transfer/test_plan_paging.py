"""What a prompt occupies where layers are unlike: published figures, and a model that asks token by token."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.errors import GeometryError
from transfer.geometry import (
    KvGeometry,
    LayerGroup,
    PageGroup,
    block_counts,
    group_page_bytes,
    kv_geometry,
    max_prompt_tokens,
    most_pages,
    num_pages,
    page_groups,
)

unhurried = settings(deadline=None)

FULL = PageGroup("full", 8)


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def gemma_3(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    text = sizes(layers, hidden, heads, kv_heads, model_type="gemma3_text", sliding_window=1024, **more)
    return {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}


MODELS = {
    "Llama-3.1-8B": sizes(32, 4096, 32, 8, model_type="llama"),
    "Mistral-7B-v0.1": sizes(32, 4096, 32, 8, model_type="mistral", sliding_window=4096),
    "Gemma-3-12B": gemma_3(48, 3840, 16, 8),
    "Gemma-3-27B": gemma_3(62, 5376, 32, 16, head_dim=128),
    "gpt-oss-120b": sizes(36, 2880, 64, 8, model_type="gpt_oss", head_dim=64, sliding_window=128),
    "MiMo-V2-Flash": sizes(
        48, 4096, 64, 4, model_type="mimo_v2_flash", head_dim=192, v_head_dim=128, sliding_window=128
    ),
    "Qwen3-Next-80B": sizes(48, 2048, 16, 2, model_type="qwen3_next", head_dim=256),
}


def geometry_of(name: str, **options: Any) -> KvGeometry:
    return kv_geometry(MODELS[name], **options)


def bytes_of(geometry: KvGeometry, num_tokens: int, chunk_size: int) -> int:
    groups = page_groups(geometry.groups, chunk_size)
    return num_pages(groups, num_tokens, chunk_size) * group_page_bytes(geometry.groups, chunk_size)


# ── published figures ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("window", "null", "real"), [(1024, 4311, 64), (128, 4367, 8), (4096, 4119, 256)])
def test_the_published_arithmetic(window: int, null: int, real: int) -> None:
    assert PageGroup("sliding", 1, window).blocks(70_000, 16) == (null, real)


@pytest.mark.parametrize("window", [128, 1024, 4096])
def test_worst_alignment(window: int) -> None:
    group = PageGroup("sliding", 1, window)
    worst = -(-(window - 1) // 16) + 1
    counts = {group.blocks(70_000 + shift, 16)[1] for shift in range(16)}
    assert max(counts) == worst == most_pages([group], 70_000, 16)


@pytest.mark.parametrize(
    ("name", "gigabytes", "instead_of"),
    [("Gemma-3-12B", 4.93, 27.5), ("gpt-oss-120b", 2.58, 5.16), ("Mistral-7B-v0.1", 0.54, 9.2)],
)
def test_what_windows_save_at_70k_tokens(name: str, gigabytes: float, instead_of: float) -> None:
    geometry = geometry_of(name)
    assert bytes_of(geometry, 70_000, 16) / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert ceil(70_000 / 16) * geometry.page_bytes(16) / 1e9 == pytest.approx(instead_of, rel=0.01)


@pytest.mark.parametrize(
    ("name", "groups", "layers", "padding"),
    [
        ("Llama-3.1-8B", 1, {32}, 0.0),
        ("Mistral-7B-v0.1", 1, {32}, 0.0),
        ("Gemma-3-12B", 6, {8}, 0.0),
        ("gpt-oss-120b", 2, {18}, 0.0),
        ("Gemma-3-27B", 7, {10, 2}, 0.114),
        ("MiMo-V2-Flash", 11, {9, 4, 3}, 0.121),
    ],
)
def test_what_grouping_costs_in_padding(name: str, groups: int, layers: set[int], padding: float) -> None:
    """Bytes of one chunk of all layers that are in its pages and not used: a share of the pages."""
    geometry = geometry_of(name)
    cut = page_groups(geometry.groups, 16)
    assert (len(cut), {group.num_layers for group in cut}) == (groups, layers)
    assert sum(group.num_layers for group in cut) == sum(group.num_layers for group in geometry.groups)
    used = geometry.page_bytes(16) / (len(cut) * group_page_bytes(geometry.groups, 16))
    assert 1 - used == pytest.approx(padding, abs=0.001)


def test_a_page_of_layers_alike_is_a_chunk_of_all_of_them() -> None:
    for name in ("Llama-3.1-8B", "Mistral-7B-v0.1"):
        geometry = geometry_of(name)
        assert group_page_bytes(geometry.groups, 256) == geometry.page_bytes(256)
    uneven = [LayerGroup("mla", 61, 78_324)]
    assert group_page_bytes(uneven, 1) == 78_324


def test_ranks_hold_their_share() -> None:
    one, four = geometry_of("Gemma-3-12B"), geometry_of("Gemma-3-12B", tp_size=4)
    assert page_groups(one.groups, 16) == page_groups(four.groups, 16)
    assert group_page_bytes(one.groups, 16) == 4 * group_page_bytes(four.groups, 16)


def test_states_take_pages_of_the_same_size() -> None:
    geometry = geometry_of("Qwen3-Next-80B")
    full, linear = page_groups(geometry.groups, 256)
    assert (full.kind, full.num_layers, linear.kind, linear.num_layers) == ("full", 12, "linear", 36)
    page = group_page_bytes(geometry.groups, 256)
    assert (linear.state_pages - 1) * page < geometry.bytes_per_sequence <= linear.state_pages * page
    assert num_pages((full, linear), 1000, 256) == 4 + linear.state_pages
    assert num_pages((full, linear), 0, 256) == 0


def test_bytes_given_by_hand_are_one_group() -> None:
    geometry = kv_geometry({}, bytes_per_token=1000)
    assert page_groups(geometry.groups, 16) == (PageGroup("full", 0),)
    assert group_page_bytes(geometry.groups, 16) == 16_000
    assert group_page_bytes([], 16) == 0


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1), st.integers(1, 64))
@unhurried
def test_groups_share_one_page_size_and_lose_no_layer(kinds: list[tuple[int, int]], chunk_size: int) -> None:
    """One kind per window, each of so many layers of so many bytes."""
    layers = [LayerGroup("sliding", count, count * size, window) for window, (count, size) in enumerate(kinds, 8)]
    groups = page_groups(layers, chunk_size)
    page = group_page_bytes(layers, chunk_size)
    smallest = min(layer.bytes_per_token for layer in layers) * chunk_size
    for layer, (count, size) in zip(layers, kinds, strict=True):
        ours = [group.num_layers for group in groups if group.window == layer.window]
        assert sum(ours) == count
        assert len(set(ours[:-1])) <= 1
        assert all(num_layers * size * chunk_size <= page for num_layers in ours)
    assert page <= max(smallest, *(size * chunk_size for _, size in kinds)), "one layer, or the smallest kind, fills it"


# ── the model that asks token by token ──────────────────────────────────────────────────────────────────────────────


def is_read_later(kind: str, window: int | None, position: int, num_tokens: int) -> bool:
    """Will a token behind the prompt attend to `position`? One that is not there yet is read by itself."""
    later = range(max(num_tokens, position), max(num_tokens, position) + 2 * (window or 1) + 2)
    if kind == "full":
        return True
    assert window is not None
    if kind == "sliding":
        return any(token - window < position for token in later)
    return any(token // window == position // window for token in later)


def blocks_by_hand(kind: str, window: int | None, num_tokens: int, size: int) -> tuple[int, int]:
    """`(null, real)`: blocks of which nothing is read later, and the others."""
    blocks = [range(first, first + size) for first in range(0, num_tokens, size)]
    wanted = [any(is_read_later(kind, window, token, num_tokens) for token in block) for block in blocks]
    null = wanted.index(True) if True in wanted else len(wanted)
    assert all(wanted[null:]), "what is not read lies in front"
    return null, len(wanted) - null


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
@pytest.mark.parametrize(
    ("window", "size"), [(8, 4), (7, 4), (9, 4), (4, 8), (1, 4), (2, 4), (16, 16), (5, 1), (12, 5)]
)
def test_every_length_around_windows_and_blocks(kind: str, window: int, size: int) -> None:
    limit = None if kind == "full" else window
    for num_tokens in range(1, 4 * max(window, size) + 3):
        expected = blocks_by_hand(kind, limit, num_tokens, size)
        assert block_counts(kind, num_tokens, limit, size) == expected, num_tokens
        assert PageGroup(kind, 3, limit).blocks(num_tokens, size) == expected, num_tokens


GROUPS = [
    (FULL,),
    (PageGroup("sliding", 8, 12),),
    (PageGroup("chunked", 8, 16),),
    (PageGroup("chunked", 8, 10),),
    (FULL, PageGroup("sliding", 8, 12), PageGroup("sliding", 2, 12)),
    (FULL, PageGroup("chunked", 8, 16)),
    (FULL, PageGroup("linear", 4, state_pages=3)),
    (PageGroup("sliding", 8, 9), PageGroup("linear", 4, state_pages=3)),
    (PageGroup("sliding", 8, 1),),
    (PageGroup("linear", 4, state_pages=3),),
]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 4, 5])
def test_the_longest_prompt(groups: tuple[PageGroup, ...], chunk_size: int) -> None:
    """Everything up to it fits. Where no layer is windowed, one token more does not."""
    needed = [num_pages(groups, n, chunk_size) for n in range(200)]
    for pages in range(20):
        longest = max_prompt_tokens(groups, pages, chunk_size)
        first_too_long = next((n for n, count in enumerate(needed) if count > pages), None)
        if longest is None:
            assert first_too_long is None, pages
            continue
        assert first_too_long is None or longest < first_too_long, pages
        if not any(group.window for group in groups):
            assert first_too_long is None or longest == first_too_long - 1, pages
        elif first_too_long is None:  # the worst alignment is one that this window never has
            assert pages < most_pages(groups, 1 << 40, chunk_size)
        else:
            assert first_too_long - longest <= 2 * chunk_size + max(group.window or 0 for group in groups), pages


@given(st.sampled_from(GROUPS), st.integers(0, 300), st.integers(1, 20))
@unhurried
def test_most_pages_is_enough_and_never_falls(groups: tuple[PageGroup, ...], num_tokens: int, chunk_size: int) -> None:
    most = most_pages(groups, num_tokens, chunk_size)
    assert all(num_pages(groups, n, chunk_size) <= most for n in range(num_tokens + 1))
    assert most <= most_pages(groups, num_tokens + 1, chunk_size)


def test_one_full_group_is_counted_as_ever() -> None:
    for num_tokens in range(1, 100):
        assert num_pages([FULL], num_tokens, 16) == most_pages([FULL], num_tokens, 16) == ceil(num_tokens / 16)
    assert max_prompt_tokens([FULL], 64, 256) == 16_384


def test_refusals() -> None:
    with pytest.raises(GeometryError, match="pages"):
        max_prompt_tokens([FULL], -1, 16)
    with pytest.raises(GeometryError, match="chunk_size"):
        group_page_bytes([LayerGroup("full", 1, 1)], 0)
    with pytest.raises(GeometryError, match="need a window"):
        PageGroup("sliding", 1).blocks(5, 16)
