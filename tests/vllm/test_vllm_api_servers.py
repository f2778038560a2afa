"""vLLM with two API servers for each engine, which are several processes behind one address."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.vllm.engines import MODEL, Fleet
from tests.vllm.proxy import Proxy, serving
from tests.vllm.questions import client_of, ids

ENGINES = ("servers-prefill-0", "servers-prefill-1", "servers-decode")
ALL_ENGINES = ENGINES
PREFILLERS = ENGINES[:2]
NUM_REQUESTS = 40
SEED = int(os.environ.get("PDPROXY_TEST_SEED", "5"))

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="function")]


async def test_requests_are_served_and_no_engine_is_taken_for_another(using: Fleet, say: Callable[[str], None]) -> None:
    """Each look, and each leg, may meet another process."""
    dice = random.Random(SEED)
    prompts = [ids(dice, dice.randint(1, 700)) for _ in range(NUM_REQUESTS)]
    urls = [[using[name].url for name in names] for names in (PREFILLERS, ENGINES[2:])]
    async with client_of(using["servers-decode"].url) as alone:
        expected = [await _ask(alone, prompt) for prompt in prompts]
    preempted = [await using[name].value("vllm:num_preemptions_total") for name in ENGINES]
    async with serving(using, *urls) as proxy, client_of(proxy.url) as ours:
        before = await epochs(proxy)
        answers, looks = [], []
        for start in range(0, NUM_REQUESTS, 8):
            answers += await asyncio.gather(*(_ask(ours, prompt) for prompt in prompts[start : start + 8]))
            looks.append(await epochs(proxy))
        assert all(one["state"] == "ready" for one in (await proxy.status())["fleet"])
    say(f"seed {SEED}: {Counter(prefiller for _, prefiller in answers)}, {before}")
    assert [text for text, _ in answers] == [text for text, _ in expected]
    assert {prefiller for _, prefiller in answers} == {"prefill-0", "prefill-1"}
    assert looks == [before] * len(looks)
    assert [await using[name].value("vllm:num_preemptions_total") for name in ENGINES] == preempted
    for name in PREFILLERS:
        await using[name].becomes_idle(within_s=5)


async def test_an_engine_that_was_restarted_is_noticed(using: Fleet, say: Callable[[str], None]) -> None:
    """Its metrics do not say when it was started."""
    name = PREFILLERS[0]
    assert "process_start_time_seconds" not in await using[name].page()
    urls = [[using[name].url for name in names] for names in (PREFILLERS, ENGINES[2:])]
    async with serving(using, *urls) as proxy, client_of(proxy.url) as ours:
        before = await epochs(proxy)
        await _ask(ours, [11, 12, 13])
        await asyncio.sleep(2)  # a look between the last request and the end
        using.kill(name)
        using.use(*ENGINES)
        await proxy.wait_ready()
        after = await epochs(proxy)
        await _ask(ours, [11, 12, 14])
    say(f"{before} became {after}")
    assert after.pop("prefill-0") != before.pop("prefill-0")
    assert after == before


async def epochs(proxy: Proxy) -> dict[str, str]:
    return {one["name"]: one["epoch"] for one in (await proxy.status())["fleet"]}


async def _ask(client: object, prompt: list[int]) -> tuple[str, str | None]:
    """The text, and who has read the prompt."""
    raw = await client.completions.with_raw_response.create(  # type: ignore[attr-defined]
        model=MODEL, prompt=prompt, max_tokens=8, temperature=0
    )
    return raw.parse().choices[0].text, raw.headers.get("x-pdproxy-prefiller")
