"""The KV of real models, from their published hyper-parameters, and every way in which a config can be of no help."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from transfer.geometry import (
    GeometryError,
    KvGeometry,
    LayerGroup,
    block_counts,
    capacity,
    kv_geometry,
    load_config,
    num_skipped_tokens,
    parse_size,
)
from transfer.geometry.model import ByHand, Model

# ── published models ────────────────────────────────────────────────────────────────────────────────────────────────


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def latent(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    mla = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    return sizes(layers, hidden, heads, heads, **mla, **more)


@dataclass(frozen=True)
class Published:
    name: str
    model_type: str
    config: dict[str, Any]
    """What the model's config.json says about KV; the rest is left to the class, as it is there."""
    groups: tuple[tuple[Any, ...], ...]
    """`(kind, layers, bytes per token, window, bytes per sequence)` in bfloat16 on one rank."""

    @property
    def json(self) -> dict[str, Any]:
        return {"model_type": self.model_type, "torch_dtype": "bfloat16", **self.config}

    def config_object(self) -> Any:
        return CONFIG_MAPPING[self.model_type](dtype="bfloat16", **self.config)


def full(layers: int, num_bytes: int) -> tuple[Any, ...]:
    return ("full", layers, num_bytes, None, 0)


GEMMA_3_12B = {"text_config": sizes(48, 3840, 16, 8, model_type="gemma3_text", sliding_window=1024)}
SCOUT = {"text_config": sizes(48, 5120, 40, 8, model_type="llama4_text", head_dim=128, attention_chunk_size=8192)}

