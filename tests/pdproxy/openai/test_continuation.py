"""A decoder is lost in the middle of a stream: another pair goes on, and the client sees one whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.engines.http.base import EngineBroken
from tests.fakes.fake_engine import BROKEN, FIRST_ID, WORDS, FakeEngine, FakeReply, error_reply
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import Answer, Harness, proxy_in_front_of

pytestmark = pytest.mark.usefixtures("both_ways")

TEXT = "".join(WORDS)
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "tell me"}]
ERROR = b'data: {"error": {"message": "the engine died", "type": "server_error", "code": null}}\n\n'


def two_decoders() -> list[FakeEngine]:
    """The first one dies in the middle of every stream; the second one's answers have another id."""
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    decoders[0].fail_at["middle"] = BROKEN
    decoders[1].answer_id = "answer-of-another"
    return decoders


async def post_to_first(house: Harness, path: str = "/v1/completions", **body: Any) -> Answer:
    """A stream that begins at the first decoder."""
    lease = await Held(house.proxy.pool.of_role("decode")[1], 9).wait()
    try:
        return await house.post(path, stream=True, **body)
    finally:
        lease.release()


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_neither_gap_nor_repeat(path: str) -> None:
    decoders = two_decoders()
    async with proxy_in_front_of(decoders=decoders) as house:
        body: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": [5, 6, 7]}
        answer = await post_to_first(house, path, stream_options={"include_usage": True}, **body)
        assert answer.text() == TEXT
        assert answer.headers["x-pdproxy-decoder"] == "decode-0"
        events = answer.events()
        assert [event for event in events if event == "[DONE]"] == ["[DONE]"]
        assert events[-1] == "[DONE]"
        assert {(event["id"], event["created"]) for event in events[:-1]} == {("answer-1", len("answer-1"))}
        roles = [event for event in events[:-1] if event["choices"] and "role" in event["choices"][0].get("delta", {})]
        assert len(roles) == (1 if path == CHAT else 0)
        assert events[-2]["usage"]["completion_tokens"] == len(WORDS)
        assert b"token_ids" not in answer.body, "nobody asked for them"
        assert house.proxy.orchestrator.num_continued == 1
        assert house.proxy.recent.facts()[0]["outcome"] == "done"


async def test_what_the_second_pair_is_given() -> None:
    decoders = two_decoders()
    async with proxy_in_front_of(decoders=decoders) as house:
        await post_to_first(house, prompt=[5, 6, 7])
        first, second = (call.body["kv_transfer_params"] for call in house.prefiller.generations())
        num_shown = second["num_answer_tokens"]
        assert 0 < num_shown < len(WORDS)
        assert "num_answer_tokens" not in first
        assert second["prompt_token_ids"] == [5, 6, 7] + [FIRST_ID + i for i in range(num_shown)]
        assert first["attempt"] != second["attempt"]
        assert decoders[1].generations()[0].body["kv_transfer_params"]["num_answer_tokens"] == num_shown


async def test_prompt_whose_ids_only_the_engine_knows() -> None:
    async with proxy_in_front_of(decoders=two_decoders()) as house:
        assert (await post_to_first(house, prompt="a b c")).text() == TEXT
        params = house.prefiller.generations()[1].body["kv_transfer_params"]
        assert params["prompt_token_ids"][:4] == [1, 1, 1, FIRST_ID]


async def test_client_that_asked_for_ids_gets_each_once() -> None:
    async with proxy_in_front_of(decoders=two_decoders()) as house:
        answer = await post_to_first(house, return_token_ids=True)
        ids = [i for event in answer.events()[:-1] for i in event["choices"][0].get("token_ids", [])]
        assert ids == [FIRST_ID + i for i in range(len(WORDS))]


async def test_every_decoder_dies_again_and_again_but_each_gets_further() -> None:
    """One retry in a row is allowed; what shows something new starts the count again."""
    decoders = two_decoders()
    decoders[1].fail_at["middle"] = BROKEN
    async with proxy_in_front_of(decoders=decoders, retries=1) as house:
        assert (await house.post(stream=True)).text() == TEXT
        assert house.proxy.orchestrator.num_continued >= 2


@pytest.mark.parametrize("fault", [BROKEN, FakeReply(200, [ERROR], {"content-type": "text/event-stream"})])
async def test_who_cannot_go_on_either_ends_it_with_an_error(fault: FakeReply | EngineBroken) -> None:
    decoders = two_decoders()
    async with proxy_in_front_of(decoders=decoders) as house:
        decoders[1].fail_at["decode"] = fault
        answer = await post_to_first(house)
        assert TEXT.startswith(answer.text())
        assert answer.events()[-1]["error"]["code"] == "leg_failed"
        assert len(house.prefiller.generations()) == 2


