"""A plain `torch` copy on one thread, in one process. It has the same pages, the same scatter, and no second process at
all.

Runs of neighbours are one copy, as they are one write for NIXL. Views are made beforehand: only copying is timed.
"""

from __future__ import annotations

import torch

from scripts.dev.bench_transfer.plan import CONTIGUOUS, Order
from scripts.dev.bench_transfer.slab import synchronize
from transfer.memory.buffer import PagedBuffer


class PlainCopy:
    """A `PlainCopy` copies from one slab into another of the same size.

    Mutable state: `_pairs`, the (to, from) views of the next copy.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: str, num_layers: int) -> None:
        self.source = PagedBuffer(num_pages, page_bytes, device)
        self.target = PagedBuffer(num_pages, page_bytes, device)
        self._num_layers = num_layers
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prepare(self, layout: str, order: Order, *, by_layer: bool) -> None:
        parts = self._num_layers if by_layer else 1
        shape = (self.target.num_pages, parts, self.target.page_bytes // parts)
        to, origin = self.target.pages.view(shape), self.source.pages.view(shape)
        if layout == CONTIGUOUS:
            count = len(order.ordinals)
            self._pairs = [(to[:count, part], origin[:count, part]) for part in range(parts)]
            return
        self._pairs = [(to[i, part], origin[j, part]) for part in range(parts) for i, j in order.pairs()]

    def copy(self) -> None:
        for to, origin in self._pairs:
            to.copy_(origin)
        synchronize(self.target)
