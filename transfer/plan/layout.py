"""The layout of a page in bytes, on one rank.

A page holds one chunk of one page group (`transfer.geometry.paging`), layer by layer:

    page of a group = its first layer: keys [heads, chunk, key_dim], values [heads, chunk, value_dim]; its next layer: …

The layer comes first, so that a prefiller can send a layer as soon as it is computed. The head comes before the token,
so that the heads for one decoder rank are one run of bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice

from transfer.errors import GeometryError
from transfer.geometry import LayerGroup, PageGroup, page_groups
from transfer.geometry.groups import merge
from transfer.plan.ranks import Rank, heads_of


@dataclass(frozen=True, slots=True)
class LayerKv:
    """A `LayerKv` tells what one layer keeps of the whole model's prompt: per token, or as one state.

    `key_dim` and `value_dim` are elements per head; for latent attention there is one "head" that every rank holds.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    kind: str = "full"
    """The kind of layer: ``full``, ``mla``, ``sliding``, ``chunked`` or ``linear``."""
    window: int | None = None
    state_bytes: int = 0
    """The bytes of the state of a ``linear`` layer. It has no heads that could be told apart: such a model has one
    rank."""

    @property
    def elements_per_token(self) -> int:
        return 0 if self.kind == "linear" else self.num_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Part:
    """A `Part` is the keys or the values of one layer in a page: `heads` of them, `head_bytes` bytes each, from
    `offset` on."""

    layer: int
    """The index of the layer in the group, from 0."""
    is_values: bool
    offset: int
    num_heads: int
    """Counts the heads of the whole model in this layer."""
    heads: range
    """The heads of this rank."""
    head_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.heads) * self.head_bytes


@dataclass(frozen=True)
class GroupLayout:
    """A `GroupLayout` describes the pages of one group on one rank. `layers` are indexes into the model's layers."""

    group: PageGroup
    layers: tuple[int, ...]
    parts: tuple[Part, ...]
    num_bytes: int
    """The bytes of one page; for a ``linear`` group, of all state pages together."""


@dataclass(frozen=True)
class KvLayout:
    """A `KvLayout` describes the KV of a whole model: one entry per layer, None for a layer that keeps none of its own.

    Raises `GeometryError` when no layer keeps KV per token.
    """

    layers: tuple[LayerKv | None, ...]
    chunk_size: int
    element_bytes: int
    dtype: str = ""
    """The name of the dtype, for the handshake: equal names mean equal meaning."""
    packing: str = ""
    """The name of the order of the bytes within a head of a page, where an engine keeps another one than token by
    token. Equal names mean equal orders."""
    grouping: tuple[tuple[int, ...], ...] = ()
    """The layers of each page group, where an engine has groups of its own: all layers of one are of one kind and
    window. Where it is empty, the groups follow from the layers."""

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or self.element_bytes < 1:
            raise GeometryError(f"a page of {self.chunk_size} tokens of {self.element_bytes}-byte elements is none")
        if not any(layer and layer.elements_per_token for layer in self.layers):
            raise GeometryError("no layer of this model keeps KV per token: there is nothing to put into pages")
        if self.grouping:
            self._check_grouping()

    @classmethod
    def uniform(
        cls, *, num_layers: int, num_kv_heads: int, head_dim: int, chunk_size: int, dtype: str, element_bytes: int
    ) -> KvLayout:
        """Returns the layout of plain attention with all layers alike, as most models have it."""
        return cls((LayerKv(num_kv_heads, head_dim, head_dim),) * num_layers, chunk_size, element_bytes, dtype)

    @cached_property
    def groups(self) -> tuple[PageGroup, ...]:
        """Holds the page groups, in the order in which pages of one block follow each other."""
        if self.grouping:
            firsts = [self.layers[indexes[0]] for indexes in self.grouping]
            sizes = [len(indexes) for indexes in self.grouping]
            return tuple(
                PageGroup(first.kind, size, first.window) for first, size in zip(firsts, sizes, strict=True) if first
            )
        return page_groups(self._merged(), self.chunk_size)

    @cached_property
    def layers_by_group(self) -> tuple[tuple[int, ...], ...]:
        """Holds, for each group, its layers, in order of the model."""
        if self.grouping:
            return self.grouping
        by_kind: dict[tuple[str, int | None], list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer is not None:
                by_kind.setdefault((layer.kind, layer.window), []).append(index)
        waiting = {key: iter(indexes) for key, indexes in by_kind.items()}
        return tuple(tuple(islice(waiting[group.kind, group.window], group.num_layers)) for group in self.groups)

    @cached_property
    def head_counts(self) -> frozenset[int]:
        """Holds the numbers of heads that layers have. Most models have one number."""
        return frozenset(layer.num_heads for layer in self.layers if layer and layer.kind != "linear")

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.elements_per_token for layer in self.layers if layer) * self.element_bytes

    def describe(self) -> str:
        """Returns a text for the handshake. Equal texts say that every byte of a page means the same, apart from dtype
        and chunk size, which are told beside it."""
        shapes = ";".join(_shape(layer) for layer in self.layers)
        if self.grouping:
            shapes += f"|{self.grouping}"
        digest = hashlib.sha256(shapes.encode()).hexdigest()[:16]
        return f"layer,kv,head,{self.packing or 'token'};{digest}"

    def describe_heads(self) -> str:
        """Returns the KV heads layer by layer, with runs of equal ones shortened: ``32×8``."""
        counts = (layer.num_heads if layer else 0 for layer in self.layers)
        return ",".join(f"{sum(1 for _ in run)}×{count}" for count, run in groupby(counts))

    def of_rank(self, size: int = 1, index: int = 0) -> RankLayout:
        """Returns what rank `index` of `size` stores. Raises `GeometryError` where the heads cannot be divided so."""
        return RankLayout(self, Rank(size, index))

    def _check_grouping(self) -> None:
        """Raises `GeometryError` unless each layer with KV is in one group, with others of its kind."""
        grouped = sorted(index for indexes in self.grouping for index in indexes)
        if grouped != [index for index, layer in enumerate(self.layers) if layer is not None]:
            raise GeometryError(f"page groups of layers {grouped} are not those of the layers that keep KV")
        for indexes in self.grouping:
            kinds = {(layer.kind, layer.window) for index in indexes if (layer := self.layers[index])}
            if len(kinds) != 1 or "linear" in {kind for kind, _ in kinds}:
                raise GeometryError(f"layers of the kinds {sorted(map(str, kinds))} cannot share pages")

    def _merged(self) -> list[LayerGroup]:
        return merge(_as_group(layer, self.element_bytes) for layer in self.layers if layer is not None)


