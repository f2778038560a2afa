"""A prompt whose beginning was read before, through the proxy: told as cached, and answered as the first time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import running
from tests.e2e.test_equality import CHUNK, NUM_TOKENS, Reference, make_prompt

pytestmark = pytest.mark.engine


async def ask(client: httpx.AsyncClient, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 0, **more}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def test_what_was_read_is_told_as_cached(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    rng = random.Random(7)
    folder = tiny_model()
    reference = Reference(folder)
    system = make_prompt(rng, 2 * CHUNK + 10)
    engine = ("--chunk-size", str(CHUNK), "--served-model-name", "tiny")
    async with running(folder, tmp_path, engine=engine, proxy=("--chunk-size", str(CHUNK))) as cluster:
        async with httpx.AsyncClient(base_url=cluster.proxy, timeout=60) as client:
            for num_cached, num_more in ((0, 0), (2 * CHUNK, 0), (2 * CHUNK, 100)):
                prompt = system + make_prompt(rng, num_more)
                before = (await cluster.statistics("prefill-0"))["tokens_fed"]
                answer = await ask(client, prompt)
                assert answer["choices"][0]["logprobs"]["tokens"] == reference.tokens(prompt, NUM_TOKENS)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
                fed = (await cluster.statistics("prefill-0"))["tokens_fed"] - before
                assert fed == len(prompt) - num_cached
            # Several answers are the decoder's own affair; it had these prompts handed over.
            several = await ask(client, system, n=2)
            expected = reference.tokens(system, NUM_TOKENS)
            assert [choice["logprobs"]["tokens"] for choice in several["choices"]] == [expected] * 2
            assert several["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * CHUNK
        await cluster.settled()
