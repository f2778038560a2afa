"""What is counted of an answer as it goes by, and the times between its tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.openai.client_stream import StreamedAnswer
from pdproxy.openai.request import COMPLETIONS, parse
from pdproxy.openai.token_count import TokenCount
from tests.fakes.fleet import Clock

DONE = b"data: [DONE]\n\n"


def event(*choices: dict[str, Any], spaced: bool = False, **more: Any) -> bytes:
    separators = None if spaced else (",", ":")
    told = {"id": "a", "choices": [{"index": 0, "finish_reason": None} | choice for choice in choices]} | more
    return b"data: " + json.dumps(told, separators=separators).encode() + b"\n\n"


def ids(*numbers: int, **options: Any) -> bytes:
    return event({"text": "x", "token_ids": list(numbers)}, **options)


TEXT = event({"text": "x"})
ROLE = event({"delta": {"role": "assistant", "content": ""}})
USAGE = {"prompt_tokens": 7, "completion_tokens": 42, "total_tokens": 49, "prompt_tokens_details": {"cached_tokens": 3}}


def counted(*pieces: bytes) -> TokenCount:
    tokens = TokenCount(Clock())
    for piece in pieces:
        tokens.add(piece)
    return tokens


@pytest.mark.parametrize(
    ("pieces", "num", "source"),
    [
        ((TEXT, TEXT, TEXT, DONE), 3, "events"),
        ((TEXT + TEXT, b": a comment\n\n", TEXT + DONE), 3, "events"),
        ((ROLE + TEXT, TEXT), 2, "events"),
        ((event({"text": "a"}, {"text": "b"}), TEXT), 3, "events"),
        ((event({"text": 'says "finish_reason" and "token_ids":[1,2,3'}), TEXT), 2, "events"),
        ((b'data: {"choices":[{"text":"x"}]}\n\n',) * 3, 3, "events"),
        ((ids(1), ids(2), ids(3)), 3, "ids"),
        ((ids(1, 2, 3), ids(), ids(4) + ids(5, 6), DONE), 6, "ids"),
        ((ids(1, 2, spaced=True), ids(3, spaced=True)), 3, "ids"),
        ((ROLE + ids(1), ids(2)), 2, "ids"),
        ((event({"text": "x", "token_ids": None, "prompt_token_ids": [1, 2, 3]}), TEXT), 2, "events"),
    ],
)
def test_tokens_of_events(pieces: tuple[bytes, ...], num: int, source: str) -> None:
    tokens = counted(*pieces)
    assert (tokens.num_output, tokens.source, tokens.num_prompt) == (num, source, None)


def test_a_usage_is_exact_and_the_last_one_counts() -> None:
    tokens = counted(TEXT, TEXT)
    tokens.tell(event(usage={"prompt_tokens": 7, "completion_tokens": 1}))
    assert (tokens.num_prompt, tokens.num_output, tokens.source) == (7, 1, "usage")
    tokens.tell(TEXT + event(usage=USAGE) + DONE)
    assert (tokens.num_prompt, tokens.num_output) == (7, 42)
    tokens.tell(b'{"choices": [{"text": "\\"completion_tokens\\": 5"}], "usage": null}')
    assert (tokens.num_prompt, tokens.num_output) == (7, 42), "it told nothing"


def test_an_answer_that_begins_anew_is_counted_anew_but_its_prompt_is_the_same() -> None:
    tokens = counted(ids(1), ids(2))
    tokens.tell(event(usage=USAGE))
    tokens.tell_prompt(7)
    tokens.clear()
    assert (tokens.num_output, tokens.num_prompt) == (0, 7)
    tokens.add(TEXT)
    assert (tokens.num_output, tokens.source) == (1, "events")


def test_a_stream_counts_what_it_shows_and_forgets_that_when_it_starts_over() -> None:
    request = parse(COMPLETIONS, b'{"prompt": "x", "stream": true}')
    stream = StreamedAnswer(request, tokens=TokenCount(Clock()), limit_bytes=1000)
    stream.take(ids(1, 2))
    assert stream.tokens.num_output == 2
    stream.start_over()
    stream.take(ids(1))
    assert stream.tokens.num_output == 1


def test_times_between_tokens() -> None:
    clock = Clock()
    tokens = TokenCount(clock)
    for piece, later_s in ((ROLE + TEXT, 0.25), (TEXT, 0.5), (TEXT + TEXT, 0.25), (TEXT, 9.0), (DONE, 0.0)):
        tokens.add(piece)
        clock.now += later_s
    assert tokens.mean_gap_s == pytest.approx(1.0 / 4), "of five tokens; the end's own time is nobody's"
    assert tokens.longest_gap_s == pytest.approx(0.5)
    tokens.tell(event(usage={"prompt_tokens": 1, "completion_tokens": 11}))
    assert tokens.mean_gap_s == pytest.approx(1.0 / 10), "a usage counts better"


def test_no_time_between_tokens_that_came_at_once_or_belong_to_several_answers() -> None:
    assert counted(TEXT + TEXT + DONE).mean_gap_s is None
    assert counted(TEXT, DONE).mean_gap_s is None
    clock = Clock()
    tokens = TokenCount(clock)
    tokens.num_sequences = 2
    for _ in range(3):
        tokens.add(TEXT)
        clock.now += 1.0
    assert tokens.mean_gap_s is None
