"""A real decoder that has the whole prompt in its cache serves it alone, and the proxy knows it before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.hostile import new_dice
from tests.vllm.engines import BLOCK_SIZE, Fleet
from tests.vllm.proxy import Proxy, serving_events
from tests.vllm.turns import Chats

ENGINES = ("events-prefill", "events-decode")
ALL_ENGINES = ENGINES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


async def known(proxy: Proxy, wanted: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any]:
    """What the proxy knows of each instance's cache, once it is as `wanted`."""
    async with asyncio.timeout(60):
        while True:
            told = {one["name"]: one["kv_events"] for one in (await proxy.status())["fleet"]}
            if wanted(told):
                return told
            await asyncio.sleep(0.1)


def all_exact(told: dict[str, Any]) -> bool:
    return {one["state"] for one in told.values()} == {"exact"}


async def test_a_decoder_that_has_the_prompt_serves_it_alone(using: Fleet, say: Callable[[str], None]) -> None:
    policies = ("--prefill-policy", "cache_aware", "--decode-policy", "cache_aware")
    async with serving_events(using, "events-prefill", "events-decode", *policies) as proxy:
        await known(proxy, all_exact)
        chats = Chats(new_dice(), proxy.url)
        async with chats.client:
            prompt = [{"role": "user", "content": chats.words(120)}]
            first, _ = await chats.ask(prompt)
            assert first.headers["x-pdproxy-path"] == "disaggregated"
            await known(proxy, lambda told: told["events-decode"]["blocks"] >= 3)
            second, cached = await chats.ask(prompt)
            say(f"{second.headers['x-pdproxy-path']}, {cached} tokens cached; {await known(proxy)}")
            assert second.headers["x-pdproxy-path"] == "local"
            num_tokens = second.json()["usage"]["prompt_tokens"]
            assert cached == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert second.json()["choices"] == first.json()["choices"]
            other = [{"role": "user", "content": "x " + chats.words(120)}]
            third, _ = await chats.ask(other)
            assert third.headers["x-pdproxy-path"] == "disaggregated"
        assert all_exact(await known(proxy))
