"""The engine's KV cache. It is pages of one slab, behind transformers' cache interface.

A page holds one chunk of tokens for the layers of one page group, in the very layout that travels
(`transfer.plan.layout`). So a prefiller sends its cache pages as they are, and a decoder copies a received page into a
cache page with one memory copy.

What is stored is what the model's attention hands to the cache: keys and values for most, the two latents for MLA. A
windowed layer gives the model what is in the window of the first token that is fed, and nothing before it: there the
pages may be null blocks, or hold later tokens already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
)

from transfer.engine.cache_need import BlockTable
from transfer.errors import GeometryError, IntegrityError
from transfer.geometry import LayerGroup, PageGroup, layer_groups, num_skipped_tokens
from transfer.memory.buffer import PagedBuffer
from transfer.memory.views import LayerViews, layer_views
from transfer.plan.layout import KvLayout, LayerKv, RankLayout

OnLayer = Callable[[int, int], None]
"""A function that is told (group, layer of the group) when that layer's KV of the tokens being fed is in its page."""


def observe_layout(model: Any, chunk_size: int) -> KvLayout:
    """Feeds the model one token and looks what its layers put into a cache. That is exact for any architecture.

    The model's config says which layers are windowed. Its arithmetic, which sizes the proxy's admission, must agree
    with what was seen. Raises `GeometryError` where it does not, and for layers whose state is not one entry per token
    (state-space, sparse-indexed): this engine cannot page them.
    """
    cache = DynamicCache(config=model.config)
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    except (TypeError, ValueError) as error:  # the model keeps its state in a cache of its own
        raise GeometryError(f"{type(model).__name__} takes no cache that could be paged: {error}") from error
    shapes = [_shape_of(index, layer) for index, layer in enumerate(cache.layers)]
    dtypes = {t.dtype for layer, s in zip(cache.layers, shapes, strict=True) if s for t in (layer.keys, layer.values)}
    if not dtypes:
        raise GeometryError(f"{type(model).__name__} puts no keys and values into the cache; its state cannot be paged")
    if len(dtypes) > 1:
        raise GeometryError(f"the layers of {type(model).__name__} cache different dtypes: {sorted(map(str, dtypes))}")
    dtype = dtypes.pop()
    kinds = _kinds(model, shapes, dtype)
    _check_windows(kinds, cache.layers)
    layers = tuple(
        LayerKv(*shape, kind=kind.kind, window=kind.window) if shape and kind else None
        for shape, kind in zip(shapes, kinds, strict=True)
    )
    return KvLayout(layers, chunk_size, dtype.itemsize, _dtype_name(dtype))


def _shape_of(index: int, layer: Any) -> tuple[int, int, int] | None:
    """Returns (heads, key_dim, value_dim) of what the layer stores per token; None if it stores nothing."""
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
    return heads, key_dim, layer.values.shape[3]


def _kinds(
    model: Any, shapes: Sequence[tuple[int, int, int] | None], dtype: torch.dtype
) -> Sequence[LayerGroup | None]:
    """Returns what the config says of each layer, in that reading of MLA (latent or expanded) whose sizes are those
    seen."""
    observed = [shape[0] * (shape[1] + shape[2]) * dtype.itemsize if shape else 0 for shape in shapes]
    said = []
    for cache in ("latent", "expanded"):
        groups = layer_groups(model.config, kv_cache_dtype=_dtype_name(dtype), cache=cache)
        sizes = [group.bytes_per_token if group else 0 for group in groups]
        if sizes == observed:
            return groups
        said.append(f"{sum(sizes)} ({cache})")
    raise GeometryError(
        f"{type(model).__name__} stores {sum(observed)} B of KV per token; its config says {' or '.join(said)}"
    )


