"""What engines of every kind answer to a prefill leg: an OpenAI answer of one choice and, at most, one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pdproxy.engines.base import MalformedReply
from pdproxy.reply.seam import PromptUsage
from pdproxy.request.openai import Fields, GenerationRequest

OUT_OF_TOKENS = "length"
_ENDS = frozenset({"stop", "tool_calls", "function_call", "content_filter", "repetition"})
"""Reasons for which an answer is over, however many tokens it might have had."""
_FEWEST = ("min_tokens", "min_completion_tokens")


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    text: str | None = None
    message: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneToken:
    fields: Fields
    """The whole answer, as it came."""
    choice: dict[str, Any]
    """Its only choice, as Python values."""
    usage: PromptUsage | None
    has_text: bool
    """Something of it shows: text, or any part of a message but its role."""
    finish_reason: str | None


_fields = msgspec.json.Decoder(Fields)
_answer = msgspec.json.Decoder(_Answer)
_choices = msgspec.json.Decoder(list[dict[str, Any]])


def read_one_token(body: bytes) -> OneToken:
    """Raises `MalformedReply`."""
    try:
        fields, answer = _fields.decode(body), _answer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedReply(f"its reply is not a one-token answer: {error}") from None
    if answer.error is not None:
        raise MalformedReply("it reported an error")
    if len(answer.choices) != 1:
        raise MalformedReply(f"its reply has {len(answer.choices)} choices")
    return OneToken(
        fields=fields,
        choice=_choices.decode(fields["choices"])[0],
        usage=_prompt_usage(answer.usage),
        has_text=_has_text(answer.choices[0]),
        finish_reason=answer.choices[0].finish_reason,
    )


def is_whole(request: GenerationRequest, finish_reason: str | None) -> bool:
    """Whether the answer that was to be continued elsewhere is over with its first token.

    A prefill leg says nothing of `min_tokens`, so an end by it is none where the client wants more tokens than this.
    """
    if request.max_tokens == 1:
        return finish_reason == OUT_OF_TOKENS or finish_reason in _ENDS
    return finish_reason in _ENDS and not any(_is_positive(request.value(name)) for name in _FEWEST)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _prompt_usage(usage: _Usage | None) -> PromptUsage | None:
    if usage is None or usage.prompt_tokens is None:
        return None
    details = usage.prompt_tokens_details
    return PromptUsage(usage.prompt_tokens, None if bytes(details) == b"null" else details)


def _has_text(choice: _Choice) -> bool:
    message = choice.message or {}
    return bool(choice.text) or any(value for name, value in message.items() if name != "role")
