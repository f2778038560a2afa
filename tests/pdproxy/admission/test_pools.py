"""One pool per model, each of one kind of engine, behind one proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.fleet.instance import Health
from tests.fakes.fake_engine import BROKEN, FakeEngine, ScriptedEngine
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until


@asynccontextmanager
async def two_pools(wait: bool = True, **options: Any) -> AsyncIterator[Harness]:
    """``tiny`` on built-in engines (the first of each role), ``large`` on vLLM."""
    prefillers: list[ScriptedEngine] = [FakeEngine("prefill"), FakeNixl("prefill", model="large")]
    decoders: list[ScriptedEngine] = [FakeEngine("decode"), FakeNixl("decode", model="large")]
    async with proxy_in_front_of(prefillers, decoders, wait=wait, **options) as house:
        yield house


def switch_off(house: Harness, *engines: ScriptedEngine) -> None:
    for engine in engines:
        client = house.client_of(engine)
        client.is_up = False
        next(one for one in house.proxy.pool.instances if one.client is client).lost("switched off")


async def test_each_request_stays_in_its_pool() -> None:
    async with two_pools() as house:
        for number, model in enumerate(("tiny", "large")):
            for _ in range(3):
                answer = await house.post(model=model)
                assert answer.headers["x-pdproxy-path"] == "disaggregated"
                served = (answer.headers["x-pdproxy-prefiller"], answer.headers["x-pdproxy-decoder"])
                assert served == (f"prefill-{number}", f"decode-{number}")
            for engine in (house.prefillers[number], house.decoders[number]):
                assert {call.body["model"] for call in engine.generations()} == {model}
        models = (await house.get("/v1/models")).json()["data"]
        assert [card["id"] for card in models] == ["large", "tiny"]


async def test_slots_are_counted_in_each_pools_own_memory() -> None:
    async with two_pools() as house:
        keepers = [instance.name for instance in house.proxy.pool.instances if instance.is_owner]
        assert keepers == ["prefill-1", "decode-0"]


async def test_where_several_models_are_served_one_is_named() -> None:
    async with two_pools() as house:
        answer = await house.post(model=None)
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert "large, tiny" in answer.error["message"]
        unknown = await house.post(model="nobody")
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
        assert not any(engine.generations() for engine in (*house.prefillers, *house.decoders))


async def test_a_model_whose_engines_are_down_is_known_all_the_same() -> None:
    async with two_pools() as house:
        switch_off(house, house.prefillers[1], house.decoders[1])
        answer = await house.post(model="large")
        assert (answer.status, answer.error["code"]) == (503, "no_ready_instance")
        assert (await house.post(model="tiny")).status == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_model_of_which_one_half_never_answered_is_known_too(role: str) -> None:
    async with two_pools(wait=False) as house:
        half = house.prefillers[1] if role == "prefill" else house.decoders[1]
        house.client_of(half).is_up = False
        await until(lambda: house.proxy.pool.is_ready)
        answer = await house.post(model="large")
        assert (answer.status, answer.error["code"]) == (503, "no_ready_instance")
        house.client_of(half).is_up = True


async def test_halves_of_two_pools_are_not_ready() -> None:
    async with two_pools(when_no_prefiller="refuse", when_no_decoder="refuse") as house:
        switch_off(house, house.prefillers[0])
        assert (await house.get("/ready")).status == 200
        switch_off(house, house.decoders[1])
        assert (await house.get("/ready")).status == 503
        for model in ("tiny", "large", None):
            answer = await house.post(model=model)
            assert (answer.status, answer.error["code"]) == (503, "no_ready_instance")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_instance_of_another_kind_is_kept_back(role: str) -> None:
    """For the same model: it could not read what the others write."""
    prefillers: list[ScriptedEngine] = [FakeEngine("prefill")]
    decoders: list[ScriptedEngine] = [FakeEngine("decode")]
    (prefillers if role == "prefill" else decoders).append(
        FakeNixl("prefill" if role == "prefill" else "decode", model="other")
    )
    other = (prefillers if role == "prefill" else decoders)[1]
    counterpart = FakeNixl("decode" if role == "prefill" else "prefill", model="other")
    (decoders if role == "prefill" else prefillers).append(counterpart)
    async with proxy_in_front_of(prefillers, decoders) as house:
        [stranger] = [one for one in house.proxy.pool.instances if one.client is house.client_of(other)]
        other.model, other.epoch = "tiny", "9"
        stranger.suspected.set()
        await until(lambda: not stranger.is_ready and "vllm_nixl" in stranger.why)
        assert "it does not fit" in stranger.why
        for _ in range(3):
            assert (await house.post(model="tiny")).status == 200
        assert other.generations() == []
        other.model = counterpart.model = "tiny"


async def test_of_two_kinds_that_come_up_together_one_is_kept_back() -> None:
    """Each pair is well by itself; a prefiller of one and a decoder of the other would not be."""
    prefillers: list[ScriptedEngine] = [FakeEngine("prefill"), FakeNixl("prefill")]
    decoders: list[ScriptedEngine] = [FakeEngine("decode"), FakeNixl("decode")]
    async with proxy_in_front_of(prefillers, decoders, wait=False) as house:
        await until(lambda: house.proxy.pool.is_ready)
        await until(lambda: sum("it does not fit" in one.why for one in house.proxy.pool.instances) == 2)
        kinds = {one.adapter.name for one in house.proxy.pool.instances if one.is_ready}
        assert len(kinds) == 1
        for _ in range(3):
            assert (await house.post()).status == 200


async def test_without_a_name_a_retry_stays_in_its_pool() -> None:
    """Of the other pool a prefiller has come up since, and nobody else."""
    prefillers: list[ScriptedEngine] = [FakeEngine("prefill"), FakeNixl("prefill", model="large")]
    decoders: list[ScriptedEngine] = [FakeEngine("decode"), FakeNixl("decode", model="large")]
    async with proxy_in_front_of(prefillers, decoders) as house:
        switch_off(house, house.prefillers[1], house.decoders[1])
        prefillers[0].hang_at.add("prefill")
        call = house.call(model=None)
        await prefillers[0].reached("prefill")
        house.client_of(prefillers[1]).is_up = True
        back = house.proxy.pool.of_role("prefill")[1]
        back.suspected.set()
        await until(lambda: back.health is Health.DOWN and "in a row" in back.why)
        back.suspected.set()
        await until(lambda: back.is_ready)
        prefillers[0].fail_at["prefill"] = BROKEN
        prefillers[0].let_go("prefill")
        answer = await call.answer()
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert prefillers[1].generations() == []