MODELS = [
    Published("Llama-3.1-8B", "llama", sizes(32, 4096, 32, 8), (full(32, 131_072),)),
    Published("Llama-3-70B", "llama", sizes(80, 8192, 64, 8), (full(80, 327_680),)),
    Published("Llama-3.1-405B", "llama", sizes(126, 16_384, 128, 8), (full(126, 516_096),)),
    Published("Mixtral-8x7B", "mixtral", sizes(32, 4096, 32, 8, sliding_window=None), (full(32, 131_072),)),
    Published(
        "Mistral-7B-v0.1",
        "mistral",
        sizes(32, 4096, 32, 8, sliding_window=4096),
        (("sliding", 32, 131_072, 4096, 0),),
    ),
    Published("Phi-3-mini", "phi3", sizes(32, 3072, 32, 32, sliding_window=2047), (("sliding", 32, 393_216, 2047, 0),)),
    Published(
        "Qwen2.5-7B",
        "qwen2",
        sizes(28, 3584, 28, 4, sliding_window=131_072, use_sliding_window=False, max_window_layers=28),
        (full(28, 57_344),),
    ),
    Published(
        "Qwen2 with its window",
        "qwen2",
        sizes(28, 3584, 28, 4, sliding_window=4096, use_sliding_window=True, max_window_layers=21),
        (full(21, 43_008), ("sliding", 7, 14_336, 4096, 0)),
    ),
    Published("Qwen3-8B", "qwen3", sizes(36, 4096, 32, 8, head_dim=128), (full(36, 147_456),)),
    Published("Qwen3-30B-A3B", "qwen3_moe", sizes(48, 2048, 32, 4, head_dim=128), (full(48, 98_304),)),
    Published("Qwen3-235B-A22B", "qwen3_moe", sizes(94, 4096, 64, 4, head_dim=128), (full(94, 192_512),)),
    Published("GPT-2", "gpt2", {"n_layer": 12, "n_head": 12, "n_embd": 768}, (full(12, 36_864),)),
    Published(
        "Falcon-7B",
        "falcon",
        {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "multi_query": True},
        (full(32, 8192),),
    ),
    Published(
        "Falcon-40B",
        "falcon",
        {
            "num_hidden_layers": 60,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
        (full(60, 122_880),),
    ),
    Published("DeepSeek-V3", "deepseek_v3", latent(61, 7168, 128), (("mla", 61, 70_272, None, 0),)),
    Published("DeepSeek-V2-Lite", "deepseek_v2", latent(27, 2048, 16), (("mla", 27, 31_104, None, 0),)),
    Published(
        "DeepSeek-V3.2",
        "deepseek_v32",
        latent(61, 7168, 128, index_topk=2048, index_head_dim=128, index_n_heads=64),
        (("mla", 61, 78_324, None, 0),),
    ),
    Published("LongCat-Flash", "longcat_flash", {"num_layers": 28}, (("mla", 56, 64_512, None, 0),)),
    Published("GLM-4.5-Air", "glm4_moe", sizes(46, 4096, 96, 8, head_dim=128), (full(46, 188_416),)),
    Published("Gemma-3-12B", "gemma3", GEMMA_3_12B, (full(8, 65_536), ("sliding", 40, 327_680, 1024, 0))),
    Published(
        "Gemma-2-9B",
        "gemma2",
        sizes(42, 3584, 16, 8, head_dim=256, sliding_window=4096),
        (full(21, 172_032), ("sliding", 21, 172_032, 4096, 0)),
    ),
    Published(
        "Gemma-3n-E4B",
        "gemma3n",
        {"text_config": sizes(35, 2048, 8, 2, head_dim=256, sliding_window=512, num_kv_shared_layers=15)},
        (full(4, 8192), ("sliding", 16, 32_768, 512, 0)),
    ),
    Published(
        "Gemma-4",
        "gemma4",
        {"text_config": sizes(30, 2304, 8, 4, head_dim=256, global_head_dim=512, sliding_window=512)},
        (full(5, 40_960), ("sliding", 25, 102_400, 512, 0)),
    ),
    Published(
        "gpt-oss-120b",
        "gpt_oss",
        sizes(36, 2880, 64, 8, head_dim=64, sliding_window=128),
        (full(18, 36_864), ("sliding", 18, 36_864, 128, 0)),
    ),
    Published("Llama-4-Scout", "llama4", SCOUT, (full(12, 49_152), ("chunked", 36, 147_456, 8192, 0))),
    Published(
        "MiMo-V2-Flash",
        "mimo_v2_flash",
        sizes(48, 4096, 64, 4, head_dim=192, v_head_dim=128, sliding_window=128),
        (full(9, 23_040), ("sliding", 39, 199_680, 128, 0)),
    ),
    Published(
        "Qwen3-Next-80B",
        "qwen3_next",
        sizes(48, 2048, 16, 2, head_dim=256),
        (full(12, 24_576), ("linear", 36, 0, None, 77_266_944)),
    ),
    Published(
        "Jamba-v0.1",
        "jamba",
        sizes(32, 4096, 32, 8),
        (full(4, 16_384), ("linear", 28, 0, None, 16_056_320)),
    ),
]

unhurried = settings(deadline=None)
published = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def by_name(name: str) -> Any:
    return next(model for model in MODELS if model.name == name).config_object()


@published
def test_published_models(model: Published) -> None:
    assert kv_geometry(model.config_object()).groups == tuple(LayerGroup(*group) for group in model.groups)


@published
def test_json_and_class_agree(model: Published) -> None:
    config = model.config_object()
    expected = kv_geometry(config)

    assert kv_geometry(model.json) == expected
    assert kv_geometry(json.loads(config.to_json_string(use_diff=False))) == expected
    assert kv_geometry(json.loads(config.to_json_string())) == expected


# MiMo's class doubles the windowed layers' KV heads without an attribute that says so; its own JSON has one, see below.
@pytest.mark.parametrize("model", [m for m in MODELS if m.name != "MiMo-V2-Flash"], ids=lambda model: model.name)
def test_an_unheard_of_model_type_is_read_the_same_or_refused(model: Published) -> None:
    """What transformers cannot complete must not come out as another number."""
    raw = json.loads(model.config_object().to_json_string(use_diff=False))
    for part in (raw, raw.get("text_config", {})):
        part["model_type"] = "unheard_of"
    try:
        geometry = kv_geometry(raw)
    except GeometryError:
        return
    assert geometry == kv_geometry(model.config_object())


@pytest.mark.parametrize(
    ("name", "tp_size", "per_rank"),
    [
        ("Llama-3-70B", 8, 40_960),
        ("Llama-3-70B", 16, 40_960),
        ("Llama-3.1-8B", 2, 65_536),
        ("Qwen3-235B-A22B", 2, 96_256),
        ("Qwen3-235B-A22B", 4, 48_128),
        ("Qwen3-235B-A22B", 8, 48_128),
        ("Falcon-7B", 4, 8192),
        ("DeepSeek-V3", 1, 70_272),
        ("DeepSeek-V3", 8, 70_272),
        ("DeepSeek-V3.2", 8, 78_324),
    ],
)
def test_one_rank(name: str, tp_size: int, per_rank: int) -> None:
    assert kv_geometry(by_name(name), tp_size=tp_size).bytes_per_token == per_rank


def test_states_are_divided_over_ranks() -> None:
    whole, half = (kv_geometry(by_name("Qwen3-Next-80B"), tp_size=n).bytes_per_sequence for n in (1, 2))
    assert half * 2 == whole
    whole, half = (kv_geometry(by_name("Jamba-v0.1"), tp_size=n).bytes_per_sequence for n in (1, 2))
    assert half * 2 == whole


@pytest.mark.parametrize(
    ("name", "tp_size", "message"),
    [
        ("Llama-3.1-8B", 3, "8 KV heads can be neither divided over nor repeated on 3 ranks"),
        ("Qwen3-Next-80B", 64, "linear_num_value_heads = 32 cannot be divided over 64 ranks"),
        ("Llama-3.1-8B", 0, "tp_size must be at least 1"),
    ],
)
def test_ranks_that_cannot_be(name: str, tp_size: int, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        kv_geometry(by_name(name), tp_size=tp_size)


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "expected"),
    [
        ("Llama-3.1-8B", "fp8", 65_536),
        ("Llama-3.1-8B", "fp8_e4m3", 65_536),
        ("Llama-3.1-8B", "auto", 131_072),
        ("Llama-3.1-8B", "float64", 524_288),
        ("Llama-3.1-8B", "float32", 262_144),
        ("DeepSeek-V3", "fp8", 35_136),
        ("DeepSeek-V3.2", "fp8", 61 * (576 + 132)),
    ],
)
def test_kv_cache_dtype(name: str, kv_cache_dtype: str, expected: int) -> None:
    assert kv_geometry(by_name(name), kv_cache_dtype=kv_cache_dtype).bytes_per_token == expected


