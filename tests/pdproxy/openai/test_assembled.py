"""A whole answer put together from a stream's events, with plain values: which fields it has, and when it is none."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.engines.vllm_answers import VLLM_SHAPE
from pdproxy.openai.assembled import AssembledAnswer, NotAssembledError
from pdproxy.openai.request import CHAT, COMPLETIONS, GenerationRequest, parse
from pdproxy.openai.response import CorruptAnswer
from pdproxy.openai.sse import EventBuffer, event
from pdproxy.openai.streamable import as_stream, is_streamable

HEAD = {"id": "a-1", "created": 7, "model": "m"}
USAGE = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
DONE = b"data: [DONE]\n\n"


def chunk(**choice: Any) -> dict[str, Any]:
    return HEAD | {"object": "whatever", "choices": [{"index": 0} | choice]}


def usage(**more: Any) -> dict[str, Any]:
    return HEAD | {"object": "whatever", "choices": [], "usage": USAGE | more}


def stream(*chunks: dict[str, Any]) -> bytes:
    return b"".join(map(event, chunks)) + DONE


def assembled(events: bytes, *, is_chat: bool = False, num_choices: int = 1) -> dict[str, Any]:
    answer = AssembledAnswer(is_chat=is_chat, num_choices=num_choices, limit_bytes=1 << 20)
    answer.add(events)
    body: dict[str, Any] = json.loads(answer.body(VLLM_SHAPE))
    return body


def text(piece: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return chunk(text=piece, logprobs=None, finish_reason=finish, **more)


def said(piece: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return chunk(delta={"content": piece}, logprobs=None, finish_reason=finish, **more)


ROLE = chunk(delta={"role": "assistant", "content": ""}, logprobs=None, finish_reason=None)


# ── what it is ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_completion_has_every_field_of_vllms() -> None:
    ends = text("b", "stop", stop_reason=".")
    told = usage(prompt_tokens_details={"cached_tokens": 1}) | {"system_fingerprint": "f", "metrics": {"x": 1}}
    assert assembled(stream(text("a"), ends, told)) == {
        "id": "a-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": ".",
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "routed_experts": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": "f",
        "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens_details": None},
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": {"x": 1},
    }


def test_chat_has_a_message() -> None:
    first = ROLE | {"prompt_token_ids": [1, 2], "usage": None}
    whole = assembled(stream(first, said("a"), said("é", "length"), usage()), is_chat=True)
    assert (whole["object"], whole["prompt_token_ids"], whole["prompt_text"]) == ("chat.completion", [1, 2], None)
    [choice] = whole["choices"]
    assert list(choice) == list(VLLM_SHAPE.chat_choice)
    assert choice["message"] == dict.fromkeys(VLLM_SHAPE.message) | {"role": "assistant", "content": "aé"}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_shape_of_the_built_in_engine_has_no_fields_of_vllm() -> None:
    shape = BuiltinAdapter().traits.streams_whole
    assert shape is not None
    answer = AssembledAnswer(is_chat=True, num_choices=1, limit_bytes=1 << 20)
    answer.add(stream(ROLE, said("a"), chunk(delta={}, finish_reason="stop"), usage()))
    whole = json.loads(answer.body(shape))
    assert list(whole) == ["id", "object", "created", "model", "choices", "usage"]
    message = {"role": "assistant", "content": "a", "refusal": None}
    assert whole["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


def test_log_probabilities_of_a_completion_are_lists_one_behind_the_other() -> None:
    def scores(token: str, at: int) -> dict[str, Any]:
        return {"tokens": [token], "token_logprobs": [-0.5], "top_logprobs": [{token: -0.5}], "text_offset": [at]}

    chunks = [text("a") | {}, text("bc", "stop")]
    chunks[0]["choices"][0]["logprobs"], chunks[1]["choices"][0]["logprobs"] = scores("a", 0), scores("bc", 1)
    assert assembled(stream(*chunks, usage()))["choices"][0]["logprobs"] == {
        "tokens": ["a", "bc"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"bc": -0.5}],
        "text_offset": [0, 1],
    }


def test_log_probabilities_of_a_chat_keep_every_digit_and_every_null() -> None:
    raw = b'{"content":[{"token":"a","logprob":-0.10,"bytes":[97]}],"refusal":null}'
    events = stream(ROLE, said("a", "stop"), usage()).replace(b'"content":"a"},"logprobs":null', b"@" + raw)
    events = events.replace(b"@", b'"content":"a"},"logprobs":')
    answer = AssembledAnswer(is_chat=True, num_choices=1, limit_bytes=1 << 20)
    answer.add(events)
    assert b'"logprobs":' + raw in answer.body(VLLM_SHAPE)


def test_ids_are_told_where_they_were_and_are_null_elsewhere() -> None:
    with_ids = stream(text("a", token_ids=[4], prompt_token_ids=[1]), text("", "stop", token_ids=[5, 6]), usage())
    [choice] = assembled(with_ids)["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([4, 5, 6], [1])
    [choice] = assembled(stream(text("a", token_ids=None), text("", "stop", token_ids=None), usage()))["choices"]
    assert choice["token_ids"] is None
    [choice] = assembled(stream(text("", "stop", token_ids=[]), usage()))["choices"]
    assert choice["token_ids"] == []


def test_choices_come_in_the_order_of_their_indices() -> None:
    chunks = [chunk(text=f"{i}{part}", finish_reason="stop" if part else None) for part in (0, 1) for i in (1, 0)]
    for number, one in enumerate(chunks):
        one["choices"][0]["index"] = 1 - number % 2
    whole = assembled(stream(*chunks, usage()), num_choices=2)
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(0, "0001"), (1, "1011")]


def test_event_may_tell_of_several_choices_or_of_none_of_their_texts() -> None:
    def both(**choice: Any) -> dict[str, Any]:
        return chunk() | {"choices": [{"index": index} | choice for index in (0, 1)]}

    chunks = (both(text="a"), both(text="b"), chunk(), both(text="c", finish_reason="stop"))
    whole = assembled(stream(*chunks, usage()), num_choices=2)
    assert [choice["text"] for choice in whole["choices"]] == ["abc", "abc"]


def test_field_that_nobody_has_heard_of_comes_last() -> None:
    whole = assembled(stream(text("a", "stop", flavour="sweet") | {"weather": "fine"}, usage()))
    assert (list(whole)[-1], list(whole["choices"][0])[-1]) == ("weather", "flavour")


def test_beginning_anew_forgets_everything() -> None:
    answer = AssembledAnswer(is_chat=False, num_choices=1, limit_bytes=1 << 20)
    answer.add(stream(text("lost") | {"weather": "bad"}))
    assert answer.has_begun
    answer.clear()
    assert (answer.has_begun, answer.num_bytes) == (False, 0)
    answer.add(stream(text("kept", "stop"), usage()))
    whole = json.loads(answer.body(VLLM_SHAPE))
    assert whole["choices"][0]["text"] == "kept"
    assert "weather" not in whole


# ── what it is not ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0}]},
        {"refusal": "no"},
        {"audio": {"id": "x"}},
    ],
    ids=lambda delta: next(iter(delta)),
)
def test_delta_that_says_more_cannot_be_put_together(delta: dict[str, Any]) -> None:
    with pytest.raises(NotAssembledError, match=next(iter(delta))):
        assembled(stream(ROLE, chunk(delta=delta)), is_chat=True)


def test_delta_whose_other_fields_are_empty_says_no_more() -> None:
    empty = {"reasoning_content": None, "tool_calls": [], "refusal": ""}
    whole = assembled(stream(ROLE, chunk(delta={"content": "a"} | empty, finish_reason="stop"), usage()), is_chat=True)
    assert whole["choices"][0]["message"]["content"] == "a"


def test_engine_that_looks_for_reasoning_is_noticed_by_its_usage() -> None:
    counted = usage(completion_tokens_details={"reasoning_tokens": 0})
    with pytest.raises(NotAssembledError, match="reasoning"):
        assembled(stream(ROLE, said("a", "stop"), counted), is_chat=True)
    assert assembled(stream(text("a", "stop"), counted))["choices"][0]["text"] == "a", "completions are not parsed"


def test_without_a_usage_it_is_not_whole() -> None:
    with pytest.raises(NotAssembledError, match="usage"):
        assembled(stream(text("a", "stop")))


@pytest.mark.parametrize(
    ("events", "what"),
    [
        (stream(text("a"), usage()), "broke off"),
        (stream(usage()), "broke off"),
        (stream(text("a", "abort"), usage()), "abort"),
        (stream(text("a", "error"), usage()), "error"),
        (stream(chunk(text="a", index=1), usage()), "choice 1"),
        (stream(chunk(text="a", index=-1), usage()), "choice -1"),
        (stream(chunk(text=7), usage()), "cannot be read"),
        (stream(chunk(text="a", token_ids=3), usage()), "list"),
        (stream(chunk(text="a", logprobs=[1]), usage()), "cannot be read"),
        (b"data: {\n\n", "cannot be read"),
        (b'data: {"choices": 3}\n\n', "cannot be read"),
        (b'data: {"choices": [{"index": 0, "text": "\xff"}]}\n\n', "cannot be read"),
    ],
)
def test_what_is_no_whole_answer(events: bytes, what: str) -> None:
    with pytest.raises(CorruptAnswer, match=what):
        assembled(events)


def test_choice_that_never_came() -> None:
    with pytest.raises(CorruptAnswer, match="broke off"):
        assembled(stream(text("a", "stop"), usage()), num_choices=2)


def test_memory_has_a_bound() -> None:
    answer = AssembledAnswer(is_chat=False, num_choices=1, limit_bytes=1000)
    size = len(event(text("word")))
    for _ in range(1000 // size):
        answer.add(event(text("word")))
    with pytest.raises(CorruptAnswer, match="1000 bytes"):
        answer.add(event(text("word")))


# ── any stream, cut anywhere ────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def answers(draw: st.DrawFn) -> tuple[bool, list[list[tuple[str, list[int], list[float] | None]]]]:
    """Whether it is a chat; of each choice its pieces: a text, its ids, the log-probabilities of those."""
    with_logprobs = draw(st.booleans())
    scores = st.lists(st.floats(-20, 0, allow_nan=False), min_size=0, max_size=2)
    piece = st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
        st.lists(st.integers(0, 9), max_size=2),
        scores if with_logprobs else st.none(),
    )
    return draw(st.booleans()), draw(st.lists(st.lists(piece, min_size=1, max_size=5), min_size=1, max_size=3))


def scored(scores: list[float] | None, *, is_chat: bool) -> Any:
    if scores is None:
        return None
    return {"content": [{"logprob": one} for one in scores]} if is_chat else {"token_logprobs": scores}


@given(answer=answers(), dice=st.randoms(use_true_random=False), borders=st.lists(st.integers(0, 4000), max_size=12))
def test_any_cut_and_any_order_of_the_choices_give_the_same_answer(answer: Any, dice: Any, borders: list[int]) -> None:
    with_ids = dice.random() < 0.5
    is_chat, choices = answer
    left = {index: list(enumerate(pieces)) for index, pieces in enumerate(choices)}
    chunks = []
    while left:
        index = dice.choice(sorted(left))
        number, (piece, ids, scores) = left[index].pop(0)
        is_last = not left[index]
        if is_last:
            del left[index]
        part: dict[str, Any] = {"delta": {"content": piece}} if is_chat else {"text": piece}
        if is_chat and number == 0:
            part["delta"]["role"] = "assistant"
        part |= {"index": index, "token_ids": ids if with_ids else None, "logprobs": scored(scores, is_chat=is_chat)}
        chunks.append(chunk(**part, finish_reason="stop" if is_last else None))
    data = stream(*chunks, usage())

    buffer, whole = EventBuffer(), AssembledAnswer(is_chat=is_chat, num_choices=len(choices), limit_bytes=1 << 20)
    at = [0, *sorted(border for border in borders if border < len(data)), len(data)]
    for start, end in pairwise(at):
        whole.add(buffer.feed(data[start:end]))
    assert buffer.num_pending_bytes == 0

    told = json.loads(whole.body(VLLM_SHAPE))
    for choice, pieces in zip(told["choices"], choices, strict=True):
        joined = "".join(piece for piece, _, _ in pieces)
        assert (choice["message"]["content"] if is_chat else choice["text"]) == joined
        assert choice["token_ids"] == ([id_ for _, ids, _ in pieces for id_ in ids] if with_ids else None)
        scores = None if pieces[0][2] is None else [one for _, _, some in pieces for one in some or []]
        assert choice["logprobs"] == scored(scores, is_chat=is_chat)
        assert choice["finish_reason"] == "stop"
    assert told["usage"] == USAGE | {"prompt_tokens_details": None, "completion_tokens_details": None}


# ── which requests ──────────────────────────────────────────────────────────────────────────────────────────────────


def completion(**more: Any) -> GenerationRequest:
    return parse(COMPLETIONS, json.dumps({"model": "m", "prompt": "x"} | more).encode())


def chat(**more: Any) -> GenerationRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | more
    return parse(CHAT, json.dumps(body).encode())


@pytest.mark.parametrize(
    "request_",
    [
        completion(),
        completion(n=3, seed=1, stop=["x"], logprobs=2, logit_bias={"3": 1}, return_token_ids=True),
        completion(echo=False, use_beam_search=False, prompt_logprobs=None),
        chat(logprobs=True, top_logprobs=2, max_completion_tokens=3, user="u"),
        chat(tools=None, tool_choice=None, stream=False, response_format={"type": "json_object"}),
    ],
)
def test_streamable(request_: GenerationRequest) -> None:
    assert is_streamable(request_)


@pytest.mark.parametrize(
    "request_",
    [
        completion(echo=True),
        completion(prompt_logprobs=0),
        completion(best_of=2),
        completion(use_beam_search=True),
        completion(prompt=["a", "b"]),
        completion(something_new=1),
        chat(tools=[{"type": "function"}]),
        chat(tools=[{"type": "function"}], tool_choice="none"),
        chat(functions=[{"name": "f"}]),
        chat(reasoning_effort="low"),
        chat(include_reasoning=True),
        chat(chat_template_kwargs={"enable_thinking": False}),
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ],
)
def test_stays_whole(request_: GenerationRequest) -> None:
    assert not is_streamable(request_)


def test_asked_as_a_stream_only_the_streaming_differs() -> None:
    request = completion(max_tokens=5, stream=False, n=2)
    asked = as_stream(request)
    assert (asked.stream, asked.include_usage, asked.n, asked.max_tokens) == (True, True, 2, 5)
    fields = {name: json.loads(bytes(raw)) for name, raw in asked.fields.items()}
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    assert fields == {"model": "m", "prompt": "x", "max_tokens": 5, "n": 2} | streaming
    assert not request.stream
