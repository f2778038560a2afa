"""The plan of a run: the cases, their sizes, and which page goes where. Everything left to chance hangs on one seed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

KIB, MIB = 1 << 10, 1 << 20
GB = 1e9
CONTIGUOUS, SCATTERED = "contiguous", "scattered"
SERIAL, LAYERS = "serial", "layers"
NUM_LAYERS = 8
"""The layers of a page in the throughput cases: with `LAYERS` an eighth of every page travels at a time."""

Indexes = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Case:
    """A `Case` is `total_bytes` in pages of `page_bytes`, from `senders` processes at once into one receiver, each its
    share."""

    page_bytes: int
    layout: str
    """Tells where the pages lie. ``contiguous``: neighbours stay neighbours; ``scattered``: page i of one side has
    nothing to do with page i of the other."""
    mode: str
    """Tells how they are sent. ``serial``: whole pages; ``layers``: the same bytes, layer by layer over all pages."""
    senders: int
    total_bytes: int

    @property
    def pages(self) -> int:
        """The number of pages of all senders together."""
        return self.total_bytes // self.page_bytes

    @property
    def pages_per_sender(self) -> int:
        return self.pages // self.senders


@dataclass(frozen=True, slots=True)
class Order:
    """An `Order` tells in which order one sender sends: `ordinals[i]` of the attempt from its own page
    `local_pages[i]`."""

    ordinals: Indexes
    local_pages: Indexes

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.ordinals.tolist(), self.local_pages.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A `Plan` describes one run. Times are in seconds."""

    page_sizes: tuple[int, ...]
    senders: tuple[int, ...]
    total_bytes: int
    rounds: int
    """The number of rounds that count. One more goes before them, in which the bytes are checked."""
    pushes: int
    """The number of small pushes that are timed for the latency."""
    small_page_bytes: int = 64 * KIB
    layered_bytes: int
    layered_pages: int = 8
    layered_layers: int = 32
    idle_s: float

    @property
    def cases(self) -> list[Case]:
        """The cases, by page size, so that the buffers are laid out as seldom as possible."""
        kinds = product(self.page_sizes, (CONTIGUOUS, SCATTERED), (SERIAL, LAYERS), self.senders)
        return [Case(*kind, self.total_bytes) for kind in kinds]


FULL = Plan(
    page_sizes=(16 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB),
    senders=(1, 2, 4),
    total_bytes=1024 * MIB,
    rounds=5,
    pushes=1000,
    layered_bytes=256 * MIB,
    idle_s=5.0,
)
QUICK = Plan(
    page_sizes=(64 * KIB, MIB),
    senders=(1, 2),
    total_bytes=128 * MIB,
    rounds=2,
    pushes=100,
    layered_bytes=64 * MIB,
    idle_s=1.0,
)


def order(layout: str, num_pages: int, seed: int, sender: int) -> Order:
    """Returns the order of a sender's pages, the same for every target. Raises `ValueError` for an unknown layout."""
    if layout == CONTIGUOUS:
        return Order(np.arange(num_pages), np.arange(num_pages))
    if layout != SCATTERED:
        raise ValueError(f"pages lie {CONTIGUOUS} or {SCATTERED}, not {layout!r}")
    chance = np.random.default_rng([seed, num_pages, sender])
    return Order(chance.permutation(num_pages), chance.permutation(num_pages))
