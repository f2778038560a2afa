"""A decoder of vLLM's with few blocks takes them away from answers that are half written, unless the proxy lets answers
wait until there is room for all that they will be, or has a prefiller write them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import httpx
import pytest

from tests.vllm.engines import BLOCK_SIZE, FEW_BLOCKS, MODEL, Engine, Fleet
from tests.vllm.proxy import serving
from tests.vllm.questions import ids

ENGINES = ("prefill-0", "few-decode")
ALL_ENGINES = ENGINES
SEEDS = [int(seed) for seed in os.environ.get("PDPROXY_TEST_SEEDS", "5,6,7").split(",")]
NUM_REQUESTS, AT_ONCE = 24, 8
PROMPT_TOKENS, ANSWER_TOKENS = 200, 400
PREEMPTIONS = "vllm:num_preemptions_total"
LIMITS = ("slot", "prefill", "first-byte", "idle", "request")
PATIENT = [part for name in LIMITS for part in (f"--{name}-timeout-s", "1800")]
"""The machine may be slow; how fast it is makes no difference to what is counted here."""
SLOWNESS = 1.5
"""A request is good where its tokens took, on average, no more than so many times those of answers of which there are
as many as there is room for; and where its first token came in the time in which all clients get an answer so."""

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3000)]


@dataclass(frozen=True)
class Timed:
    """One streamed answer, in seconds."""

    ttft_s: float
    tpot_s: float
    longest_gap_s: float
    num_tokens: int
    text: str
    path: str


@dataclass(frozen=True)
class Load:
    """What came of all requests, and how often the decoder took blocks away meanwhile."""

    answers: Sequence[Timed]
    num_failed: int
    took_s: float
    num_preemptions: float

    def goodput(self, ttft_s: float, tpot_s: float) -> float:
        """Good answers per second."""
        good = [one for one in self.answers if one.ttft_s <= ttft_s and one.tpot_s <= tpot_s]
        return len(good) / self.took_s

    def __str__(self) -> str:
        ttft = sorted(one.ttft_s for one in self.answers)
        tpot = sorted(one.tpot_s * 1000 for one in self.answers)
        gap = max(one.longest_gap_s for one in self.answers)
        return (
            f"{self.num_preemptions:g} preemptions, {self.num_failed} failed; "
            f"{len(self.answers) / self.took_s:.3f} answers/s; "
            f"TTFT {median(ttft):.2f} s, at most {ttft[-1]:.2f} s; TPOT {median(tpot):.1f} ms, at most "
            f"{tpot[-1]:.1f} ms; longest gap {gap:.2f} s"
        )


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> Timed | None:
    """Returns None where the request failed: an answer that waits in the decoder for longer than the prefiller keeps
    its KV is lost."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    sent, came, num_tokens, text = time.monotonic(), list[float](), 0, ""
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return None
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if event["choices"]:
                came.append(time.monotonic())
                text += event["choices"][0]["text"]
            elif event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    gaps = [after - before for before, after in pairwise(came)]
    path = reply.headers["x-pdproxy-path"]
    return Timed(came[0] - sent, (came[-1] - came[0]) / (num_tokens - 1), max(gaps), num_tokens, text, path)


async def load(
    fleet: Fleet, seed: int, *options: str, oversubscribe: float = 1.0, num_requests: int = NUM_REQUESTS
) -> Load:
    """Has `AT_ONCE` clients ask, each its next question after the other's answer. The prompts are the same for a
    seed."""
    dice = random.Random(seed)
    prompts = [ids(dice, PROMPT_TOKENS) for _ in range(num_requests)]
    decoder = fleet["few-decode"]
    urls = [fleet["prefill-0"].url], [decoder.url]
    limits = httpx.Limits(max_connections=None)
    async with (
        serving(fleet, *urls, "--oversubscribe", f"{oversubscribe:g}", *PATIENT, *options) as proxy,
        httpx.AsyncClient(base_url=proxy.url, timeout=1800, limits=limits) as client,
    ):
        before, began = await decoder.value(PREEMPTIONS), time.monotonic()
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(prompt: list[int]) -> Timed | None:
            async with limit:
                return await ask(client, prompt)

        answers = [answer for answer in await asyncio.gather(*map(one, prompts)) if answer is not None]
        took_s = time.monotonic() - began
        await decoder.becomes_idle(10.0)
        num_failed = num_requests - len(answers)
        return Load(answers, num_failed, took_s, await decoder.value(PREEMPTIONS) - before)


@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_is_taken_away_where_answers_wait_for_room(
    using: Fleet, seed: int, say: Callable[[str], None]
) -> None:
    room = (FEW_BLOCKS - 1) * BLOCK_SIZE // (PROMPT_TOKENS + ANSWER_TOKENS)
    few = await load(using, seed, oversubscribe=1.0, num_requests=room)
    off = await load(using, seed, oversubscribe=1000.0)
    on = await load(using, seed, oversubscribe=1.0)
    for what, one in (("as many as there is room for", few), ("without waiting", off), ("waiting for room", on)):
        say(f"seed {seed}: {what}: {one}")
    ttft_s, tpot_s = few.took_s * AT_ONCE / room, SLOWNESS * max(one.tpot_s for one in few.answers)
    good = {what: one.goodput(ttft_s, tpot_s) for what, one in (("without waiting", off), ("waiting", on))}
    say(f"seed {seed}: good answers/s with a TTFT up to {ttft_s:.1f} s and a TPOT up to {tpot_s * 1000:.0f} ms: {good}")
    assert all(one.num_tokens == ANSWER_TOKENS for one in (*off.answers, *on.answers))
    assert off.num_preemptions > 0, "the load has shown nothing"
    assert (on.num_preemptions, on.num_failed) == (0, 0)
    assert await _nothing_is_left(using["few-decode"])


async def test_a_prefiller_writes_what_the_decoder_has_no_room_for(using: Fleet, say: Callable[[str], None]) -> None:
    """Only where the operator wants the way to be chosen by load. Every answer is as if it had waited."""
    waiting = await load(using, SEEDS[0])
    by_load = await load(using, SEEDS[0], "--path-by-load")
    relieved = [one.path for one in by_load.answers].count("local")
    for what, one in (("waiting for room", waiting), (f"{relieved} written by the prefiller", by_load)):
        say(f"seed {SEEDS[0]}: {what}: {one}")
    assert [one.path for one in waiting.answers].count("local") == 0
    assert relieved > 0
    assert [one.text for one in by_load.answers] == [one.text for one in waiting.answers]
    assert (by_load.num_preemptions, by_load.num_failed) == (0, 0)
    for name in ENGINES:
        assert await _nothing_is_left(using[name])


async def _nothing_is_left(decoder: Engine) -> bool:
    return await decoder.num_blocks_taken() == 0
