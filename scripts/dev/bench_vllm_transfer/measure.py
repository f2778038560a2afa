"""Asks the proxy at PDPROXY_URL, and writes what it has measured to the file named: run by ``pdproxy up --once``."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

LONG_TOKENS = 1500
NUM_ALONE = 12
"""The prompts that are asked one by one."""
NUM_TOGETHER, AT_ONCE = 48, 8
TURNS = 3
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 400, 60, 60
_FIRST_ID, _LAST_ID = 10, 90


class Bench:
    """A `Bench` asks one fleet. `dice` make the prompts, no two of which begin alike."""

    def __init__(self, client: httpx.AsyncClient, model: str, decoder_url: str, dice: random.Random) -> None:
        self._client = client
        self._model = model
        self._decoder_url = decoder_url
        self._dice = dice

    async def alone(self) -> dict[str, float]:
        """Asks for streams one by one. Returns the median milliseconds from the end of prefill to the first token, and
        until the first token in all."""
        after_prefill, in_all = [], []
        for _ in range(NUM_ALONE):
            started = time.perf_counter()
            body = self._body(self._ids(LONG_TOKENS), 4) | {"stream": True}
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                phases = _phases(answer.headers["server-timing"])
                async for _ in answer.aiter_lines():
                    in_all.append((time.perf_counter() - started) * 1e3)
                    break
            after_prefill.append(phases.get("kv_wait", 0.0) + phases["first_byte"])
        return {"after_prefill_ms": statistics.median(after_prefill), "first_token_ms": statistics.median(in_all)}

    async def together(self) -> dict[str, float]:
        """Asks for many answers, some at once. Returns answers per second and the median milliseconds of one."""
        places, took = asyncio.Semaphore(AT_ONCE), []

        async def one(ids: list[int]) -> None:
            async with places:
                started = time.perf_counter()
                (await self._client.post("/v1/completions", json=self._body(ids, 16))).raise_for_status()
                took.append((time.perf_counter() - started) * 1e3)

        prompts = [self._ids(LONG_TOKENS) for _ in range(NUM_TOGETHER)]
        started = time.perf_counter()
        await asyncio.gather(*map(one, prompts))
        return {
            "answers_per_s": NUM_TOGETHER / (time.perf_counter() - started),
            "answer_ms": statistics.median(took),
        }

    async def conversation(self) -> dict[str, float]:
        """Talks for some turns. Returns the KiB of KV that came to the decoder in each."""
        prompt, sent = self._ids(SYSTEM_TOKENS), {}
        for turn in range(1, TURNS + 1):
            prompt = [*prompt, *self._ids(QUESTION_TOKENS)]
            before = await self._num_pulled()
            body = self._body(prompt, ANSWER_TOKENS) | {"return_token_ids": True, "ignore_eos": True}
            answer = (await self._client.post("/v1/completions", json=body)).raise_for_status()
            told = re.search(r"bytes=(\d+)", answer.headers.get("x-pdproxy-kv", ""))
            num_bytes = float(told[1]) if told else await self._num_pulled() - before
            sent[f"turn_{turn}_kib"] = num_bytes / 1024
            prompt = [*prompt, *answer.json()["choices"][0]["token_ids"]]
        return sent

    def _ids(self, count: int) -> list[int]:
        return [self._dice.randint(_FIRST_ID, _LAST_ID) for _ in range(count)]

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        return {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}

    async def _num_pulled(self) -> float:
        """Returns the bytes that the decoder's NixlConnector has fetched so far."""
        await asyncio.sleep(1.0)  # vLLM counts them with a later step
        page = (await self._client.get(f"{self._decoder_url}/metrics")).text
        values = re.findall(r"^vllm:nixl_bytes_transferred_sum\{.*\} (\S+)$", page, re.MULTILINE)
        return sum(map(float, values))


async def measure(seed: int) -> dict[str, Any]:
    """Measures everything once, behind a few questions for which nothing is measured."""
    async with httpx.AsyncClient(base_url=os.environ["PDPROXY_URL"], timeout=120) as client:
        status = (await client.get("/status")).json()
        decoder = next(one for one in status["fleet"] if one["role"] == "decode")
        bench = Bench(client, decoder["models"][0], decoder["url"], random.Random(seed))
        await bench.conversation()
        for length in (10, 500, LONG_TOKENS):
            body = {"model": decoder["models"][0], "prompt": [9] * length, "max_tokens": 16}
            (await client.post("/v1/completions", json=body)).raise_for_status()
        found = await bench.conversation() | await bench.alone() | await bench.together()
        status = (await client.get("/status")).json()
    return found | {"served": status["totals"]}


def _phases(header: str) -> dict[str, float]:
    """Returns the milliseconds of each phase that ``server-timing`` names."""
    return {name: float(ms) for name, ms in re.findall(r"([a-z_]+);dur=([0-9.]+)", header)}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asyncio.run(measure(int(sys.argv[2])))))
