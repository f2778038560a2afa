"""Engines are asked how long prompts are: whom, how often, and what becomes of their answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdproxy.engines.http.base import EngineBroken
from pdproxy.engines.tokenize import is_certain, tokenize_call
from pdproxy.errors import InvalidRequest
from pdproxy.fleet import token_counts
from pdproxy.openai.request import CHAT, COMPLETIONS, GenerationRequest, parse
from tests.fakes.fake_engine import FakeEngine, error_reply, json_reply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

HELLO = [{"role": "user", "content": "hi there"}]
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}]


def chat(**fields: Any) -> GenerationRequest:
    return parse(CHAT, json_of({"messages": HELLO} | fields))


def json_of(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def asked(house: Harness) -> list[int]:
    """How often each engine was."""
    return [len(engine.bodies("/tokenize")) for engine in (*house.prefillers, *house.decoders)]


# ── what is asked ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
        ({"documents": [{"text": "d"}]}, {"documents": [{"text": "d"}]}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "x"}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
)
def test_what_vllms_chat_endpoint_hands_its_template(fields: dict[str, Any], kwargs: dict[str, Any] | None) -> None:
    body = json.loads(tokenize_call(chat(model="m", max_tokens=3, stream=True, **fields)).body)
    assert body == {"messages": HELLO, "model": "m"} | ({} if kwargs is None else {"chat_template_kwargs": kwargs})


def test_a_text_is_asked_for_as_a_text() -> None:
    request = parse(COMPLETIONS, json_of({"prompt": ["abc"], "max_tokens": 3, "add_special_tokens": False}))
    assert tokenize_call(request).body == b'{"add_special_tokens":false,"prompt":"abc"}'


@pytest.mark.parametrize("kwargs", [[1], "x", 5])
def test_variables_that_are_none(kwargs: Any) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
        tokenize_call(chat(chat_template_kwargs=kwargs, documents=[{}]))


@pytest.mark.parametrize(
    ("fields", "certain"),
    [
        ({}, True),
        ({"tools": TOOLS, "tool_choice": "auto", "response_format": {"type": "text"}}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"truncate_prompt_tokens": 5}, False),
        ({"reasoning_effort": "low"}, False),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_where_more_may_make_a_difference(fields: dict[str, Any], certain: bool) -> None:
    assert is_certain(chat(**fields)) is certain


# ── who is asked ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_short_chat_costs_no_call_and_gives_back_what_it_held_too_much() -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.hang_at.add("prefill")
        house.decoder.hang_at.add("decode")
        call = house.call(CHAT, messages=HELLO)
        await house.prefiller.reached("prefill")
        assert house.held > 1
        house.prefiller.let_go("prefill")
        await house.decoder.reached("decode")
        assert house.held == 1
        house.decoder.let_go("decode")
        assert (await call.answer()).status == 200
        assert asked(house) == [0, 0]


@pytest.mark.parametrize(("dtype", "are_told"), [("float32", True), ("bfloat16", False)])
async def test_ids_that_one_engine_tells_are_not_given_to_another_revision(dtype: str, are_told: bool) -> None:
    """They may stand for other tokens there."""
    prefillers, decoders = ([FakeEngine(role) for _ in range(2)] for role in ("prefill", "decode"))
    prefillers[1].dtype = decoders[1].dtype = dtype
    async with proxy_in_front_of(prefillers, decoders) as house:
        await asyncio.sleep(token_counts.TRAITS_S)
        answer = await house.post(CHAT, messages=HELLO, tools=TOOLS)
        assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "disaggregated")
        assert sum(asked(house)) == 1
        (sent,) = (call.body for engine in prefillers for call in engine.generations())
        assert ("prompt_token_ids" in sent["kv_transfer_params"]) is are_told


async def test_an_answer_is_kept_and_they_are_asked_in_turn() -> None:
    async with proxy_in_front_of([FakeEngine("prefill"), FakeEngine("prefill")]) as house:
        for number in (1, 1, 2, 2, 3, 4):
            tools = [{"type": "function", "function": {"name": f"rain{number}"}}]
            answer = await house.post(CHAT, messages=HELLO, tools=tools)
            assert answer.headers["x-pdproxy-path"] == "disaggregated"
        assert sum(asked(house)[:2]) == 4
        assert min(asked(house)[:2]) >= 1
        assert asked(house)[2] == 0, "a decoder was asked"


@pytest.mark.parametrize(("kept_s", "expected"), [(30.0, 1), (0.0, 3)])
async def test_an_engine_without_such_an_endpoint_is_not_asked_again_for_a_while(
    kept_s: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has a bound is served; what has none is told to come back."""
    monkeypatch.setattr(token_counts, "KEPT_S", kept_s)
    async with proxy_in_front_of() as house:
        for engine in (house.prefiller, house.decoder):
            engine.fail_at["/tokenize"] = error_reply(404, "no such route")
        for _ in range(3):
            assert (await house.post(CHAT, messages=HELLO, tools=TOOLS)).status == 503
        assert asked(house) == [expected, expected]
        assert (await house.post(CHAT, messages=HELLO)).status == 200


