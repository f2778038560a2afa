"""A prompt larger than the decoder's PD buffer, through the proxy: it passes through the buffer, while it is alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import running
from tests.e2e.test_equality import CHUNK, NUM_TOKENS, Reference, make_prompt

pytestmark = pytest.mark.engine

BUFFER_PAGES = 4
BYTES_PER_TOKEN = 1024
"""Of the tiny llama: 4 layers × 2 KV heads × 16 dims × 2 × 4 bytes."""


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> list[str]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 0}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-pdproxy-path"] == "disaggregated"
    return list(reply.json()["choices"][0]["logprobs"]["tokens"])


async def test_it_is_answered_as_by_generate_among_others(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    rng = random.Random(7)
    folder = tiny_model()
    reference = Reference(folder)
    large = 3 * BUFFER_PAGES * CHUNK
    first, *together = (make_prompt(rng, length) for length in (50, large, 100, large - 5, 200, 64, large))
    engine = ("--chunk-size", str(CHUNK), "--served-model-name", "tiny")
    decode = ("--pd-buffer-size", str(BUFFER_PAGES * CHUNK * BYTES_PER_TOKEN))
    proxy = ("--chunk-size", str(CHUNK), "--oversized", "window", "--retries", "0")
    async with running(folder, tmp_path, engine=engine, decode=decode, proxy=proxy) as cluster:
        facts = await cluster.get("decode-0", "/kv_buffer")
        assert (facts["num_pages"], facts["windowed"]) == (BUFFER_PAGES, True)
        fed_before = (await cluster.statistics("decode-0"))["tokens_fed"]
        async with httpx.AsyncClient(base_url=cluster.proxy, timeout=60) as client:
            for prompt in (first, together[0], first):
                assert await complete(client, prompt) == reference.tokens(prompt, NUM_TOKENS)
            answers = await asyncio.gather(*(complete(client, prompt) for prompt in together))
        assert answers == [reference.tokens(prompt, NUM_TOKENS) for prompt in together]
        fed = (await cluster.statistics("decode-0"))["tokens_fed"] - fed_before
        assert fed == (3 + len(together)) * (NUM_TOKENS - 1), "the decoder read no prompt"
        await cluster.settled()
