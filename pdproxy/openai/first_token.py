"""The module puts an answer together whose first token the prefiller wrote and whose rest a decoder wrote.

The decoder took that token for a part of the prompt, but the client must see one answer. The module does no I/O. It
works for completions only, where a token is a piece of text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pdproxy.openai.body import Fields
from pdproxy.openai.request import GenerationRequest, encode
from pdproxy.openai.sse import data_of, event, split

_LISTS: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_IDS: Final = ("prompt_token_ids", "token_ids")
_COUNTS: Final = (b'"completion_tokens"', b'"text_offset"', b'"prompt_token_ids":[', b'"prompt_token_ids": [')
"""The names of fields that depend on where the answer starts, as they stand in an event. (In a text the names' quotes
would be escaped.)
"""


@dataclass(frozen=True, slots=True)
class Opening:
    """An `Opening` is the beginning of the client's answer, which the decoder's answer continues."""

    fields: Fields
    """The fields of a completion with one token."""
    num_tokens: int = 1

    @property
    def choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = msgspec.json.decode(self.fields["choices"])[0]
        return choice

    @property
    def text(self) -> str:
        return self.choice.get("text") or ""


def as_events(opening: Opening, events: bytes, request: GenerationRequest) -> bytes:
    """Returns the opening as one event, which goes before a stream's first `events` and has their head."""
    choice = opening.choice
    ours = {"index": 0, "text": choice.get("text") or "", "logprobs": choice.get("logprobs"), "finish_reason": None}
    ours |= {name: choice[name] for name in _IDS if name in choice}
    chunk = _first_chunk(events) | {"choices": [ours]}
    if request.include_usage:
        chunk["usage"] = None
    return event(chunk)


def with_opening(body: bytes, opening: Opening) -> bytes:
    """Returns a decoder's whole answer, with the opening before its text and counted in its usage."""
    answer = msgspec.json.decode(body, type=Fields)
    choices = msgspec.json.decode(answer["choices"])
    choices[0] = _joined(opening.choice, choices[0])
    answer["choices"] = msgspec.Raw(encode(choices))
    return _counted(encode(answer), opening)


def stream_with_opening_counted(events: bytes, opening: Opening) -> bytes:
    """Returns whole events which count tokens and characters from the opening's start.

    They are without the prompt's ids, which are told with the opening. Events that need no change stay as they are.
    """
    if not any(name in events for name in _COUNTS):
        return events
    return b"".join(_event_counted(raw, opening) for raw in split(events))


def _event_counted(raw_event: bytes, opening: Opening) -> bytes:
    data = data_of(raw_event)
    if data is None or not any(name in data for name in _COUNTS):
        return raw_event
    return b"data: " + _moved(_counted(data, opening), opening) + b"\n\n"


def _counted(body: bytes, opening: Opening) -> bytes:
    answer = msgspec.json.decode(body, type=Fields)
    usage = msgspec.json.decode(answer.get("usage", b"null"))
    if not isinstance(usage, dict) or not isinstance(usage.get("completion_tokens"), int):
        return body
    # For the decoder, the opening belonged to the prompt.
    usage["completion_tokens"] += opening.num_tokens
    if isinstance(usage.get("prompt_tokens"), int):
        usage["prompt_tokens"] -= opening.num_tokens
    return encode(answer | {"usage": msgspec.Raw(encode(usage))})


def _moved(body: bytes, opening: Opening) -> bytes:
    """Returns one event that comes after the opening: its texts begin there, and it tells no prompt ids."""
    chunk = msgspec.json.decode(body, type=Fields)
    choices = msgspec.json.decode(chunk.get("choices", b"[]"))
    told = [choice["logprobs"] for choice in choices if isinstance(choice.get("logprobs"), dict)]
    read = [choice for choice in choices if choice.get("prompt_token_ids")]
    if not read and not any(logprobs.get("text_offset") for logprobs in told):
        return body
    for logprobs in told:
        logprobs["text_offset"] = [offset + len(opening.text) for offset in logprobs.get("text_offset") or []]
    for choice in read:
        choice["prompt_token_ids"] = None
    return encode(chunk | {"choices": msgspec.Raw(encode(choices))})


def _first_chunk(events: bytes) -> dict[str, Any]:
    """Returns the fields of the first chunk that all chunks of its stream share: all but ``choices`` and ``usage``."""
    for raw_event in split(events):
        data = data_of(raw_event)
        if data is not None and data != b"[DONE]":
            chunk: dict[str, Any] = msgspec.json.decode(data, type=Fields)
            return {name: value for name, value in chunk.items() if name not in ("choices", "usage")}
    return {}


def _joined(first: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    text = first.get("text") or ""
    joined = rest | {"text": text + (rest.get("text") or "")}
    if "prompt_token_ids" in first:
        joined["prompt_token_ids"] = first["prompt_token_ids"]
    if isinstance(first.get("token_ids"), list) and isinstance(rest.get("token_ids"), list):
        joined["token_ids"] = first["token_ids"] + rest["token_ids"]
    if isinstance(first.get("logprobs"), dict) and isinstance(rest.get("logprobs"), dict):
        joined["logprobs"] = _joined_logprobs(first["logprobs"], rest["logprobs"], len(text))
    return joined


def _joined_logprobs(first: dict[str, Any], rest: dict[str, Any], num_characters: int) -> dict[str, Any]:
    """Joins the lists of both, one after the other. The text offsets of the rest count from the opening's start."""
    moved = rest | {"text_offset": [offset + num_characters for offset in rest.get("text_offset") or []]}
    return rest | {name: (first.get(name) or []) + (moved.get(name) or []) for name in _LISTS if name in rest}
