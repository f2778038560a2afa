"""A config's layers one by one say what it says of them together."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from transfer.geometry import GeometryError, LayerGroup, kv_geometry, layer_groups
from transfer.geometry.groups import merge

SHAPE: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "dtype": "bfloat16"}


def config_of(model_type: str, **more: Any) -> Any:
    return AutoConfig.for_model(model_type, **SHAPE | more)


HYBRID = config_of(
    "gemma3_text",
    num_hidden_layers=3,
    sliding_window=64,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
SHARING = config_of(
    "gemma3n_text",
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    intermediate_size=[64] * 4,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
LATENT = config_of("deepseek_v3", num_hidden_layers=2, kv_lora_rank=32, qk_rope_head_dim=8, v_head_dim=8)
STATES = config_of(
    "qwen3_next",
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)


def test_kinds_and_windows_in_order_of_the_model() -> None:
    sliding, full = LayerGroup("sliding", 1, 64, 64), LayerGroup("full", 1, 64)
    assert layer_groups(HYBRID) == [sliding, full, sliding]


def test_a_layer_without_kv_of_its_own_is_none() -> None:
    assert [layer and layer.kind for layer in layer_groups(SHARING)] == ["sliding", "full", None, None]


@pytest.mark.parametrize("config", [HYBRID, SHARING, LATENT, STATES], ids=["hybrid", "sharing", "latent", "states"])
@pytest.mark.parametrize("cache", ["latent", "expanded"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_together_they_are_the_geometry(config: Any, cache: str, tp_size: int) -> None:
    how: dict[str, Any] = {"tp_size": tp_size, "cache": cache, "kv_cache_dtype": "float32"}
    layers = [layer for layer in layer_groups(config, **how) if layer is not None]
    assert all(layer.num_layers == 1 for layer in layers)
    assert tuple(merge(layers)) == kv_geometry(config, **how).groups


def test_nonsense_is_refused() -> None:
    with pytest.raises(GeometryError, match="cache must be"):
        layer_groups(HYBRID, cache="neither")
    with pytest.raises(GeometryError, match="tp_size"):
        layer_groups(HYBRID, tp_size=0)
