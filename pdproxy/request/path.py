"""Disaggregate only if it fits and pays: which way a request goes, and why. Pure: facts in, a choice out."""

from __future__ import annotations

from dataclasses import dataclass

from pdproxy.config import Oversized
from pdproxy.errors import ContextLengthExceeded
from pdproxy.flight import Path
from pdproxy.request.openai import GenerationRequest, PromptKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSize:
    """A prompt's length. `tokens` is an upper bound where `is_exact` is False; `ids` where the proxy
    knows them."""

    tokens: int
    is_exact: bool
    ids: list[int] | None = None
    num_answer_tokens: int = 0
    """The last so many of `ids` are the beginning of the answer, which is to be gone on with."""

    def with_answer(self, prompt_ids: list[int], answer_ids: list[int]) -> PromptSize:
        """What is to be prefilled for an answer whose first tokens were shown already."""
        ids = prompt_ids + answer_ids
        return PromptSize(tokens=len(ids), is_exact=True, ids=ids, num_answer_tokens=len(answer_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one decoder and the configuration allow."""

    capacity_pages: int
    max_model_len: int | None
    """None: not known here."""
    min_prompt_tokens: int
    oversized: Oversized
    """What becomes of a prompt larger than the decoder's PD buffer."""
    is_windowed: bool = False
    """It can pass through that buffer in pieces."""
    hands_over: bool = True
    """Its engines can divide this request."""
    keeper: str = "decoder's PD buffer"
    """Whose pages they are."""
    serves_alone: bool = True
    """One instance can answer by itself; else everything takes both."""


@dataclass(frozen=True, slots=True)
class Choice:
    path: Path
    reason: str
    """One word for metrics and headers."""


def choose_path(request: GenerationRequest, size: PromptSize, pages: int, limits: Limits) -> Choice:
    """Raises `ContextLengthExceeded` where nobody could serve the prompt, or nobody may."""
    _check_context(request, size, limits)
    if not limits.serves_alone:
        if pages > limits.capacity_pages:
            raise _too_large(request, size, pages, limits)
        return Choice(Path.DISAGGREGATED, "both_legs")
    if (reason := _why_decoder_alone(request)) is not None:
        return Choice(Path.LOCAL, reason)
    if request.max_tokens == 1:
        return Choice(Path.PREFILL_ONLY, "one_token")
    if not limits.hands_over:
        return Choice(Path.LOCAL, "no_handover")
    if pages > limits.capacity_pages:
        return _oversized(request, size, pages, limits)
    if size.tokens < limits.min_prompt_tokens:
        return Choice(Path.LOCAL, "short")
    return Choice(Path.DISAGGREGATED, "fits")


def _check_context(request: GenerationRequest, size: PromptSize, limits: Limits) -> None:
    if limits.max_model_len is not None and size.is_exact and size.tokens >= limits.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {size.tokens} tokens, and the model's context of {limits.max_model_len} tokens "
            "must also hold the answer; shorten the prompt",
            param=request.prompt_field,
        )


def _why_decoder_alone(request: GenerationRequest) -> str | None:
    """The reason why this body cannot be split in two legs, or None."""
    reasons = {
        "several_answers": request.n > 1,
        "several_prompts": request.prompt_kind is PromptKind.BATCH,
        "media": request.has_media,
        "prompt_in_answer": request.reads_prompt,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _oversized(request: GenerationRequest, size: PromptSize, pages: int, limits: Limits) -> Choice:
    if limits.oversized == "window" and limits.is_windowed:
        return Choice(Path.DISAGGREGATED, "window")
    if limits.oversized != "refuse":
        return Choice(Path.LOCAL, "oversized")
    raise _too_large(request, size, pages, limits)


def _too_large(request: GenerationRequest, size: PromptSize, pages: int, limits: Limits) -> ContextLengthExceeded:
    counted = "" if size.is_exact else " (counted in bytes; give the proxy --model for exact counting)"
    return ContextLengthExceeded(
        f"the prompt needs {pages} pages of the {limits.keeper}{counted}, which has {limits.capacity_pages}; "
        f"shorten the prompt or enlarge the {limits.keeper}",
        param=request.prompt_field,
    )