async def test_answers_get_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may tell the time."""
    monkeypatch.setattr(token_counts, "KEPT_S", 0.0)
    async with proxy_in_front_of() as house:
        for _ in range(2):
            await house.post(CHAT, messages=HELLO, tools=TOOLS)
        assert asked(house) == [2, 0]


async def test_who_asks_the_same_at_the_same_time_shares_the_answer() -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.hang_at.add("tokenize")
        calls = [house.call(CHAT, messages=HELLO, tools=TOOLS) for _ in range(3)]
        await house.prefiller.reached("tokenize")
        await asyncio.sleep(0.01)
        house.prefiller.let_go("tokenize")
        assert [(await call.answer()).status for call in calls] == [200] * 3
        assert asked(house) == [1, 0]


async def test_when_the_one_who_asked_has_left_another_one_asks() -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.hang_at.add("tokenize")
        first = house.call(CHAT, messages=HELLO, tools=TOOLS)
        await house.prefiller.reached("tokenize")
        second = house.call(CHAT, messages=HELLO, tools=TOOLS)
        await asyncio.sleep(0.01)
        first.leave()
        await first.done()
        await until(lambda: asked(house) == [2, 0])
        house.prefiller.let_go("tokenize")
        assert (await second.answer()).status == 200


@pytest.mark.parametrize("failure", [EngineBroken("gone"), error_reply(500, "oh"), json_reply({"count": "x"})])
async def test_another_one_is_asked_where_one_fails(failure: Any) -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.fail_at["tokenize" if isinstance(failure, Exception) else "/tokenize"] = failure
        answer = await house.post(CHAT, messages=HELLO, tools=TOOLS)
        assert (answer.status, asked(house)) == (200, [1, 1])


async def test_an_engine_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_counts.post, "__kwdefaults__", {"timeout_s": 0.05})
    async with proxy_in_front_of() as house:
        for engine in (house.prefiller, house.decoder):
            engine.hang_at.add("tokenize")
        answer = await house.post(CHAT, messages=HELLO, tools=TOOLS)
        assert (answer.status, answer.error["code"]) == (503, "prompt_not_counted")
        long = [{"role": "user", "content": "x" * 1500}]
        assert (await house.post(CHAT, messages=long)).headers["x-pdproxy-path"] == "local"


@pytest.mark.parametrize("status", [400, 422])
async def test_an_engines_refusal_reaches_the_client_as_it_is(status: int) -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.fail_at["/tokenize"] = error_reply(status, "conversation roles must alternate")
        answer = await house.post(CHAT, messages=HELLO, tools=TOOLS)
        assert (answer.status, answer.error["code"]) == (status, "from_engine")
        assert answer.error["message"] == "conversation roles must alternate"
        assert house.prefiller.generations() == house.decoder.generations() == []


async def test_the_call_carries_what_the_client_shows_every_leg() -> None:
    async with proxy_in_front_of() as house:
        await house.post(CHAT, {"authorization": "Bearer mine"}, messages=HELLO, tools=TOOLS)
        [call] = [call for call in house.prefiller.calls if call.path == "/tokenize"]
        assert call.headers["authorization"] == "Bearer mine"
