"""The engine's KV cache: pages of one slab, behind transformers' cache interface.

A page holds one chunk of tokens for all layers, in the very layout that travels, so a prefiller sends its cache pages
as they are and a decoder copies a received page into a cache page with one memory copy:

    page = layer 0: keys [heads, chunk, key_dim], values [heads, chunk, value_dim]; layer 1: …

What is stored is what the model's attention hands to the cache: keys and values for most, the two latents for MLA.
Windowed layers keep all their tokens too; the model's own mask leaves out what is beyond the window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, DynamicCache, DynamicIndexedLayer

from transfer.errors import GeometryError
from transfer.memory.buffer import PagedBuffer


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token: `heads` × (`key_dim` + `value_dim`) elements."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a page is filled: one `LayerShape` per layer, None for layers that keep no KV of their own."""

    layers: tuple[LayerShape | None, ...]
    chunk_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return sum(s.elements_per_token for s in self.layers if s) * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.bytes_per_token * self.chunk_size

    def describe(self) -> str:
        """Equal text means equal meaning of every byte in a page (sizes and dtype apart, which are told beside it)."""
        shapes = ";".join(f"{s.heads}x{s.key_dim}+{s.value_dim}" if s else "-" for s in self.layers)
        return f"layer,kv,head,token;{hashlib.sha256(shapes.encode()).hexdigest()[:16]}"

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.chunk_size)


def observe_layout(model: Any, chunk_size: int) -> CacheLayout:
    """Feed the model one token and see what its layers put into a cache: exact for any architecture.

    Raises `GeometryError` for layers whose state is not one entry per token (state-space, sparse-indexed): this engine
    cannot page them.
    """
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(
            input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True
        )
    shapes = [_shape_of(index, layer) for index, layer in enumerate(cache.layers)]
    dtypes = {t.dtype for layer, s in zip(cache.layers, shapes, strict=True) if s for t in (layer.keys, layer.values)}
    if not dtypes:
        raise GeometryError(f"{type(model).__name__} puts no keys and values into the cache; its state cannot be paged")
    if len(dtypes) > 1:
        raise GeometryError(f"the layers of {type(model).__name__} cache different dtypes: {sorted(map(str, dtypes))}")
    return CacheLayout(tuple(shapes), chunk_size, dtypes.pop())


def _shape_of(index: int, layer: Any) -> LayerShape | None:
    if isinstance(layer, DummyLayer):
        return None
    if (
        not isinstance(layer, CacheLayerMixin)
        or isinstance(layer, DynamicIndexedLayer)
        or hasattr(layer, "conv_states")
    ):
        raise GeometryError(
            f"layer {index} keeps its state in a {type(layer).__name__}; the built-in engine pages attention KV only"
        )
    if layer.keys is None:
        return None
    _, heads, _, key_dim = layer.keys.shape
    if layer.values.shape[1] != heads:
        raise GeometryError(f"layer {index} has {heads} key heads and {layer.values.shape[1]} value heads")
    return LayerShape(heads, key_dim, layer.values.shape[3])


class PagedStore:
    """The slab, seen through the layout: per layer a view of keys and of values.

    A view has the shape ``[num_pages, heads, chunk_size, dim]``.
    """

    def __init__(self, layout: CacheLayout, num_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.buffer = PagedBuffer(num_pages, layout.page_bytes, device, prefault=False)
        elements = self.buffer.pages.view(layout.dtype)
        self.views: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        offset = 0
        for shape in layout.layers:
            if shape is None:
                self.views.append(None)
                continue
            keys, offset = _cut(elements, offset, shape.heads, layout.chunk_size, shape.key_dim)
            values, offset = _cut(elements, offset, shape.heads, layout.chunk_size, shape.value_dim)
            self.views.append((keys, values))

    def copy_in(self, source: torch.Tensor, source_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copy whole pages from `source`, uint8 ``[n, page_bytes]`` of the same layout, page by page."""
        for theirs, ours in zip(source_pages, pages, strict=True):
            self.buffer.pages[ours].copy_(source[theirs])


def _cut(elements: torch.Tensor, offset: int, heads: int, chunk: int, dim: int) -> tuple[torch.Tensor, int]:
    end = offset + heads * chunk * dim
    return elements[:, offset:end].view(-1, heads, chunk, dim), end


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of one sequence: writes new tokens into its pages, reads all of them back in order.

    Mutable state: `length`, the tokens stored; `pages` is shared with the sequence and may grow.
    """

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, pages: list[int], length: int) -> None:
        super().__init__()
        self._views = (keys, values)
        self._pages = pages
        self._chunk = keys.shape[2]
        self.length = length
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[1, heads, new, dim]`` behind what is there; return all tokens as ``[1, heads, length, dim]``."""
        for view, states in zip(self._views, (key_states, value_states), strict=True):
            self._write(view, states[0])
        self.length += key_states.shape[2]
        return self._read(self._views[0]), self._read(self._views[1])

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _write(self, view: torch.Tensor, states: torch.Tensor) -> None:
        position, done = self.length, 0
        while done < states.shape[1]:
            page, start = divmod(position + done, self._chunk)
            count = min(self._chunk - start, states.shape[1] - done)
            view[self._pages[page], :, start : start + count] = states[:, done : done + count]
            done += count

    def _read(self, view: torch.Tensor) -> torch.Tensor:
        num_pages = -(-self.length // self._chunk)
        if num_pages == 1:
            return view[self._pages[0], :, : self.length].unsqueeze(0)
        tokens = torch.cat([view[page] for page in self._pages[:num_pages]], dim=1)
        return tokens[:, : self.length].unsqueeze(0)


def sequence_cache(store: PagedStore, pages: list[int], length: int) -> Cache:
    """transformers' view of one sequence whose first `length` tokens are in `pages` (in order) of `store`."""
    layers = [DummyLayer() if v is None else PagedLayer(v[0], v[1], pages, length) for v in store.views]
    return Cache(layers=layers)
