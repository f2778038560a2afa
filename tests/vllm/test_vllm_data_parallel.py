"""vLLM with two data-parallel ranks for each engine, which are an instance each."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.vllm.engines import MODEL, NUM_BLOCKS, Fleet
from tests.vllm.proxy import serving
from tests.vllm.questions import client_of, ids

ENGINES = ("ranks-prefill-0", "ranks-decode")
ALL_ENGINES = ENGINES
OPTIONS = ("--prefill-data-parallel-size", "2", "--decode-data-parallel-size", "2")
NUM_REQUESTS = 40
SEED = int(os.environ.get("PDPROXY_TEST_SEED", "5"))

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="function")]


async def test_all_ranks_are_used_and_all_answers_are_right(using: Fleet, say: Callable[[str], None]) -> None:
    """The KV goes from the rank that has it to the rank that was chosen."""
    dice = random.Random(SEED)
    prompts = [ids(dice, dice.randint(1, 700)) for _ in range(NUM_REQUESTS)]
    async with client_of(using["ranks-decode"].url) as alone:
        expected = [(await _ask(alone, prompt))[0] for prompt in prompts]
    served = {name: await _requests(using, name) for name in ENGINES}
    urls = [[using[name].url] for name in ENGINES]
    async with serving(using, *urls, *OPTIONS) as proxy, client_of(proxy.url) as ours:
        fleet = (await proxy.status())["fleet"]
        assert {one["name"] for one in fleet} == {
            f"{role}-0/{rank}" for role in ("prefill", "decode") for rank in (0, 1)
        }
        assert [one["capacity"] for one in fleet if one["role"] == "prefill"] == [NUM_BLOCKS - 1] * 2
        answers = []
        for start in range(0, NUM_REQUESTS, 8):
            answers += await asyncio.gather(*(_ask(ours, prompt) for prompt in prompts[start : start + 8]))
    pairs = Counter(pair for _, pair in answers)
    say(f"seed {SEED}: {dict(pairs)}")
    assert [text for text, _ in answers] == expected
    for name, which in zip(ENGINES, (0, 1), strict=True):
        # The proxy says which rank it was, and the engine says so as well. Canaries are requests, too.
        said = Counter(pair[which] for pair in pairs.elements())
        seen = [now - then for now, then in zip(await _requests(using, name), served[name], strict=True)]
        assert set(said) == {f"{('prefill', 'decode')[which]}-0/{rank}" for rank in (0, 1)}
        for rank, number in enumerate(seen):
            assert (
                said[f"{('prefill', 'decode')[which]}-0/{rank}"]
                <= number
                <= said[f"{('prefill', 'decode')[which]}-0/{rank}"] + 4
            )
        assert await using[name].value("vllm:num_preemptions_total") == 0
    assert await using["ranks-decode"].value("vllm:nixl_num_failed_transfers_total") == 0
    await using["ranks-prefill-0"].becomes_idle(within_s=5)


async def _requests(fleet: Fleet, name: str) -> list[float]:
    """The number of requests that each rank has ended."""
    return [await fleet[name].value("vllm:request_success_total", engine=str(rank)) for rank in (0, 1)]


async def _ask(client: object, prompt: list[int]) -> tuple[str, tuple[str | None, str | None]]:
    """The text, and who has made it."""
    raw = await client.completions.with_raw_response.create(  # type: ignore[attr-defined]
        model=MODEL, prompt=prompt, max_tokens=8, temperature=0
    )
    headers = raw.headers
    return raw.parse().choices[0].text, (headers.get("x-pdproxy-prefiller"), headers.get("x-pdproxy-decoder"))
