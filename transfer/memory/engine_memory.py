"""The KV cache of an engine that has allocated it itself: one region, seen as pages.

What must hold: byte for byte, the heads of a layer in one block of the engine are what `RankLayout` says of a page. A
violation would be seen as another text than one engine alone answers. So the shapes and strides of the engine's own
tensors are compared with the layout, and what differs is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transfer.errors import GeometryError
from transfer.memory.buffer import region_of
from transfer.plan.layout import GroupLayout, Part, RankLayout
from transfer.plan.placement import GroupPlace, Rows


class EngineMemory:
    """An `EngineMemory` is an engine's KV cache: `layers` has a tensor ``[blocks, heads, tokens, elements]`` for each
    layer of the model, None for a layer that keeps no KV.

    Within a block the heads lie one behind the other, and so do the tokens of a head. All layers are in one allocation.
    Raises `GeometryError` where that is not so, or where the shapes are not those of `layout`.

    Where a block has the tokens of several pages of `layout`, `rows` says for each layer how a head can be cut, and
    page p is piece ``p % pages_per_block`` of block ``p // pages_per_block``.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor | None],
        layout: RankLayout,
        pages_per_block: int = 1,
        rows: Sequence[Sequence[Rows]] = (),
    ) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in layers if tensor is not None}
        if len(storages) != 1:
            raise GeometryError(f"the KV cache is in {len(storages)} allocations; it has to be in one")
        (first,) = storages.values()
        storage = first.untyped_storage()
        self.whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
        """All bytes of the allocation."""
        self.region = region_of(self.whole, storage.nbytes())
        self.layers = list(layers)
        self.pages_per_block = pages_per_block
        self._rows = [tuple(of_layer) for of_layer in rows]
        self.placement = tuple(self._place(group, layout) for group in layout.groups)

    def __repr__(self) -> str:
        return f"<EngineMemory {self.region.num_bytes} B on {self.whole.device}>"

    def put(self, layer: int, pages: torch.Tensor, content: torch.Tensor) -> None:
        """Copies `content`, bytes ``[len(pages), heads, bytes of a head]``, into these pages of a layer. All are on the
        device."""
        tensor = self.layers[layer]
        assert tensor is not None
        target = tensor.view(torch.uint8).flatten(2)
        pieces = self.pages_per_block
        if pieces == 1:
            target.index_copy_(0, pages, content)
            return
        which = pages // pieces, pages % pieces
        begin, num_tokens = 0, content.shape[2] // self._token_bytes(layer)
        for num, token_bytes in self._rows[layer]:
            size = token_bytes * num_tokens
            end = begin + num * size
            theirs = content[:, :, begin:end].reshape(*content.shape[:2], num, size)
            ours = target[:, :, begin * pieces : end * pieces].view(*target.shape[:2], num, pieces, size)
            ours.permute(0, 3, 1, 2, 4).index_put_(which, theirs)
            begin = end

    def _token_bytes(self, layer: int) -> int:
        return sum(num * token_bytes for num, token_bytes in self._rows[layer])

    def _place(self, group: GroupLayout, layout: RankLayout) -> GroupPlace:
        strides, offsets, rows = set(), [], []
        for part in group.parts:
            index = group.layers[part.layer]
            tensor = self.layers[index]
            strides.add(_stride(tensor, index, part, layout.chunk_size, self.pages_per_block))
            assert tensor is not None
            offsets.append(int(tensor.storage_offset()) * tensor.element_size())
            if self.pages_per_block > 1:
                if self._token_bytes(index) * layout.chunk_size != part.head_bytes:
                    raise GeometryError(
                        f"layer {index} has {part.head_bytes // layout.chunk_size} bytes per token and head, and "
                        f"its rows {self._token_bytes(index)}"
                    )
                rows.append(self._rows[index])
        if len(strides) != 1:
            raise GeometryError(f"the layers of one page group have blocks at distances of {sorted(strides)} bytes")
        return GroupPlace(strides.pop(), tuple(offsets), self.pages_per_block, tuple(rows))


def _stride(tensor: torch.Tensor | None, index: int, part: Part, chunk_size: int, pages_per_block: int) -> int:
    """Returns the bytes from a block of a layer to the next one. Raises `GeometryError` for a tensor that is not as
    `EngineMemory` says."""
    if tensor is not None and tensor.dim() != 4:
        raise GeometryError(
            f"layer {index} has the shape {tuple(tensor.shape)}, which is not [blocks, heads, tokens, elements]"
        )
    shape = (len(part.heads), chunk_size * pages_per_block, part.head_bytes // chunk_size)
    if tensor is None or part.is_values or _bytes_per_block(tensor) != shape:
        found = None if tensor is None else _bytes_per_block(tensor)
        raise GeometryError(
            f"a block of layer {index} has (heads, tokens, bytes) = {found}, and the layout says {shape}"
        )
    wanted = shape[1] * tensor.shape[3], tensor.shape[3], 1
    dimensions = zip(shape[:2] + tensor.shape[3:], tensor.stride()[1:], wanted, strict=True)
    if any(size > 1 and stride != want for size, stride, want in dimensions):  # one head has any stride
        raise GeometryError(
            f"layer {index} has the strides {tensor.stride()}: within a block, heads and their tokens have to lie "
            "one behind the other"
        )
    return int(tensor.stride(0)) * tensor.element_size()


def _bytes_per_block(tensor: torch.Tensor) -> tuple[int, int, int]:
    _, heads, tokens, elements = map(int, tensor.shape)
    return heads, tokens, elements * tensor.element_size()
