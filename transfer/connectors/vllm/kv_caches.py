"""The layout of vLLM's KV cache, as vLLM's own specifications describe it.

vLLM groups layers that are kept alike; a block is ``[heads, tokens, content]`` of one layer, where a token's keys and
values in a head lie one behind the other. So a page has one part per layer: its content.

A page is a block, or a part of one: engines with blocks of unlike sizes agree on pages that divide both. What must hold
then: a page has the bytes that a block of as many tokens would have. A violation would be seen as another text. How the
tokens lie in a block is its backend's affair, so a block is cut only where that is known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from transfer.errors import GeometryError, TransferError
from transfer.plan.layout import KvLayout, LayerKv, RankLayout
from transfer.plan.placement import Rows

_KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
}
_TOKEN_BY_TOKEN = ("FLASH_ATTN", "TRITON_ATTN")
"""The backends that keep a head token by token, each with its key and its value: their kernels get the two as slices of
each token's content."""
_TRANSPOSED = ("vec", "vec16")
"""The kernels of ``CPU_ATTN`` that keep a head's keys dimension by dimension, each for all tokens of the block, and its
values token by token behind them."""
_WINDOWS = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}


class KvCaches:
    """`KvCaches` tells what vLLM keeps: `layout`, `block_size`, and `layer_names` in the order of its layers. A page
    has `chunk_size` tokens, by default those of a block.

    Raises `TransferError` for what this connector cannot move: pipeline or context parallelism, batches that are
    computed in parts, memory that is given back while vLLM sleeps, states, layers with blocks of unlike sizes, pages
    that do not divide blocks.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, rank: int, chunk_size: int | None = None) -> None:
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
        self.block_size: int = block_sizes.pop()
        """The tokens of a block of vLLM's."""
        chunk_size = chunk_size or self.block_size
        if self.block_size % chunk_size:
            raise TransferError(
                f"kv_connector_extra_config: chunk_size is {chunk_size}, and vLLM's blocks have {self.block_size} "
                "tokens: give a divisor of that, which divides the other engines' block size, too"
            )
        self.pages_per_block = self.block_size // chunk_size
        self._specs: list[Any] = []
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
                self._specs.append(spec)
                self.layer_names.append(name)
        if len(dtypes) != 1:
            raise TransferError(f"vLLM's KV caches have several dtypes: {sorted(map(str, dtypes))}")
        dtype: torch.dtype = dtypes.pop()
        self._content = _content(dtype, getattr(vllm_config.cache_config, "cache_dtype", "auto"))
        try:
            kv = KvLayout(
                tuple(layers),
                chunk_size,
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

    def rows(self, packing: str) -> list[tuple[Rows, ...]]:
        """Returns the rows of each layer's heads in blocks whose bytes are in this order. Raises `TransferError` where
        it is not known how such a block is cut into pages."""
        return [] if self.pages_per_block == 1 else [self._rows_of(spec, packing.split("+")) for spec in self._specs]

    def _rows_of(self, spec: Any, packing: list[str]) -> tuple[Rows, ...]:
        content, element = int(spec.state_content_size_bytes), int(spec.dtype.itemsize)
        head_size, value_size = (int(getattr(spec, name, 0)) for name in ("head_size", "head_size_v"))
        is_plain = not self._content and (head_size + value_size) * element == content
        if is_plain and packing[0] in _TOKEN_BY_TOKEN and len(packing) == 1:
            return (Rows(1, content),)
        kernels = set(packing[2:])
        if (
            is_plain
            and packing[0] == "CPU_ATTN"
            and kernels
            and kernels <= set(_TRANSPOSED)
            and head_size == value_size
        ):
            return (Rows(head_size, element), Rows(1, head_size * element))
        order = " ".join(filter(None, ("+".join(packing), self._content)))
        raise TransferError(
            f"kv_connector_extra_config: chunk_size is {self.layout.chunk_size}, and it is not known how blocks of "
            f"{self.block_size} tokens that are kept as {order} are cut into such pages: leave it out, and give all "
            "engines the same --block-size"
        )


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
