"""One process of a measurement: `python -m scripts.dev.bench_transfer.peer receiver|sender|copier DEVICE LIFETIME_S`
starts it. All times are taken in here, on the clock that all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from scripts.dev.bench_transfer.bare import BareReceiver, BareSender
from scripts.dev.bench_transfer.copying import PlainCopy
from scripts.dev.bench_transfer.ours import OurReceiver, OurSender
from scripts.dev.bench_transfer.plan import Indexes, Order, order
from scripts.dev.bench_transfer.samples import Timed
from scripts.dev.bench_transfer.slab import checksum, fill, synchronize
from scripts.dev.common.peer import Peer, run
from transfer.memory.buffer import PagedBuffer


class Stopwatch:
    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._started = time.monotonic()

    def lap(self) -> Timed:
        ended = time.monotonic()
        return Timed(self._started, ended, time.process_time() - self._cpu)


class End(Peer):
    """An `End` is a side of a transfer. Mutable state: `slab`, laid out anew by `lay_out`."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._slab: PagedBuffer | None = None

    @property
    def slab(self) -> PagedBuffer:
        assert self._slab is not None
        return self._slab

    def new_slab(self, num_pages: int, page_bytes: int) -> PagedBuffer:
        self._slab = None  # before the next one is made: two of them may not fit
        self._slab = PagedBuffer(num_pages, page_bytes, self.device)
        return self._slab


class ReceivingPeer(End):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._ours: OurReceiver | None = None
        self._bare: BareReceiver | None = None

    @property
    def ours(self) -> OurReceiver:
        assert self._ours is not None
        return self._ours

    async def lay_out(self, page_bytes: int, num_pages: int, num_layers: int) -> list[Any]:
        """Makes a new buffer, empty, and our receiver over it. Returns [host, port]."""
        await self.close()
        self._ours = OurReceiver(self.new_slab(num_pages, page_bytes), num_layers)
        return await self._ours.start()

    async def bare(self) -> dict[str, Any]:
        """Makes a bare NIXL agent over the same buffer. Returns its facts."""
        self._bare = BareReceiver(self.slab)
        return self._bare.facts()

    async def take(self, attempts: list[str]) -> None:
        for attempt in attempts:
            await self.ours.take(attempt)

    async def arrived(self, attempt: str) -> float:
        """Does the same as `take`, for an attempt that may be under way. Returns when all of it was there, on
        `time.monotonic()`."""
        await self.ours.take(attempt)
        return time.monotonic()

    async def pages(self, attempt: str) -> list[int]:
        return [int(page) for page in self.ours.pages(attempt)]

    async def clear(self) -> None:
        self.slab.pages.zero_()
        synchronize(self.slab)

    async def checksum(self, pages: list[int]) -> int:
        return checksum(self.slab, _indexes(pages))

    async def close(self) -> None:
        if self._bare is not None:
            self._bare.close()
        if self._ours is not None:
            await self._ours.close()
        self._ours = self._bare = None


