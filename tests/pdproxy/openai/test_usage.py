"""Two engines' work as one answer, byte by byte; and what a client has seen, read back from its events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdproxy.openai.sse import DONE, event
from pdproxy.openai.transcript import NotReadableError, Transcript
from pdproxy.openai.usage import (
    Head,
    PromptUsage,
    before_error,
    continued,
    is_clients_fault,
    stream_with_prompt_usage,
    with_prompt_usage,
    without_token_ids,
)

HEAD = Head("first", 1)


def chunk(**choice: Any) -> dict[str, Any]:
    return {"id": "second", "created": 2, "model": "m", "choices": [{"index": 0} | choice]}


def test_continued_takes_the_first_head() -> None:
    events = b": comment\n\n" + event(chunk(text="x")) + event({"choices": [], "id": "second"}) + DONE
    assert continued(events, HEAD) == (
        b": comment\n\n"
        b'data: {"id":"first","created":1,"model":"m","choices":[{"index":0,"text":"x"}]}\n\n'
        b'data: {"choices":[],"id":"first"}\n\n' + DONE
    )


@pytest.mark.parametrize(
    ("choice", "left"),
    [
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, None),
        ({"delta": {"role": "assistant"}}, None),
        ({"delta": {"role": "assistant", "content": "x"}}, {"delta": {"content": "x"}}),
        ({"delta": {"role": "assistant", "tool_calls": [{}]}}, {"delta": {"tool_calls": [{}]}}),
        ({"delta": {"role": "assistant"}, "finish_reason": "stop"}, {"delta": {}, "finish_reason": "stop"}),
        ({"delta": {"content": 'a "role"'}}, {"delta": {"content": 'a "role"'}}),
    ],
)
def test_continued_names_no_role(choice: dict[str, Any], left: dict[str, Any] | None) -> None:
    expected = b"" if left is None else event(chunk(**left) | {"id": "first", "created": 1})
    assert continued(event(chunk(**choice)), HEAD) == expected


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (b'{"text":"a","token_ids":[1,2],"x":1}', b'{"text":"a","x":1}'),
        (b'{"text":"a","token_ids":[1]}', b'{"text":"a"}'),
        (b'{"text":"a","token_ids":[]} {"text":"b","token_ids":[2]}', b'{"text":"a"} {"text":"b"}'),
        (b'{"prompt_token_ids":[3],"text":"a","token_ids":[1]}', b'{"text":"a"}'),
        (b'{"token_ids": [1, 2], "text": "a"}', b'{"text": "a"}'),
        (b'{"text": "a", "token_ids": null, "prompt_token_ids": [3]}', b'{"text": "a"}'),
        (rb'{"text":"a,\"token_ids\":[1]"}', rb'{"text":"a,\"token_ids\":[1]"}'),
    ],
)
def test_ids_nobody_asked_for(events: bytes, expected: bytes) -> None:
    assert without_token_ids(events) == expected


def test_error_events() -> None:
    text, error = event({"text": 'data: {"error"'}), event({"error": {"code": 500}})
    assert before_error(text + error + DONE) == (text, error + DONE)
    assert before_error(error) == (b"", error)
    assert before_error(text + DONE) == (text + DONE, b"")


@pytest.mark.parametrize(
    ("error", "is_theirs"),
    [
        ({"code": 400}, True),
        ({"code": 429}, False),
        ({"code": 500}, False),
        ({"code": None, "type": "invalid_request_error"}, True),
        ("text", False),
    ],
)
def test_whose_fault(error: Any, is_theirs: bool) -> None:
    assert is_clients_fault(event({"error": error})) is is_theirs


def usage(**fields: Any) -> bytes:
    return json.dumps({"id": "i", "usage": fields}).encode()


def test_usage_is_merged_only_where_it_differs() -> None:
    prompt = PromptUsage(7, msgspec.Raw(b'{"cached_tokens": 4}'))
    same = usage(prompt_tokens=7, completion_tokens=2, prompt_tokens_details={"cached_tokens": 4})
    assert with_prompt_usage(same, prompt) == same
    assert with_prompt_usage(b'{"usage": null}', prompt) == b'{"usage": null}'
    decoders = usage(prompt_tokens=8, completion_tokens=2, total_tokens=10, prompt_tokens_details={"cached_tokens": 8})
    assert json.loads(with_prompt_usage(decoders, prompt))["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_usage_in_a_stream() -> None:
    text = event({"choices": [{"text": '"prompt_tokens"'}], "usage": None})
    last = event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    merged = event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}})
    assert stream_with_prompt_usage(text + last + DONE, PromptUsage(2)) == text + merged + DONE


# ── the transcript ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_shown_is_read_back() -> None:
    transcript = Transcript(10_000)
    transcript.add(event(chunk(delta={"role": "assistant", "content": ""})))
    transcript.add(event(chunk(text="a", token_ids=[1])) + event(chunk(text="", token_ids=[2, 3])))
    shown = transcript.read()
    assert (shown.id, shown.created, shown.answer_ids) == ("second", 2, [1, 2, 3])
    assert (shown.is_finished, shown.has_usage, shown.is_done) == (False, False, False)
    transcript.add(event(chunk(text="", finish_reason="stop")) + event({"choices": [], "usage": {}}) + DONE)
    shown = transcript.read()
    assert (shown.is_finished, shown.has_usage, shown.is_done) == (True, True, True)


def test_memory_is_bounded() -> None:
    one = event(chunk(text="a", token_ids=[1]))
    transcript = Transcript(2 * len(one))
    for _ in range(3):
        transcript.add(one)
    assert transcript._pieces == []
    assert transcript.num_bytes == 3 * len(one)
    with pytest.raises(NotReadableError, match="longer than"):
        transcript.read()


@pytest.mark.parametrize("events", [event(chunk(text="a")), b"data: {\n\n", event({"choices": 3})])
def test_what_does_not_tell_its_tokens(events: bytes) -> None:
    transcript = Transcript(1000)
    transcript.add(events)
    with pytest.raises(NotReadableError):
        transcript.read()
