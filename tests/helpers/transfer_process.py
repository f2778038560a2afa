"""One end of a transfer as a process of its own, so that a test can kill it, freeze it and measure it.

    python -m tests.helpers.transfer_process receiver|sender

Reads commands from standard input, one JSON list per line, and answers each with one JSON value per line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
import uuid
from collections import Counter
from typing import Any

import torch

from transfer import wire
from transfer.agents.nixl import NixlAgent
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.plan.layout import KvLayout
from transfer.roles.handshake import Identity
from transfer.roles.receiver import Receiver, ReceiverConfig
from transfer.roles.sender import Push, Sender

PAGE_BYTES = 1 << 20
NUM_PAGES = 32
KV = KvLayout.uniform(
    num_layers=4, num_kv_heads=1, head_dim=PAGE_BYTES // 8, chunk_size=1, dtype="uint8", element_bytes=1
)
IDENTITY = Identity("m", KV.of_rank())
CONFIG = ReceiverConfig(heartbeat_s=0.2, writer_timeout_s=1.5)


def fill(slab: PagedBuffer) -> None:
    """Page i: bytes that tell pages, and places in a page, apart."""
    for page in range(slab.num_pages):
        slab.pages[page] = torch.arange(PAGE_BYTES) // 7 * (2 * page + 1)


def checksum(slab: PagedBuffer, pages: list[int]) -> str:
    digest = hashlib.sha256()
    for page in pages:
        digest.update(slab.pages[page].numpy().tobytes())
    return digest.hexdigest()


class End:
    """What both ends can be asked: `idle` tells the CPU seconds used while nothing happens."""

    def __init__(self, *, receives: bool) -> None:
        self.agent = NixlAgent(uuid.uuid4().hex, receives=receives)
        self.slab = PagedBuffer(NUM_PAGES, PAGE_BYTES)

    async def idle(self, seconds: float) -> float:
        used = time.process_time()
        await asyncio.sleep(seconds)
        return time.process_time() - used

    async def close(self) -> None:
        await asyncio.to_thread(self.agent.close)


class ReceivingEnd(End):
    def __init__(self) -> None:
        super().__init__(receives=True)
        self.receiver = Receiver(self.agent, self.slab, IDENTITY, CONFIG)

    async def start(self) -> list[Any]:
        await self.receiver.start()
        return [self.receiver.endpoint.host, self.receiver.endpoint.port]

    async def read(self, attempt: str) -> str:
        """The checksum of what was received, in order of the prompt."""
        await self.receiver.wait_ready(attempt)
        value = checksum(self.slab, self.receiver.take(attempt))
        self.receiver.consumed(attempt)
        return value

    async def free_pages(self, expected: int, timeout_s: float) -> float:
        """Seconds until so many pages are free."""
        started = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while self.receiver.reservations.num_free != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.receiver.reservations.check_integrity()
        return time.monotonic() - started

    async def num_free(self) -> int:
        return self.receiver.reservations.num_free

    async def close(self) -> None:
        await self.receiver.aclose()
        await super().close()


class SendingEnd(End):
    def __init__(self) -> None:
        super().__init__(receives=False)
        fill(self.slab)
        self.sender = Sender(self.agent, IDENTITY)
        self.pushes: dict[str, Push] = {}
        self.num_filled: Counter[str] = Counter()

    async def start(self) -> None:
        await asyncio.wrap_future(self.agent.register(self.slab.region))

    async def checksum(self, pages: list[int]) -> str:
        return checksum(self.slab, pages)

    async def open(self, host: str, port: int, attempt: str, num_pages: int, timeout_s: float) -> None:
        endpoint = wire.Endpoint(rank=0, host=host, port=port)
        params = wire.PushParams(attempt=attempt, receivers=[endpoint], timeout_s=timeout_s)
        self.pushes[attempt] = await self.sender.open(params, num_tokens=num_pages)

    async def fill(self, attempt: str, pages: list[int]) -> None:
        """The next pages of the prompt are these local ones."""
        first = self.num_filled[attempt]
        self.num_filled[attempt] += len(pages)
        self.pushes[attempt].pages_filled(range(first, first + len(pages)), pages)

    async def finish(self, attempt: str) -> list[Any]:
        """(what came of it, seconds it took)"""
        started = time.monotonic()
        try:
            num_bytes, _ = await self.pushes[attempt].finish()
            return [num_bytes, time.monotonic() - started]
        except TransferError as error:
            return [str(error), time.monotonic() - started]

    async def ended(self, attempt: str) -> None:
        await self.pushes[attempt].wait_ended()

    async def close(self) -> None:
        await self.sender.aclose()
        await super().close()


async def main(role: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX reports a dead peer on standard output
    end: Any = ReceivingEnd() if role == "receiver" else SendingEnd()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        name, *arguments = json.loads(line)
        try:
            answer = await getattr(end, name)(*arguments)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)
        if name == "close":
            return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
