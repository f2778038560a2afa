"""Whose fault it is that a prefiller's KV does not reach a decoder, and what becomes of either."""

from __future__ import annotations

import pytest

from pdproxy.engines.adapter import NobodyReached, PrefillReply
from pdproxy.fleet.breaker import BreakerState
from pdproxy.fleet.exchanges import Exchanges
from pdproxy.fleet.instance import Health
from tests.fakes.fake_engine import FakeEngine, json_reply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

DEAF = {"message": "the receiver at tcp://127.0.0.1:7300 fell silent", "type": "x", "code": "kv_receiver_lost"}


def test_who_works_with_others_since_is_told_of_either_side() -> None:
    p, q, d, e = (Exchanges(name) for name in "pqde")
    q.worked(d)
    assert p.failed(d) == (False, False), "what worked before says nothing"
    q.worked(d)
    assert p.failed(d) == (False, True)
    p.worked(e)
    assert p.failed(d) == (True, True)
    p.worked(d)
    assert p.failed(d) == (False, False), "it begins anew"
    p.worked(e)
    d.forget()
    assert p.failed(d) == (True, False)
    p.forget()
    assert p.failed(d) == (False, False)


def test_nothing_is_noted_while_all_is_well() -> None:
    p, d = Exchanges("p"), Exchanges("d")
    p.worked(d)
    assert (p._worked_at, d._worked_at) == (0, 0)


def breakers(house: Harness) -> dict[str, tuple[int, int]]:
    return {
        one.name: (one.breaker.statistics().num_opened, one.breaker.statistics().num_faults)
        for one in house.proxy.pool.instances
    }


async def test_a_single_deaf_decoder_is_named_and_its_prefiller_is_not_blamed() -> None:
    async with proxy_in_front_of(retries=0, breaker_faults=3, breaker_cool_off_s=60.0) as house:
        house.prefiller.fail_at["prefill"] = json_reply({"error": DEAF}, 502)
        for _ in range(3):
            answer = await house.post()
            assert (answer.status, answer.error["code"]) == (502, "kv_transfer_failed")
            assert "'decode-0'" in answer.error["message"]
        prefiller, decoder = house.proxy.pool.instances
        assert (prefiller.health, prefiller.breaker.statistics().num_faults) == (Health.READY, 0)
        assert decoder.breaker.state is BreakerState.OPEN
        await house.settled()


async def test_a_deaf_decoder_is_named_where_the_prefiller_says_so_with_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As vLLM does with our connector: it has no error of its own for that."""
    async with proxy_in_front_of(retries=0, breaker_faults=3, breaker_cool_off_s=60.0) as house:
        prefiller, decoder = house.proxy.pool.instances

        def deaf(self: object, request: object, body: bytes) -> PrefillReply:
            raise NobodyReached("its KV did not reach the decoder")

        monkeypatch.setattr(type(prefiller.adapter), "read_prefill", deaf)
        for _ in range(3):
            answer = await house.post()
            assert (answer.status, answer.error["code"]) == (502, "kv_transfer_failed")
            assert "'decode-0'" in answer.error["message"]
        assert prefiller.breaker.statistics().num_faults == 0
        assert decoder.breaker.state is BreakerState.OPEN
        await house.settled()


async def test_a_decoder_found_deaf_again_on_trial_is_left_alone_again() -> None:
    async with proxy_in_front_of(retries=0, breaker_faults=1, breaker_cool_off_s=0.02) as house:
        house.prefiller.fail_at["prefill"] = json_reply({"error": DEAF}, 502)
        breaker = house.proxy.pool.instances[1].breaker
        for count in range(1, 4):
            await until(breaker.allows)
            assert (await house.post()).status == 502
            assert (breaker.state, breaker.statistics().num_opened) == (BreakerState.OPEN, count)
        del house.prefiller.fail_at["prefill"]
        await until(breaker.allows)
        assert (await house.post()).status == 200
        assert breaker.state is BreakerState.CLOSED
        await house.settled()


async def test_a_prefiller_that_reaches_no_decoder_is_blamed_where_others_reach_them() -> None:
    prefillers = [FakeEngine("prefill"), FakeEngine("prefill")]
    async with proxy_in_front_of(prefillers=prefillers, breaker_faults=3, breaker_cool_off_s=60.0) as house:
        prefillers[0].fail_at["prefill"] = json_reply({"error": DEAF}, 502)
        for _ in range(12):
            assert (await house.post()).status == 200
        told = breakers(house)
        assert told["prefill-0"][0] == 1, told
        assert told["prefill-1"] == (0, 0)
        assert told["decode-0"][0] == 0, told
        await house.settled()


@pytest.mark.parametrize("body", [b'{"status": "failed", "reason": "its receiver is deaf"}', b"\xff", b"[]"])
async def test_why_an_engine_is_not_well_is_told_in_its_own_words(body: bytes) -> None:
    async with proxy_in_front_of() as house:
        reply = json_reply({}, 503)
        reply.chunks = [body]
        house.decoder.fail_at["/health"] = reply
        decoder = house.proxy.pool.instances[1]
        for _ in range(3):
            await house.proxy.probe.look(decoder)
        assert decoder.health is Health.DOWN
        assert ("its receiver is deaf" in decoder.why) == (b"reason" in body)
        assert "/health is HTTP 503" in decoder.why
        del house.decoder.fail_at["/health"]
        decoder.suspected.set()
        await house.is_ready()


async def test_why_kv_was_not_taken_is_told_to_operators_in_the_prefillers_words() -> None:
    said = {"message": "the attempt was not signed", "type": "x", "code": "kv_transfer_failed"}
    prefiller = FakeEngine("prefill")
    prefiller.fail_at["prefill"] = json_reply({"error": said}, 502)
    async with proxy_in_front_of([prefiller], wait=False) as house:
        await until(lambda: "(the attempt was not signed)" in house.proxy.pool.instances[1].why)
        prefiller.fail_at.clear()
        await house.is_ready()
    async with proxy_in_front_of(retries=0) as house:
        house.prefiller.fail_at["prefill"] = json_reply({"error": said}, 502)
        answer = await house.post()
        assert answer.error["message"].endswith("its KV did not reach 'decode-0'"), "clients are not told it"
        await house.settled()
