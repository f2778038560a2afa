"""The layout of vLLM's KV cache, as vLLM's own specifications describe it.

vLLM groups layers that are kept alike; a block is ``[heads, tokens, content]`` of one layer, where a token's keys and
values in a head lie one behind the other. So a page has one part per layer: its content.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from transfer.errors import GeometryError, TransferError
from transfer.plan.layout import KvLayout, LayerKv, RankLayout

_KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
}
_WINDOWS = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}


class KvCaches:
    """`KvCaches` tells what vLLM keeps: `layout`, and `layer_names` in the order of its layers.

    Raises `TransferError` for what this connector cannot move: pipeline or context parallelism, batches that are
    computed in parts, memory that is given back while vLLM sleeps, states, layers with blocks of unlike sizes.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, rank: int) -> None:
        parallel = vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) != 1:
                raise TransferError(f"{name} has to be 1 with this connector, and is {getattr(parallel, name)}")
        if getattr(parallel, "use_ubatching", False):
            raise TransferError("enable_dbo and ubatch_size have to be off: a layer is sent when it was computed once")
        if getattr(vllm_config.model_config, "enable_sleep_mode", False):
            raise TransferError("enable_sleep_mode has to be off: other engines read and write this engine's memory")
        groups = kv_cache_config.kv_cache_groups
        block_sizes = {group.kv_cache_spec.block_size for group in groups}
        if len(block_sizes) != 1:
            raise TransferError(
                f"vLLM's KV cache groups have blocks of {sorted(block_sizes)} tokens; all must be equal"
            )
        self.layer_names: list[str] = []
        layers: list[LayerKv] = []
        grouping, dtypes = [], set()
        total = vllm_config.model_config.get_total_num_kv_heads()
        size = parallel.tensor_parallel_size
        for group in groups:
            grouping.append(tuple(range(len(layers), len(layers) + len(group.layer_names))))
            for name in group.layer_names:
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                layers.append(_layer(name, spec, size, total))
                dtypes.add(spec.dtype)
                self.layer_names.append(name)
        if len(dtypes) != 1:
            raise TransferError(f"vLLM's KV caches have several dtypes: {sorted(map(str, dtypes))}")
        dtype: torch.dtype = dtypes.pop()
        self._content = _content(dtype, getattr(vllm_config.cache_config, "cache_dtype", "auto"))
        try:
            kv = KvLayout(
                tuple(layers),
                block_sizes.pop(),
                dtype.itemsize,
                str(dtype).removeprefix("torch."),
                grouping=tuple(grouping),
            )
            self.layout = kv.of_rank(size, rank)
        except GeometryError as error:
            raise TransferError(f"vLLM's KV cache cannot be moved by this connector: {error}") from None

    def packed(self, packing: str) -> RankLayout:
        """Returns the layout of blocks whose bytes are in this order."""
        kv = replace(self.layout.kv, packing=f"{packing} {self._content}".strip())
        return kv.of_rank(self.layout.rank.size, self.layout.rank.index)


def packing_of(vllm_config: Any, layer_names: list[str], device: torch.device) -> str:
    """Returns a name for the order of the bytes within a head of a block. The attention's code decides about it, and on
    a CPU the processor does, too. Call it in the worker, which has the layers."""
    layers = vllm_config.compilation_config.static_forward_context
    backends = {_backend(layers.get(name)) for name in layer_names}
    parts = sorted(backends)
    if device.type == "cpu":
        parts.append(torch.backends.cpu.get_cpu_capability())
        parts += sorted({str(layers[name].isa) for name in layer_names if hasattr(layers.get(name), "isa")})
    return "+".join(parts)


def _content(dtype: torch.dtype, kv_cache_dtype: str) -> str:
    """Returns a name for what an element means where its dtype does not say it: vLLM keeps several kinds of quantized
    KV as plain bytes."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return ""
    return "fp8_e4m3" if kv_cache_dtype == "fp8" else kv_cache_dtype


def _backend(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    return "unknown" if backend is None else str(backend.get_name())


def _layer(name: str, spec: Any, tp_size: int, total_heads: int) -> LayerKv:
    """Returns what a layer keeps. Raises `TransferError` for kinds of layers that this connector does not know."""
    kind = _KINDS.get(type(spec).__name__)
    if kind is None or getattr(spec, "tokens_per_state", 1) != 1:
        known = ", ".join(_KINDS)
        raise TransferError(f"layer {name} has a {type(spec).__name__}; this connector moves {known} alone")
    if getattr(spec, "extra_retained_tokens", 0):
        raise TransferError(
            f"layer {name} keeps {spec.extra_retained_tokens} tokens in front of its window, for several modules of "
            "speculative decoding: they would not be sent"
        )
    window = getattr(spec, _WINDOWS[kind]) if kind in _WINDOWS else None
    content, rest = divmod(spec.state_content_size_bytes, spec.dtype.itemsize)
    if rest:
        raise TransferError(
            f"layer {name} keeps {spec.state_content_size_bytes} B per token and head: no whole elements"
        )
    num_heads = 1 if kind == "mla" else min(spec.num_heads * tp_size, max(total_heads, spec.num_heads))
    return LayerKv(num_heads, content, 0, kind, window)
