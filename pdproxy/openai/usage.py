"""The module makes one answer of the work of several engines: one id, one role, one usage, and no field nobody asked
for.

It does no I/O. What need not change keeps its bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pdproxy.openai.answer import Counted, PromptCount
from pdproxy.openai.body import Fields
from pdproxy.openai.request import encode
from pdproxy.openai.sse import data_of, event, split

_IDS: Final = rb'"(?:prompt_)?token_ids":\s*(?:\[[0-9,\s]*\]|null)'
_TOKEN_IDS: Final = re.compile(rb",\s*" + _IDS + rb"|" + _IDS + rb",\s*")
_USUAL_START: Final = b',"token_ids":['
"""The bytes which nearly every piece has, once, because it has one event. Finding them is much faster than the
expression.
"""
ERROR_EVENT: Final = b'data: {"error"'
"""The bytes with which an event begins by which an engine ends a stream."""
PROMPT_TOKENS: Final = b'"prompt_tokens"'
"""The bytes that every event with a usage has."""


@dataclass(slots=True, init=False)
class PromptUsage:
    """`PromptUsage` is what a prefiller says of a prompt. Only the prefiller knows what it had cached."""

    tokens: int
    details: msgspec.Raw | None
    """The field ``prompt_tokens_details``, as it came."""

    def __init__(self, tokens: int, details: msgspec.Raw | None = None) -> None:
        self.tokens = tokens
        self.details = details


@dataclass(slots=True)
class Head:
    """A `Head` holds what all chunks of one stream share."""

    id: str | None
    created: int | None


_fields: Final = msgspec.json.Decoder(Fields)
_counted: Final = msgspec.json.Decoder(Counted)


def continued(events: bytes, head: Head) -> bytes:
    """Returns whole events rewritten so that they continue another stream: with the `head` of that stream, and without
    a second role.
    """
    return b"".join([_continued(raw, head) for raw in split(events)])


def _continued(raw_event: bytes, head: Head) -> bytes:
    data = data_of(raw_event)
    if data is None or data == b"[DONE]":
        return raw_event
    chunk: dict[str, Any] = dict(_fields.decode(data))
    if b'"role"' in data and "choices" in chunk:
        chunk["choices"] = _without_roles(chunk["choices"])
        if not chunk["choices"]:
            return b""
    same = {"id": head.id, "created": head.created}
    return event(chunk | {name: value for name, value in same.items() if name in chunk and value is not None})


def _without_roles(raw: msgspec.Raw) -> list[dict[str, Any]]:
    """Returns a chunk's choices without their roles. Leaves out the choices that said nothing but the role."""
    choices = []
    for choice in msgspec.json.decode(raw, type=list[dict[str, Any]]):
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        says_more = any(value for name, value in delta.items() if name != "role")
        if says_more or "role" not in delta or choice.get("finish_reason") or choice.get("token_ids"):
            choices.append(choice | ({"delta": {k: v for k, v in delta.items() if k != "role"}} if delta else {}))
    return choices


def without_token_ids(events: bytes) -> bytes:
    """Returns events as they would be if nobody had asked for ids. (In a text the name's quotes would be escaped.)"""
    num_names = events.count(b'token_ids"')
    if not num_names:
        return events
    start = events.find(_USUAL_START)
    if num_names > 1 or start < 0:
        return _TOKEN_IDS.sub(b"", events)
    return events[:start] + events[events.index(b"]", start) + 1 :]


def before_error(events: bytes) -> tuple[bytes, bytes]:
    """Splits whole events at the engine's own error event. Returns the events before it, and the events from there on.

    The second part is empty where there is no error event.
    """
    if events.find(ERROR_EVENT) < 0:
        return events, b""
    start = 0
    for raw_event in split(events):
        if raw_event.startswith(ERROR_EVENT):
            return events[:start], events[start:]
        start += len(raw_event)
    return events, b""


def is_clients_fault(error_events: bytes) -> bool:
    """Tells whether the error event says that nobody else could serve the request either."""
    data = data_of(split(error_events)[0]) or b""
    try:
        error = msgspec.json.decode(data).get("error")
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        return False
    if not isinstance(error, dict):
        return False
    code = error.get("code")
    is_4xx = isinstance(code, int) and 400 <= code < 500 and code != 429
    return is_4xx or error.get("type") == "invalid_request_error"


def error_reply(error_events: bytes) -> tuple[int, bytes] | None:
    """Returns the HTTP status and the body which the engine would have sent for this error before a stream.

    Returns None where the event tells no status.
    """
    data = data_of(split(error_events)[0]) or b""
    try:
        code = msgspec.json.decode(data)["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return None
    return (code, data) if isinstance(code, int) and 400 <= code < 600 else None


def with_prompt_usage(body: bytes, prompt: PromptUsage) -> bytes:
    """Returns `body` with the prompt's tokens as the prefiller counted them. `body` is a whole answer, or one event's
    data.
    """
    told = _counted.decode(body).usage
    if told is None or _says_the_same(told, prompt):
        return body
    fields = _fields.decode(body)
    usage = _fields.decode(fields["usage"])
    return encode(fields | {"usage": msgspec.Raw(encode(_merged(usage, prompt)))})


def stream_with_prompt_usage(events: bytes, prompt: PromptUsage) -> bytes:
    """Does the same as `with_prompt_usage` for whole events. Events without a usage stay as they are."""
    if events.find(PROMPT_TOKENS) < 0:
        return events
    return b"".join([_event_with_prompt_usage(raw, prompt) for raw in split(events)])


def usage_event(chunk: Fields, prompt: PromptUsage, num_answer_tokens: int) -> bytes:
    """Returns the usage chunk, as an event, of the stream that `chunk` belongs to."""
    head = {name: raw for name, raw in chunk.items() if name in ("id", "object", "created", "model")}
    answer = {"completion_tokens": msgspec.Raw(b"%d" % num_answer_tokens)}
    return event(head | {"choices": [], "usage": _merged(answer, prompt)})


def _event_with_prompt_usage(raw_event: bytes, prompt: PromptUsage) -> bytes:
    data = data_of(raw_event)
    if data is None or data.find(PROMPT_TOKENS) < 0:
        return raw_event
    merged = with_prompt_usage(data, prompt)
    return raw_event if merged is data else b"data: " + merged + b"\n\n"


def _says_the_same(told: PromptCount, prompt: PromptUsage) -> bool:
    if told.prompt_tokens != prompt.tokens:
        return False
    details = prompt.details
    return details is None or told.prompt_tokens_details == details or _is_same(told.prompt_tokens_details, details)


def _is_same(ours: msgspec.Raw, theirs: msgspec.Raw) -> bool:
    return bool(msgspec.json.decode(ours) == msgspec.json.decode(theirs))


def _merged(usage: Fields, prompt: PromptUsage) -> Fields:
    theirs = {"prompt_tokens": msgspec.Raw(b"%d" % prompt.tokens)}
    if prompt.details is not None:
        theirs["prompt_tokens_details"] = prompt.details
    num_answer = msgspec.json.decode(usage.get("completion_tokens", b"0"))
    total = msgspec.Raw(b"%d" % (prompt.tokens + (num_answer if isinstance(num_answer, int) else 0)))
    return usage | theirs | {"total_tokens": total}
