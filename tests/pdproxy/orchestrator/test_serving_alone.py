"""Requests while one of the two roles has nobody: instances of the other answer alone, and go back when it is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from pdproxy.engines.http.base import EngineBroken
from pdproxy.fleet import instance as instance_module
from pdproxy.fleet.instance import Health
from tests.fakes.fake_engine import WORDS, FakeEngine, ScriptedEngine, error_reply
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import WAYS, Harness, Way, proxy_in_front_of, until

REASONS = {"prefill": "no_prefiller", "decode": "no_decoder"}
KINDS: dict[str, Callable[..., ScriptedEngine]] = {"builtin": FakeEngine, "vllm_nixl": FakeNixl}


async def look(house: Harness) -> None:
    proxy = house.leader or house.proxy
    for instance in proxy.pool.instances:
        await proxy.probe.look(instance)


def switch(house: Harness, engine: ScriptedEngine, *, is_up: bool) -> None:
    client = house.client_of(engine)
    client.is_up = is_up
    if not is_up:
        proxy = house.leader or house.proxy
        next(one for one in proxy.pool.instances if house.by_url[one.url] is client).lost("switched off")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_front", [False, True], ids=["one process", "by a front"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("missing", "other"), [("prefill", "decode"), ("decode", "prefill")])
async def test_who_is_left_answers_alone_until_the_others_are_back(
    kind: str, missing: str, other: str, by_front: bool, way: Way
) -> None:
    engines = {role: KINDS[kind](role) for role in ("prefill", "decode")}
    async with proxy_in_front_of(
        [engines["prefill"]], [engines["decode"]], by_front=by_front, way=way, engine=kind, probe_successes=1
    ) as house:
        before = await house.post(prompt="a b c d e f g h")
        assert before.headers["x-pdproxy-path"] == "disaggregated"
        switch(house, engines[missing], is_up=False)
        await until(lambda: not house.proxy.pool.of_role(missing)[0].is_ready)  # type: ignore[arg-type]
        for stream in (False, True):
            answer = await house.post(prompt="a b c d e f g h", stream=stream)
            assert answer.status == 200
            assert answer.headers["x-pdproxy-path"] == "local"
            assert answer.headers["x-pdproxy-decoder"] == f"{other}-0"
            assert "x-pdproxy-prefiller" not in answer.headers
        assert (await house.get("/ready")).status == 200
        assert [card["id"] for card in (await house.get("/v1/models")).json()["data"]] == ["tiny"]
        if not by_front:  # a front's figures reach its leader with its next report
            page = (await house.get("/metrics")).body.decode()
            assert f'path="local",reason="{REASONS[missing]}"' in page
        switch(house, engines[missing], is_up=True)
        await look(house)
        await until(lambda: house.proxy.pool.of_role(missing)[0].is_ready)  # type: ignore[arg-type]
        after = await house.post(prompt="a b c d e f g h")
        assert after.headers["x-pdproxy-path"] == "disaggregated"


async def test_who_waits_for_pages_is_let_go_when_the_last_prefiller_is_lost() -> None:
    prefiller, decoder = FakeNixl("prefill"), FakeNixl("decode")
    async with proxy_in_front_of([prefiller], [decoder], engine="vllm_nixl") as house:
        owner = house.proxy.pool.of_role("prefill")[0]
        held = await Held(owner, owner.capacity).wait()
        calls = [house.call(prompt="a b c d e f g h") for _ in range(3)]
        await until(lambda: house.admission.num_waiting == 3)
        switch(house, prefiller, is_up=False)
        answers = [await call.answer() for call in calls]
        assert [answer.headers["x-pdproxy-path"] for answer in answers] == ["local"] * 3
        held.release()


@pytest.mark.parametrize("by_front", [False, True], ids=["one process", "by a front"])
async def test_a_stream_that_broke_off_is_continued_by_another_that_answers_alone(by_front: bool) -> None:
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of(decoders=decoders, retries=1, by_front=by_front) as house:
        first, second = (house.leader or house.proxy).pool.of_role("decode")
        second.drain()
        decoders[0].hang_at.add("middle")
        call = house.call(stream=True)
        await decoders[0].reached("middle")
        second.resume()
        first.drain()
        switch(house, house.prefiller, is_up=False)
        pool = house.proxy.pool
        await until(lambda: [one.name for one in pool.admission.open_places("tiny").alone] == ["decode-1"])
        decoders[0].fail_at["middle"] = EngineBroken("the connection was reset")
        decoders[0].let_go("middle")
        answer = await call.answer()
        assert (answer.text(), answer.events()[-1]) == ("".join(WORDS), "[DONE]")
        assert house.proxy.orchestrator.num_continued == 1


@pytest.mark.parametrize("by_front", [False, True], ids=["one process", "by a front"])
async def test_a_prefiller_that_answers_looks_and_no_canary_keeps_nobody_from_answering_alone(
    by_front: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "START_S", 0.0)
    prefillers = [FakeEngine("prefill"), FakeEngine("prefill")]
    prefillers[1].fail_at["prefill"] = error_reply(500, "broken")
    async with proxy_in_front_of(prefillers, wait=False, by_front=by_front) as house:
        pools = [house.proxy.pool, (house.leader or house.proxy).pool]
        await until(lambda: all([one.is_ready for one in pool.instances] == [True, False, True] for pool in pools))
        await until(lambda: "canary" in pools[1].instances[1].why)
        switch(house, prefillers[0], is_up=False)
        await until(lambda: not pools[0].instances[0].is_ready)
        answer = await house.post()
        assert (answer.status, answer.headers.get("x-pdproxy-path")) == (200, "local")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_nobody_answers_alone_where_that_is_refused(role: str) -> None:
    async with proxy_in_front_of(when_no_prefiller="refuse", when_no_decoder="refuse") as house:
        switch(house, house.prefiller if role == "prefill" else house.decoder, is_up=False)
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (503, "no_ready_instance")


async def test_a_fleet_that_starts_waits_for_both_before_anybody_answers_alone() -> None:
    prefiller = FakeEngine("prefill")
    async with proxy_in_front_of([prefiller], wait=False) as house:
        decoder = house.proxy.pool.of_role("decode")[0]
        assert decoder.health is Health.UNKNOWN
        assert not house.admission.open_places("tiny").alone
        await house.is_ready()
        assert (await house.post()).headers["x-pdproxy-path"] == "disaggregated"


async def test_a_fleet_that_starts_waits_for_who_is_still_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes its time to load a model, and nobody listens there meanwhile."""
    async with proxy_in_front_of(wait=False, probe_successes=1) as house:
        first, second = house.proxy.pool.instances
        switch(house, house.prefiller, is_up=False)
        await look(house)
        assert (first.health, second.health) == (Health.DOWN, Health.ALIVE)
        assert (await house.post()).status == 503
        monkeypatch.setattr(instance_module, "START_S", 0.0)
        first.no_longer_expected()
        await look(house)
        assert second.is_proven_alone
        assert (await house.post()).headers["x-pdproxy-path"] == "local"


