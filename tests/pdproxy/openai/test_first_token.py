"""One answer of two engines: the prefiller's token in front of what the decoder wrote behind it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdproxy.openai.body import Fields
from pdproxy.openai.first_token import Opening, as_events, stream_with_opening_counted, with_opening
from pdproxy.openai.request import COMPLETIONS, GenerationRequest, parse

USAGE = {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8}
COUNTED = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def opening(**choice: Any) -> Opening:
    first = {"index": 0, "text": "Once", "logprobs": None, "finish_reason": "length"} | choice
    answer = {"id": "p", "created": 1, "model": "m", "choices": [first], "usage": {"completion_tokens": 1}}
    return Opening(msgspec.json.decode(json.dumps(answer), type=Fields))


def logprobs(*tokens: str, start: int = 0) -> dict[str, Any]:
    offsets = [start + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    return {
        "tokens": list(tokens),
        "token_logprobs": [-1.0] * len(tokens),
        "top_logprobs": [{token: -1.0} for token in tokens],
        "text_offset": offsets,
    }


def whole(**more: Any) -> bytes:
    choice = {"index": 0, "text": " upon a", "logprobs": None, "finish_reason": "stop"} | more.pop("choice", {})
    return json.dumps({"id": "d", "created": 2, "model": "m", "choices": [choice], "usage": USAGE} | more).encode()


def request(**body: Any) -> GenerationRequest:
    return parse(COMPLETIONS, json.dumps({"prompt": "x", "stream": True} | body).encode())


def sse(*chunks: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def read(events: bytes) -> list[Any]:
    data = [block.removeprefix("data: ") for block in events.decode().split("\n\n") if block]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


# ── a whole answer ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_text_and_usage() -> None:
    answer = json.loads(with_opening(whole(), opening()))
    choice = {"index": 0, "text": "Once upon a", "logprobs": None, "finish_reason": "stop"}
    assert answer == {"id": "d", "created": 2, "model": "m", "choices": [choice], "usage": COUNTED}


def test_ids_and_logprobs_one_behind_the_other() -> None:
    body = whole(choice={"token_ids": [101, 102], "logprobs": logprobs(" upon", " a")})
    first = opening(token_ids=[100], logprobs=logprobs("Once"))
    [choice] = json.loads(with_opening(body, first))["choices"]
    assert choice["token_ids"] == [100, 101, 102]
    assert choice["logprobs"] == logprobs("Once", " upon", " a")


def test_the_prompts_ids_are_the_prefillers() -> None:
    """For the decoder, the opening belonged to the prompt."""
    body = whole(choice={"prompt_token_ids": [1, 2, 100]})
    [choice] = json.loads(with_opening(body, opening(prompt_token_ids=[1, 2])))["choices"]
    assert choice["prompt_token_ids"] == [1, 2]


@pytest.mark.parametrize("first", [{}, {"token_ids": None, "logprobs": None}])
def test_what_only_one_of_them_tells_stays_as_it_is(first: dict[str, Any]) -> None:
    body = whole(choice={"token_ids": [101], "logprobs": logprobs(" upon a")})
    [choice] = json.loads(with_opening(body, opening(**first)))["choices"]
    assert (choice["token_ids"], choice["logprobs"]) == ([101], logprobs(" upon a"))


def test_a_token_that_shows_nothing() -> None:
    [choice] = json.loads(with_opening(whole(), opening(text=None)))["choices"]
    assert choice["text"] == " upon a"


@pytest.mark.parametrize("usage", [None, {"completion_tokens": None}, {"completion_tokens": 2}])
def test_usage_that_says_less(usage: Any) -> None:
    told = json.loads(with_opening(whole(usage=usage), opening()))["usage"]
    assert told == ({"completion_tokens": 3} if usage == {"completion_tokens": 2} else usage)


# ── a stream ────────────────────────────────────────────────────────────────────────────────────────────────────────

HEAD = {"id": "d", "object": "text_completion", "created": 2, "model": "m"}
CHUNK = HEAD | {"choices": [{"index": 0, "text": " upon", "logprobs": None, "finish_reason": None}]}


def test_first_event_has_the_decoders_head() -> None:
    [event] = read(as_events(opening(), sse(CHUNK), request()))
    assert event == HEAD | {"choices": [{"index": 0, "text": "Once", "logprobs": None, "finish_reason": None}]}


def test_first_event_tells_ids_and_logprobs_where_they_were_asked_for() -> None:
    first = opening(token_ids=[100], logprobs=logprobs("Once"))
    [event] = read(as_events(first, sse(CHUNK), request()))
    [choice] = event["choices"]
    assert (choice["token_ids"], choice["logprobs"]) == ([100], logprobs("Once"))


def test_the_prompts_ids_are_told_once() -> None:
    first = opening(prompt_token_ids=[1, 2])
    chunk = HEAD | {"choices": [{"index": 0, "text": " upon", "prompt_token_ids": [1, 2, 100]}]}
    [event] = read(as_events(first, sse(chunk), request()))
    assert event["choices"][0]["prompt_token_ids"] == [1, 2]
    event, _ = read(stream_with_opening_counted(sse(chunk), first))
    assert event["choices"][0] == {"index": 0, "text": " upon", "prompt_token_ids": None}


@pytest.mark.parametrize("include_usage", [False, True])
def test_first_event_says_of_usage_what_the_others_do(include_usage: bool) -> None:
    options = {"include_usage": include_usage}
    [event] = read(as_events(opening(), sse(CHUNK | {"usage": None}), request(stream_options=options)))
    assert ("usage" in event, event.get("usage")) == (include_usage, None)


def test_head_is_of_the_first_event_that_is_a_chunk() -> None:
    [event] = read(as_events(opening(), b": a comment\n\n" + sse(CHUNK), request()))
    assert event["id"] == "d"


def test_events_that_count_nothing_keep_their_bytes() -> None:
    text = CHUNK | {"choices": [{"index": 0, "text": '"completion_tokens" and "text_offset"', "logprobs": None}]}
    events = b": a comment\n\n" + sse(CHUNK, text)
    assert stream_with_opening_counted(events, opening()) is events


def test_usages_count_the_opening() -> None:
    first, last, done = read(
        stream_with_opening_counted(sse(CHUNK | {"usage": USAGE}, HEAD | {"choices": [], "usage": USAGE}), opening())
    )
    assert first == CHUNK | {"usage": COUNTED}
    assert last == HEAD | {"choices": [], "usage": COUNTED}
    assert done == "[DONE]"


def test_texts_begin_behind_the_opening() -> None:
    chunk = HEAD | {"choices": [{"index": 0, "text": " upon", "logprobs": logprobs(" upon")}]}
    event, _ = read(stream_with_opening_counted(sse(chunk), opening()))
    assert event["choices"][0]["logprobs"] == logprobs(" upon", start=len("Once"))
    plain = HEAD | {"choices": [{"index": 0, "text": " a", "logprobs": logprobs() | {"text_offset": []}}]}
    assert read(stream_with_opening_counted(sse(plain), opening()))[0] == plain
