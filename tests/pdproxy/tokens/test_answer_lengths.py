"""How long answers are thought to be."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdproxy.admission.room import Room
from pdproxy.openai.request import GenerationRequest, parse
from pdproxy.tokens.answer_lengths import (
    BYTES_PER_TOKEN,
    MAX_MODELS,
    MEDIA_TOKENS,
    MIN_ANSWERS,
    UNKNOWN_TOKENS,
    AnswerLengths,
)
from pdproxy.tokens.prompt_size import PromptSize

EXACT = PromptSize(tokens=100, is_exact=True)


def request(**fields: Any) -> GenerationRequest:
    return parse("/v1/completions", json.dumps({"model": "m", "prompt": "x"} | fields).encode())


def learned(*lengths: int, model: str = "m") -> AnswerLengths:
    found = AnswerLengths()
    for length in lengths:
        found.note(model, length)
    return found


def test_the_longest_that_it_may_have_is_thought_as_long_as_nothing_is_known() -> None:
    few = learned(*[10] * (MIN_ANSWERS - 1))
    assert few.growth("m", 400) == 400
    assert few.growth("m", None) == UNKNOWN_TOKENS


def test_nine_of_ten_answers_are_no_longer_than_what_is_thought() -> None:
    found = learned(*[20] * 95, *[1000] * 5)
    assert 20 <= found.growth("m", None) < 25
    found = learned(*[20] * 80, *[1000] * 20)
    assert 1000 <= found.growth("m", None) < 1250


def test_nothing_is_thought_to_be_longer_than_it_may_be() -> None:
    assert learned(*[1000] * 20).growth("m", 400) == 400


def test_each_model_is_known_by_itself() -> None:
    found = learned(*[10] * 20)
    assert found.growth("other", 400) == 400
    for n in range(MAX_MODELS):
        found.note(f"m{n}", 1)
    assert found.growth("m", 400) == 400


def test_what_is_long_ago_is_forgotten() -> None:
    assert learned(*[2000] * 5000, *[10] * 2000).growth("m", None) < 16


def test_weights_never_grow_without_bound() -> None:
    found = learned(*[10] * 30_000)
    assert 10 <= found.growth("m", None) < 13


def test_the_room_of_a_request() -> None:
    assert AnswerLengths().room(request(max_tokens=7), EXACT) == Room(100, 7, 7)
    assert AnswerLengths().room(request(max_tokens=7, n=3), EXACT) == Room(100, 21, 21, 3)
    assert learned(*[50] * 20).room(request(max_tokens=900), EXACT).most == 900


def test_a_prompt_that_was_counted_in_bytes_takes_fewer_tokens_than_bytes() -> None:
    room = AnswerLengths().room(request(max_tokens=1), PromptSize(tokens=300, is_exact=False))
    assert room.prompt == 300 // BYTES_PER_TOKEN


def test_the_bytes_of_an_image_are_no_tokens() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}]
    chat = parse("/v1/chat/completions", json.dumps({"model": "m", "messages": messages}).encode())
    size = PromptSize(tokens=chat.num_prompt_bytes, is_exact=False)
    assert AnswerLengths().room(chat, size).prompt == MEDIA_TOKENS
    assert AnswerLengths().room(chat, PromptSize(tokens=9000, is_exact=True)).prompt == 9000


@given(st.lists(st.integers(0, 10**6), min_size=MIN_ANSWERS, max_size=200))
def test_what_is_thought_is_a_length_that_came_within_a_quarter(lengths: list[int]) -> None:
    thought = learned(*lengths).growth("m", None)
    assert any(max(1, length) <= thought <= max(1, length) * 1.25 for length in lengths)