async def test_an_instance_that_was_proven_alone_is_proven_with_a_counterpart_as_soon_as_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instance_module, "START_S", 0.0)
    prefiller, decoder = FakeEngine("prefill"), FakeEngine("decode")
    async with proxy_in_front_of([prefiller], [decoder], wait=False, probe_successes=1) as house:
        first, second = house.proxy.pool.instances
        switch(house, prefiller, is_up=False)
        await until(lambda: second.is_ready)
        assert second.is_proven_alone
        assert (await house.post()).headers["x-pdproxy-path"] == "local"
        switch(house, prefiller, is_up=True)
        await look(house)
        await until(lambda: first.is_ready)
        assert not second.is_proven_alone
        assert (await house.post()).headers["x-pdproxy-path"] == "disaggregated"


async def test_a_prompt_that_is_too_long_is_told_so_by_who_answers_alone() -> None:
    decoder = FakeEngine("decode")
    async with proxy_in_front_of(decoders=[decoder]) as house:
        house.decoder.max_model_len = 4
        switch(house, house.prefiller, is_up=False)
        await look(house)
        answer = await house.post(prompt=json.loads("[1, 2, 3, 4, 5, 6, 7, 8]"))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_a_prompt_too_large_for_one_decoder_waits_for_another_that_takes_its_kv() -> None:
    small, large = FakeEngine("decode", num_pages=2), FakeEngine("decode", num_pages=32)
    async with proxy_in_front_of(decoders=[small, large], decode_policy="round_robin") as house:
        prompt = "word " * 40  # three pages of 16
        for _ in range(4):
            answer = await house.post(prompt=prompt)
            assert answer.headers["x-pdproxy-path"] == "disaggregated"
            assert answer.headers["x-pdproxy-decoder"] == "decode-1"
        held = await Held(house.proxy.pool.of_role("decode")[1], 32).wait()
        waits = asyncio.create_task(house.post(prompt=prompt))
        await until(lambda: house.proxy.pool.admission.num_waiting == 1)
        answer = await house.post(prompt="short")
        assert (answer.headers["x-pdproxy-path"], answer.headers["x-pdproxy-decoder"]) == ("disaggregated", "decode-0")
        held.release()
        answer = await waits
        assert (answer.headers["x-pdproxy-path"], answer.headers["x-pdproxy-decoder"]) == ("disaggregated", "decode-1")


async def test_a_prompt_too_large_for_one_decoder_is_served_there_when_the_other_has_gone() -> None:
    small, large = FakeEngine("decode", num_pages=2), FakeEngine("decode", num_pages=32)
    async with proxy_in_front_of(decoders=[small, large]) as house:
        held = await Held(house.proxy.pool.of_role("decode")[1], 32).wait()
        waits = asyncio.create_task(house.post(prompt="word " * 40))
        await until(lambda: house.proxy.pool.admission.num_waiting == 1)
        house.proxy.pool.of_role("decode")[1].lost("it cannot be reached")
        answer = await waits
        assert (answer.headers["x-pdproxy-path"], answer.headers["x-pdproxy-decoder"]) == ("local", "decode-0")
        held.release()
