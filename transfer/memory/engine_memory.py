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
from transfer.plan.layout import GroupLayout, RankLayout
from transfer.plan.placement import GroupPlace


class EngineMemory:
    """An `EngineMemory` is an engine's KV cache: `layers` has a tensor ``[blocks, heads, tokens, elements]`` for each
    layer of the model, None for a layer that keeps no KV.

    Within a block the heads lie one behind the other, and so do the tokens of a head. All layers are in one allocation.
    Raises `GeometryError` where that is not so, or where the shapes are not those of `layout`.
    """

    def __init__(self, layers: Sequence[torch.Tensor | None], layout: RankLayout) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in layers if tensor is not None}
        if len(storages) != 1:
            raise GeometryError(f"the KV cache is in {len(storages)} allocations; it has to be in one")
        (first,) = storages.values()
        storage = first.untyped_storage()
        self.whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
        """All bytes of the allocation."""
        self.region = region_of(self.whole, storage.nbytes())
        self.layers = list(layers)
        self.placement = tuple(_place(self.layers, group, layout) for group in layout.groups)

    def __repr__(self) -> str:
        return f"<EngineMemory {self.region.num_bytes} B on {self.whole.device}>"


def _place(layers: Sequence[torch.Tensor | None], group: GroupLayout, layout: RankLayout) -> GroupPlace:
    strides, offsets = set(), []
    for part in group.parts:
        index = group.layers[part.layer]
        tensor = layers[index]
        if tensor is not None and tensor.dim() != 4:
            raise GeometryError(
                f"layer {index} has the shape {tuple(tensor.shape)}, which is not [blocks, heads, tokens, elements]"
            )
        shape = (len(part.heads), layout.chunk_size, part.head_bytes // layout.chunk_size)
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
        strides.add(tensor.stride(0) * tensor.element_size())
        offsets.append(int(tensor.storage_offset()) * tensor.element_size())
    if len(strides) != 1:
        raise GeometryError(f"the layers of one page group have blocks at distances of {sorted(strides)} bytes")
    return GroupPlace(strides.pop(), tuple(offsets))


def _bytes_per_block(tensor: torch.Tensor) -> tuple[int, int, int]:
    _, heads, tokens, elements = map(int, tensor.shape)
    return heads, tokens, elements * tensor.element_size()
