"""Whole answers that the proxy puts together from streams are, field by field, the whole answers that vLLM writes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.vllm.engines import MODEL, Fleet
from tests.vllm.proxy import Proxy, serving
from tests.vllm.questions import chat, ids, words

ENGINES = ("single", "prefill-0", "decode-0")
ALL_ENGINES = ENGINES
SEED = int(os.environ.get("PDPROXY_TEST_SEED", "5"))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
AT_ONCE = 8
ABS = 1e-3
"""Log-probabilities may differ by so much between two runs of one engine."""
NOT_COMPARED = ("id", "created")
WRITERS = {"disaggregated": "decode-0", "local": "decode-0", "prefill_only": "prefill-0"}
"""Whose answer the client gets, by the request's path."""
WARMING: tuple[dict[str, Any], ...] = ({"logprobs": 2}, {"temperature": 0.5, "seed": 1}, {"repetition_penalty": 1.3})
END_OF_SEQUENCE = "1"

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(using: Fleet) -> AsyncIterator[Proxy]:
    async with serving(using, [using["prefill-0"].url], [using["decode-0"].url]) as proxy:
        yield proxy


Ask = tuple[str, dict[str, Any]]


def asks(dice: random.Random) -> list[Ask]:
    """No two begin alike. The greedy ones have one answer; those with a seed are drawn in the same way everywhere."""
    lengths = (1, 2, 31, 33, 128, 257, 777)
    all_of: list[Ask] = [(COMPLETIONS, {"prompt": ids(dice, length)}) for length in lengths]
    all_of += [(COMPLETIONS, {"prompt": words(dice, count)}) for count in (1, 20, 130)]
    all_of += [(CHAT, {"messages": chat(dice, count)}) for count in (1, 20, 130)]
    for more in (
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 40},
        {"return_token_ids": True},
        {"return_token_ids": True, "max_tokens": 1},
        {"logit_bias": {END_OF_SEQUENCE: 100}},
        {"logit_bias": {END_OF_SEQUENCE: 100}, "return_token_ids": True},
        {"min_tokens": 4, "stop": [" "], "include_stop_str_in_output": False},
        {"stop": ["e", "zzz"], "include_stop_str_in_output": True},
        {"stop": ["e"], "include_stop_str_in_output": False},
        {"stop_token_ids": list(range(3, 260))},
        {"stop_token_ids": list(range(3, 400, 7)), "return_token_ids": True},
        {"ignore_eos": True, "max_tokens": 30},
        {"seed": 7, "temperature": 0.8},
        {"n": 2, "seed": 3, "temperature": 0.6},
        {"n": 3, "seed": 3, "temperature": 0.6, "return_token_ids": True, "max_tokens": 5},
        {"skip_special_tokens": False, "logit_bias": {END_OF_SEQUENCE: 2}},
        {"user": "somebody", "repetition_penalty": 1.3, "presence_penalty": 0.3},
        {"truncate_prompt_tokens": 5},
    ):
        all_of.append((COMPLETIONS, {"prompt": ids(dice, dice.randint(40, 200))} | more))
        all_of.append((CHAT, {"messages": chat(dice, dice.randint(5, 60))} | more))
    for top in (0, 2):
        logprobs = ({"logprobs": top}, {"logprobs": True, "top_logprobs": top})
        for more in ({}, {"stop": ["e"]}, {"max_tokens": 1}, {"return_tokens_as_token_ids": True}):
            all_of.append((COMPLETIONS, {"prompt": ids(dice, 70)} | logprobs[0] | more))
            all_of.append((CHAT, {"messages": chat(dice, 30)} | logprobs[1] | more))
        all_of.append((COMPLETIONS, {"prompt": ids(dice, 50), "n": 2, "seed": 5, "temperature": 0.5} | logprobs[0]))
        all_of.append((CHAT, {"messages": chat(dice, 9), "n": 2, "seed": 5, "temperature": 0.5} | logprobs[1]))
    return all_of


async def answers(url: str, all_of: list[Ask]) -> list[httpx.Response]:
    limit = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def ask(one: Ask) -> httpx.Response:
            async with limit:
                return await client.post(one[0], json={"model": MODEL, "max_tokens": 10, "temperature": 0} | one[1])

        return list(await asyncio.gather(*map(ask, all_of)))


def differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Where the two differ, names and their order included."""
    if isinstance(theirs, float) and isinstance(ours, float):
        return [] if ours == pytest.approx(theirs, abs=ABS) else [f"{at}: {ours} is not {theirs}"]
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if list(ours) != list(theirs):
            return [f"{at}: {list(ours)} is not {list(theirs)}"]
        return [one for name in theirs for one in differences(ours[name], theirs[name], f"{at}.{name}")]
    if isinstance(theirs, list) and isinstance(ours, list):
        if len(ours) != len(theirs):
            return [f"{at}: {ours} is not {theirs}"]
        return [one for i in range(len(theirs)) for one in differences(ours[i], theirs[i], f"{at}[{i}]")]
    return [] if ours == theirs else [f"{at}: {ours!r} is not {theirs!r}"]


async def fingerprint(fleet: Fleet, name: str) -> str:
    """By which an engine tells how it was started: those with a connector have other ones."""
    (reply,) = await answers(fleet[name].url, [(COMPLETIONS, {"prompt": [11], "max_tokens": 2})])
    told: str = reply.json()["system_fingerprint"]
    return told


def _short(ask: Ask) -> dict[str, Any]:
    return {name: value for name, value in ask[1].items() if name not in ("prompt", "messages")} | {"path": ask[0]}


def without_what_always_differs(reply: httpx.Response) -> Any:
    return {name: value for name, value in reply.json().items() if name not in NOT_COMPARED}


async def test_every_field_is_the_engines(using: Fleet, proxy: Proxy, say: Callable[[str], None]) -> None:
    all_of = asks(random.Random(SEED))
    for name in ENGINES:  # which compile something for the first such request; that is not to look like a fault
        await answers(using[name].url, [(COMPLETIONS, {"prompt": [11], "max_tokens": 2} | more) for more in WARMING])
    theirs = await answers(using["single"].url, all_of)
    ours = await answers(proxy.url, all_of)
    fingerprints = {path: await fingerprint(using, name) for path, name in WRITERS.items()}
    found = []
    for ask, one, other in zip(all_of, ours, theirs, strict=True):
        assert other.status_code == 200, (ask, other.text)
        assert one.status_code == 200, (ask, one.text)
        path = one.headers["x-pdproxy-path"]
        mine, wanted = without_what_always_differs(one), without_what_always_differs(other)
        wanted["system_fingerprint"] = fingerprints[path]
        found += [(_short(ask), path, text) for text in differences(mine, wanted)]
    reasons = sorted({choice["finish_reason"] for one in theirs for choice in one.json()["choices"]})
    say(f"seed {SEED}: {len(all_of)} whole answers compared field by field, finish reasons {reasons}")
    assert not found, f"{len(found)} differences (seed {SEED}): " + "\n".join(map(str, found[:10]))
    assert reasons == ["length", "stop"]
    assert await proxy.metric("pdproxy_retries_total") == 0
    assert "not put together" not in proxy.log.read_text(), "they were asked for as wholes"
    await proxy.settled()


async def test_what_the_engine_refuses_has_its_status_and_its_words(using: Fleet, proxy: Proxy) -> None:
    """Whether it finds out before it streams or behind that."""
    refused: list[Ask] = [
        (COMPLETIONS, {"prompt": [10] * 20, "n": 2}),
        (COMPLETIONS, {"prompt": [10] * 20, "temperature": -1}),
        (CHAT, {"messages": chat(random.Random(1), 5), "top_logprobs": 2}),
        (COMPLETIONS, {"prompt": [10] * 20, "n": 2, "logprobs": 4000}),
    ]
    for one, other in zip(await answers(proxy.url, refused), await answers(using["single"].url, refused), strict=True):
        assert 400 <= other.status_code < 500
        assert one.status_code == other.status_code
        assert differences(one.json(), other.json()) == []


async def test_slots_come_back_while_a_whole_answer_is_written(using: Fleet, proxy: Proxy) -> None:
    """The first event has freed the prefiller's blocks; the answer is long."""
    body = {"model": MODEL, "prompt": ids(random.Random(9), 300), "max_tokens": 1200, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=proxy.url, timeout=120) as client:
        asked = asyncio.create_task(client.post(COMPLETIONS, json=body))
        seen = set()
        while not asked.done():
            for one in (await proxy.status())["in_flight"]:
                seen.add((one["phase"], await proxy.held()))
            await asyncio.sleep(0.02)
        answer = (await asked).json()
    assert answer["usage"]["completion_tokens"] == 1200
    assert ("decode", 0) in seen