def _check_windows(kinds: Sequence[LayerGroup | None], layers: Sequence[Any]) -> None:
    """Raises `GeometryError` for windows that cannot be computed: transformers makes one mask for all windowed layers,
    and its own cache must forget what ours leaves out."""
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        kept = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        if kind is not None and kind.window != kept:
            raise GeometryError(f"layer {index} has a window of {kind.window} tokens; transformers keeps {kept} of it")
    windows = {(kind.kind, kind.window) for kind in kinds if kind and kind.window}
    if len(windows) > 1:
        raise GeometryError(f"layers with different windows cannot be computed with one mask: {sorted(windows)}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class PagedStore:
    """A `PagedStore` is the slab, seen through the layout. All page groups share its pages.

    With `is_shared` another process can map it.
    """

    def __init__(self, layout: RankLayout, num_pages: int, device: torch.device, *, is_shared: bool = False) -> None:
        self.layout = layout
        self.buffer = PagedBuffer(num_pages, layout.page_bytes, device, prefault=False, is_shared=is_shared)
        self.views: list[LayerViews | None] = layer_views(self.buffer.pages, layout)

    def copy_in(self, source: torch.Tensor, source_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copies whole pages from `source`, uint8 ``[n, page_bytes]`` of the same layout, page by page."""
        for theirs, ours in zip(source_pages, pages, strict=True):
            self.buffer.pages[ours].copy_(source[theirs])


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A `PagedLayer` is one layer of one sequence. It writes new tokens into its pages, and reads back those that they
    may attend to, in order.

    Mutable state: `length`, the tokens stored; `table` is the sequence's and may grow.
    """

    def __init__(
        self,
        views: LayerViews,
        table: BlockTable,
        length: int,
        group: PageGroup,
        on_layer: OnLayer | None = None,
    ) -> None:
        super().__init__()
        self._views = views
        self._table = table
        self._chunk = views.keys.shape[2]
        self._group = group
        self._on_layer = on_layer
        self.length = length
        self.is_sliding = group.window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the pages are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores ``[1, heads, new, dim]`` behind what is there.

        Returns all tokens that the new ones may attend to, ``[1, heads, n, dim]``: as many as `get_mask_sizes` says.
        """
        start = self._first_read()
        self._write(self._views.keys, key_states[0])
        self._write(self._views.values, value_states[0])
        self.length += key_states.shape[2]
        if self._on_layer is not None:
            self._on_layer(self._views.group, self._views.position)
        return self._read(self._views.keys, start), self._read(self._views.values, start)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns (tokens that `update` will return, position of the first of them)."""
        start = self._first_read()
        return self.length + query_length - start, start

    def get_max_length(self) -> int:
        return -1

    def _first_read(self) -> int:
        """Returns the position of the first token that the next one may attend to.

        It has to be exact: where one token is fed, transformers makes no mask that would leave out any of a few tokens
        too many.
        """
        return num_skipped_tokens(self._group.kind, self.length, self._group.window)

    def _write(self, view: torch.Tensor, states: torch.Tensor) -> None:
        done = 0
        while done < states.shape[1]:
            block, start = divmod(self.length + done, self._chunk)
            count = min(self._chunk - start, states.shape[1] - done)
            (page,) = self._pages(block, block + 1)
            view[page, :, start : start + count] = states[:, done : done + count]
            done += count

    def _read(self, view: torch.Tensor, start: int) -> torch.Tensor:
        first, end = start // self._chunk, -(-self.length // self._chunk)
        pages = self._pages(first, end)
        tokens = view[pages[0]] if len(pages) == 1 else torch.cat([view[page] for page in pages], dim=1)
        offset = first * self._chunk
        return tokens[:, start - offset : self.length - offset].unsqueeze(0)

    def _pages(self, first: int, end: int) -> list[int]:
        pages = [page for page in self._table[first:end] if page is not None]
        if len(pages) != end - first:
            raise IntegrityError(f"a layer needs blocks {first} to {end}, and only {len(pages)} of them have a page")
        return pages


def sequence_cache(
    store: PagedStore, tables: Sequence[BlockTable], length: int, on_layer: OnLayer | None = None
) -> Cache:
    """Returns transformers' view of one sequence whose first `length` tokens are in `tables` (one per group) of
    `store`."""
    groups = store.layout.kv.groups
    layers = [
        DummyLayer() if views is None else PagedLayer(views, tables[views.group], length, groups[views.group], on_layer)
        for views in store.views
    ]
    return Cache(layers=layers)
