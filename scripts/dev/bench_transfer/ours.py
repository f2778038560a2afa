"""Our own transfer, as an engine uses it: a `Receiver` here, a `Sender` there. It is all that the benchmark knows of
them.

Nothing is switched off for it: handshake, custody of pages, heartbeats and the word that all has arrived are in it.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import numpy as np

from scripts.dev.bench_transfer.plan import Indexes, Order
from transfer import wire
from transfer.agents.nixl import NixlAgent
from transfer.memory.buffer import PagedBuffer
from transfer.plan.layout import KvLayout, RankLayout
from transfer.roles.handshake import Identity
from transfer.roles.receiver import Receiver, ReceiverConfig
from transfer.roles.sender import Push, Sender

MODEL = "bench"
HEAD_DIM, ELEMENT_BYTES = 64, 2
TIMEOUT_S = 60.0


def layout_of(page_bytes: int, num_layers: int) -> RankLayout:
    """Returns the layout of pages of exactly `page_bytes` bytes, of `num_layers` layers that are all alike. Raises
    `ValueError` where none fit."""
    chunk_size, rest = divmod(page_bytes, num_layers * 2 * HEAD_DIM * ELEMENT_BYTES)
    if rest or not chunk_size:
        raise ValueError(f"{page_bytes} bytes are no page of {num_layers} layers with {HEAD_DIM} elements per head")
    kv = KvLayout.uniform(
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        chunk_size=chunk_size,
        dtype="bfloat16",
        element_bytes=ELEMENT_BYTES,
    )
    return kv.of_rank()


class OurReceiver:
    """`OurReceiver` is the decoder's end. Mutable state: `_pages`, where the KV of attempts was that nobody has asked
    about yet."""

    def __init__(self, slab: PagedBuffer, num_layers: int) -> None:
        self._agent = NixlAgent(uuid.uuid4().hex, receives=True, device=slab.pages.device)
        identity = Identity(MODEL, layout_of(slab.page_bytes, num_layers))
        self._receiver = Receiver(self._agent, slab, identity, ReceiverConfig())
        self._pages: dict[str, Indexes] = {}

    async def start(self) -> list[Any]:
        """Starts it. Returns where it listens: [host, port]."""
        await self._receiver.start()
        return [self._receiver.endpoint.host, self._receiver.endpoint.port]

    async def take(self, attempt: str) -> None:
        """Waits for an attempt's KV and gives its pages back, as an engine that has copied them out."""
        await self._receiver.wait_ready(attempt)
        self._pages[attempt] = np.array(self._receiver.take(attempt), dtype=np.int64)
        self._receiver.consumed(attempt)

    def pages(self, attempt: str) -> Indexes:
        """Returns where an attempt's KV was, in order of the prompt. It is told once."""
        return self._pages.pop(attempt)

    async def close(self) -> None:
        await self._receiver.aclose()
        await asyncio.to_thread(self._agent.close)


class OurSender:
    """`OurSender` is the prefiller's end. Mutable state: `_push`, the open one; `_ordinals` and `_local_pages`, what it
    moves."""

    def __init__(self, slab: PagedBuffer, num_layers: int) -> None:
        self._slab = slab
        self._num_layers = num_layers
        self._layout = layout_of(slab.page_bytes, num_layers)
        self._agent = NixlAgent(uuid.uuid4().hex, receives=False, device=slab.pages.device)
        self._sender = Sender(self._agent, Identity(MODEL, self._layout))
        self._push: Push | None = None
        self._ordinals: list[int] = []
        self._local_pages: list[int] = []

    @property
    def push(self) -> Push:
        assert self._push is not None
        return self._push

    async def start(self) -> None:
        await asyncio.wrap_future(self._agent.register(self._slab.region))

    async def open(self, host: str, port: int, attempt: str, num_pages: int) -> None:
        """Reserves pages for an attempt, and shakes hands where this is the first one."""
        endpoint = wire.Endpoint(rank=0, host=host, port=port)
        params = wire.PushParams(attempt=attempt, receivers=[endpoint], timeout_s=TIMEOUT_S)
        self._push = await self._sender.open(params, num_tokens=num_pages * self._layout.chunk_size)

    def prepare(self, order: Order) -> None:
        """Takes which pages go where in `send` and `layer_filled`."""
        self._ordinals, self._local_pages = order.ordinals.tolist(), order.local_pages.tolist()

    async def send(self, *, by_layer: bool) -> None:
        """Says that everything is filled, and waits until it is at the receiver and the receiver knows."""
        if by_layer:
            for layer in range(self._num_layers):
                self.layer_filled(layer)
                await asyncio.sleep(0)  # an engine computes the next layer here
        else:
            self.push.pages_filled(self._ordinals, self._local_pages)
        await self.push.finish()

    def layer_filled(self, layer: int) -> None:
        """Says that one layer of all pages is complete."""
        self.push.pages_filled(self._ordinals, self._local_pages, layer, layer + 1)

    async def ended(self) -> None:
        await self.push.wait_ended()

    async def close(self) -> None:
        await self._sender.aclose()
        await asyncio.to_thread(self._agent.close)