def test_fp8_kv_leaves_states_as_they_are() -> None:
    config = by_name("Jamba-v0.1")
    assert kv_geometry(config, kv_cache_dtype="fp8").bytes_per_sequence == kv_geometry(config).bytes_per_sequence


def test_expanded_latent_is_keys_and_values_of_every_head() -> None:
    config = by_name("DeepSeek-V3")
    whole = kv_geometry(config, cache="expanded")
    assert whole.groups == (LayerGroup("full", 61, 61 * 128 * (128 + 64 + 128) * 2),)
    assert kv_geometry(config, cache="expanded", tp_size=8).bytes_per_token * 8 == whole.bytes_per_token
    with pytest.raises(GeometryError, match="'latent' or 'expanded'"):
        kv_geometry(config, cache="compressed")


# ── configs that mislead ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v2", "glm4_moe_lite", "kimi_linearly"])
def test_head_dim_of_a_latent_config_is_not_believed(model_type: str) -> None:
    raw = {"model_type": model_type, "head_dim": 192, "torch_dtype": "bfloat16", **latent(10, 2048, 16)}
    assert kv_geometry(raw).bytes_per_token == 10 * 576 * 2


def test_a_latent_text_part_is_found_in_an_unknown_whole() -> None:
    text = {"model_type": "deepseek_v3", "head_dim": 192, **latent(61, 7168, 128)}
    geometry = kv_geometry({"model_type": "some_vlm", "dtype": "bfloat16", "text_config": text})
    assert geometry.bytes_per_token == 70_272


def test_layers_that_reuse_an_indexers_choice_keep_no_index_key() -> None:
    raw = {"model_type": "glm_moe_dsa", "dtype": "bfloat16", **latent(4, 2048, 16)}
    geometry = kv_geometry({**raw, "indexer_types": ["full", "full", "shared", "shared"]})
    assert geometry.bytes_per_token == 4 * 576 * 2 + 2 * 132


