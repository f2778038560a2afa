"""One answer of several: numbers, usages and heads."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdproxy.openai.request import COMPLETIONS, PromptKind, parse
from pdproxy.openai.response import CorruptAnswer
from pdproxy.openai.several_prompts import JoinedAnswer, JoinedStream, prompts_of, with_prompt
from pdproxy.openai.sse import DONE, event


def answer(name: str, **usage: Any) -> bytes:
    choice = {"index": 0, "text": name, "finish_reason": "stop"}
    body = {"id": name, "created": 1, "choices": [choice], "system_fingerprint": None}
    return json.dumps(body | ({"usage": usage} if usage else {})).encode()


def test_a_request_for_each_prompt_has_all_else_byte_for_byte() -> None:
    request = parse(COMPLETIONS, b'{"model": "m", "prompt": ["\\u00e4", "b"], "temperature": 0.10, "stop": ["x" ]}')
    assert request.num_prompts == 2
    first, second = (with_prompt(request, raw) for raw in prompts_of(request))
    assert (first.prompt_kind, first.prompt_text, second.prompt_text) == (PromptKind.TEXT, "ä", "b")
    assert bytes(first.fields["temperature"]) == b"0.10"
    assert bytes(first.fields["stop"]) == b'["x" ]'
    assert (first.num_sequences, first.num_prompt_bytes) == (1, 8)
    ids = [
        with_prompt(one, raw) for one in (parse(COMPLETIONS, b'{"prompt": [[1, 2], [3]]}'),) for raw in prompts_of(one)
    ]
    assert [(one.prompt_kind, one.prompt_ids, one.num_prompt_ids) for one in ids] == [
        (PromptKind.IDS, [1, 2], 2),
        (PromptKind.IDS, [3], 1),
    ]


def test_a_whole_answer_is_in_the_order_of_the_prompts_whoever_came_first() -> None:
    joined = JoinedAnswer()
    details = {"cached_tokens": 2, "audio_tokens": None}
    joined.add(answer("b", prompt_tokens=1, total_tokens=3, prompt_tokens_details=details), 1)
    joined.add(answer("a", prompt_tokens=4, total_tokens=5, prompt_tokens_details=details), 0)
    joined.add(answer("c", prompt_tokens=1, total_tokens=1, prompt_tokens_details=None), 2)
    whole = json.loads(msgspec.json.encode(joined.fields()))
    assert whole["id"] == "a"
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(0, "a"), (1, "b"), (2, "c")]
    assert whole["usage"] == {
        "prompt_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": None},
    }


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"choices": 1}', b'{"choices": [1]}', b'{"choices": [], "usage": 1}']
)
def test_what_is_no_answer_is_not_taken(body: bytes) -> None:
    joined = JoinedAnswer()
    with pytest.raises(CorruptAnswer):
        joined.add(body, 0)
    joined.add(answer("a"), 0)
    assert "usage" not in joined.fields()


def test_a_stream_has_one_head_one_usage_and_one_end() -> None:
    stream = JoinedStream()
    chunk = {"id": "a", "created": 1, "choices": [{"index": 0, "text": "x"}], "usage": None}
    usage = {"id": "a", "created": 1, "choices": [], "usage": {"prompt_tokens": 2}}
    other = {"id": "b", "created": 2}
    assert stream.take(event(chunk), 0) == event(chunk)
    assert stream.take(b": still here\n\n", 1) == b": still here\n\n"
    assert stream.take(event(chunk | other), 1) == event(chunk | {"choices": [{"index": 1, "text": "x"}]})
    assert stream.take(event(usage | other) + DONE, 1) == b""
    assert stream.take(event(usage) + DONE, 0) == b""
    assert stream.end() == event(usage | {"usage": {"prompt_tokens": 4}}) + DONE
    assert JoinedStream().end() == DONE
    for bad in (b"data: {\n\n", b"data: 1\n\n", b'data: {"choices": [1]}\n\n'):
        with pytest.raises(CorruptAnswer):
            stream.take(bad, 0)
