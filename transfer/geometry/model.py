"""The part of a config about the model as a whole: how many layers, of which types, in which dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transfer.errors import GeometryError
from transfer.geometry.checks import positive
from transfer.geometry.config import Attributes, resolve_config, text_part

_ELEMENT_BYTES = {
    **dict.fromkeys(("float64", "fp64", "double"), 8),
    **dict.fromkeys(("float32", "fp32", "float"), 4),
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 1),
}
_LAYER_TYPES_WITHOUT_KV = ("moe", "mlp")

# These attributes tell that layers differ. Only a model's own class knows how, and then has `layer_types`.
_LAYER_PATTERNS = (
    "attention_types",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_types",
    "conv_L_cache",
    "full_attention_interval",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "layer_group_size",
    "linear_attn_config",
    "mamba_d_state",
    "sliding_window_pattern",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
)
# These change the bytes per token: compressed or pooled KV, heads that differ without `per_layer_config`.
_BEYOND_US = ("compress_ratios", "global_head_dim", "index_kpool", "num_global_key_value_heads")


@dataclass(frozen=True, slots=True)
class ByHand:
    """`ByHand` holds the values that the caller supplies instead of the config. A number that is there is positive."""

    num_layers: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    bytes_per_sequence: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "bytes_per_sequence"):
            if (value := getattr(self, name)) is not None:
                positive(name, value)


class Model:
    """A `Model` is the text part of a config, corrected by hand. Raises `GeometryError` where it cannot be
    understood."""

    def __init__(self, config: object, by_hand: ByHand) -> None:
        config = resolve_config(config) if isinstance(config, Mapping) else config
        whole = Attributes(config)
        if whole.get("is_encoder_decoder"):
            raise GeometryError(
                f"{whole.model_type!r} is an encoder-decoder: its prompt is read by the encoder and does not become "
                "KV token by token; give --bytes-per-token"
            )
        self.text = Attributes(text_part(config))
        self.text.refuse(_BEYOND_US)
        self.by_hand = by_hand
        self.dtype = by_hand.dtype or _dtype_name(self.text) or _dtype_name(whole)
        self.num_layers = by_hand.num_layers or _num_layers(self.text)
        self.layer_types = _layer_types(self.text, self.num_layers)
        self._sharing = self.text.get("kv_sharing_modes")
        self._num_own = self.num_layers - (self.text.count("num_kv_shared_layers") or 0)

    def keeps_kv(self, index: int) -> bool:
        """Returns False for a layer that reads an earlier layer's KV (Gemma-3n) or does not attend at all."""
        shared = index >= self._num_own if self._sharing is None else self._sharing[index] == "reuse"
        return not shared and self.layer_types[index] not in _LAYER_TYPES_WITHOUT_KV

    def element_bytes(self, kv_cache_dtype: str | None = None) -> int:
        """Returns the bytes of one element of the KV. None and ``"auto"`` mean the model's own dtype. Raises
        `GeometryError` for a dtype that is not known."""
        name = self.dtype if kv_cache_dtype in (None, "auto") else kv_cache_dtype
        if name is None:
            raise GeometryError(
                f"the {self.text.model_type!r} config has no dtype, nor have weights beside it; give it "
                "by hand with --dtype (pdproxy serve: --kv-cache-dtype)"
            )
        if name not in _ELEMENT_BYTES:
            raise GeometryError(f"unknown dtype {name!r}; known are {', '.join(sorted(_ELEMENT_BYTES))}")
        return _ELEMENT_BYTES[name]


def _dtype_name(config: Attributes) -> str | None:
    """Returns the dtype's name. It is in ``dtype`` since transformers 5 and in ``torch_dtype`` before, as a string or a
    torch.dtype.

    The old name is only asked for where there is no new one: transformers warns about it.
    """
    value = config.get("dtype") if config.has("dtype") else config.get("torch_dtype")
    return None if value is None else str(value).removeprefix("torch.")


def _num_layers(text: Attributes) -> int:
    """Returns the number of attention layers. LongCat has two in each of its `num_layers`."""
    if text.model_type.startswith("longcat") and (pairs := text.count("num_layers")) is not None:
        return 2 * pairs
    return text.need("--num-layers", "num_hidden_layers", "n_layer", "n_layers")


def _layer_types(text: Attributes, num_layers: int) -> Sequence[str]:
    types = text.get("layer_types", "layers_block_type")
    if types is None:
        return _layer_types_by_rule(text, num_layers)
    if not isinstance(types, list | tuple) or len(types) != num_layers:
        raise GeometryError(
            f"layer_types of the {text.model_type!r} config is no list of {num_layers} types, one for each layer; "
            "correct it, or --num-layers"
        )
    return [str(layer_type) for layer_type in types]


def _layer_types_by_rule(text: Attributes, num_layers: int) -> Sequence[str]:
    """Returns the types for configs without `layer_types`: all layers are alike, unless an attribute says that they are
    not."""
    text.refuse(_LAYER_PATTERNS)
    if text.count("attention_chunk_size") is not None:
        return _chunked_where_rotary(text, num_layers)
    if text.count("sliding_window") is None or text.get("use_sliding_window") is False:
        return ["full_attention"] * num_layers
    num_full = min(num_layers, text.count("max_window_layers") or 0)
    return ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)


def _chunked_where_rotary(text: Attributes, num_layers: int) -> Sequence[str]:
    """Returns the types for Llama-4 as older releases wrote it: a layer is chunked where it has rotary positions."""
    rotary = text.get("no_rope_layers")
    if not isinstance(rotary, Sequence) or len(rotary) != num_layers:
        raise GeometryError(
            f"the {text.model_type!r} config has attention_chunk_size but no layer_types that say which layers are "
            "chunked; give --bytes-per-token"
        )
    return ["chunked_attention" if has_rotary else "full_attention" for has_rotary in rotary]