def test_mimo_as_its_own_json_has_it() -> None:
    own = {"swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128}
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    raw = sizes(3, 4096, 64, 4, head_dim=192, v_head_dim=128, sliding_window=128, layer_types=types, **own)
    geometry = kv_geometry({"model_type": "unheard_of", "dtype": "bfloat16", **raw})
    assert geometry.groups == (LayerGroup("full", 1, 2560), LayerGroup("sliding", 2, 2 * 5120, 128))


def test_windowed_latents_have_no_indexer() -> None:
    types = ["indexed_attention", "sliding_attention"]
    raw = latent(2, 2048, 16, index_head_dim=128, layer_types=types, sliding_window=512)
    geometry = kv_geometry({"model_type": "unheard_of", "dtype": "bfloat16", **raw})
    assert geometry.groups == (LayerGroup("mla", 1, 576 * 2 + 132), LayerGroup("sliding", 1, 576 * 2, 512))


@pytest.mark.parametrize("dtype", [{"dtype": "float16"}, {"torch_dtype": "float16"}])
@pytest.mark.parametrize("make", [dict, SimpleNamespace])
def test_dtype_under_both_names(dtype: dict[str, str], make: Any) -> None:
    config = make(model_type="unheard_of", **sizes(2, 64, 4, 2), **dtype)
    assert kv_geometry(config).bytes_per_token == 2 * 2 * 32 * 2


def test_an_empty_dtype_does_not_hide_the_older_name() -> None:
    assert kv_geometry({**COMPLETE, "dtype": None, "torch_dtype": "bfloat16"}) == kv_geometry(COMPLETE)


def test_dtype_of_the_whole_counts_where_the_text_part_has_none() -> None:
    raw = {"model_type": "gemma3", "torch_dtype": "float32", **GEMMA_3_12B}
    assert kv_geometry(raw).bytes_per_token == 2 * (65_536 + 327_680)


def test_layer_types_of_older_releases() -> None:
    llama_4 = sizes(4, 64, 4, 2, attention_chunk_size=16, no_rope_layers=[1, 1, 1, 0])
    qwen_2 = sizes(4, 64, 4, 2, sliding_window=16, use_sliding_window=True, max_window_layers=3)
    one = 2 * 32 * 2
    for raw, expected in [
        (llama_4, (LayerGroup("full", 1, one), LayerGroup("chunked", 3, 3 * one, 16))),
        (qwen_2, (LayerGroup("full", 3, 3 * one), LayerGroup("sliding", 1, one, 16))),
    ]:
        assert kv_geometry({"model_type": "unheard_of", "dtype": "bfloat16", **raw}).groups == expected


def test_layers_without_attention_keep_nothing() -> None:
    types = ["attention", "moe", "mlp", "attention"]
    raw = sizes(4, 64, 4, 2, layers_block_type=types, dtype="bfloat16", model_type="unheard_of")
    assert kv_geometry(raw).groups == (LayerGroup("full", 2, 2 * 2 * 32 * 2),)


# ── never a silent guess ────────────────────────────────────────────────────────────────────────────────────────────

COMPLETE = {"model_type": "unheard_of", "dtype": "bfloat16", **sizes(2, 64, 4, 2)}


@pytest.mark.parametrize(
    ("missing", "flag"),
    [
        ("num_hidden_layers", "--num-layers"),
        ("num_key_value_heads", "--num-kv-heads"),
        ("hidden_size", "--head-dim"),
        ("dtype", "--dtype"),
    ],
)
def test_a_missing_attribute_is_named_with_its_flag_and_the_flag_works(missing: str, flag: str) -> None:
    raw = {name: value for name, value in COMPLETE.items() if name != missing}
    with pytest.raises(GeometryError, match=f"{missing}.*{flag}"):
        kv_geometry(raw)
    by_hand = {"--num-layers": 2, "--num-kv-heads": 2, "--head-dim": 16, "--dtype": "bfloat16"}
    option = {flag.removeprefix("--").replace("-", "_"): by_hand[flag]}
    assert kv_geometry(raw, **option) == kv_geometry(COMPLETE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 65}, "head_dim.*--head-dim"),
        ({"num_key_value_heads": None}, "num_key_value_heads.*--num-kv-heads"),
        ({"num_key_value_heads": [2, 4]}, r"num_key_value_heads.*\[2, 4\].*--bytes-per-token"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers.*'many'"),
        ({"layer_types": ["full_attention"]}, "layer_types.*list of 2"),
        ({"layer_types": 7}, "layer_types.*list of 2"),
        ({"layer_types": ["full_attention", "hybrid"]}, "'hybrid'.*--bytes-per-token"),
        ({"layer_types": ["full_attention", "indexed_attention"]}, "no kv_lora_rank.*--bytes-per-token"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "--bytes-per-sequence"),
        ({"sliding_window": 16, "sliding_window_pattern": 2}, "sliding_window_pattern.*--bytes-per-token"),
        ({"attn_layer_period": 8}, "attn_layer_period"),
        ({"attention_chunk_size": 16}, "layer_types"),
        ({"compress_ratios": [4, 128]}, "compress_ratios"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config"),
        ({"is_encoder_decoder": True}, "encoder-decoder.*--bytes-per-token"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"dtype": "float12"}, "unknown dtype 'float12'"),
    ],
)
def test_what_is_not_understood_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        kv_geometry({**COMPLETE, **change})


