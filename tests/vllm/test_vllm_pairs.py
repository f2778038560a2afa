"""Two prefillers and two decoders of vLLM on one machine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.vllm.engines import LEASE_S, MODEL, Fleet
from tests.vllm.proxy import serving
from tests.vllm.questions import client_of, ids
from tests.vllm.relay import relayed

ENGINES = ("single", "prefill-0", "prefill-1", "decode-0", "decode-1")
ALL_ENGINES = ENGINES
AT_ONCE = 6
SEED = int(os.environ.get("PDPROXY_TEST_SEED", "5"))

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="function")]


async def test_all_four_pairs_are_used_and_all_answers_are_right(using: Fleet, say: Callable[[str], None]) -> None:
    """Prompts and answers of any length, some at once: what waits at prefillers says nothing of what decoders hold."""
    dice = random.Random(SEED)
    questions = [(ids(dice, dice.randint(1, 700)), dice.choice((2, 8, 48))) for _ in range(32)]
    limit = asyncio.Semaphore(AT_ONCE)
    async with client_of(using["single"].url) as single:
        expected = await asyncio.gather(*(_ask(single, *question, limit) for question in questions))
    using["single"].freeze()
    names = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
    urls = [[using[name].url for name in role] for role in names]
    async with serving(using, *urls) as proxy, client_of(proxy.url) as ours:
        answers = await asyncio.gather(*(_ask(ours, *question, limit) for question in questions))
        pairs = Counter(pair for _, pair in answers)
    say(f"seed {SEED}: {dict(pairs)}")
    assert [text for text, _ in answers] == [text for text, _ in expected]
    assert set(pairs) == {(prefiller, decoder) for prefiller in names[0] for decoder in names[1]}
    for name in ("decode-0", "decode-1"):
        assert await using[name].value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") > 0
        assert await using[name].value("vllm:nixl_num_failed_transfers_total") == 0
    for name in names[0]:
        await using[name].becomes_idle(within_s=5)


async def test_the_check_finds_nothing_wrong_until_one_of_them_stands_still(
    using: Fleet, say: Callable[[str], None]
) -> None:
    names = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
    urls = [",".join(using[name].url for name in role) for role in names]
    status, report = await _check("builtin", *urls)
    assert (status, {one["problem"] for one in report["findings"]}) == (1, {"unlike_its_kind"})
    status, report = await _check("vllm_nixl", *urls)
    took_s = [round(pair["seconds"], 2) for pair in report["pairs"]]
    say(f"a small request through each of {len(took_s)} pairs took {took_s} s; {report['findings']}")
    assert (status, report["ok"], len(took_s)) == (0, True, 4), report
    assert {one["engine"] for one in report["instances"]} == {"vllm_nixl"}
    using["decode-1"].freeze()
    status, report = await _check("vllm_nixl", *urls, "--time-limit-s", "20")
    using["decode-1"].thaw()
    assert status == 1
    assert all("decode-1" in one["instances"] for one in report["findings"] if not one["is_warning"]), report
    assert sum(pair["is_good"] for pair in report["pairs"]) == 2
    for name in (*names[0], *names[1]):
        await using[name].becomes_idle(within_s=2 * LEASE_S)


async def _check(engine: str, prefillers: str, decoders: str, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status of ``pdproxy check``, and its report."""
    what = ("--engine", engine, "--prefill", prefillers, "--decode", decoders, *options, "--json")
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdproxy", "check", *what), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, json.loads(out)


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_an_engine_that_dies_is_replaced_by_its_like(using: Fleet, role: str, say: Callable[[str], None]) -> None:
    """Before the first byte. Whichever of the two the leg has come to is killed under it; the other one is asked."""
    async with AsyncExitStack() as stack:
        alive = {name: using[name] for name in ENGINES if using[name].is_running and name != "single"}
        relays = {name: await stack.enter_async_context(relayed(engine.port)) for name, engine in alive.items()}
        urls = [[relay.url for name, relay in relays.items() if name.startswith(r)] for r in ("prefill", "decode")]
        proxy = await stack.enter_async_context(serving(using, *urls))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.url, timeout=60))
        body = {"model": MODEL, "prompt": ids(random.Random(8), 300), "max_tokens": 8, "temperature": 0, "user": role}
        using["single"].thaw()
        expected = (await client.post(f"{using['single'].url}/v1/completions", json=body)).json()

        stops = {name: relay.stop("request", f'"{role}"') for name, relay in relays.items() if name.startswith(role)}
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        while not (there := [name for name, stop in stops.items() if stop.reached.is_set()]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        using.kill(there[0])
        for stop in stops.values():
            stop.go.set()
        reply = await task
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["text"] == expected["choices"][0]["text"]
        (other,) = set(stops) - set(there)
        say(f"{there[0]} killed, {other} asked; blocks of the first attempt are free when the lease is over")
        await proxy.settled(LEASE_S + 8)
        for name, engine in alive.items():
            if name != there[0]:
                await engine.becomes_idle(LEASE_S + 8)


async def _ask(
    client: AsyncOpenAI, prompt: list[int], max_tokens: int, limit: asyncio.Semaphore
) -> tuple[str, tuple[str | None, str | None]]:
    """The text, and who has made it."""
    async with limit:
        raw = await client.completions.with_raw_response.create(
            model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0
        )
    headers = raw.headers
    return raw.parse().choices[0].text, (headers.get("x-pdproxy-prefiller"), headers.get("x-pdproxy-decoder"))