async def test_4xx_to_the_second_attempt_is_told_as_the_fault_it_began_with() -> None:
    decoders = two_decoders()
    async with proxy_in_front_of(decoders=decoders) as house:
        decoders[1].fail_at["decode"] = error_reply(400, "no such tokens")
        answer = await post_to_first(house)
        assert answer.events()[-1]["error"]["code"] == "leg_failed"
        assert "decode-0" in answer.events()[-1]["error"]["message"]


async def test_prefiller_whose_token_ends_the_answer() -> None:
    """The rest of it is one token: no decoder is needed."""
    async with proxy_in_front_of(decoders=two_decoders()) as house:
        house.decoders[0].hang_at.add("middle")
        lease = await Held(house.proxy.pool.of_role("decode")[1], 9).wait()
        call = house.call(CHAT, messages=MESSAGES, stream=True)
        await house.decoders[0].reached("middle")
        house.prefiller.finish_at_first = "stop"
        house.decoders[0].let_go("middle")
        answer = await call.answer()
        lease.release()
        num_shown = house.prefiller.generations()[1].body["kv_transfer_params"]["num_answer_tokens"]
        assert answer.text() == "".join(WORDS[: num_shown + 1])
        assert answer.events()[-2]["choices"][0]["finish_reason"] == "stop"
        assert answer.events()[-2]["id"] == "answer-1"
        assert house.decoders[1].generations() == []


async def test_usage_tells_what_the_first_prefiller_had_cached() -> None:
    """The second one reads the prompt again, and has it cached because of that."""
    async with proxy_in_front_of(decoders=two_decoders()) as house:
        house.decoders[0].hang_at.add("middle")
        house.prefiller.num_cached_tokens = 0
        lease = await Held(house.proxy.pool.of_role("decode")[1], 9).wait()
        call = house.call(stream=True, stream_options={"include_usage": True})
        await house.decoders[0].reached("middle")
        house.prefiller.num_cached_tokens = 3
        house.decoders[0].let_go("middle")
        answer = await call.answer()
        lease.release()
        assert answer.text() == TEXT
        assert answer.events()[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_half_an_event_never_reaches_the_client() -> None:
    decoders = two_decoders()
    whole = b'data: {"id": "answer-1", "choices": [{"index": 0, "text": "Once", "token_ids": [100]}]}\n\n'
    decoders[0].fail_at.clear()
    decoders[0].events = [whole + b'data: {"id": "answer-1", "choices": [{"index": 0, "te', b'xt": " up']
    async with proxy_in_front_of(decoders=decoders) as house:
        assert (await post_to_first(house)).text() == TEXT


@pytest.mark.parametrize("options", [{}, {"retries": 0}], ids=["retries", "no retries"])
@pytest.mark.parametrize("missing", ["usage and end", "end", "nothing"])
async def test_end_that_got_lost_needs_no_engine(missing: str, options: dict[str, Any]) -> None:
    decoders = two_decoders()
    decoders[0].fail_at.clear()
    chunk = {"id": "i", "object": "text_completion", "created": 3, "model": "tiny"}
    last = chunk | {"choices": [{"index": 0, "text": "Once", "finish_reason": "stop", "token_ids": [100, 2]}]}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    parts = [last, chunk | {"choices": [], "usage": usage}]
    events = [b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts] + [b"data: [DONE]\n\n"]
    kept = {"usage and end": 1, "end": 2, "nothing": 3}[missing]
    headers = {"content-type": "text/event-stream"}
    async with proxy_in_front_of(decoders=decoders, **options) as house:
        decoders[0].fail_at["decode"] = FakeReply(200, [*events[:kept], BROKEN], headers)
        answer = await post_to_first(house, stream_options={"include_usage": True})
        assert answer.events()[1:] == [chunk | {"choices": [], "usage": usage}, "[DONE]"]
        assert len(house.prefiller.generations()) == 1


async def test_ids_that_nobody_needed_before_are_asked_for() -> None:
    """The chat went to the decoder alone, as text."""
    async with proxy_in_front_of(decoders=two_decoders(), min_prompt_tokens=1000) as house:
        answer = await post_to_first(house, path=CHAT, messages=MESSAGES)
        assert answer.headers["x-pdproxy-path"] == "local"
        assert answer.text() == TEXT


# ── when it is not possible ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ({"continue_streams": False}, {}),
        ({"continue_limit": 300}, {}),
        ({"retries": 0}, {}),
        ({"retry_share": 0.0, "retry_min_per_s": 0.0}, {}),
        ({}, {"n": 2}),
        ({}, {"prompt": ["a", "b"], "echo": True}),
        ({"min_prompt_tokens": 100}, {}),
    ],
    ids=["off", "too long", "no retries", "no budget", "n", "batch", "local, without ids"],
)
async def test_else_an_error_event(options: dict[str, Any], body: dict[str, Any]) -> None:
    async with proxy_in_front_of(decoders=two_decoders(), **options) as house:
        for engine in (house.prefiller, *house.decoders):
            engine.fail_at["/tokenize"] = error_reply(404, "not here")
        answer = await post_to_first(house, **body)
        assert answer.status == 200
        assert answer.events()[-1]["error"]["code"] == "leg_failed"
        assert answer.text().startswith("Once")
        assert house.proxy.orchestrator.num_continued == 0
        assert len(house.prefiller.generations()) <= 1