@pytest.mark.parametrize("model_type", ["bert", "whisper", "falcon_h1", "deepseek_v4", "bamba", "rwkv", "minimax"])
def test_architectures_beyond_us_are_refused(model_type: str) -> None:
    with pytest.raises(GeometryError, match="--"):
        kv_geometry(CONFIG_MAPPING[model_type](), dtype="bfloat16")


def test_values_that_the_class_refuses() -> None:
    with pytest.raises(GeometryError, match=r"^transformers cannot read this 'llama' config: [^\n]*$"):
        kv_geometry({"model_type": "llama", "num_hidden_layers": "many"})


def test_a_property_that_raises_is_named() -> None:
    class Broken(SimpleNamespace):
        @property
        def layer_types(self) -> list[str]:
            raise ValueError("the set of types differs")

    with pytest.raises(GeometryError, match="layer_types of this Broken cannot be read: the set of types differs"):
        kv_geometry(Broken(**COMPLETE))


@pytest.mark.parametrize(
    "by_hand",
    [{"num_layers": 0}, {"num_kv_heads": -1}, {"head_dim": 0}, {"bytes_per_token": 0}, {"bytes_per_sequence": -5}],
)
def test_numbers_by_hand_are_checked(by_hand: dict[str, int]) -> None:
    (name,) = by_hand
    with pytest.raises(GeometryError, match=f"{name} must be at least 1"):
        kv_geometry(COMPLETE, **by_hand)


def test_bytes_by_hand_need_no_config() -> None:
    assert kv_geometry({}, bytes_per_token=1000).groups == (LayerGroup("full", 0, 1000),)
    geometry = kv_geometry({}, bytes_per_token=1000, bytes_per_sequence=70)
    assert (geometry.bytes_per_token, geometry.bytes_per_sequence) == (1000, 70)


def test_states_by_hand() -> None:
    raw = {**COMPLETE, "layer_types": ["full_attention", "linear_attention"]}
    geometry = kv_geometry(raw, bytes_per_sequence=5000)
    assert geometry.groups == (LayerGroup("full", 1, 128), LayerGroup("linear", 1, 0, None, 5000))
    with pytest.raises(GeometryError, match="means nothing"):
        kv_geometry(COMPLETE, bytes_per_sequence=5000)


def test_heads_by_hand_do_not_describe_a_latent() -> None:
    with pytest.raises(GeometryError, match="--bytes-per-token"):
        kv_geometry(by_name("DeepSeek-V3"), num_kv_heads=8)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_load_config_from_a_folder_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS[0].json))
    for path in (tmp_path, str(tmp_path), file, str(file)):
        assert kv_geometry(load_config(path)).bytes_per_token == 131_072


