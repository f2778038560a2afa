"""When an answer is finished, and what of it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from transfer.engine.answer import Answer
from transfer.engine.sampling import SampledToken
from transfer.engine.tiny import make_tiny_tokenizer

END = 1
USER = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return make_tiny_tokenizer(folder, "bytes")


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def feed(answer: Answer, token_ids: Iterable[int]) -> list[str]:
    return [answer.feed(SampledToken(token_id, -0.5)).text for token_id in token_ids]


def test_length_ends_the_answer_and_shows_what_was_held_back(tokenizer: Any) -> None:
    euro = ids(tokenizer, "€")
    answer = Answer(tokenizer, max_tokens=2)
    assert feed(answer, euro[:2]) == ["", "\N{REPLACEMENT CHARACTER}"]
    assert (answer.finish_reason, answer.num_tokens) == ("length", 2)


def test_end_of_sequence_is_counted_and_not_shown(tokenizer: Any) -> None:
    hello = ids(tokenizer, "Hello")
    answer = Answer(tokenizer, max_tokens=100, eos_token_ids=frozenset({END}), with_logprobs=True)
    feed(answer, [*hello, END])
    assert (answer.shown.text, answer.finish_reason) == ("Hello", "stop")
    assert answer.num_tokens == len(hello) + 1
    assert [token.token_id for token in answer.shown.tokens] == hello


def test_end_of_sequence_that_is_ignored_goes_on(tokenizer: Any) -> None:
    answer = Answer(tokenizer, max_tokens=100)
    feed(answer, [END, *ids(tokenizer, "Hello")])
    assert (answer.shown.text, answer.finish_reason) == ("Hello", None)


def test_stop_string_across_tokens_is_cut_out_with_its_tokens(tokenizer: Any) -> None:
    before, stop = ids(tokenizer, "one two"), ids(tokenizer, "###")
    answer = Answer(tokenizer, max_tokens=100, stop=["###"], with_logprobs=True)
    feed(answer, [*before, *stop])
    assert (answer.shown.text, answer.finish_reason) == ("one two", "stop")
    assert [token.token_id for token in answer.shown.tokens] == before
    assert answer.num_tokens == len(before) + len(stop)


def test_what_only_looked_like_a_stop_string_is_shown_at_the_end(tokenizer: Any) -> None:
    token_ids = ids(tokenizer, "one ##")
    answer = Answer(tokenizer, max_tokens=len(token_ids), stop=["###"], with_logprobs=True)
    feed(answer, token_ids)
    assert (answer.shown.text, answer.finish_reason) == ("one ##", "length")
    assert [token.token_id for token in answer.shown.tokens] == token_ids


def test_tokens_come_with_the_text_they_belong_to(tokenizer: Any) -> None:
    token_ids = ids(tokenizer, "a €b")
    answer = Answer(tokenizer, max_tokens=len(token_ids), with_logprobs=True)
    deltas = [answer.feed(SampledToken(token_id, -0.5)) for token_id in token_ids]
    assert "".join(delta.text for delta in deltas) == answer.shown.text == "a €b"
    assert all(bool(delta.text) == bool(delta.tokens) for delta in deltas)
    assert [token.token_id for delta in deltas for token in delta.tokens] == token_ids
    assert answer.shown.offsets == sorted(answer.shown.offsets)
    assert answer.shown.offsets[-1] == 3  # the "b"


def test_special_tokens_have_no_text_and_shift_no_offset(tokenizer: Any) -> None:
    hello = ids(tokenizer, "Hello")
    answer = Answer(tokenizer, max_tokens=len(hello) + 1, with_logprobs=True)
    feed(answer, [USER, *hello])
    assert answer.shown.text == "Hello"
    assert answer.shown.offsets[:2] == [0, 0]


def test_a_finished_answer_takes_nothing_more(tokenizer: Any) -> None:
    answer = Answer(tokenizer, max_tokens=1)
    feed(answer, ids(tokenizer, "Hello")[:1])
    before = answer.shown.text
    with pytest.raises(ValueError, match="length"):
        answer.feed(SampledToken(50))
    assert (answer.shown.text, answer.num_tokens) == (before, 1)
