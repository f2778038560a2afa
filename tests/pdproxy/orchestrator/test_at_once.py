"""Pairs whose legs are sent at once, through the whole proxy: SGLang's and Mooncake's stand-ins.

Leaving the block checks that no room is open, none was entered twice, and the proxy holds nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.engines.http.base import EngineBroken
from tests.fakes.at_once_engine import KINDS, MAX_REQUESTS, Kind, pairs
from tests.fakes.fail_once import fail_once
from tests.fakes.fake_engine import BROKEN, WORDS, FakeReply, error_reply, json_reply
from tests.fakes.proxy_harness import Answer, until

pytestmark = pytest.mark.usefixtures("both_ways")

CHAT = "/v1/chat/completions"
TEXT = "".join(WORDS)
LEGS = ["/v1/completions"]
both_kinds = pytest.mark.parametrize("kind", KINDS)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def text(answer: Answer, *, stream: bool) -> str:
    return answer.text() if stream else str(answer.json()["choices"][0]["text"])


# ── when all goes well ──────────────────────────────────────────────────────────────────────────────────────────────


@both_kinds
@both_ways
async def test_both_legs_go_at_once_and_meet(kind: Kind, stream: bool) -> None:
    async with pairs(kind) as fleet:
        fleet.prefiller.hang_at = {"prefill"}
        call = fleet.house.call(stream=stream)
        await fleet.decoder.reached("waiting")
        assert fleet.keys(fleet.prefiller) == fleet.keys(fleet.decoder)
        assert not call.is_started
        fleet.prefiller.let_go("prefill")
        answer = await call.answer()
        assert (answer.status, text(answer, stream=stream)) == (200, TEXT)


@both_kinds
async def test_no_two_requests_meet_in_one_place(kind: Kind) -> None:
    async with pairs(kind) as fleet:
        calls = [fleet.house.call(stream=bool(number % 2)) for number in range(12)]
        assert {(await call.answer()).status for call in calls} == {200}
        keys = fleet.keys(fleet.decoder)
        assert len(set(keys)) == 12
        assert sorted(keys) == sorted(fleet.keys(fleet.prefiller))


async def test_one_token_takes_both_legs_of_sglang() -> None:
    async with pairs("sglang") as fleet:
        assert (await fleet.house.post(max_tokens=1)).status == 200
        assert len(fleet.keys(fleet.decoder)) == 1


async def test_several_prompts_take_a_room_each() -> None:
    async with pairs("sglang") as fleet:
        fleet.prefiller.hang_at = {"transfer"}
        call = fleet.house.call(prompt=["a", "b", "c"])
        await fleet.prefiller.reached("transfer")
        assert (len(fleet.meetings.open), fleet.house.held) == (3, 3)
        fleet.prefiller.let_go("transfer")
        assert [choice["index"] for choice in (await call.answer()).json()["choices"]] == [0, 1, 2]


async def test_more_prompts_than_a_prefiller_has_rooms_are_served_one_by_one() -> None:
    async with pairs("sglang") as fleet:
        answer = await fleet.house.post(prompt=["a"] * (MAX_REQUESTS + 1))
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(MAX_REQUESTS + 1))
        assert len(fleet.prefiller.generations()) == MAX_REQUESTS + 1
        assert fleet.meetings.most_open <= MAX_REQUESTS


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_several_answers_to_one_prompt_are_refused_before_anybody_is_asked(path: str) -> None:
    async with pairs("sglang") as fleet:
        messages: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {}
        answer = await fleet.house.post(path, n=2, **messages)
        assert (answer.status, answer.error["param"]) == (400, "n")
        assert fleet.prefiller.generations() + fleet.decoder.generations() == []


@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["a", "b"], "echo": True}])
async def test_a_mooncake_decoder_serves_alone_what_cannot_be_split(body: dict[str, Any]) -> None:
    async with pairs("mooncake") as fleet:
        assert (await fleet.house.post(**body)).status == 200
        assert fleet.prefiller.generations() == []
        assert fleet.keys(fleet.decoder) == []


# ── slots ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@both_kinds
async def test_slots_come_back_with_the_first_event(kind: Kind) -> None:
    async with pairs(kind) as fleet:
        fleet.decoder.hang_at = {"first", "middle"}
        call = fleet.house.call(stream=True)
        await fleet.decoder.reached("first")
        assert fleet.house.held > 0
        fleet.decoder.let_go("first")
        await fleet.decoder.reached("middle")
        assert fleet.house.held == 0
        fleet.decoder.let_go("middle")
        assert (await call.answer()).text() == TEXT


async def test_a_prefiller_never_has_more_rooms_open_than_it_may() -> None:
    async with pairs("sglang", max_rooms=2) as fleet:
        fleet.prefiller.hang_at = {"transfer"}
        calls = [fleet.house.call() for _ in range(5)]
        await until(lambda: len(fleet.meetings.open) == 2)
        assert fleet.house.held == 2
        fleet.prefiller.let_go("transfer")
        assert {(await call.answer()).status for call in calls} == {200}
        assert fleet.meetings.most_open == 2


# ── a prefiller that fails ──────────────────────────────────────────────────────────────────────────────────────────


@both_kinds
@pytest.mark.parametrize("point", ["prefill", "transfer"])
@pytest.mark.parametrize("failure", [error_reply(500, "broken"), BROKEN, json_reply({})], ids=["500", "broken", "none"])
async def test_a_failing_prefill_ends_the_decode_leg(kind: Kind, failure: FakeReply | EngineBroken, point: str) -> None:
    """Before its decoder has heard of it, which would wait for ever, and after, when both fail."""
    async with pairs(kind, retries=0) as fleet:
        fleet.prefiller.fail_at = {point: failure}
        answer = await fleet.house.post(stream=point == "transfer")
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")
        if point == "prefill":
            assert "prefill-0" in answer.error["message"]
            assert fleet.decoder.closed == LEGS


@pytest.mark.parametrize(
    ("kind", "reason", "code"), [("sglang", "abort", "leg_failed"), ("mooncake", "stop", "kv_not_handed_over")]
)
async def test_a_prefiller_that_kept_nothing(kind: Kind, reason: str, code: str) -> None:
    async with pairs(kind, retries=0) as fleet:
        choice = {"index": 0, "text": "x", "finish_reason": reason}
        fleet.prefiller.fail_at = {"prefill": json_reply({"choices": [choice]})}
        answer = await fleet.house.post()
        assert (answer.status, answer.error["code"]) == (502, code)
        assert fleet.decoder.closed == LEGS


@both_kinds
async def test_an_engines_own_refusal_reaches_the_client_and_ends_the_other_leg(kind: Kind) -> None:
    async with pairs(kind) as fleet:
        fleet.prefiller.fail_at = {"prefill": error_reply(400, "too long for me")}
        answer = await fleet.house.post()
        assert (answer.status, answer.error["message"]) == (400, "too long for me")
        assert fleet.decoder.closed == LEGS
        assert len(fleet.prefiller.generations()) == 1


@both_kinds
async def test_a_busy_prefiller_is_passed_on(kind: Kind) -> None:
    async with pairs(kind) as fleet:
        fleet.prefiller.fail_at = {"prefill": error_reply(503, "busy", retry_after="3")}
        answer = await fleet.house.post()
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")
        assert fleet.decoder.closed == LEGS


@both_kinds
async def test_a_hanging_prefill_ends_by_deadline(kind: Kind) -> None:
    async with pairs(kind, retries=0) as fleet:
        fleet.house.limit(prefill_timeout_s=0.01, kv_timeout_s=0.01, first_byte_timeout_s=0.01)
        fleet.prefiller.hang_at = {"prefill"}
        answer = await fleet.house.post()
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert fleet.decoder.closed == LEGS
        assert fleet.prefiller.closed == LEGS


@both_kinds
async def test_a_prefiller_that_nobody_reaches_ends_the_decode_leg(kind: Kind) -> None:
    async with pairs(kind, retries=0) as fleet:
        fleet.house.client_of(fleet.prefiller).is_up = False
        answer = await fleet.house.post()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")
        assert "prefill-0" in answer.error["message"]
        assert fleet.decoder.closed == LEGS


@both_kinds
async def test_a_prefill_that_fails_after_the_answer_has_begun_is_no_concern_of_it(kind: Kind) -> None:
    """The decoder has its KV: to cut a good answer would help nobody."""
    async with pairs(kind) as fleet:
        fleet.prefiller.hang_at, fleet.decoder.hang_at = {"prefill_done"}, {"middle"}
        fleet.prefiller.fail_at = {"prefill_done": BROKEN}
        call = fleet.house.call(stream=True)
        await fleet.decoder.reached("middle")
        fleet.prefiller.let_go("prefill_done")
        await until(lambda: fleet.house.proxy.pool.instances[0].num_legs == 0)
        fleet.decoder.let_go("middle")
        answer = await call.answer()
        assert (text(answer, stream=True), answer.events()[-1]) == (TEXT, "[DONE]")


async def test_of_several_answers_one_that_has_begun_says_nothing_of_the_others() -> None:
    async with pairs("sglang") as fleet:
        fleet.prefiller.hang_at, fleet.decoder.hang_at = {"prefill_done"}, {"middle"}
        fleet.prefiller.fail_at = {"prefill_done": BROKEN}
        call = fleet.house.call(prompt=["a", "b"], stream=True)
        await fleet.decoder.reached("middle")
        fleet.prefiller.let_go("prefill_done")
        events = (await call.answer()).events()
        assert "prefill-0" in events[-1]["error"]["message"]
        assert "[DONE]" not in events
        assert fleet.decoder.closed == LEGS


@both_kinds
@pytest.mark.parametrize(("point", "stream"), [("prefill", True), ("transfer", False)])
async def test_a_retry_meets_elsewhere(kind: Kind, stream: bool, point: str) -> None:
    async with pairs(kind, num_prefillers=2, retries=2) as fleet:
        for prefiller in fleet.house.prefillers:
            fail_once(prefiller, point)
        answer = await fleet.house.post(stream=stream)
        assert (answer.status, text(answer, stream=stream)) == (200, TEXT)
        keys = [key for prefiller in fleet.house.prefillers for key in fleet.keys(prefiller)]
        assert len(set(keys)) == 3
        assert set(keys) >= set(fleet.keys(fleet.decoder))


# ── a decoder that fails ────────────────────────────────────────────────────────────────────────────────────────────


@both_kinds
@pytest.mark.parametrize("failure", [error_reply(500, "broken"), BROKEN], ids=["500", "broken"])
async def test_a_failing_decode_ends_the_prefill_leg(kind: Kind, failure: FakeReply | EngineBroken) -> None:
    async with pairs(kind, retries=0) as fleet:
        fleet.decoder.fail_at = {"decode": failure}
        answer = await fleet.house.post()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")
        assert "decode-0" in answer.error["message"]
        assert fleet.prefiller.closed == LEGS


@both_kinds
async def test_a_decoder_that_breaks_in_the_middle_ends_the_stream_with_an_error(kind: Kind) -> None:
    async with pairs(kind) as fleet:
        fleet.decoder.fail_at = {"middle": BROKEN}
        events = (await fleet.house.post(stream=True)).events()
        assert events[-1]["error"]["code"] == "leg_failed"
        assert "[DONE]" not in events


# ── a client that leaves ────────────────────────────────────────────────────────────────────────────────────────────


@both_kinds
@pytest.mark.parametrize(
    ("role", "point", "stream"),
    [
        ("prefill", "prefill", False),
        ("prefill", "transfer", True),
        ("decode", "decode", False),
        ("decode", "waiting", True),
        ("decode", "first", False),
        ("decode", "first", True),
        ("decode", "middle", True),
    ],
)
async def test_a_client_that_leaves_takes_both_legs_with_it(kind: Kind, role: str, point: str, stream: bool) -> None:
    async with pairs(kind) as fleet:
        fleet.prefiller.hang_at = {"prefill_done"}
        engine = fleet.prefiller if role == "prefill" else fleet.decoder
        engine.hang_at |= {point}
        call = fleet.house.call(stream=stream)
        await engine.reached(point)
        call.leave()
        await call.done()
        assert fleet.prefiller.closed == LEGS
        assert fleet.decoder.closed == LEGS
        await fleet.house.settled()
        assert not fleet.meetings.open


@both_kinds
async def test_a_client_that_leaves_when_the_prefill_is_over(kind: Kind) -> None:
    async with pairs(kind) as fleet:
        fleet.decoder.hang_at = {"first"}
        call = fleet.house.call(stream=True)
        await fleet.decoder.reached("first")
        await until(lambda: not fleet.meetings.open)
        call.leave()
        await call.done()
        assert (fleet.prefiller.closed, fleet.decoder.closed) == ([], LEGS)


async def test_an_abandoned_sglang_prompt_is_ended_by_its_id() -> None:
    async with pairs("sglang") as fleet:
        fleet.prefiller.hang_at = {"transfer"}
        call = fleet.house.call()
        await fleet.prefiller.reached("transfer")
        call.leave()
        await call.done()
        await fleet.house.settled()
        (leg,) = fleet.prefiller.generations()
        assert fleet.prefiller.bodies("/abort_request") == [{"rid": leg.body["rid"]}]


# ── what the engines say of themselves ──────────────────────────────────────────────────────────────────────────────


async def test_an_instance_in_the_wrong_role_is_not_used() -> None:
    async with pairs("sglang", num_decoders=2, wait=False) as fleet:
        fleet.decoder.role = "prefill"
        wrong, *right = sorted(fleet.house.proxy.pool.instances, key=lambda instance: instance.name)
        await until(lambda: all(instance.is_ready for instance in right) and wrong.why != "not asked yet")
        assert (wrong.name, wrong.is_ready) == ("decode-0", False)
        assert "prefill" in wrong.why


async def test_sglang_is_met_at_the_bootstrap_server_of_its_prefiller() -> None:
    async with pairs("sglang") as fleet:
        await fleet.house.post()
        (leg,) = fleet.decoder.generations()
        assert (leg.body["bootstrap_host"], leg.body["bootstrap_port"]) == ("p0", 8998)


async def test_mooncake_is_met_by_the_id_that_its_prefiller_has_there() -> None:
    async with pairs("mooncake") as fleet:
        await fleet.house.post()
        (leg,) = fleet.decoder.generations()
        params = leg.body["kv_transfer_params"]
        assert params["remote_bootstrap_addr"] == "http://p0:8998"
        assert params["remote_engine_id"] == fleet.prefiller.epoch
