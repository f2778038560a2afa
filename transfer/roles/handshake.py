"""The handshake of two sides before any KV moves: what they tell each other, and what each refuses.

They must agree on the model, the dtype and how pages are cut; they may differ in the number of their tensor-parallel
ranks, as long as the heads can be divided over both. Each side works out the other's page size from the agreed values,
and refuses where the other says something else: then the two would not mean the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer import wire
from transfer.errors import GeometryError, HandshakeRefused
from transfer.plan.layout import RankLayout

AGREED = ("model", "dtype", "chunk_size", "cache", "heads")
"""The fields of `wire.Layout` that must be equal on both sides."""


@dataclass(frozen=True)
class Identity:
    """An `Identity` tells what one rank is: a model (any text; equal text means the same weights) and the layout of its
    pages."""

    model: str
    layout: RankLayout

    @property
    def on_wire(self) -> wire.Layout:
        kv, rank = self.layout.kv, self.layout.rank
        return wire.Layout(
            model=self.model,
            dtype=kv.dtype,
            chunk_size=kv.chunk_size,
            cache=kv.describe(),
            heads=kv.describe_heads(),
            tp_size=rank.size,
            tp_rank=rank.index,
            page_bytes=self.layout.page_bytes,
        )

    def check_version(self, version: int) -> None:
        """Raises `HandshakeRefused` unless the peer speaks this version of the protocol."""
        if version != wire.PROTOCOL_VERSION:
            raise HandshakeRefused("protocol version", wire.PROTOCOL_VERSION, version)

    def check(self, theirs: wire.Layout) -> RankLayout:
        """Returns the layout of the peer's pages, as both sides understand them. Raises `HandshakeRefused` with the
        first field that differs.

        A number of ranks over which the heads cannot be divided counts as such a field, too.
        """
        ours = self.on_wire
        for field in AGREED:
            if getattr(theirs, field) != getattr(ours, field):
                raise HandshakeRefused(field, getattr(ours, field), getattr(theirs, field))
        try:
            layout = self.layout.kv.of_rank(theirs.tp_size, theirs.tp_rank)
        except GeometryError as error:
            raise HandshakeRefused("tp_size", ours.tp_size, f"{theirs.tp_rank} of {theirs.tp_size}: {error}") from None
        if layout.page_bytes != theirs.page_bytes:
            raise HandshakeRefused("page_bytes", layout.page_bytes, theirs.page_bytes)
        return layout
