"""The paged cache holds what transformers' own cache holds, wherever its pages lie."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer

from transfer.engine.paged_cache import (
    CacheLayout,
    LayerShape,
    PagedLayer,
    PagedStore,
    observe_layout,
    sequence_cache,
)
from transfer.engine.tiny import Family, make_tiny_model
from transfer.errors import GeometryError

CPU = torch.device("cpu")
CHUNK = 4
NUM_PAGES = 12

SAME = LayerShape(heads=2, key_dim=8, value_dim=8)
UNEVEN = LayerShape(heads=3, key_dim=6, value_dim=4)
LAYOUT = CacheLayout(layers=(SAME, None, UNEVEN), chunk_size=CHUNK, dtype=torch.float32)


def new_store(layout: CacheLayout = LAYOUT) -> PagedStore:
    store = PagedStore(layout, NUM_PAGES, CPU)
    store.buffer.pages.fill_(0xA5)  # whatever was there before must not be seen
    return store


def tokens(shape: LayerShape, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, shape.heads, count, shape.key_dim), torch.randn(1, shape.heads, count, shape.value_dim)


# ── layers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 11), min_size=1, max_size=8), st.integers(0, 2**31))
def test_random_writes_read_back_as_from_a_dynamic_cache(sizes: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    pages = list(range(2 * NUM_PAGES))
    random.Random(seed).shuffle(pages)
    for shape in (SAME, UNEVEN):
        layout = CacheLayout(layers=(shape,), chunk_size=CHUNK, dtype=torch.float32)
        store = PagedStore(layout, len(pages), CPU)
        (views,) = store.views
        assert views is not None
        ours, theirs = PagedLayer(*views, pages, 0), DynamicLayer()
        for size in sizes:
            written = tokens(shape, size)
            for got, expected in zip(ours.update(*written), theirs.update(*written), strict=True):
                assert torch.equal(got, expected)
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)


def test_two_sequences_do_not_disturb_each_other() -> None:
    store = new_store()
    one, other = ([3, 0, 7], [1, 8, 2])
    kept = {}
    for pages in (one, other):
        for index, shape in ((0, SAME), (2, UNEVEN)):
            views = store.views[index]
            assert views is not None
            kept[pages[0], index] = PagedLayer(*views, pages, 0).update(*tokens(shape, 10))
    for pages in (one, other):
        for index, shape in ((0, SAME), (2, UNEVEN)):
            views = store.views[index]
            assert views is not None
            layer = PagedLayer(*views, pages, 9)
            last = [states[:, :, 9:] for states in kept[pages[0], index]]
            for got, expected in zip(layer.update(*last), kept[pages[0], index], strict=True):
                assert torch.equal(got, expected), shape
    untouched = [page for page in range(NUM_PAGES) if page not in one + other]
    assert (store.buffer.pages[untouched] == 0xA5).all()


def test_a_page_copied_as_bytes_continues_a_sequence_elsewhere() -> None:
    """What the transfer does: the same bytes under other page numbers are the same KV."""
    source, target = new_store(), new_store()
    cache = sequence_cache(source, [5, 2, 9], 0)
    written = {index: tokens(shape, 10) for index, shape in ((0, SAME), (2, UNEVEN))}
    for index, states in written.items():
        cache.update(*states, index)
    target.copy_in(source.buffer.pages, [5, 2, 9], [0, 11, 4])

    continued = sequence_cache(target, [0, 11, 4], 10)
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
    views = store.views[0]
    assert views is not None
    pages = [4]
    layer = PagedLayer(*views, pages, 0)
    layer.update(*tokens(SAME, CHUNK))
    pages.append(1)
    keys, _ = layer.update(*tokens(SAME, 1))
    assert keys.shape == (1, 2, CHUNK + 1, 8)


# ── layout ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_arithmetic_of_a_layout() -> None:
    assert LAYOUT.bytes_per_token == (2 * 16 + 3 * 10) * 4
    assert LAYOUT.page_bytes == CHUNK * LAYOUT.bytes_per_token
    assert [LAYOUT.pages_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    store = PagedStore(LAYOUT, 2, CPU)
    assert [v if v is None else (v[0].shape, v[1].shape) for v in store.views] == [
        ((2, 2, 4, 8), (2, 2, 4, 8)),
        None,
        ((2, 3, 4, 6), (2, 3, 4, 4)),
    ]


def test_every_byte_of_a_page_belongs_to_one_layer() -> None:
    store = new_store()
    for mark, views in enumerate((v for v in store.views if v), start=1):
        for view in views:
            assert (view.flatten().view(torch.uint8) == 0xA5).all(), "written by another layer"
            view.fill_(float(mark))
    assert set(store.buffer.pages.view(torch.float32).flatten().tolist()) == {1.0, 2.0}, "no byte is left over"


@pytest.mark.parametrize(
    "other",
    [
        CacheLayout((SAME, UNEVEN), CHUNK, torch.float32),
        CacheLayout((UNEVEN, None, SAME), CHUNK, torch.float32),
        CacheLayout((SAME, None, LayerShape(3, 4, 6)), CHUNK, torch.float32),
    ],
)
def test_layouts_that_differ_are_described_differently(other: CacheLayout) -> None:
    assert LAYOUT.describe() == CacheLayout((SAME, None, UNEVEN), CHUNK, torch.float32).describe()
    assert LAYOUT.describe() != other.describe()


EXPECTED = {
    Family.LLAMA: [LayerShape(2, 16, 16)] * 4,
    Family.GEMMA3: [LayerShape(2, 16, 16)] * 6,
    Family.MISTRAL: [LayerShape(2, 16, 16)] * 4,
    Family.QWEN3: [LayerShape(2, 32, 32)] * 4,
    Family.DEEPSEEK: [LayerShape(1, 32, 8)] * 3,  # what its attention caches: the latent, and the rotary part
}


@pytest.fixture(scope="module", params=Family, ids=lambda family: family.value)
def family_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Any]:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("model"), request.param)
    return request.param, AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def test_observed_layouts(family_model: tuple[Family, Any]) -> None:
    family, model = family_model
    layout = observe_layout(model, CHUNK)
    assert layout.dtype == torch.float32
    assert list(layout.layers) == EXPECTED[family]


@torch.inference_mode()
def test_a_model_computes_the_same_with_paged_and_dynamic_cache(family_model: tuple[Family, Any]) -> None:
    """The prompt in chunks, then token by token, beyond the window where there is one."""
    _, model = family_model
    layout = observe_layout(model, 16)
    store = PagedStore(layout, 8, CPU)
    ids = torch.randint(6, 512, (1, 90), generator=torch.Generator().manual_seed(1))
    pages, dynamic = [6, 1, 4, 0, 7, 3], DynamicCache(config=model.config)
    bounds = [0, 16, 32, 48, 64, 80, *range(81, 91)]
    for start, end in pairwise(bounds):
        cache = sequence_cache(store, pages, start)
        ours = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True).logits
        theirs = model(input_ids=ids[:, start:end], past_key_values=dynamic, use_cache=True).logits
        torch.testing.assert_close(ours[:, -1], theirs[:, -1], rtol=1e-4, atol=1e-3)
        assert ours[0, -1].argmax() == theirs[0, -1].argmax()


def test_half_precision_is_half_the_bytes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", dtype="bfloat16")
    layout = observe_layout(AutoModelForCausalLM.from_pretrained(folder, local_files_only=True), CHUNK)
    assert layout.dtype == torch.bfloat16
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
    assert layout.layers == (LayerShape(2, 8, 8), LayerShape(2, 8, 8), None, None)
    store = PagedStore(layout, 1, CPU)
    assert isinstance(sequence_cache(store, [0], 0).layers[3], DummyLayer)


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
