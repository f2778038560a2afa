"""The module reads what engines of every kind answer to a prefill leg: an OpenAI answer of one choice and at most one
token.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from pdproxy.engines.adapter import MalformedReply
from pdproxy.openai.answer import NULL, PrefilledAnswer, Usage
from pdproxy.openai.body import Fields
from pdproxy.openai.request import GenerationRequest
from pdproxy.openai.usage import PromptUsage

OUT_OF_TOKENS: Final = "length"
_ENDS: Final = frozenset({"stop", "tool_calls", "function_call", "content_filter", "repetition"})
"""The reasons for which an answer is over, however many tokens it might have had."""
_FEWEST: Final = ("min_tokens", "min_completion_tokens")
_SHORT_BYTES: Final = 4096
"""The reply length in bytes up to which a reply is read quickly, whatever it says."""
_OPENS_IDS: Final = b'"prompt_token_ids":['
_ID_ELSEWHERE: Final = msgspec.Raw(b"0")
"""The number which takes the place of the ids. No engine says a number there."""
_BACKSLASH: Final = b"\\"

T = TypeVar("T")


_answer: Final = msgspec.json.Decoder(PrefilledAnswer)
_fields: Final = msgspec.json.Decoder(Fields)
_choices: Final = msgspec.json.Decoder(list[dict[str, Any]])


class OneToken:
    """A `OneToken` is what a reply says. `body` is the whole reply. `prompt_ids` are the ids of the prompt, as they
    came, or None.
    """

    __slots__ = ("_body", "_choice", "_fields", "finish_reason", "has_text", "params", "prompt_ids", "usage")

    def __init__(self, body: bytes, answer: PrefilledAnswer, prompt_ids: msgspec.Raw | None) -> None:
        choice = answer.choices[0]
        self.finish_reason = choice.finish_reason
        self.usage = _prompt_usage(answer.usage)
        self.has_text = choice.says_something
        """Tells whether something of the token shows: text, or any part of a message but its role."""
        self.params = _none_for_null(answer.kv_transfer_params)
        """The field ``kv_transfer_params``, as it came, or None."""
        self.prompt_ids = prompt_ids
        self._body = body
        self._fields: Fields | None = None
        self._choice: dict[str, Any] | None = None

    @property
    def fields(self) -> Fields:
        """Returns the whole answer, as it came. Raises `MalformedReply`."""
        if self._fields is None:
            self._fields = _decode(_fields, self._body)
        return self._fields

    @property
    def choice(self) -> dict[str, Any]:
        """Returns the reply's only choice, as Python values. Raises `MalformedReply`."""
        if self._choice is None:
            self._choice = _decode(_choices, self.fields["choices"])[0]
        return self._choice


def read_one_token(body: bytes) -> OneToken:
    """Reads a reply to a prefill leg. Raises `MalformedReply`."""
    answer, prompt_ids = _read(body)
    if answer.error is not None:
        raise MalformedReply("it reported an error")
    if len(answer.choices) != 1:
        raise MalformedReply(f"its reply has {len(answer.choices)} choices")
    return OneToken(body, answer, prompt_ids)


def is_whole(request: GenerationRequest, finish_reason: str | None) -> bool:
    """Tells whether an answer that was to be continued elsewhere is over with its first token.

    A prefill leg says nothing of `min_tokens`. So an early end does not count where the client asks for a least number
    of tokens.
    """
    if request.max_tokens == 1:
        return finish_reason == OUT_OF_TOKENS or finish_reason in _ENDS
    return finish_reason in _ENDS and not any(_is_positive(request.value(name)) for name in _FEWEST)


def _read(body: bytes) -> tuple[PrefilledAnswer, msgspec.Raw | None]:
    """Returns what is looked at, and the prompt's ids or None. Raises `MalformedReply`.

    A long prompt's ids are nearly all of its reply. To read them one by one costs as much as all else that is done for
    the request. So they are cut out unread: the proxy trusts an engine's ids.
    """
    if len(body) > _SHORT_BYTES and (place := _place_of_ids(body)) is not None:
        answer = _decode(_answer, b"".join((body[: place.start], _ID_ELSEWHERE, body[place.stop :])))
        if _told_ids(answer) == _ID_ELSEWHERE:
            return answer, msgspec.Raw(memoryview(body)[place])
    answer = _decode(_answer, body)
    return answer, _told_ids(answer)


def _place_of_ids(body: bytes) -> slice | None:
    """Returns the place of the first array of numbers that follows this name; None where there is none.

    Within a text the quotes around the name would be escaped.
    """
    opens = body.find(_OPENS_IDS)
    start = opens + len(_OPENS_IDS) - 1
    stop = body.find(b"]", start) + 1
    is_name = opens > 0 and body[opens - 1 : opens] != _BACKSLASH
    return slice(start, stop) if is_name and stop and body[start + 1 : start + 2].isdigit() else None


def _told_ids(answer: PrefilledAnswer) -> msgspec.Raw | None:
    """Returns the prompt's ids. A completion tells them in its choice, a chat beside it."""
    in_choice = _none_for_null(answer.choices[0].prompt_token_ids) if answer.choices else None
    return in_choice or _none_for_null(answer.prompt_token_ids)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _decode(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedReply(f"its reply is not a one-token answer: {error}") from None


def _prompt_usage(usage: Usage | None) -> PromptUsage | None:
    if usage is None or usage.prompt_tokens is None:
        return None
    return PromptUsage(usage.prompt_tokens, _none_for_null(usage.prompt_tokens_details))


def _none_for_null(raw: msgspec.Raw) -> msgspec.Raw | None:
    return None if raw == NULL else raw
