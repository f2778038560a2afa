"""Whole answers that engines are asked for as streams: limits, failures at any time, and what the client gets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.engines.http.base import EngineBroken
from tests.fakes.fail_once import fail_once
from tests.fakes.fake_engine import BROKEN, WORDS, FakeEngine, FakeReply, error_reply
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.proxy_harness import Answer, Harness, proxy_in_front_of, until

pytestmark = pytest.mark.usefixtures("both_ways")

TEXT = "".join(WORDS)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "tell me"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def vllms(num_decoders: int = 1, **options: Any) -> AsyncIterator[Harness]:
    """Their decoders cannot go on with what another one began."""
    decoders = [FakeNixl("decode") for _ in range(num_decoders)]
    async with proxy_in_front_of([FakeNixl("prefill")], decoders, **options) as house:
        yield house


@asynccontextmanager
async def builtins(num_decoders: int = 1, **options: Any) -> AsyncIterator[Harness]:
    async with proxy_in_front_of(decoders=[FakeEngine("decode") for _ in range(num_decoders)], **options) as house:
        yield house


both_kinds = pytest.mark.parametrize("fleet", [vllms, builtins], ids=["vllm", "builtin"])


def text(answer: Answer) -> str:
    [choice] = answer.json()["choices"]
    said: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return said


def attempts(house: Harness) -> int:
    number: int = house.proxy.recent.facts()[0]["attempts"]
    return number


def decode_bodies(house: Harness) -> list[dict[str, Any]]:
    return [call.body for decoder in house.decoders for call in decoder.generations()]


def events(*chunks: Any) -> list[bytes]:
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]


# ── served ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@both_kinds
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_decoder_is_asked_for_a_stream_and_the_client_gets_it_whole(fleet: Any, path: str) -> None:
    async with fleet() as house:
        answer = await house.post(path, **({"messages": MESSAGES} if path == CHAT else {}))
        assert (answer.status, answer.headers["content-type"], text(answer)) == (200, "application/json", TEXT)
        assert answer.json()["usage"]["completion_tokens"] == len(WORDS)
        assert answer.json()["object"] == ("chat.completion" if path == CHAT else "text_completion")
        assert not answer.json()["choices"][0].get("token_ids"), "nobody asked for them"
        [asked] = decode_bodies(house)
        assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})


@both_kinds
async def test_several_answers(fleet: Any) -> None:
    async with fleet() as house:
        answer = await house.post(n=3)
        assert [(one["index"], one["text"]) for one in answer.json()["choices"]] == [(i, TEXT) for i in range(3)]


@both_kinds
async def test_ids_for_who_asks_for_them(fleet: Any) -> None:
    async with fleet() as house:
        answer = await house.post(return_token_ids=True)
        assert len(answer.json()["choices"][0]["token_ids"]) == len(WORDS)


@both_kinds
@pytest.mark.parametrize(
    ("options", "path", "body", "is_stream"),
    [
        ({}, CHAT, {"messages": MESSAGES, "tools": TOOLS}, False),
        ({}, COMPLETIONS, {"something_new": 1}, False),
        ({"assemble": "none"}, COMPLETIONS, {}, False),
        ({"assemble": "completions"}, COMPLETIONS, {}, True),
        ({"assemble": "completions"}, CHAT, {"messages": MESSAGES}, False),
    ],
)
async def test_what_stays_whole(fleet: Any, options: Any, path: str, body: Any, is_stream: bool) -> None:
    async with fleet(**options) as house:
        assert text(await house.post(path, **body)) == TEXT
        [asked] = decode_bodies(house)
        assert asked.get("stream", False) == is_stream
        assert asked.get("return_token_ids", False) == (is_stream and fleet is builtins)


@both_kinds
async def test_engine_that_answers_as_a_whole_all_the_same(fleet: Any) -> None:
    body = b'{ "choices": [{"text": "x", "finish_reason": "stop"}],  "usage": {"prompt_tokens": 3} }'
    async with fleet(min_prompt_tokens=99) as house:
        house.decoder.fail_at["decode"] = FakeReply(200, [body])
        assert (await house.post()).body == body


# ── limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@both_kinds
@pytest.mark.parametrize(("point", "limit"), [("first", "first_byte_timeout_s"), ("middle", "idle_timeout_s")])
async def test_silence_has_a_limit(fleet: Any, point: str, limit: str) -> None:
    async with fleet(retries=0) as house:
        house.limit(**{limit: 0.03})
        house.decoder.hang_at.add(point)
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert "0.03 s" in answer.error["message"]


@both_kinds
@pytest.mark.parametrize("point", ["first", "middle"])
async def test_silent_decoder_is_left_for_another(fleet: Any, point: str) -> None:
    async with fleet(num_decoders=2) as house:
        house.limit(first_byte_timeout_s=0.05, idle_timeout_s=0.05)
        house.decoders[0].hang_at.add(point)
        for _ in range(2):
            assert text(await house.post()) == TEXT
        assert max(record["attempts"] for record in house.proxy.recent.facts()[:2]) == 2


async def test_answer_that_stays_whole_has_a_limit_of_its_own() -> None:
    async with builtins(retries=0) as house:
        house.limit(first_byte_timeout_s=0.01, whole_timeout_s=0.05)
        house.decoder.hang_at.add("first")
        answer = await house.post(CHAT, messages=MESSAGES, tools=TOOLS)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert "whole answer took longer than 0.05 s" in answer.error["message"]


async def test_decoder_is_looked_at_while_its_whole_answer_is_waited_for() -> None:
    async with builtins() as house:
        house.limit(first_byte_timeout_s=0.01)
        house.decoder.hang_at.add("first")
        call = house.call(CHAT, messages=MESSAGES, tools=TOOLS)
        await house.decoder.reached("first")
        before = len(house.decoder.bodies("/health"))
        await until(lambda: len(house.decoder.bodies("/health")) > before + 1)
        house.decoder.let_go("first")
        assert (await call.answer()).status == 200


# ── failures, of which the client sees a status or nothing ──────────────────────────────────────────────────────────


@both_kinds
@pytest.mark.parametrize("point", ["decode", "first", "middle"])
async def test_failure_at_any_time_is_made_good_elsewhere(fleet: Any, point: str) -> None:
    async with fleet(num_decoders=2) as house:
        fail_once(house.decoder, point)
        for _ in range(2):
            answer = await house.post()
            assert (answer.status, text(answer)) == (200, TEXT)
            assert answer.json()["usage"]["completion_tokens"] == len(WORDS)
        assert sorted(record["attempts"] for record in house.proxy.recent.facts()[:2]) == [1, 2]


@both_kinds
@pytest.mark.parametrize("point", ["first", "middle"])
async def test_failure_that_is_not_made_good_has_a_status(fleet: Any, point: str) -> None:
    async with fleet(retries=0) as house:
        house.decoder.fail_at[point] = BROKEN
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")
        assert "decode-0" in answer.error["message"]


async def test_what_cannot_be_gone_on_with_is_begun_anew_within_the_number_of_retries() -> None:
    async with vllms(retries=2) as house:
        house.decoder.fail_at["middle"] = BROKEN
        assert (await house.post()).status == 502
        assert attempts(house) == 3
        assert house.proxy.orchestrator.num_continued == 0


async def test_what_can_be_gone_on_with_is() -> None:
    async with builtins(num_decoders=2) as house:
        for decoder in house.decoders:
            fail_once(decoder, "middle")
        answer = await house.post(prompt=[5, 6, 7], logprobs=1)
        assert (answer.status, text(answer)) == (200, TEXT)
        assert answer.json()["usage"]["completion_tokens"] == len(WORDS)
        assert house.proxy.orchestrator.num_continued >= 1
        resumed = decode_bodies(house)
        assert max(body["kv_transfer_params"].get("num_answer_tokens", 0) for body in resumed) > 0


@pytest.mark.parametrize("options", [{"continue_streams": False}, {"continue_limit": 300}], ids=str)
async def test_where_too_little_is_kept_it_is_begun_anew(options: dict[str, Any]) -> None:
    async with builtins(num_decoders=2, **options) as house:
        fail_once(house.decoders[0], "middle")
        fail_once(house.decoders[1], "middle")
        house.limit(retries=2)
        answer = await house.post()
        assert (answer.status, text(answer)) == (200, TEXT)
        assert house.proxy.orchestrator.num_continued == 0


async def test_what_is_begun_anew_is_all_the_second_decoders() -> None:
    """The ids of a text that no prefiller has read are not known, where engines do not tell them, so that nobody could
    go on with it."""
    async with builtins(num_decoders=2, min_prompt_tokens=99, retries=2) as house:
        for engine in (*house.prefillers, *house.decoders):
            engine.fail_at["/tokenize"] = error_reply(404, "there is no such route")
        for number, decoder in enumerate(house.decoders):
            fail_once(decoder, "middle")
            decoder.answer_id = f"answer-of-{number}"
        answer = await house.post()
        assert (answer.status, text(answer), answer.headers["x-pdproxy-path"]) == (200, TEXT, "local")
        assert answer.json()["id"] == f"answer-of-{answer.headers['x-pdproxy-decoder'][-1]}"
        assert house.proxy.orchestrator.num_continued == 0


async def test_prefiller_whose_token_ends_an_answer_that_was_begun_elsewhere() -> None:
    async with builtins() as house:
        house.decoder.fail_at["middle"] = BROKEN
        house.prefiller.hang_at.add("prefill_done")
        call = house.call(prompt=[5, 6, 7])
        await house.prefiller.reached("prefill_done")
        house.prefiller.finish_at_first = "stop"  # of the next leg
        house.prefiller.let_go("prefill_done")
        answer = await call.answer()
        assert answer.status == 200
        assert TEXT.startswith(text(answer))
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        tokens = answer.json()["usage"]["completion_tokens"]
        assert "".join(WORDS[:tokens]) == text(answer)


REFUSED = {"error": {"message": "no such grammar", "type": "BadRequestError", "param": None, "code": 400}}
LOST = {"error": {"message": "KV load failure", "type": "InternalServerError", "code": 500}}


@pytest.mark.parametrize("num_before", [0, 2])
async def test_clients_own_fault_that_a_stream_tells_has_the_engines_status(num_before: int) -> None:
    async with vllms(num_decoders=2) as house:
        for decoder in house.decoders:
            decoder.events = [*decoder.stream(COMPLETIONS, {"prompt": "a"})[:num_before], *events(REFUSED), DONE]
        answer = await house.post()
        assert (answer.status, answer.json(), attempts(house)) == (400, REFUSED, 1)


@pytest.mark.parametrize("num_before", [0, 2])
async def test_engines_own_fault_that_a_stream_tells_is_tried_elsewhere(num_before: int) -> None:
    async with vllms(num_decoders=2) as house:
        house.decoders[0].events = [
            *house.decoder.stream(COMPLETIONS, {"prompt": "a"})[:num_before],
            *events(LOST),
            DONE,
        ]
        for _ in range(2):
            answer = await house.post()
            assert (answer.status, text(answer)) == (200, TEXT)
        house.decoders[1].events = house.decoders[0].events
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "engine_error")


@pytest.mark.parametrize(
    "broken",
    [
        [b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n', DONE],
        [b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "usage": {}}\n\n'],
        [b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n', b"data: {\n\n", DONE],
        [b'data: {"choices": [{"index": 5, "text": "x"}]}\n\n', DONE],
        [b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n', b'data: {"choices": [{"index": 0, "te'],
    ],
    ids=["without an end", "without done", "no JSON", "no such choice", "half an event"],
)
async def test_half_an_answer_is_never_shown(broken: list[bytes]) -> None:
    async with vllms(retries=0) as house:
        house.decoder.events = broken
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")


# ── streams of which no whole answer can be made ────────────────────────────────────────────────────────────────────


def reasoning(house: Harness) -> list[bytes]:
    role, *rest = house.decoder.stream(CHAT, {"messages": MESSAGES})
    return [role, *events({"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]}), *rest]


async def streams_asked(decoders: Sequence[FakeNixl]) -> list[bool]:
    return [bool(call.body.get("stream")) for decoder in decoders for call in decoder.generations()]


async def test_who_reasons_is_asked_again_for_a_whole_answer_and_from_then_on_at_once() -> None:
    async with vllms(retries=0) as house:
        house.decoder.events = reasoning(house)
        for _ in range(2):
            answer = await house.post(CHAT, messages=MESSAGES)
            assert (answer.status, text(answer)) == (200, TEXT)
        assert await streams_asked(house.decoders) == [True, False, False]
        assert house.proxy.recent.facts()[0]["attempts"] == 1
        house.decoder.events = None
        assert text(await house.post()) == TEXT
        assert (await streams_asked(house.decoders))[-1], "its completions are as they were"


async def test_request_is_asked_again_once_however_many_decoders_reason() -> None:
    async with vllms(num_decoders=3, retries=0) as house:
        for decoder in house.decoders:
            decoder.events = reasoning(house)
        assert text(await house.post(CHAT, messages=MESSAGES)) == TEXT
        assert sorted(await streams_asked(house.decoders)) == [False, True]


async def test_another_process_at_the_same_place_is_tried_again() -> None:
    async with vllms() as house:
        house.decoder.events = reasoning(house)
        await house.post(CHAT, messages=MESSAGES)
        house.decoder.events = None
        instance = house.proxy.pool.of_role("decode")[0]
        before = instance.epoch
        house.decoder.restart()
        instance.suspected.set()
        await until(lambda: instance.epoch != before and instance.is_ready)
        await house.post(CHAT, messages=MESSAGES)
        assert (await streams_asked(house.decoders))[-1]


async def test_stream_without_a_usage_is_asked_again_for_a_whole_answer() -> None:
    async with vllms() as house:
        house.decoder.events = house.decoder.stream(COMPLETIONS, {"prompt": "a b c"})
        answer = await house.post()
        assert (answer.status, answer.json()["usage"]["completion_tokens"]) == (200, len(WORDS))
        assert await streams_asked(house.decoders) == [True, False]


async def test_bug_in_the_middle_is_no_hanging_client() -> None:
    """What the connection says late is not lost either."""
    async with vllms(retries=0) as house:
        house.decoder.fail_at["middle"] = EngineBroken("it went away")
        assert (await house.post(CHAT, messages=MESSAGES)).status == 502