class SendingPeer(End):
    """A `SendingPeer` is a sender's process. Mutable state: `_order`, what the next `send` or `send_bare` moves, and
    `_by_layer`, how."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._ours: OurSender | None = None
        self._bare: BareSender | None = None
        self._num_layers = 1
        self._order: Order | None = None
        self._by_layer = False

    @property
    def ours(self) -> OurSender:
        assert self._ours is not None
        return self._ours

    @property
    def order(self) -> Order:
        assert self._order is not None
        return self._order

    async def lay_out(self, page_bytes: int, num_pages: int, num_layers: int, seed: int) -> None:
        """Makes a new buffer, filled, and our sender over it."""
        await self.close()
        self._num_layers = num_layers
        fill(self.new_slab(num_pages, page_bytes), seed)
        self._ours = OurSender(self.slab, num_layers)
        await self._ours.start()

    async def bare(self, facts: dict[str, Any]) -> None:
        """Makes a bare NIXL agent over the same buffer, connected to the receiver's."""
        self._bare = BareSender(self.slab, facts, self._num_layers)

    async def prepare(self, layout: str, num_pages: int, seed: int, sender: int, by_layer: bool) -> None:
        self._order = order(layout, num_pages, seed, sender)
        self._by_layer = by_layer
        self.ours.prepare(self._order)

    async def prepare_bare(self, remote_pages: list[int]) -> None:
        """Prepares bare NIXL. `remote_pages` are, by ordinal, those that our receiver granted."""
        assert self._bare is not None
        remote = _indexes(remote_pages)[self.order.ordinals]
        self._bare.prepare(self.order.local_pages, remote, by_layer=self._by_layer)

    async def open(self, host: str, port: int, attempt: str) -> dict[str, float]:
        watch = Stopwatch()
        await self.ours.open(host, port, attempt, len(self.order.ordinals))
        return asdict(watch.lap())

    async def send(self) -> dict[str, float]:
        """Returns the time from the first page that is filled until the receiver has been told, and the CPU seconds
        until the last word is out."""
        watch = Stopwatch()
        await self.ours.send(by_layer=self._by_layer)
        lap = watch.lap()
        await self.ours.ended()
        return asdict(replace(lap, cpu_s=watch.lap().cpu_s))

    async def send_bare(self) -> dict[str, float]:
        assert self._bare is not None
        watch = Stopwatch()
        self._bare.push()
        return asdict(watch.lap())

    async def checksum(self) -> int:
        """Returns the checksum of what the prepared order sends, by ordinal."""
        by_ordinal = self.order.local_pages[self.order.ordinals.argsort()]
        return checksum(self.slab, by_ordinal)

    async def compute(self, layer_s: float, value: int, as_layers: bool) -> float:
        """Fills layer after layer, `layer_s` seconds for each, and sends each at once or everything at the end.

        Returns the seconds from the last layer's end until the receiver had been told: what is not hidden.
        """
        loop = asyncio.get_running_loop()
        for layer in range(self._num_layers):
            due = loop.time() + layer_s
            await asyncio.to_thread(self._fill_layer, layer, value)
            await asyncio.sleep(due - loop.time())
            filled = time.monotonic()
            if as_layers:
                self.ours.layer_filled(layer)
        if as_layers:
            await self.ours.push.finish()
        else:
            await self.ours.send(by_layer=False)
        exposed_s = time.monotonic() - filled
        await self.ours.ended()
        return exposed_s

    def _fill_layer(self, layer: int, value: int) -> None:
        by_layer = self.slab.pages.view(self.slab.num_pages, self._num_layers, -1)
        by_layer[:, layer] = (layer + value) % 251
        synchronize(self.slab)

    async def close(self) -> None:
        if self._bare is not None:
            self._bare.close()
        if self._ours is not None:
            await self._ours.close()
        self._ours = self._bare = None


class CopyingPeer(Peer):
    """A `CopyingPeer` is the process of the plain copy. Mutable state: `_copy`, and `_prepared`, which tells for
    what."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._copy: PlainCopy | None = None
        self._prepared: tuple[str, bool] | None = None

    async def lay_out(self, page_bytes: int, num_pages: int, num_layers: int) -> None:
        self._copy = self._prepared = None
        self._copy = PlainCopy(num_pages, page_bytes, self.device, num_layers)

    async def prepare(self, layout: str, num_pages: int, seed: int, by_layer: bool) -> None:
        assert self._copy is not None
        if self._prepared != (layout, by_layer):
            self._copy.prepare(layout, order(layout, num_pages, seed, 0), by_layer=by_layer)
            self._prepared = layout, by_layer

    async def copy(self) -> dict[str, float]:
        assert self._copy is not None
        watch = Stopwatch()
        self._copy.copy()
        return asdict(watch.lap())


ROLES: dict[str, Callable[[str], Peer]] = {
    "receiver": ReceivingPeer,
    "sender": SendingPeer,
    "copier": CopyingPeer,
}


def _indexes(pages: list[int]) -> Indexes:
    return np.array(pages, dtype=np.int64)


def main(role: str, device: str, lifetime_s: str) -> None:
    run(lambda: ROLES[role](device), lifetime_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
