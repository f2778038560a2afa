"""The paged cache holds what transformers' own cache holds, wherever its pages lie."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from transfer.engine import paged_cache
from transfer.engine.cache_need import cache_need
from transfer.engine.paged_cache import PagedLayer, PagedStore, observe_layout, sequence_cache
from transfer.engine.tiny import Family, make_tiny_model
from transfer.errors import GeometryError, IntegrityError
from transfer.geometry import LayerGroup, PageGroup, kv_geometry
from transfer.plan.layout import KvLayout, LayerKv

CPU = torch.device("cpu")
CHUNK = 4
NUM_PAGES = 12

SAME = LayerKv(2, 8, 8)
UNEVEN = LayerKv(3, 6, 4)
FULL = PageGroup("full", 1)


def layout_of(*layers: LayerKv | None) -> KvLayout:
    return KvLayout(layers, CHUNK, 4, "float32")


LAYOUT = layout_of(SAME, None, UNEVEN)


def new_store(layout: KvLayout = LAYOUT, num_pages: int = NUM_PAGES) -> PagedStore:
    store = PagedStore(layout.of_rank(), num_pages, CPU)
    store.buffer.pages.fill_(0xA5)  # whatever was there before must not be seen
    return store


def layer_of(
    store: PagedStore, index: int, pages: list[int | None], length: int = 0, group: PageGroup = FULL
) -> PagedLayer:
    views = store.views[index]
    assert views is not None
    return PagedLayer(views, pages, length, group)


def tokens(shape: LayerKv, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, shape.num_heads, count, shape.key_dim), torch.randn(
        1, shape.num_heads, count, shape.value_dim
    )


# ── layers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 11), min_size=1, max_size=8), st.integers(0, 2**31))
def test_random_writes_read_back_as_from_a_dynamic_cache(sizes: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    pages: list[int | None] = list(range(2 * NUM_PAGES))
    random.Random(seed).shuffle(pages)
    for shape in (SAME, UNEVEN):
        ours, theirs = layer_of(new_store(layout_of(shape), len(pages)), 0, pages), DynamicLayer()
        for size in sizes:
            written = tokens(shape, size)
            for got, expected in zip(ours.update(*written), theirs.update(*written), strict=True):
                assert torch.equal(got, expected)
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 15), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31))
def test_a_sliding_layer_reads_as_transformers_own(window: int, num_prompt: int, num_answer: int, seed: int) -> None:
    """The prompt chunk by chunk, then token by token, in no more pages than such a sequence is given."""
    torch.manual_seed(seed)
    group = PageGroup("sliding", 1, window)
    need = cache_need((group,), CHUNK, num_prompt + num_answer)
    store = new_store(layout_of(LayerKv(2, 8, 8, "sliding", window)), need.num_pages)
    (table,) = need.tables(range(need.num_pages))
    ours, theirs = layer_of(store, 0, table, 0, group), DynamicSlidingWindowLayer(window)
    assert ours.is_sliding
    for count in [min(CHUNK, num_prompt - start) for start in range(0, num_prompt, CHUNK)] + [1] * num_answer:
        written = tokens(SAME, count)
        assert ours.get_mask_sizes(count) == theirs.get_mask_sizes(count)
        for got, expected in zip(ours.update(*written), theirs.update(*written), strict=True):
            assert torch.equal(got, expected)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_a_chunked_layer_reads_from_the_running_chunk_on() -> None:
    store = new_store(layout_of(LayerKv(2, 8, 8, "chunked", 6)))
    layer = layer_of(store, 0, [1, 0, 2], 0, PageGroup("chunked", 1, 6))
    keys, _ = layer.update(*tokens(SAME, 8))
    assert (keys.shape[2], layer.get_mask_sizes(1)) == (8, (3, 6)), "tokens 6 to 8: the chunk is 6 to 11"
    following, _ = layer.update(*tokens(SAME, 4))
    assert torch.equal(following[:, :, :2], keys[:, :, 6:])
    assert layer.get_mask_sizes(1) == (1, 12), "a new chunk has begun"


def test_a_null_block_is_never_read_or_written() -> None:
    store = new_store(layout_of(SAME))
    with pytest.raises(IntegrityError, match="blocks 0 to 1"):
        layer_of(store, 0, [None, 3]).update(*tokens(SAME, 1))
    with pytest.raises(IntegrityError, match="blocks 0 to 3, and only 2"):
        layer_of(store, 0, [None, 3, 4], 8).update(*tokens(SAME, 1))
    with pytest.raises(IntegrityError, match="blocks 1 to 2"):
        layer_of(store, 0, [3], 4).update(*tokens(SAME, 1))


def test_each_layer_tells_when_it_is_written() -> None:
    layout = layout_of(LayerKv(2, 8, 8, "sliding", 6), SAME, None, LayerKv(2, 8, 8, "sliding", 6))
    told: list[tuple[int, int]] = []
    cache = sequence_cache(new_store(layout), [[0], [1], [2]], 0, lambda *layer: told.append(layer))
    for index in (0, 1, 3):
        cache.update(*tokens(SAME, 3), index)
    assert told == [(1, 0), (0, 0), (2, 0)], "one full layer, so groups of one"


def test_two_sequences_do_not_disturb_each_other() -> None:
    store = new_store()
    one, other = ([3, 0, 7], [1, 8, 2])
    kept = {}
    for pages in (one, other):
        for index, shape in ((0, SAME), (2, UNEVEN)):
            kept[pages[0], index] = layer_of(store, index, [*pages]).update(*tokens(shape, 10))
    for pages in (one, other):
        for index, shape in ((0, SAME), (2, UNEVEN)):
            layer = layer_of(store, index, [*pages], 9)
            last = [states[:, :, 9:] for states in kept[pages[0], index]]
            for got, expected in zip(layer.update(*last), kept[pages[0], index], strict=True):
                assert torch.equal(got, expected), shape
    untouched = [page for page in range(NUM_PAGES) if page not in one + other]
    assert (store.buffer.pages[untouched] == 0xA5).all()


def test_a_page_copied_as_bytes_continues_a_sequence_elsewhere() -> None:
    """What the transfer does: the same bytes under other page numbers are the same KV."""
    source, target = new_store(), new_store()
    cache = sequence_cache(source, [[5, 2, 9]], 0)
    written = {index: tokens(shape, 10) for index, shape in ((0, SAME), (2, UNEVEN))}
    for index, states in written.items():
        cache.update(*states, index)
    target.copy_in(source.buffer.pages, [5, 2, 9], [0, 11, 4])

    continued = sequence_cache(target, [[0, 11, 4]], 10)
    assert continued.get_seq_length() == 10
    for index, shape in ((0, SAME), (2, UNEVEN)):
        more = tokens(shape, 1)
        got = continued.update(*more, index)
        for ours, before, new in zip(got, written[index], more, strict=True):
            assert torch.equal(ours, torch.cat([before, new], dim=2))


def test_copying_needs_a_page_for_each_page() -> None:
    store = new_store()
    with pytest.raises(ValueError, match="zip"):
        store.copy_in(new_store().buffer.pages, [0, 1], [0])


def test_pages_may_come_while_the_sequence_grows() -> None:
    store = new_store()
    pages: list[int | None] = [4]
    layer = layer_of(store, 0, pages)
    layer.update(*tokens(SAME, CHUNK))
    pages.append(1)
    keys, _ = layer.update(*tokens(SAME, 1))
    assert keys.shape == (1, 2, CHUNK + 1, 8)


# ── layout ──────────────────────────────────────────────────────────────────────────────────────────────────────────


SLIDING, CHUNKED = LayerKv(2, 16, 16, "sliding", 64), LayerKv(2, 16, 16, "chunked", 64)
EXPECTED = {
    Family.LLAMA: [LayerKv(2, 16, 16)] * 4,
    Family.GEMMA3: [SLIDING, SLIDING, LayerKv(2, 16, 16)] * 2,
    Family.MISTRAL: [SLIDING] * 4,
    Family.QWEN3: [LayerKv(2, 32, 32)] * 4,
    Family.DEEPSEEK: [LayerKv(1, 32, 8, "mla")] * 3,  # what its attention caches: the latent, and the rotary part
    Family.GPT_OSS: [SLIDING, LayerKv(2, 16, 16)] * 2,
    Family.LLAMA4: [CHUNKED, LayerKv(2, 16, 16)] * 3,
}


@pytest.fixture(scope="module", params=EXPECTED, ids=lambda family: family.value)
def family_model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> tuple[Family, Any]:
    folder = tiny_model(request.param)
    return request.param, AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def test_observed_layouts(family_model: tuple[Family, Any]) -> None:
    family, model = family_model
    layout = observe_layout(model, CHUNK)
    assert (layout.dtype, layout.element_bytes, layout.chunk_size) == ("float32", 4, CHUNK)
    assert list(layout.layers) == EXPECTED[family]
    assert layout.bytes_per_token == kv_geometry(model.config).bytes_per_token


@torch.inference_mode()
def test_a_model_computes_the_same_with_paged_and_dynamic_cache(family_model: tuple[Family, Any]) -> None:
    """The prompt in chunks, then token by token, beyond the window where there is one."""
    _, model = family_model
    groups = (layout := observe_layout(model, 16)).groups
    need = cache_need(groups, 16, 96)
    store = new_store(layout, need.num_pages)
    ids = torch.randint(6, 512, (1, 90), generator=torch.Generator().manual_seed(1))
    tables, dynamic = need.tables(range(need.num_pages)[::-1]), DynamicCache(config=model.config)
    bounds = [0, 16, 32, 48, 64, 80, *range(81, 91)]
    for start, end in pairwise(bounds):
        cache = sequence_cache(store, tables, start)
        ours = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True).logits
        theirs = model(input_ids=ids[:, start:end], past_key_values=dynamic, use_cache=True).logits
        torch.testing.assert_close(ours[:, -1], theirs[:, -1], rtol=1e-4, atol=1e-3)
        assert ours[0, -1].argmax() == theirs[0, -1].argmax()


def test_half_precision_is_half_the_bytes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", dtype="bfloat16")
    layout = observe_layout(AutoModelForCausalLM.from_pretrained(folder, local_files_only=True), CHUNK)
    assert layout.dtype == "bfloat16"
    assert layout.bytes_per_token == 4 * 2 * (16 + 16) * 2


def small(model_type: str, **shape: Any) -> Any:
    config = AutoConfig.for_model(
        model_type, vocab_size=64, bos_token_id=0, eos_token_id=1, pad_token_id=2, **{"hidden_size": 32} | shape
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_layers_that_share_anothers_kv_keep_none() -> None:
    model = small(
        "gemma3n_text",
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=[64] * 4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
    )
    layout = observe_layout(model, CHUNK)
    window = model.config.sliding_window
    assert layout.layers == (LayerKv(2, 8, 8, "sliding", window), LayerKv(2, 8, 8), None, None)
    store = PagedStore(layout.of_rank(), 2, CPU)
    assert isinstance(sequence_cache(store, [[0], [1]], 0).layers[3], DummyLayer)


def test_a_state_space_model_is_refused() -> None:
    with pytest.raises(GeometryError, match=r"layer 0 keeps its state in a Linear.* attention KV only"):
        observe_layout(small("mamba", num_hidden_layers=2, state_size=8), CHUNK)


def test_a_hybrid_of_state_space_and_attention_is_refused() -> None:
    model = small(
        "lfm2",
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        layer_types=["full_attention", "conv"],
    )
    with pytest.raises(GeometryError, match="layer 1"):
        observe_layout(model, CHUNK)


def test_a_model_that_ignores_the_cache_is_refused() -> None:
    with pytest.raises(GeometryError, match="puts no keys and values into the cache"):
        observe_layout(small("rwkv", num_hidden_layers=2, attention_hidden_size=32), CHUNK)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            [LayerGroup("full", 1, 128), LayerGroup("full", 1, 256)],
            r"stores 512 B .* its config says 384 \(latent\) or",
        ),
        ([LayerGroup("full", 1, 256), None], "its config says 256"),
        ([LayerGroup("full", 1, 256), LayerGroup("sliding", 1, 256, 9)], "layer 1 has a window of 9 .* keeps None"),
    ],
)
def test_a_config_that_tells_another_story_is_refused(
    said: list[LayerGroup | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    model = small("llama", **shape)
    monkeypatch.setattr(paged_cache, "layer_groups", lambda *_, **__: said)
    with pytest.raises(GeometryError, match=message):
        observe_layout(model, CHUNK)


def test_windows_that_differ_are_refused() -> None:
    """transformers makes its one mask of the first of them."""
    kinds = [LayerGroup("sliding", 1, 256, window) for window in (8, 16)]
    layers = [DynamicSlidingWindowLayer(window) for window in (8, 16)]
    with pytest.raises(GeometryError, match="different windows"):
        paged_cache._check_windows(kinds, layers)
