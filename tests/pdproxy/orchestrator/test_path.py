"""Which way, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.engines.info import EngineInfo
from pdproxy.errors import ContextLengthExceeded
from pdproxy.openai.request import COMPLETIONS, parse
from pdproxy.orchestrator.path import Choice, PathChooser
from pdproxy.telemetry.attempt_record import Path
from pdproxy.tokens.prompt_size import PromptSize

TOKENS_PER_PAGE = 10
MANNER = BuiltinAdapter().traits


def choose(tokens: int = 10, *, is_exact: bool = True, hands_over: bool = True, **more: Any) -> Choice:
    """At a decoder of 8 pages of 10 tokens, with a context of 1000."""
    paths = PathChooser(min_prompt_tokens=more.pop("min_prompt_tokens", 0), oversized=more.pop("oversized", "local"))
    facts = EngineInfo(
        epoch="e",
        num_pages=8,
        chunk_size=TOKENS_PER_PAGE,
        max_model_len=1000,
        windowed=more.pop("is_windowed", False),
    )
    traits = replace(MANNER, serves_alone=more.pop("serves_alone", True), page_owner=more.pop("page_owner", "decode"))
    request = parse(COMPLETIONS, json.dumps({"prompt": "x"} | more).encode())
    size = PromptSize(tokens=tokens, is_exact=is_exact)
    return paths.choose(request, size, owner=facts, decoder=facts, traits=traits, hands_over=hands_over)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (choose(), Choice(Path.DISAGGREGATED, "fits")),
        (choose(tokens=80), Choice(Path.DISAGGREGATED, "fits")),
        (choose(tokens=90), Choice(Path.LOCAL, "oversized")),
        (choose(tokens=90, is_windowed=True), Choice(Path.LOCAL, "oversized")),
        (choose(tokens=90, oversized="window"), Choice(Path.LOCAL, "oversized")),
        (choose(tokens=90, oversized="window", is_windowed=True), Choice(Path.DISAGGREGATED, "window")),
        (choose(tokens=80, oversized="window", is_windowed=True), Choice(Path.DISAGGREGATED, "fits")),
        (choose(tokens=90, oversized="window", is_windowed=True, n=2), Choice(Path.LOCAL, "several_answers")),
        (choose(n=2), Choice(Path.LOCAL, "several_answers")),
        (choose(n=2, max_tokens=1), Choice(Path.LOCAL, "several_answers")),
        (choose(prompt=["a", "b"]), Choice(Path.LOCAL, "several_prompts")),
        (choose(prompt_logprobs=0), Choice(Path.LOCAL, "prompt_in_answer")),
        (choose(max_tokens=1), Choice(Path.PREFILL_ONLY, "one_token")),
        (choose(max_tokens=1, tokens=90), Choice(Path.PREFILL_ONLY, "one_token")),
        (choose(min_prompt_tokens=11), Choice(Path.LOCAL, "short")),
        (choose(hands_over=False), Choice(Path.LOCAL, "no_handover")),
        (choose(serves_alone=False, n=2), Choice(Path.DISAGGREGATED, "both_legs")),
        (choose(tokens=5000, is_exact=False), Choice(Path.LOCAL, "oversized")),
    ],
)
def test_choice(choice: Choice, expected: Choice) -> None:
    assert choice == expected


def test_longer_than_the_context() -> None:
    assert choose(tokens=999, oversized="window", is_windowed=True).path is Path.DISAGGREGATED
    assert choose(tokens=1000, is_exact=False).path is Path.LOCAL
    with pytest.raises(ContextLengthExceeded, match="1000 tokens"):
        choose(tokens=1000)


def test_refused_with_both_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"needs 9 pages .* has 8"):
        choose(tokens=90, oversized="refuse")
    with pytest.raises(ContextLengthExceeded, match="counted in bytes"):
        choose(tokens=90, oversized="refuse", is_exact=False)
    with pytest.raises(ContextLengthExceeded, match="the prefiller's KV memory"):
        choose(tokens=90, serves_alone=False, page_owner="prefill")
