"""Is it an answer, and how does a whole one look as a stream."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdproxy.openai.body import Fields
from pdproxy.openai.request import CHAT, COMPLETIONS, parse
from pdproxy.openai.response import CorruptAnswer, as_stream, check_whole, error_code, error_message, has_begun
from pdproxy.openai.sse import data_of, event, split


def events(*choices: dict[str, Any]) -> bytes:
    return b"".join(event({"choices": [choice]}) for choice in choices)


ROLE = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}


@pytest.mark.parametrize(
    ("stream", "begun"),
    [
        (b"", False),
        (b": comment\n\n", False),
        (events(ROLE), False),
        (event({"choices": [], "usage": {}}), False),
        (events({"text": "x"}), True),
        (events(ROLE, {"delta": {"content": "x"}}), True),
        (events(ROLE, {"delta": {"reasoning_content": "x"}}), True),
        (events(ROLE, {"delta": {"tool_calls": [{}]}}), True),
    ],
)
def test_has_begun(stream: bytes, begun: bool) -> None:
    assert has_begun(stream, needs_text=True) is begun


@pytest.mark.parametrize(
    "stream",
    [
        b"data: [DONE]\n\n",
        b"data: {\n\n",
        event({"error": {"message": "x"}}),
        events({"text": "", "finish_reason": "stop"}),
        events({"text": "x", "finish_reason": "error"}),
        events({"text": "x", "finish_reason": "abort"}),
    ],
)
def test_corrupt_beginnings(stream: bytes) -> None:
    with pytest.raises(CorruptAnswer):
        has_begun(stream, needs_text=True)


def test_empty_end_is_fine_where_no_text_is_due() -> None:
    assert has_begun(events({"text": "", "finish_reason": "stop"}), needs_text=False)
    check_whole(b'{"choices": [{"text": "", "finish_reason": "stop"}]}', needs_text=False)


def fields(answer: dict[str, Any]) -> Fields:
    return msgspec.json.decode(json.dumps(answer), type=Fields)


def stream_of(path: str, answer: dict[str, Any], **body: Any) -> list[Any]:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    request = parse(path, json.dumps(prompt | {"stream": True} | body).encode())
    data = [data_of(raw) for raw in split(as_stream(fields(answer), request))]
    assert data.pop() == b"[DONE]"
    return [json.loads(one or b"") for one in data]


def test_completion_as_stream() -> None:
    choice = {"index": 0, "text": "x", "logprobs": {"tokens": ["x"]}, "finish_reason": "length"}
    answer = {"id": "i", "created": 5, "model": "m", "choices": [choice], "usage": {"total_tokens": 2}}
    head = {"id": "i", "object": "text_completion", "created": 5, "model": "m"}
    assert stream_of(COMPLETIONS, answer) == [head | {"choices": [choice]}]
    assert stream_of(COMPLETIONS, answer, stream_options={"include_usage": True}) == [
        head | {"choices": [choice], "usage": None},
        head | {"choices": [], "usage": {"total_tokens": 2}},
    ]


def test_chat_as_stream_keeps_tools_and_reasoning() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    answer = {"id": "i", "created": 5, "model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}]}
    deltas = [chunk["choices"][0] for chunk in stream_of(CHAT, answer)]
    assert [d["delta"] for d in deltas] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm", "tool_calls": [call | {"index": 0}]},
        {},
    ]
    assert [d["finish_reason"] for d in deltas] == [None, None, "tool_calls"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"message": "m", "code": "lost"}}', "lost"),
        (b'{"error": {"code": 502}}', None),
        (b'{"error": {"message": "m"}}', None),
        (b'{"error": "lost"}', None),
        (b'{"code": "lost"}', None),
        pytest.param(b'{"error": {"code": "lost", "x": ' + b"[" * 100_000, None, id="deep"),
        (b'{"error": {"code": "\xff"}}', None),
        (b"", None),
    ],
)
def test_code_of_an_error_object(body: bytes, code: str | None) -> None:
    assert error_code(body) == code


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m", "code": "lost"}}', "m"),
        (b'{"error": {"message": 5, "code": "lost"}}', ""),
        (b'{"error": {"code": "lost"}}', ""),
        (b'{"error": "lost"}', ""),
        (b'{"error": {"message": "\xff"}}', ""),
        (b"", ""),
    ],
)
def test_message_of_an_error_object(body: bytes, message: str) -> None:
    assert error_message(body) == message
