"""What engines of every kind answer to a prefill leg: an OpenAI answer of one choice and, at most, one token."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar

import msgspec

from pdproxy.engines.base import MalformedReply
from pdproxy.reply.seam import PromptUsage
from pdproxy.request.openai import Fields, GenerationRequest

OUT_OF_TOKENS = "length"
_ENDS = frozenset({"stop", "tool_calls", "function_call", "content_filter", "repetition"})
"""Reasons for which an answer is over, however many tokens it might have had."""
_FEWEST = ("min_tokens", "min_completion_tokens")
_NULL = msgspec.Raw(b"null")

T = TypeVar("T")


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: msgspec.Raw = _NULL


class _Choice(msgspec.Struct):
    text: str | None = None
    message: dict[str, Any] | None = None
    finish_reason: str | None = None
    prompt_token_ids: msgspec.Raw = _NULL


class _Answer(msgspec.Struct):
    """What is looked at in every reply, in one reading."""

    choices: list[_Choice]
    usage: _Usage | None = None
    error: Any = None
    kv_transfer_params: msgspec.Raw = _NULL
    prompt_token_ids: msgspec.Raw = _NULL


_answer = msgspec.json.Decoder(_Answer)
_fields = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[dict[str, Any]])


class OneToken:
    """What a reply says. `body` is the whole of it."""

    def __init__(self, body: bytes, answer: _Answer) -> None:
        choice = answer.choices[0]
        self.finish_reason = choice.finish_reason
        self.usage = _prompt_usage(answer.usage)
        self.has_text = bool(choice.text) or (choice.message is not None and _says_something(choice.message))
        """Something of it shows: text, or any part of a message but its role."""
        self.params = _none_for_null(answer.kv_transfer_params)
        """``kv_transfer_params``, as they came."""
        self.prompt_ids = _none_for_null(choice.prompt_token_ids) or _none_for_null(answer.prompt_token_ids)
        """The ids it was made of, as they came. A completion tells them in its choice, a chat beside it."""
        self._body = body

    @cached_property
    def fields(self) -> Fields:
        """The whole answer, as it came. Raises `MalformedReply`."""
        return _decode(_fields, self._body)

    @cached_property
    def choice(self) -> dict[str, Any]:
        """Its only choice, as Python values. Raises `MalformedReply`."""
        return _decode(_choices, self.fields["choices"])[0]


def read_one_token(body: bytes) -> OneToken:
    """Raises `MalformedReply`."""
    answer = _decode(_answer, body)
    if answer.error is not None:
        raise MalformedReply("it reported an error")
    if len(answer.choices) != 1:
        raise MalformedReply(f"its reply has {len(answer.choices)} choices")
    return OneToken(body, answer)


def is_whole(request: GenerationRequest, finish_reason: str | None) -> bool:
    """Whether the answer that was to be continued elsewhere is over with its first token.

    A prefill leg says nothing of `min_tokens`, so an end by it is none where the client wants more tokens than this.
    """
    if request.max_tokens == 1:
        return finish_reason == OUT_OF_TOKENS or finish_reason in _ENDS
    return finish_reason in _ENDS and not any(_is_positive(request.value(name)) for name in _FEWEST)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _decode(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedReply(f"its reply is not a one-token answer: {error}") from None


def _prompt_usage(usage: _Usage | None) -> PromptUsage | None:
    if usage is None or usage.prompt_tokens is None:
        return None
    return PromptUsage(usage.prompt_tokens, _none_for_null(usage.prompt_tokens_details))


def _says_something(message: dict[str, Any]) -> bool:
    return any(value for name, value in message.items() if name != "role")


def _none_for_null(raw: msgspec.Raw) -> msgspec.Raw | None:
    return None if raw == _NULL else raw