def test_load_config_keeps_an_unknown_model_type_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(COMPLETE))
    assert load_config(tmp_path) == COMPLETE


def weights(folder: Path, **dtypes: str) -> None:
    tensors = {name: {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]} for name, dtype in dtypes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    (folder / "model-00001-of-00002.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


class TestADtypeThatNoConfigNames:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        without = {name: value for name, value in COMPLETE.items() if "dtype" not in name}
        (tmp_path / "config.json").write_text(json.dumps(without))
        return tmp_path

    def test_it_is_that_of_the_weights(self, folder: Path) -> None:
        weights(folder, blocks="U8", scales="F8_E8M0", norm="BF16", router="F32")
        (folder / "model-00002-of-00002.safetensors").write_bytes(b"not read")
        assert Model(load_config(folder), ByHand()).dtype == "bfloat16"

    def test_what_the_config_names_goes_first(self, folder: Path) -> None:
        weights(folder, norm="BF16")
        (folder / "config.json").write_text(json.dumps({**COMPLETE, "dtype": "float32"}))
        assert Model(load_config(folder), ByHand()).dtype == "float32"

    @pytest.mark.parametrize("content", [None, b"", b"\x08" + bytes(7) + b"[1, 2, 3", b"\xff" * 16])
    def test_without_weights_it_is_asked_for(self, folder: Path, content: bytes | None) -> None:
        if content is not None:
            (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(GeometryError, match="nor have weights beside it; give it by hand with --dtype"):
            kv_geometry(load_config(folder))

    def test_the_card_of_gpt_oss(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "num_hidden_layers": 24}))
        assert Model(load_config(tmp_path), ByHand()).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[1]", "holds a JSON list"),
        (None, "there is no .*config.json; give a model's folder or its config.json"),
    ],
)
def test_load_config_says_what_is_wrong_with_a_file(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(GeometryError, match=f"^[^\n]*{words}[^\n]*$"):
        load_config(tmp_path)


def run_python(code: str, *arguments: str) -> str:
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert "deprecated" not in run.stderr
    return run.stdout


def test_the_geometry_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, transfer.geometry; print({'torch', 'transformers'} & set(sys.modules))"
    assert run_python(code) == "set()\n"


WITHOUT_TORCH = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
def find_but_torch(name, path=None, target=None):
    return None if name.partition(".")[0] == "torch" else find(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_but_torch)
from transfer.geometry import kv_geometry, load_config
print(kv_geometry(load_config(sys.argv[1])).bytes_per_token, "torch" in sys.modules)
"""


def test_a_config_is_read_where_there_is_no_torch(tmp_path: Path) -> None:
    gemma = next(model for model in MODELS if model.name == "Gemma-3-12B")
    (tmp_path / "config.json").write_text(json.dumps(gemma.json))
    assert run_python(WITHOUT_TORCH, str(tmp_path)) == "393216 False\n"


# ── capacity ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_gib_of_llama() -> None:
    held = capacity(kv_geometry(by_name("Llama-3.1-8B")), 2 * 1024**3, 256)
    assert (held.page_bytes, held.pages, held.max_prompt_tokens) == (33_554_432, 64, 16_384)


def test_a_buffer_smaller_than_one_page() -> None:
    geometry = kv_geometry({}, bytes_per_token=1000)
    assert capacity(geometry, 256_000, 256).pages == 1
    with pytest.raises(GeometryError, match=r"255,999 bytes is smaller than one page of 256,000 bytes"):
        capacity(geometry, 255_999, 256)


def test_no_pages_for_a_model_of_states_only() -> None:
    with pytest.raises(GeometryError, match="no KV per token"):
        capacity(KvGeometry((LayerGroup("linear", 2, 0, None, 100),)), 1024, 16)


def test_a_chunk_has_tokens() -> None:
    with pytest.raises(GeometryError, match="chunk_size must be at least 1"):
        capacity(kv_geometry({}, bytes_per_token=1), 1024, 0)


@unhurried
@given(st.integers(1, 10**7), st.integers(1, 4096), st.integers(0, 10**13))
def test_pages_fill_the_buffer_and_never_more(bytes_per_token: int, chunk_size: int, more_bytes: int) -> None:
    geometry = kv_geometry({}, bytes_per_token=bytes_per_token)
    buffer_bytes = geometry.page_bytes(chunk_size) + more_bytes
    held = capacity(geometry, buffer_bytes, chunk_size)
    assert held.pages * held.page_bytes <= buffer_bytes < (held.pages + 1) * held.page_bytes
    assert -(-held.max_prompt_tokens // chunk_size) == held.pages
    assert -(-(held.max_prompt_tokens + 1) // chunk_size) == held.pages + 1


@unhurried
@given(
    st.integers(1, 128),
    st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.sampled_from(["float32", "bfloat16", "fp8"]),
)
def test_ranks_together_hold_everything(layers: int, kv_heads: int, tp_size: int, dtype: str) -> None:
    raw = {"model_type": "unheard_of", **sizes(layers, 64 * 128, 64, kv_heads)}
    whole, part = (kv_geometry(raw, tp_size=n, kv_cache_dtype=dtype).bytes_per_token for n in (1, tp_size))
    assert part * tp_size == whole * max(1, tp_size // kv_heads)


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "num_tokens", "window", "skipped"),
    [
        ("full", 70_000, None, 0),
        ("mla", 70_000, None, 0),
        ("sliding", 70_000, 1024, 68_977),
        ("sliding", 1023, 1024, 0),
        ("sliding", 1024, 1024, 1),
        ("chunked", 8191, 8192, 0),
        ("chunked", 8192, 8192, 8192),
        ("chunked", 20_000, 8192, 16_384),
        ("linear", 70_000, None, 69_999),
        ("linear", 0, None, 0),
    ],
)
def test_skipped_tokens(kind: str, num_tokens: int, window: int | None, skipped: int) -> None:
    assert num_skipped_tokens(kind, num_tokens, window) == skipped


@pytest.mark.parametrize(("window", "null", "real"), [(1024, 4311, 64), (128, 4375 - 8, 8), (4096, 4375 - 256, 256)])
def test_blocks_of_a_long_prompt(window: int, null: int, real: int) -> None:
    assert block_counts("sliding", 70_000, window, 16) == (null, real)


@unhurried
@given(st.integers(0, 10**6), st.integers(1, 10**5), st.integers(1, 512))
def test_a_windows_blocks(num_tokens: int, window: int, block_size: int) -> None:
    null, real = block_counts("sliding", num_tokens, window, block_size)
    assert null + real == -(-num_tokens // block_size)
    assert real <= -(-(window - 1) // block_size) + 1
    assert null * block_size <= num_skipped_tokens("sliding", num_tokens, window)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sliding", 10, None), "sliding layers need a window"),
        (("sliding", 10, 0), "window must be at least 1"),
        (("round", 10, 5), "unknown kind of layer 'round'"),
        (("full", -1, None), "num_tokens must not be negative"),
    ],
)
def test_skipped_tokens_of_nonsense(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        num_skipped_tokens(*arguments)


# ── sizes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 * 1024**3),
        ("2 gib", 2 * 1024**3),
        ("2Gi", 2 * 1024**3),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("512MB", 512_000_000),
        ("512MiB", 512 * 1024**2),
        ("1KB", 1000),
        ("1TiB", 1024**4),
        ("1024", 1024),
        ("1024B", 1024),
        (" 7 ", 7),
        (1024, 1024),
    ],
)
def test_parse_size(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2G", "2 GiBs", "-1", "1e9", "two", "1_000", "0x10", True, -5])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(GeometryError, match="is not a size; write bytes"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", 0, "0.4B", "0GiB"])
def test_a_size_is_at_least_a_byte(text: str | int) -> None:
    with pytest.raises(GeometryError, match="less than one byte"):
        parse_size(text)


@unhurried
@given(st.integers(1, 10**15))
def test_a_plain_number_is_itself(num_bytes: int) -> None:
    assert parse_size(num_bytes) == parse_size(str(num_bytes)) == parse_size(f"{num_bytes}B") == num_bytes
