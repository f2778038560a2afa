"""Answers wait for room in the KV cache of their decoder, through the whole proxy, or go to another decoder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from pdproxy.fleet.instance import Instance
from tests.fakes.at_once_engine import pairs
from tests.fakes.fake_engine import BROKEN, ScriptedEngine
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.proxy_harness import Call, Harness, proxy_in_front_of, until

pytestmark = pytest.mark.usefixtures("both_ways")

CACHE_TOKENS = 1024
IDS = [5] * 100
Kind = Literal["sglang", "mooncake", "vllm_nixl"]
every_kind = pytest.mark.parametrize("kind", ["sglang", "mooncake", "vllm_nixl"])


@asynccontextmanager
async def fleet(kind: Kind, num_decoders: int = 1, **options: Any) -> AsyncIterator[Harness]:
    """Decoders whose KV caches have room for one answer of `ask`, and not for two."""
    if kind == "vllm_nixl":
        decoders = [FakeNixl("decode", num_pages=CACHE_TOKENS // 16) for _ in range(num_decoders)]
        async with proxy_in_front_of([FakeNixl("prefill")], decoders, **options) as house:
            yield house
        return
    async with pairs(kind, num_decoders=num_decoders, cache_tokens=CACHE_TOKENS, **options) as fleet:
        yield fleet.house


def ask(house: Harness, prompt: Any = IDS, max_tokens: int = 500, **body: Any) -> Call:
    return house.call(prompt=prompt, max_tokens=max_tokens, **{"stream": True} | body)


def decoder_of(house: Harness, number: int = 0) -> Instance:
    return (house.leader or house.proxy).pool.of_role("decode")[number]


async def is_written(house: Harness, engine: ScriptedEngine, num: int = 1) -> None:
    await engine.reached("middle")
    await until(lambda: len(engine.generations()) == num)


async def waits(house: Harness, num: int = 1) -> None:
    await until(lambda: (house.leader or house.proxy).pool.admission.num_waiting == num)


@every_kind
async def test_the_second_of_two_whose_sum_is_above_the_limit_waits(kind: Kind) -> None:
    async with fleet(kind) as house:
        house.decoder.hang_at = {"middle"}
        first = ask(house)
        await is_written(house, house.decoder)
        second = ask(house)
        await waits(house)
        assert decoder_of(house).residency.used == 608
        assert len(house.prefiller.generations()) == len(house.decoder.generations()) == 1
        house.decoder.let_go("middle")
        assert (await first.answer()).status == (await second.answer()).status == 200
        waited = [facts.get("waited_for") for facts in house.proxy.recent.facts()]
        assert waited == ["kv_cache", None]


@every_kind
async def test_the_second_goes_to_the_other_decoder(kind: Kind) -> None:
    async with fleet(kind, num_decoders=2) as house:
        for engine in house.decoders:
            engine.hang_at = {"middle"}
        calls = [ask(house), ask(house)]
        for engine in house.decoders:
            await is_written(house, engine)
        third = ask(house)
        await waits(house)
        for engine in house.decoders:
            engine.let_go("middle")
        assert {(await call.answer()).status for call in (*calls, third)} == {200}


@every_kind
async def test_both_are_sent_where_an_operator_wants_it_so(kind: Kind) -> None:
    async with fleet(kind, oversubscribe=2.0) as house:
        house.decoder.hang_at = {"middle"}
        calls = [ask(house), ask(house)]
        await is_written(house, house.decoder, 2)
        house.decoder.let_go("middle")
        assert {(await call.answer()).status for call in calls} == {200}


@every_kind
async def test_one_that_is_larger_than_the_whole_memory_is_served_alone(kind: Kind) -> None:
    async with fleet(kind) as house:
        house.decoder.hang_at = {"middle"}
        first = ask(house, max_tokens=100)
        await is_written(house, house.decoder)
        large = ask(house, max_tokens=100_000)
        await waits(house)
        house.decoder.let_go("middle")
        assert (await large.answer()).status == (await first.answer()).status == 200


async def test_a_client_that_leaves_makes_room() -> None:
    async with fleet("vllm_nixl") as house:
        house.decoder.hang_at = {"middle"}
        first = ask(house)
        await is_written(house, house.decoder)
        second = ask(house)
        await waits(house)
        first.leave()
        await is_written(house, house.decoder, 2)
        house.decoder.let_go("middle")
        assert (await second.answer()).status == 200


async def test_one_that_leaves_while_it_waits_takes_no_room() -> None:
    async with fleet("vllm_nixl") as house:
        house.decoder.hang_at = {"middle"}
        first = ask(house)
        await is_written(house, house.decoder)
        second = ask(house)
        await waits(house)
        second.leave()
        await waits(house, 0)
        assert list(decoder_of(house).residency.stays) != []
        house.decoder.let_go("middle")
        assert (await first.answer()).status == 200


async def test_a_decoder_that_fails_keeps_no_room() -> None:
    async with fleet("vllm_nixl", retries=0) as house:
        house.decoder.fail_at = {"decode": BROKEN}
        assert (await ask(house).answer()).status == 502
        house.decoder.fail_at = {}
        await until(lambda: decoder_of(house).residency.used == 0)
        assert (await ask(house).answer()).status == 200


async def test_several_answers_share_their_prompt() -> None:
    """The decoder writes them alone; nothing is leased at the prefiller."""
    async with fleet("vllm_nixl") as house:
        house.decoder.hang_at = {"middle"}
        call = ask(house, n=3, max_tokens=200)
        await is_written(house, house.decoder)
        assert (decoder_of(house).residency.used, house.held) == (704, 0)
        second = ask(house, n=2, max_tokens=200)
        await waits(house)
        house.decoder.let_go("middle")
        assert {(await each.answer()).status for each in (call, second)} == {200}


async def test_the_prefillers_token_alone_takes_no_room_at_a_decoder() -> None:
    async with fleet("vllm_nixl") as house:
        house.decoder.hang_at = {"middle"}
        first = ask(house, prompt=[5] * 900, max_tokens=100)
        await is_written(house, house.decoder)
        assert (await ask(house, prompt=[5] * 900, max_tokens=1, stream=False).answer()).status == 200
        house.decoder.let_go("middle")
        assert (await first.answer()).status == 200


async def test_a_prompt_that_is_counted_in_bytes() -> None:
    async with fleet("vllm_nixl") as house:
        house.decoder.hang_at = {"middle"}
        call = ask(house, prompt="word " * 60, max_tokens=100)
        await is_written(house, house.decoder)
        assert 100 + 60 <= decoder_of(house).residency.used <= 100 + 300 // 3 + 2 * 16
        house.decoder.let_go("middle")
        assert (await call.answer()).status == 200
