"""An engine's publisher of KV events, on real sockets: vLLM's and SGLang's, and one that has every fault they may have.

It publishes what it is told, in the order in which it is told. What it loses it still repeats, while it keeps it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio

from pdproxy.kv_events.wire import END_OF_REPLAY, AllBlocksCleared, BlockRemoved, BlockStored, Event


def in_order(event: Event) -> list[object]:
    """As SGLang and earlier releases of vLLM write it."""
    if isinstance(event, AllBlocksCleared):
        return ["AllBlocksCleared"]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.block_hashes, event.medium]
    told = [event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, event.lora_id, event.medium]
    return ["BlockStored", *told]


class KvPublisher:
    """``async with KvPublisher() as publisher``: it listens at `address` and `replay_address`, the same ones at each
    start."""

    def __init__(self, *, is_sglang: bool = False, num_kept: int = 10_000) -> None:
        self.is_sglang = is_sglang
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self.num_asked = 0
        self.is_mute = False
        """Whether it does not answer who asks for batches again."""
        self.num_dropped = 0
        """Of the answers to the next question, how many in the middle of them get lost."""
        self.number = 0
        self.ts = 1.0
        self._ports = [0, 0]

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[0]}"

    @property
    def replay_address(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[1]}"

    async def __aenter__(self) -> KvPublisher:
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._live, self._replay = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        for i, one in enumerate((self._live, self._replay)):
            one.set(zmq.LINGER, 0)
            one.bind(f"tcp://127.0.0.1:{self._ports[i] or '*'}")
            self._ports[i] = int(str(one.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(":")[2])
        self._task = asyncio.create_task(self._answer())

    async def _close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._live.close()
        self._replay.close()
        self._context.term()  # so that the ports are free

    async def restart(self) -> None:
        """As another process, which has no events yet."""
        await self._close()
        self.kept.clear()
        self.number = 0
        self._open()

    async def subscribed(self) -> None:
        """Until somebody has subscribed (since the last time)."""
        await self._live.recv()

    def publish(self, *events: Event, is_lost: bool = False) -> None:
        """One batch; `is_lost`: it is not sent, but kept."""
        self.ts += 1.0
        batch: list[object] = [self.ts, [in_order(one) for one in events] if self.is_sglang else list(events), 0]
        self.send(msgspec.msgpack.encode(batch), is_lost=is_lost)

    def send(self, payload: bytes, *, is_lost: bool = False) -> None:
        self.kept.append((self.number, payload))
        if not is_lost:
            self.send_raw([b"kv@pod", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def send_raw(self, frames: Sequence[bytes]) -> None:
        self._live.send_multipart(list(frames))

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            self.num_asked += 1
            if self.is_mute:
                continue
            answers = [(number, payload) for number, payload in self.kept if number >= int.from_bytes(start, "big")]
            del answers[1 : 1 + self.num_dropped]
            self.num_dropped = 0
            for number, payload in answers:
                head = [client, b""] if self.is_sglang else [client, b"", b"kv@pod"]
                await self._replay.send_multipart([*head, number.to_bytes(8, "big"), payload])
            head = [client, b""] if self.is_sglang else [client, b"", b""]
            with suppress(zmq.ZMQError):
                await self._replay.send_multipart([*head, END_OF_REPLAY, b""])


def block(name: int, ids: Sequence[int], parent: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=[name], parent_block_hash=parent, token_ids=list(ids), block_size=len(ids), medium="GPU"
    )
