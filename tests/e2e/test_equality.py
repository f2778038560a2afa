"""The answer through two processes is the answer of one: token for token, for every attention family."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import running

pytestmark = pytest.mark.engine

CHUNK = 64
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7, 2000)
NUM_TOKENS = 16
FAMILIES = ("llama", "gemma3", "mistral", "deepseek", "qwen3")


class Reference:
    """``model.generate`` in this process."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def tokens(self, prompt: list[int], num_tokens: int) -> list[str]:
        """The text of each token that greedy decoding writes after `prompt`."""
        import torch

        with torch.inference_mode():
            ids = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        return [self.tokenizer.decode([i]) for i in ids[0, len(prompt) :].tolist()]


def make_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 500) for _ in range(length)]


async def complete(client: httpx.AsyncClient, prompt: list[int], num_tokens: int, *, stream: bool) -> list[str]:
    """The answer's tokens, as text, one by one (by way of logprobs)."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "logprobs": 0,
        "stream": stream,
    }
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-pdproxy-path"].startswith("disaggregated"), reply.headers
    if not stream:
        return list(reply.json()["choices"][0]["logprobs"]["tokens"])
    return [token for event in events_of(reply.text) for token in tokens_of(event)]


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def tokens_of(event: dict[str, Any]) -> list[str]:
    return [token for choice in event["choices"] if choice.get("logprobs") for token in choice["logprobs"]["tokens"]]


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_equal_generate(family: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    # Fixed: a near-tie that float32 rounds the other way in a prompt read whole is no fault, but it would be a flake.
    seed = int(os.environ.get("PDPROXY_TEST_SEED", "7"))
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = tiny_model(family)
    reference = Reference(folder)
    prompts = [make_prompt(rng, length) for length in LENGTHS]
    mixed = [(make_prompt(rng, rng.choice(LENGTHS[:-1])), bool(i % 2)) for i in range(16)]
    engine = ("--chunk-size", str(CHUNK), "--served-model-name", "tiny")

    proxy = ("--chunk-size", str(CHUNK))
    # Every answer from a prompt that was read, none from what is left of the one before it.
    async with running(folder, tmp_path, engine=engine, proxy=proxy, prefill=("--no-prefix-cache",)) as cluster:
        fed_before = (await cluster.statistics("decode-0"))["tokens_fed"]
        async with httpx.AsyncClient(base_url=cluster.proxy, timeout=120) as client:
            for prompt in prompts:
                expected = reference.tokens(prompt, NUM_TOKENS)
                for stream in (False, True):
                    assert await complete(client, prompt, NUM_TOKENS, stream=stream) == expected, len(prompt)
            answers = await asyncio.gather(*(complete(client, p, NUM_TOKENS, stream=s) for p, s in mixed))
            for (prompt, _), answer in zip(mixed, answers, strict=True):
                assert answer == reference.tokens(prompt, NUM_TOKENS), len(prompt)

        # No prompt was read twice: the decoder was fed the tokens it continued from, and nothing else.
        num_answers = 2 * len(prompts) + len(mixed)
        fed = (await cluster.statistics("decode-0"))["tokens_fed"] - fed_before
        assert fed == num_answers * (NUM_TOKENS - 1)
        read = (await cluster.statistics("prefill-0"))["tokens_fed"]
        assert read >= 2 * sum(map(len, prompts)) + sum(len(p) for p, _ in mixed)
        await cluster.settled()
