"""The parts of a geometry: layers of one kind are taken together, because a transfer treats them alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from transfer.geometry.checks import positive

KINDS = ("full", "mla", "sliding", "chunked", "linear")
"""The kinds of layers. `full` and `mla` keep every token, `sliding` the last window, `chunked` the running chunk,
`linear` one state."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A `LayerGroup` is all layers of one kind. Bytes are those of one rank and of all `num_layers` together."""

    kind: str
    """The kind of the layers, one of `KINDS`."""
    num_layers: int
    """Counts the layers. It is 0 where the bytes were given by hand for the whole model."""
    bytes_per_token: int
    window: int | None = None
    """The window of `sliding` or the attention chunk of `chunked`, in tokens."""
    bytes_per_sequence: int = 0
    """The size, in bytes, of a state that does not grow with the prompt."""


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """`KvGeometry` is the KV of one rank: one group per kind of layer and window, in the order of `KINDS`."""

    groups: tuple[LayerGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        """The bytes that one token adds, over all groups that keep KV per token, windowed ones included."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_sequence(self) -> int:
        """The bytes of all fixed-size states of one sequence. They are no part of a page."""
        return sum(group.bytes_per_sequence for group in self.groups)

    def page_bytes(self, chunk_size: int) -> int:
        """Returns the bytes of one page: `chunk_size` tokens of every layer that keeps KV per token."""
        return self.bytes_per_token * positive("chunk_size", chunk_size)


def merge(layers: Iterable[LayerGroup]) -> list[LayerGroup]:
    """Returns one group per kind and window, in the order of `KINDS`."""
    groups: dict[tuple[int, int], LayerGroup] = {}
    for layer in layers:
        key = (KINDS.index(layer.kind), layer.window or 0)
        groups[key] = _sum(groups[key], layer) if key in groups else layer
    return [groups[key] for key in sorted(groups)]


def _sum(one: LayerGroup, other: LayerGroup) -> LayerGroup:
    return replace(
        one,
        num_layers=one.num_layers + other.num_layers,
        bytes_per_token=one.bytes_per_token + other.bytes_per_token,
        bytes_per_sequence=one.bytes_per_sequence + other.bytes_per_sequence,
    )
