"""vLLM's own block manager and publisher of KV events, without a model, and who follows them.

It is a program for vLLM's Python: it reads conversations in a cache that is too small for them, several at a time, and
prints how many requests there were, and for how many the cached tokens had been predicted exactly.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import torch
import zmq.asyncio
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from pdproxy.kv_events.index import KvIndex, PromptBlocks
from pdproxy.kv_events.subscriber import Subscriber

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, NUM_TURNS = 32, 160, 2048, 600


class Blocks:
    """The manager, and the publisher at `port` and the next one."""

    def __init__(self, port: int) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(
            config, MAX_MODEL_LEN, BLOCK_SIZE, BLOCK_SIZE, enable_caching=True, enable_kv_cache_events=True
        )
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.addresses = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
        self.publisher = ZmqEventPublisher(0, f"tcp://*:{port}", f"tcp://*:{port + 1}")
        self.num_events = self.num_requests = 0

    def publish(self) -> None:
        if events := self.manager.take_events():
            self.num_events += len(events)
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def read(self, ids: list[int]) -> tuple[Request | None, int]:
        """The request, where there were blocks for it, and how many of its tokens were cached."""
        self.num_requests += 1
        params = SamplingParams(max_tokens=64)
        request = Request(str(self.num_requests), list(ids), params, None, block_hasher=self.hasher)
        blocks, num_cached, _ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, request.num_tokens - num_cached, num_cached, blocks) is None:
            return None, num_cached
        request.num_computed_tokens = request.num_tokens
        self.publish()
        return request, num_cached

    def write(self, request: Request, token: int) -> None:
        request.append_output_token_ids(token)
        if self.manager.allocate_slots(request, 1) is not None:
            request.num_computed_tokens += 1
        self.publish()

    def free(self, requests: list[Request]) -> None:
        while requests:
            self.manager.free(requests.pop(0))


async def main(port: int, seed: int) -> None:
    dice, blocks = random.Random(seed), Blocks(port)
    context, index = zmq.asyncio.Context(), KvIndex()
    task = asyncio.create_task(Subscriber(index, context, *blocks.addresses, name="vllm").run())
    chats = [[dice.randrange(50) for _ in range(100)] for _ in range(12)]
    chats = [chats[number % 3] + [number] for number in range(12)]
    running: list[Request] = []
    turns = []
    for turn in range(NUM_TURNS):
        chat = dice.choice(chats)
        chat += [dice.randrange(50) for _ in range(dice.randrange(5, 60))]
        if len(chat) > MAX_MODEL_LEN - 150:
            del chat[100:-40]
        blocks.publish()
        while index.num_events < blocks.num_events or not index.is_exact:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        predicted = index.cached_tokens(PromptBlocks(chat))
        request, num_cached = blocks.read(chat)
        turns.append((predicted, num_cached))
        if request is None:
            blocks.free(running)
        elif dice.random() < 0.3:  # it goes on while others are read
            running.append(request)
            if len(running) > 2:
                blocks.free(one := [running.pop(0)])
                assert not one
        else:
            for _ in range(12):
                blocks.write(request, dice.randrange(50))
            chat += list(request.output_token_ids)
            blocks.free([request])
        if turn == NUM_TURNS // 2:
            blocks.free(running)
            assert blocks.manager.reset_prefix_cache()
    told = {"turns": len(turns), "exactly": sum(one == other for one, other in turns)}
    told |= {"cached": sum(cached > 0 for _, cached in turns), "gone": sum(cached < 90 for _, cached in turns)}
    print(json.dumps(told | {"index": index.status()}))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    context.destroy(linger=0)
    blocks.publisher.shutdown()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
