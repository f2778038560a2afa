"""Which way, and why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.errors import ContextLengthExceeded
from pdproxy.flight import Path
from pdproxy.request.openai import COMPLETIONS, parse
from pdproxy.request.path import Choice, Limits, PromptSize, choose_path


def choose(tokens: int = 10, pages: int = 1, *, is_exact: bool = True, **more: Any) -> Choice:
    limits = Limits(
        capacity_pages=8,
        max_model_len=1000,
        min_prompt_tokens=more.pop("min_prompt_tokens", 0),
        oversized=more.pop("oversized", "local"),
        is_windowed=more.pop("is_windowed", False),
    )
    request = parse(COMPLETIONS, json.dumps({"prompt": "x"} | more).encode())
    return choose_path(request, PromptSize(tokens=tokens, is_exact=is_exact), pages, limits)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (choose(), Choice(Path.DISAGGREGATED, "fits")),
        (choose(pages=8), Choice(Path.DISAGGREGATED, "fits")),
        (choose(pages=9), Choice(Path.LOCAL, "oversized")),
        (choose(pages=9, is_windowed=True), Choice(Path.LOCAL, "oversized")),
        (choose(pages=9, oversized="window"), Choice(Path.LOCAL, "oversized")),
        (choose(pages=9, oversized="window", is_windowed=True), Choice(Path.DISAGGREGATED, "window")),
        (choose(pages=8, oversized="window", is_windowed=True), Choice(Path.DISAGGREGATED, "fits")),
        (choose(pages=9, oversized="window", is_windowed=True, n=2), Choice(Path.LOCAL, "several_answers")),
        (choose(n=2), Choice(Path.LOCAL, "several_answers")),
        (choose(n=2, max_tokens=1), Choice(Path.LOCAL, "several_answers")),
        (choose(prompt=["a", "b"]), Choice(Path.LOCAL, "several_prompts")),
        (choose(prompt_logprobs=0), Choice(Path.LOCAL, "prompt_in_answer")),
        (choose(max_tokens=1), Choice(Path.PREFILL_ONLY, "one_token")),
        (choose(max_tokens=1, pages=9), Choice(Path.PREFILL_ONLY, "one_token")),
        (choose(min_prompt_tokens=11), Choice(Path.LOCAL, "short")),
        (choose(tokens=5000, is_exact=False, pages=9), Choice(Path.LOCAL, "oversized")),
    ],
)
def test_choice(choice: Choice, expected: Choice) -> None:
    assert choice == expected


def test_longer_than_the_context() -> None:
    assert choose(tokens=999).path is Path.DISAGGREGATED
    with pytest.raises(ContextLengthExceeded, match="1000 tokens"):
        choose(tokens=1000)


def test_refused_with_both_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"needs 9 pages .* has 8"):
        choose(pages=9, oversized="refuse")
    with pytest.raises(ContextLengthExceeded, match="counted in bytes"):
        choose(pages=9, oversized="refuse", is_exact=False)
