"""A call that this machine could not make says nothing of the engine: not to its health, its breaker or the retries."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pdproxy.engines.http.base import LocalFault
from pdproxy.fleet.instance import Health, Instance
from pdproxy.openai.request import CHAT
from tests.fakes.at_once_engine import KINDS, Kind, pairs
from tests.fakes.fake_engine import BROKEN, FakeLeg, ScriptedEngine
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

pytestmark = pytest.mark.usefixtures("both_ways")

OUT = LocalFault("[Errno 24] Too many open files")


def cannot_reach(house: Harness, engine: ScriptedEngine, *paths: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on the proxy can open no connection to `engine`, or none for these paths. Returns the list of the calls
    that failed so."""
    client, failed = house.client_of(engine), []
    usual_post, usual_get = client.post, client.get

    async def post(path: str, body: bytes, headers: Mapping[str, str]) -> FakeLeg:
        if not paths or path in paths:
            failed.append(path)
            raise OUT
        return await usual_post(path, body, headers)

    async def get(path: str, *, timeout_s: float) -> tuple[int, bytes]:
        if not paths or path in paths:
            failed.append(path)
            raise OUT
        return await usual_get(path, timeout_s=timeout_s)

    monkeypatch.setattr(client, "post", post)
    monkeypatch.setattr(client, "get", get)
    return failed


def check_not_blamed(instance: Instance) -> None:
    breaker = instance.breaker.statistics()
    assert instance.health is Health.READY
    assert not instance.is_doubted
    assert not instance.is_suspected
    assert (breaker.num_faults, breaker.num_outcomes, breaker.num_opened) == (0, breaker.num_outcomes, 0)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_local_error_never_counts_against_an_engine(leg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_in_front_of(retries=3) as house:
        engine = house.prefiller if leg == "prefill" else house.decoder
        failed = cannot_reach(house, engine, "/v1/completions", monkeypatch=monkeypatch)
        before = house.proxy.orchestrator._retries.statistics()
        for _ in range(6):  # more than a breaker takes
            answer = await house.post(stream=True)
            assert (answer.status, answer.error["code"]) == (503, "out_of_descriptors")
            assert int(answer.headers["retry-after"]) >= 1
        assert len(failed) == 6, "nothing is tried again that fails for the same reason"
        assert house.proxy.orchestrator._retries.statistics().num_retries == before.num_retries
        for instance in house.proxy.pool.instances:
            check_not_blamed(instance)
        monkeypatch.undo()
        assert (await house.post(stream=True)).status == 200


@pytest.mark.parametrize("kind", KINDS)
async def test_of_two_legs_at_once_the_one_that_cannot_be_sent_ends_the_other(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pairs(kind) as fleet:
        assert fleet.house.proxy.descriptors.legs_per_request == 2
        failed = cannot_reach(fleet.house, fleet.decoder, "/v1/completions", monkeypatch=monkeypatch)
        answer = await fleet.house.post(stream=True)
        assert (answer.status, answer.error["code"], len(failed)) == (503, "out_of_descriptors", 1)
        for instance in fleet.house.proxy.pool.instances:
            check_not_blamed(instance)


async def test_a_half_open_breaker_keeps_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_in_front_of(retries=0, breaker_faults=1, breaker_cool_off_s=0.05) as house:
        decoder = house.proxy.pool.instances[-1]
        house.decoder.fail_at["/v1/completions"] = house.decoder.fail_at["decode"] = BROKEN
        assert (await house.post(stream=True)).status == 502
        house.decoder.fail_at.clear()
        await until(lambda: decoder.is_routable)
        with monkeypatch.context() as patch:
            cannot_reach(house, house.decoder, "/v1/completions", monkeypatch=patch)
            assert (await house.post(stream=True)).error["code"] == "out_of_descriptors"
        assert (await house.post(stream=True)).status == 200, "the trial was given back"
        assert decoder.breaker.statistics().num_opened == 1


async def test_a_look_that_could_not_be_made_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_in_front_of(probe_interval_s=0.01, probe_misses=1) as house:
        failed = cannot_reach(house, house.decoder, monkeypatch=monkeypatch)
        await until(lambda: len(failed) >= 5)
        for instance in house.proxy.pool.instances:
            check_not_blamed(instance)
        assert not house.proxy.pool.instances[-1].why


async def test_an_instance_that_was_never_reached_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_in_front_of(wait=False, probe_interval_s=0.01) as house:
        failed = cannot_reach(house, house.decoder, monkeypatch=monkeypatch)
        await until(lambda: len(failed) >= 3)
        decoder = house.proxy.pool.instances[-1]
        assert decoder.health is Health.UNKNOWN
        assert decoder.why == f"the proxy cannot ask it: {OUT}"
        monkeypatch.undo()
        await house.is_ready()


async def test_a_canary_that_could_not_be_sent_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_in_front_of(wait=False, probe_interval_s=0.01) as house:
        failed = cannot_reach(house, house.prefiller, "/v1/completions", monkeypatch=monkeypatch)
        await until(lambda: len(failed) >= 3)
        assert all(instance.health is Health.ALIVE for instance in house.proxy.pool.instances)
        assert not any("canary from" in instance.why for instance in house.proxy.pool.instances)
        monkeypatch.undo()
        await house.is_ready()


async def test_an_errand_that_could_not_be_sent_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_in_front_of(retries=0) as house:
        house.prefiller.hang_at.add("prefill")
        call = house.call(stream=True)
        await house.prefiller.reached("prefill")
        failed = cannot_reach(house, house.decoder, "/kv_transfer/cancel", monkeypatch=monkeypatch)
        call.leave()
        await until(lambda: len(failed) >= 2)
        assert not any("kv_buffer" in call.path for call in house.decoder.calls), "nobody has reason to look at it"
        for instance in house.proxy.pool.instances:
            check_not_blamed(instance)
        monkeypatch.undo()
        await house.settled()
        assert house.proxy.reaper.statistics()["dropped"] == 1


async def test_a_tokenizer_that_could_not_be_asked_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}]
    ask = {"messages": [{"role": "user", "content": "hi there"}], "tools": tools}
    async with proxy_in_front_of() as house:
        for engine in (house.prefiller, house.decoder):
            cannot_reach(house, engine, "/tokenize", monkeypatch=monkeypatch)
        answer = await house.post(CHAT, **ask)
        assert (answer.status, answer.error["code"]) == (503, "prompt_not_counted")
        assert int(answer.headers["retry-after"]) >= 1
        for instance in house.proxy.pool.instances:
            check_not_blamed(instance)
        monkeypatch.undo()
        assert (await house.post(CHAT, **ask)).status == 200
