"""Two prefillers and two decoders of unlike sizes with pdproxy's own connector, of which some die and stand still, and
with a connection between a prefiller and a decoder that is cut and mended."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.helpers.tcp_relay import TcpRelay
from tests.vllm.engines import MODEL, Engine, Fleet
from tests.vllm.proxy import serving_ours
from tests.vllm.questions import Question, ask_all, client_of, ids
from tests.vllm.test_vllm_answers import SEED
from tests.vllm.test_vllm_faults import error_of, shown
from tests.vllm.test_vllm_transfer import SILENCE_S

PREFILLERS, DECODERS = ("sender", "tight-sender"), ("receiver", "tight-receiver")
ENGINES = ("single", *PREFILLERS, *DECODERS)
ALL_ENGINES = ENGINES
LIMIT_S = 3 * SILENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]


async def all_is_free(engines: list[Engine], within_s: float) -> None:
    """No block is taken, and no page of a buffer."""
    await asyncio.gather(*(engine.becomes_idle(within_s) for engine in engines))
    async with asyncio.timeout(within_s):
        for engine in engines:
            while (facts := await engine.buffer())["num_free"] != facts["num_pages"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert facts["num_wrong_tags"] == 0


async def answers_of(using: Fleet, prompts: list[list[int]], max_tokens: int) -> list[str]:
    using["single"].thaw()
    async with client_of(using["single"].url) as single:
        said = await ask_all(single, [Question(prompt, max_tokens=max_tokens) for prompt in prompts], 8)
    using["single"].freeze()
    return [one.text for one in said]


async def test_a_connection_that_is_cut_and_mended(using: Fleet, say: Callable[[str], None]) -> None:
    """The one over which a prefiller asks for pages and says that they are full: briefly, and for longer than the
    decoder waits. An attempt may fail then, with a reason; none gives a wrong answer, and the next ones succeed."""
    for name in ("tight-sender", "tight-receiver"):
        using[name].freeze()
    sender, receiver = using["sender"], using["receiver"]
    dice = random.Random(SEED)
    prompts = [ids(dice, dice.randint(600, 1200)) for _ in range(30)]
    expected = await answers_of(using, prompts, 8)
    (end,) = (await receiver.buffer())["receivers"]
    outcomes: Counter[str] = Counter()
    async with httpx.AsyncClient(timeout=60) as client:
        with TcpRelay(("127.0.0.1", end["port"])) as relay:

            async def ask(at: int) -> str:
                params = {"attempt": uuid.uuid4().hex, "receivers": [end | {"port": relay.port}], "timeout_s": 20.0}
                leg: dict[str, Any] = {"model": MODEL, "prompt": prompts[at], "max_tokens": 1, "temperature": 0}
                first = await client.post(f"{sender.url}/v1/completions", json=leg | {"kv_transfer_params": params})
                handoff = first.json()["kv_transfer_params"]
                if handoff.get("failure"):
                    return "not sent"
                await asyncio.sleep(0.3)  # the proxy waits for the decoder's word instead
                leg |= {"max_tokens": 8, "kv_transfer_params": handoff}
                second = await client.post(f"{receiver.url}/v1/completions", json=leg)
                if second.status_code != 200:
                    return "not loaded"
                assert shown(second) == expected[at], f"prompt {at} (seed {SEED})"
                return "right"

            async def some(ats: range) -> Counter[str]:
                return Counter(await asyncio.gather(*(ask(at) for at in ats)))

            assert await some(range(4)) == {"right": 4}
            for ats, cut_s in ((range(4, 12), 0.7), (range(12, 20), 1.5 * SILENCE_S)):
                task = asyncio.create_task(some(ats))
                while not await receiver_is_filling(receiver):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                relay.cut()
                await asyncio.sleep(cut_s)
                relay.mend()
                outcomes = await task
                say(f"cut for {cut_s:g} s: {dict(outcomes)}")
                await all_is_free([sender, receiver], LIMIT_S)
            assert await some(range(20, 24)) == {"right": 4}
    await all_is_free([sender, receiver], LIMIT_S)


async def receiver_is_filling(receiver: Engine) -> bool:
    facts = await receiver.buffer()
    return int(facts["num_free"]) < int(facts["num_pages"])


async def test_one_dies_and_one_stands_still_under_load(using: Fleet, say: Callable[[str], None]) -> None:
    dice = random.Random(SEED + 1)
    prompts = [ids(dice, dice.randint(1, 700)) for _ in range(48)]
    expected = await answers_of(using, prompts, 24)
    for name in (*PREFILLERS, *DECODERS):
        using[name].thaw()
    limits = ("--prefill-timeout-s", "5", "--first-byte-timeout-s", "5", "--kv-timeout-s", "5", "--retries", "2")
    ends = [{name: using[name].url for name in names} for names in (PREFILLERS, DECODERS)]
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(
            serving_ours(using, *ends, *limits, "--probe-misses", "2", "--probe-timeout-s", "1")
        )
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.url, timeout=90))
        limit = asyncio.Semaphore(8)
        outcomes: Counter[str] = Counter()
        pairs: set[tuple[str, str]] = set()

        async def ask(at: int) -> None:
            async with limit:
                request = {"model": MODEL, "prompt": prompts[at], "max_tokens": 24, "temperature": 0}
                reply = await client.post("/v1/completions", json=request)
            if reply.status_code == 200:
                outcomes["right"] += 1
                assert shown(reply) == expected[at], f"prompt {at} (seed {SEED})"
                pairs.add((reply.headers["x-pdproxy-prefiller"], reply.headers["x-pdproxy-decoder"]))
            else:
                assert reply.status_code in (502, 503, 504), reply.text
                outcomes[error_of(reply)["code"]] += 1

        tasks = [asyncio.create_task(ask(at)) for at in range(len(prompts))]
        while len(pairs) < 4 and not all(task.done() for task in tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        before = outcomes["right"]
        using["tight-receiver"].freeze()
        using.kill("tight-sender")
        await asyncio.gather(*tasks)
        say(f"seed {SEED}: {dict(outcomes)}, {before} of them before the faults")
        assert len(pairs) == 4, pairs
        assert before < len(prompts) // 2
        assert outcomes["right"] >= len(prompts) - 16, outcomes
        await asyncio.sleep(SILENCE_S)
        using["tight-receiver"].thaw()
        await all_is_free([using[name] for name in ("sender", *DECODERS)], LIMIT_S)
        await proxy.settled(LIMIT_S)
        outcomes.clear()
        await asyncio.gather(*(ask(at) for at in range(4)))
        assert outcomes == {"right": 4}
