"""The sizes of a prefiller's writes: which layers of a page are sent together, as soon as the last of them is computed.

Every write costs a few microseconds of its own, and small ones travel slowly; large ones leave late. From 256 KiB on, a
larger write does not travel much faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from transfer.plan.layout import GroupLayout

MIN_WRITE_BYTES = 256 << 10


def layer_writes(group: GroupLayout, layers_per_write: int | None = None) -> tuple[range, ...]:
    """Returns the group's layers, in order, cut into the ranges that travel together.

    Where `layers_per_write` is None, a range is as few layers as make `MIN_WRITE_BYTES`, so a smaller page is one
    write.
    """
    return tuple(_cut(group, layers_per_write))


def _cut(group: GroupLayout, layers_per_write: int | None) -> Iterator[range]:
    num_bytes: Counter[int] = Counter()
    for part in group.parts:
        num_bytes[part.layer] += part.num_bytes
    first, pending, num_layers = 0, 0, len(group.layers)
    for layer in range(num_layers):
        pending += num_bytes[layer]
        is_enough = pending >= MIN_WRITE_BYTES if layers_per_write is None else layer + 1 - first >= layers_per_write
        if is_enough or layer + 1 == num_layers:
            yield range(first, layer + 1)
            first, pending = layer + 1, 0