async def test_decoder_that_tells_no_ids() -> None:
    decoders = two_decoders()
    decoders[0].tells_ids = False
    async with proxy_in_front_of(decoders=decoders) as house:
        assert (await post_to_first(house)).events()[-1]["error"]["code"] == "leg_failed"


async def test_local_stream_with_known_ids_goes_on_locally() -> None:
    async with proxy_in_front_of(decoders=two_decoders(), min_prompt_tokens=100) as house:
        answer = await post_to_first(house, prompt=[5, 6])
        assert answer.text() == TEXT
        params = house.decoders[1].generations()[0].body["kv_transfer_params"]
        assert set(params) == {"prompt_token_ids", "num_answer_tokens"}
        assert house.prefiller.generations() == []


async def test_ids_are_not_asked_for_where_nothing_would_be_continued() -> None:
    async with proxy_in_front_of(continue_streams=False) as house:
        await house.post(stream=True)
        await house.post()
        assert all("return_token_ids" not in call.body for call in house.decoder.generations())


# ── other deaths than a broken connection ───────────────────────────────────────────────────────────────────────────


async def test_silent_decoder_is_left_for_another() -> None:
    decoders = two_decoders()
    decoders[0].fail_at.clear()
    decoders[0].hang_at.add("middle")
    async with proxy_in_front_of(decoders=decoders, idle_timeout_s=0.05) as house:
        assert (await post_to_first(house)).text() == TEXT
        assert decoders[0].closed == ["/v1/completions"]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "behind text"])
async def test_engines_error_event_is_kept_back_and_another_goes_on(together: bool) -> None:
    decoders = two_decoders()
    decoders[0].fail_at.clear()
    text = b'data: {"id": "answer-1", "choices": [{"index": 0, "text": "Once", "token_ids": [100]}]}\n\n'
    decoders[0].events = [text + ERROR] if together else [text, ERROR]
    async with proxy_in_front_of(decoders=decoders) as house:
        answer = await post_to_first(house)
        assert answer.text() == TEXT
        assert b"error" not in answer.body


async def test_event_that_cannot_be_read_is_kept_back_and_another_goes_on() -> None:
    """It tells a usage, in which the prompt is to be as its prefiller counted it."""
    decoders = two_decoders()
    decoders[0].fail_at.clear()
    text = b'data: {"id": "answer-1", "choices": [{"index": 0, "text": "Once", "token_ids": [100]}]}\n\n'
    decoders[0].events = [text, b'data: {"usage": {"prompt_tokens": 3, }\n\n', b"data: [DONE]\n\n"]
    async with proxy_in_front_of(decoders=decoders) as house:
        assert (await post_to_first(house)).text() == TEXT
        assert house.proxy.orchestrator.num_continued == 1


async def test_error_that_blames_the_request_is_passed_on() -> None:
    decoders = two_decoders()
    decoders[0].fail_at.clear()
    text = b'data: {"id": "answer-1", "choices": [{"index": 0, "text": "Once", "token_ids": [100]}]}\n\n'
    blame = b'data: {"error": {"message": "too long", "type": "x", "code": 400}}\n\n'
    decoders[0].events = [text, blame]
    async with proxy_in_front_of(decoders=decoders) as house:
        answer = await post_to_first(house)
        assert answer.events()[-1] == {"error": {"message": "too long", "type": "x", "code": 400}}
        assert len(house.prefiller.generations()) == 1


async def test_client_that_leaves_while_another_takes_over() -> None:
    decoders = two_decoders()
    async with proxy_in_front_of(decoders=decoders) as house:
        decoders[1].hang_at.add("first")
        lease = await Held(house.proxy.pool.of_role("decode")[1], 9).wait()
        call = house.call(stream=True)
        await decoders[1].reached("first")
        lease.release()
        call.leave()
        await call.done()
        assert decoders[1].closed == ["/v1/completions"]
        assert house.proxy.recent.facts()[0]["outcome"] == "client_gone"


async def test_answer_that_is_not_streamed_is_simply_tried_again() -> None:
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of(decoders=decoders) as house:
        decoders[0].fail_at["first"] = BROKEN
        for _ in range(2):
            assert (await house.post()).json()["choices"][0]["text"] == TEXT
        assert house.proxy.orchestrator.num_continued == 0
