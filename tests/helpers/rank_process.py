"""One tensor-parallel rank as a process of its own, which can be made a rank of one model after the other.

Forked by `tests.helpers.zygote`. Every element of a model's KV has a number; a sender's rank fills its pages with the
numbers of the heads that it is told are its own, and a receiver's rank compares its whole slab with what must be there.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from typing import Any

import msgspec
import torch

import tests.helpers.preload_nixl  # noqa: F401 (once for all that are forked)
from transfer import wire
from transfer.agents.nixl import NixlAgent
from transfer.errors import AttemptLost
from transfer.memory.buffer import PagedBuffer
from transfer.memory.views import LayerViews, layer_views
from transfer.plan.blocks import PageTable, page_table
from transfer.plan.layout import KvLayout, LayerKv, RankLayout
from transfer.roles.handshake import Identity
from transfer.roles.rank_slab import OtherSlabs, RankSlab
from transfer.roles.receiver import Receiver, ReceiverConfig
from transfer.roles.sender import Push, Sender

CHUNK = 4
NUM_PAGES = 24
MAX_LAYERS, MAX_HEADS, MAX_TOKENS, MAX_DIM = 4, 8, 64, 16
UNUSED = 0xA5
"""What a receiver's slab is filled with at first."""


def numbers(salt: int, layer: int, is_values: bool, heads: list[int], block: int, dim: int) -> torch.Tensor:
    """int32 ``[heads, CHUNK, dim]``: no two elements of an attempt have the same number, nor those of two salts."""
    tokens = torch.arange(block * CHUNK, (block + 1) * CHUNK)[None, :, None]
    dims = torch.arange(dim)[None, None, :]
    place = ((salt * MAX_LAYERS + layer) * 2 + is_values) * MAX_HEADS + torch.tensor(heads)[:, None, None]
    return ((place * MAX_TOKENS + tokens) * MAX_DIM + dims).to(torch.int32)


class RankEnd:
    """`heads` are, layer by layer, those that this rank holds: what the test says, not what the plan works out."""

    def __init__(self) -> None:
        self.agent: NixlAgent
        self.slab: PagedBuffer
        self.layout: RankLayout
        self.heads: list[list[int]]

    async def build(self, layers: list[list[Any]], size: int, index: int, heads: list[list[int]]) -> None:
        kv = KvLayout(tuple(LayerKv(*layer) for layer in layers), CHUNK, 4, "int32")
        self.layout = kv.of_rank(size, index)
        self.heads = heads
        self.agent = NixlAgent(uuid.uuid4().hex, receives=isinstance(self, RankReceiver))
        self.slab = PagedBuffer(NUM_PAGES, self.layout.page_bytes)
        self.slab.pages.fill_(UNUSED)

    async def drop(self) -> None:
        await asyncio.to_thread(self.agent.close)

    async def close(self) -> None:
        """Nothing is left to be done after `drop`."""

    def table(self, num_tokens: int) -> PageTable:
        return page_table(self.layout.kv.groups, num_tokens, CHUNK)

    def views_of(self, pages: torch.Tensor) -> list[tuple[int, LayerViews]]:
        """By layer of the model."""
        return [(layer, view) for layer, view in enumerate(layer_views(pages, self.layout)) if view is not None]

    def write_numbers(self, view: LayerViews, layer: int, page: int, block: int, salt: int) -> None:
        """One layer's part of one page."""
        for is_values, tensor in ((False, view.keys), (True, view.values)):
            if tensor.shape[-1]:
                tensor[page] = numbers(salt, layer, is_values, self.heads[layer], block, tensor.shape[-1])


class RankSender(RankEnd):
    async def build(self, *model: Any) -> None:
        await super().build(*model)
        await asyncio.wrap_future(self.agent.register(self.slab.region))
        self.sender = Sender(self.agent, Identity("m", self.layout))
        self.pushes: dict[str, Push] = {}
        self.unused: list[int] = []

    async def shuffle(self, seed: int) -> None:
        """All local pages may be used again, in this order."""
        self.unused = random.Random(seed).sample(range(NUM_PAGES), NUM_PAGES)

    async def push(
        self, endpoints: list[list[Any]], attempt: str, salt: int, num_tokens: int, is_layer_wise: bool
    ) -> int:
        """Everything, in whole pages or layer by layer. Returns the bytes sent."""
        await self.open(endpoints, attempt, num_tokens)
        await self.fill(attempt, salt, is_layer_wise)
        return await self.finish(attempt)

    async def open(self, endpoints: list[list[Any]], attempt: str, num_tokens: int) -> None:
        receivers = [wire.Endpoint(rank=rank, host=host, port=port) for rank, host, port in endpoints]
        params = wire.PushParams(attempt=attempt, receivers=receivers, timeout_s=20.0)
        self.pushes[attempt] = await self.sender.open(params, num_tokens=num_tokens)

    async def fill(self, attempt: str, salt: int, is_layer_wise: bool) -> None:
        push = self.pushes[attempt]
        local = [self.unused.pop() for _ in push.table.pages]
        for layer, view in self.views_of(self.slab.pages):
            for ordinal, page in enumerate(local):
                group, block = push.table.pages[ordinal]
                if group == view.group:
                    self.write_numbers(view, layer, page, block, salt)
                    if is_layer_wise:
                        push.layers_filled(ordinal, page, view.position, view.position + 1)
        if not is_layer_wise:
            for ordinal, page in enumerate(local):
                push.page_filled(ordinal, page)

    async def finish(self, attempt: str) -> int:
        return (await self.pushes[attempt].finish())[0]

    async def failed(self, attempt: str) -> str | None:
        """Wait until the push fails, of which nobody else asks."""
        await self.pushes[attempt].failed.wait()
        return self.pushes[attempt].failure

    async def drop(self) -> None:
        await self.sender.aclose()
        await super().drop()