@dataclass(frozen=True)
class RankLayout:
    """A `RankLayout` describes the pages of one tensor-parallel rank."""

    kv: KvLayout
    rank: Rank = field(default_factory=Rank)

    def __post_init__(self) -> None:
        """Raises `GeometryError` for a division that cannot be done, so that it is told at once."""
        for group in self.groups:
            is_state = group.group.kind == "linear"
            if is_state and -(-group.num_bytes // self.page_bytes) != group.group.state_pages:
                raise GeometryError(
                    f"states of {group.num_bytes} bytes were to be {group.group.state_pages} pages, which have "
                    f"{self.page_bytes} bytes here: layers of one kind differ in size"
                )

    @cached_property
    def groups(self) -> tuple[GroupLayout, ...]:
        return tuple(
            self._group(group, layers) for group, layers in zip(self.kv.groups, self.kv.layers_by_group, strict=True)
        )

    @cached_property
    def page_bytes(self) -> int:
        """The bytes of every page of this rank: those of the largest group's page. Smaller ones leave the rest of their
        pages unused."""
        return max(group.num_bytes for group in self.groups if group.group.kind != "linear")

    @property
    def chunk_size(self) -> int:
        return self.kv.chunk_size

    def _group(self, group: PageGroup, layers: Sequence[int]) -> GroupLayout:
        if group.kind == "linear":
            return self._states(group, layers)
        parts: list[Part] = []
        for position, layer in enumerate(self._layers(layers)):
            for is_values, dim in ((False, layer.key_dim), (True, layer.value_dim)):
                if dim:
                    heads = heads_of(layer.num_heads, self.rank)
                    head_bytes = self.kv.chunk_size * dim * self.kv.element_bytes
                    parts.append(Part(position, is_values, _end(parts), layer.num_heads, heads, head_bytes))
        return GroupLayout(group, tuple(layers), tuple(parts), _end(parts))

    def _states(self, group: PageGroup, layers: Sequence[int]) -> GroupLayout:
        if self.rank.size > 1:
            raise GeometryError("the states of linear-attention layers cannot be divided over ranks here")
        parts: list[Part] = []
        for position, layer in enumerate(self._layers(layers)):
            parts.append(Part(position, False, _end(parts), 1, range(1), layer.state_bytes))
        return GroupLayout(group, tuple(layers), tuple(parts), _end(parts))

    def _layers(self, indexes: Sequence[int]) -> Iterator[LayerKv]:
        return (layer for index in indexes if (layer := self.kv.layers[index]) is not None)


def _end(parts: Sequence[Part]) -> int:
    """Returns where the next part begins."""
    return parts[-1].offset + parts[-1].num_bytes if parts else 0


def _as_group(layer: LayerKv, element_bytes: int) -> LayerGroup:
    num_bytes = layer.elements_per_token * element_bytes
    return LayerGroup(layer.kind, 1, num_bytes, layer.window, layer.state_bytes)


def _shape(layer: LayerKv | None) -> str:
    if layer is None:
        return "-"
    where = f"{layer.kind}:{layer.window or ''}"
    return f"{where}:{layer.num_heads}x{layer.key_dim}+{layer.value_dim}:{layer.state_bytes}"
