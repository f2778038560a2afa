"""Engines that keep out leaders which have been replaced: what they are told, and what a refusal stands for.

Nobody is at fault then: the request asks for its turn again, and an engine is neither suspected nor left alone.
"""

from __future__ import annotations

import pytest

from pdproxy.admission.grant import Grant
from pdproxy.admission.line import Demand
from pdproxy.fleet.breaker import BreakerState
from tests.fakes.fake_engine import FakeEngine, error_reply
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

pytestmark = pytest.mark.usefixtures("both_ways")

TERM = "x-pdproxy-term"


def told(engine: FakeEngine | FakeNixl) -> list[str | None]:
    """The terms of its legs, the canaries' left out."""
    return [call.headers.get(TERM) for call in engine.generations()]


def check_nobody_is_blamed(house: Harness) -> None:
    for instance in house.proxy.pool.instances:
        assert (instance.is_ready, instance.is_suspected, instance.is_doubted) == (True, False, False)
        assert instance.breaker.state is BreakerState.CLOSED
        assert instance.breaker.statistics().num_faults == 0


async def legs(house: Harness, leg: str, outcome: str) -> int:
    page = (await house.get("/metrics")).body.decode()
    line = f'pdproxy_legs_total{{instance="{leg}-0",leg="{leg}",outcome="{outcome}"}} '
    return next((int(float(one.removeprefix(line))) for one in page.splitlines() if one.startswith(line)), 0)


def lead_again(house: Harness, term: int, engine: FakeEngine) -> list[set[str]]:
    """The proxy hears of its new term when the engine has refused it the old one. Returns whom each demand avoids."""
    admission, avoided = house.admission, list[set[str]]()
    bind = admission.bind_now

    def bind_now(demand: Demand) -> Grant | None:
        if any(told(engine)):
            admission.term = term
        avoided.append(set(demand.avoid))
        return bind(demand)

    admission.bind_now = bind_now  # type: ignore[method-assign]
    return avoided


# ── what engines are told ───────────────────────────────────────────────────────────────────────────────────────────


async def test_without_a_term_nothing_is_told() -> None:
    async with proxy_in_front_of() as house:
        assert (await house.post()).status == 200
        assert (told(house.prefiller), told(house.decoder)) == ([None], [None])


async def test_each_leg_tells_the_term_of_its_own_instant() -> None:
    """Also where another leader was told of the attempt after the prefill leg had been sent."""
    async with proxy_in_front_of() as house:
        house.admission.term = 7
        house.prefiller.hang_at = {"prefill_done"}
        call = house.call()
        await house.prefiller.reached("prefill_done")
        house.admission.term = 8
        house.prefiller.let_go("prefill_done")
        assert (await call.answer()).status == 200
        assert (told(house.prefiller), told(house.decoder)) == (["7"], ["8"])


async def test_legs_of_one_engine_alone_tell_it_too() -> None:
    async with proxy_in_front_of() as house:
        house.admission.term = 7
        assert (await house.post(n=2)).status == 200
        assert (await house.post(max_tokens=1)).status == 200
        assert (told(house.prefiller), told(house.decoder)) == (["7"], ["7"])


async def test_calls_that_let_pages_go_are_right_in_any_term() -> None:
    async with proxy_in_front_of() as house:
        house.admission.term = 7
        house.decoder.signals = "lost"
        house.limit(kv_timeout_s=0.05)
        assert (await house.post()).status in (502, 504)
        await house.settled()
        cancels = [call for call in house.decoder.calls if call.path == "/kv_transfer/cancel"]
        assert cancels
        assert not any(TERM in call.headers for call in cancels)


async def test_engines_of_a_kind_that_knows_no_terms_are_told_none() -> None:
    """Its 409 is the client's, whatever it means."""
    async with proxy_in_front_of([FakeNixl("prefill")], [FakeNixl("decode")]) as house:
        house.admission.term = 7
        assert (await house.post()).status == 200
        assert told(house.prefiller) == told(house.decoder) == [None]
        house.prefiller.fail_at["prefill"] = error_reply(409, "a conflict")
        assert (await house.post()).status == 409


async def test_a_409_that_means_something_else_reaches_the_client() -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.fail_at["prefill"] = error_reply(409, "a conflict")
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (409, "from_engine")
        assert len(house.prefiller.generations()) == 1


# ── what a refusal stands for ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_request_asks_for_its_turn_again(leg: str, stream: bool) -> None:
    """No other pair is looked for."""
    async with proxy_in_front_of() as house:
        engine = house.prefiller if leg == "prefill" else house.decoder
        house.admission.term = 7
        engine.highest_term.hear(8)
        avoided = lead_again(house, 9, engine)
        assert (await house.post(stream=stream)).status == 200
        assert avoided == [set(), set()]
        assert told(engine) == ["7", "9"]
        assert engine.highest_term.value == 9
        assert await legs(house, leg, "stale_term") == 1
        check_nobody_is_blamed(house)


async def test_engines_hear_of_a_leader_when_it_looks_at_them() -> None:
    """What they say is in use is all there is then: nothing older begins any more, however late its leg comes."""
    async with proxy_in_front_of() as house:
        assert house.decoder.highest_term.value is None
        house.admission.term = 7
        await house.proxy.probe.ask(next(one for one in house.proxy.pool.instances if one.role == "decode"))
        assert house.decoder.highest_term.value == 7


async def test_engines_are_told_no_term_while_pages_may_be_claimed() -> None:
    """A leg of the leader before may still be on its way, for a front that is about to claim its pages."""
    async with proxy_in_front_of() as house:
        house.admission.term = 7
        house.admission.kernel.claims_until = house.admission.now() + 60
        await house.proxy.probe.ask(next(one for one in house.proxy.pool.instances if one.role == "decode"))
        assert house.decoder.highest_term.value is None


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_proxy_that_leads_no_more_says_503_when_its_retries_are_used_up(leg: str) -> None:
    async with proxy_in_front_of(retries=2) as house:
        engine = house.prefiller if leg == "prefill" else house.decoder
        house.admission.term = 7
        engine.highest_term.hear(8)
        for _ in range(4):
            engine.forget()
            answer = await house.post()
            assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "stale_term", "1")
            assert told(engine) == ["7"] * 3
        await house.settled()
        check_nobody_is_blamed(house)
        assert house.decoder.pages == {}
        house.admission.term = 8
        assert (await house.post()).status == 200


async def test_a_canary_that_is_refused_says_nothing_of_its_pair() -> None:
    prefiller, decoder = FakeEngine("prefill"), FakeEngine("decode")
    for engine in (prefiller, decoder):
        engine.highest_term.hear(8)
    async with proxy_in_front_of([prefiller], [decoder], wait=False, probe_interval_s=0.05) as house:
        house.admission.term = 7
        await until(lambda: sum(call.headers.get(TERM) == "7" for call in prefiller.calls) > 1)
        assert [instance.why for instance in house.proxy.pool.instances if "canary from" in instance.why] == []
        assert not any(instance.is_ready for instance in house.proxy.pool.instances)
        house.admission.term = 8
        await until(lambda: all(instance.is_ready for instance in house.proxy.pool.instances))
        check_nobody_is_blamed(house)
