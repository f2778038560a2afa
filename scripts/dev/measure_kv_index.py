"""Measures how much memory the index of an engine's prefix cache takes, and how long it takes to fill it and to ask it.

python -m scripts.dev.measure_kv_index --blocks 1000000
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc

from pdproxy.kv_events.index import KvIndex, PromptBlocks
from pdproxy.kv_events.wire import BlockStored, EventBatch

BLOCK_SIZE = 16
PROMPT_BLOCKS = 1000
"""The blocks of one prompt: 16,000 tokens."""


def measure(num_blocks: int, seed: int, *, traced: bool) -> dict[str, float]:
    """Returns the blocks, and the bytes per block where `traced` (which makes everything slow), else the seconds."""
    dice, index = random.Random(seed), KvIndex(max_blocks=num_blocks)
    index.begin()
    if traced:
        tracemalloc.start()
    filling_s, last = 0.0, list[int]()
    while index.num_blocks < num_blocks:
        count = min(PROMPT_BLOCKS, num_blocks - index.num_blocks)
        last = [dice.randrange(150_000) for _ in range(count * BLOCK_SIZE)]
        event = BlockStored(
            block_hashes=[dice.randbytes(32) for _ in range(count)],
            parent_block_hash=None,
            token_ids=last,
            block_size=BLOCK_SIZE,
            medium="GPU",
        )
        batch = EventBatch(0.0, [event])
        started = time.perf_counter()
        index.apply(batch)
        filling_s += time.perf_counter() - started
    del event, batch
    if traced:
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return {"blocks": index.num_blocks, "bytes_per_block": round(num_bytes / index.num_blocks, 1)}
    started = time.perf_counter()
    index.cached_tokens(PromptBlocks(last))
    return {
        "us_per_stored_block": round(filling_s / index.num_blocks * 1e6, 2),
        "us_per_asked_block": round((time.perf_counter() - started) / PROMPT_BLOCKS * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of 16 tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    options = parser.parse_args()
    told = measure(options.blocks, options.seed, traced=True)
    told |= measure(options.blocks, options.seed, traced=False)
    print(json.dumps(told) if options.json else "\n".join(f"{name}: {value:,}" for name, value in told.items()))


if __name__ == "__main__":
    main()