class RankReceiver(RankEnd):
    """Any rank of a decoder; the methods of rank 0 say so. Mutable state besides: `expected`, a slab as this one must
    be. What goes from rank to rank is carried by the test, as JSON.
    """

    async def build(self, *model: Any, heartbeat_s: float = 2.0, writer_timeout_s: float = 30.0) -> None:
        await super().build(*model)
        self.expected = self.slab.pages.clone()
        self.config = ReceiverConfig(heartbeat_s=heartbeat_s, writer_timeout_s=writer_timeout_s)
        self.identity = Identity("m", self.layout)
        self.rank_slab = RankSlab(self.agent, self.slab, self.identity)
        self.receiver: Receiver | None = None

    async def start_other(self) -> str:
        """Ranks 1, 2, …: what rank 0 is to know of this one."""
        return msgspec.json.encode(await self.rank_slab.start()).decode()

    async def start(self, others: list[str]) -> list[Any]:
        """Rank 0: what senders are to know, the endpoints of all ranks."""
        slabs = [msgspec.json.decode(one, type=wire.Slab) for one in others]
        given = OtherSlabs(slabs, self.rank_slab.delivered) if slabs else None  # all ranks are on this machine
        self.receiver = Receiver(self.agent, self.slab, self.identity, self.config, others=given)
        await self.receiver.start()
        return [[end.rank, end.host, end.port] for end in self.receiver.endpoints]

    async def build_impatient(self, *model: Any) -> None:
        await self.build(*model, heartbeat_s=0.2, writer_timeout_s=1.5)

    @property
    def own(self) -> Receiver:
        assert self.receiver is not None
        return self.receiver

    async def take(self, attempt: str) -> str:
        """Rank 0: take the attempt for all ranks, and say what they are to read."""
        await self.own.wait_ready(attempt)
        self.own.take(attempt)
        return msgspec.json.encode(self.own.written(attempt)).decode()

    async def consumed(self, attempt: str) -> None:
        """Rank 0: all ranks have read it."""
        self.own.consumed(attempt)

    async def count_wrong(self, attempts: list[list[Any]]) -> int:
        """Read the attempts, (name, salt, number of tokens, what rank 0 has said) each. Returns how many bytes of the
        whole slab are not as expected."""
        for attempt, salt, num_tokens, written in attempts:
            told = msgspec.json.decode(written, type=list[wire.WrittenPages])
            table, pages = self.table(num_tokens), self.rank_slab.take(attempt, told)
            for layer, view in self.views_of(self.expected):
                for page, (group, block) in zip(pages, table.pages, strict=True):
                    if group == view.group:
                        self.write_numbers(view, layer, page, block, salt)
        return int((self.slab.pages != self.expected).sum())

    async def lost(self, attempt: str) -> list[Any]:
        """(why the KV of this attempt will never be here, when that was known)"""
        try:
            await self.own.wait_ready(attempt)
        except AttemptLost as error:
            return [str(error), time.monotonic()]
        raise AssertionError(f"{attempt} is ready")

    async def all_free(self) -> None:
        """Rank 0: wait until every page is free."""
        while self.own.reservations.num_free < NUM_PAGES:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self.own.reservations.check_integrity()

    async def begin_anew(self) -> None:
        """What has been written so far is no longer of interest."""
        self.expected = self.slab.pages.clone()

    async def drop(self) -> None:
        if self.receiver is not None:
            self.receiver.reservations.check_integrity()
            assert self.receiver.reservations.num_free == NUM_PAGES
            await self.receiver.aclose()
        await super().drop()


ROLES = {"receiving rank": RankReceiver, "sending rank": RankSender}
