"""A dialect is the form of one API's answers: how an answer begins and ends, tells its usage, and says what went wrong.

The relay goes by the dialect of the client's request and knows no API by name. What it passes on keeps its bytes. A
violation would be an answer that ends without its API's last event and is taken for a whole one, or an error that the
API's own clients do not read as one. The module does no I/O.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdproxy.errors import EngineReply, ProxyError
from pdproxy.openai import response
from pdproxy.openai.answer import TypedEvent
from pdproxy.openai.body import Fields
from pdproxy.openai.request import MESSAGES, RESPONSES, encode
from pdproxy.openai.response import CorruptAnswer
from pdproxy.openai.sse import DATA_DONE, data_of, event, has_done, split
from pdproxy.openai.usage import (
    ERROR_EVENT,
    PROMPT_TOKENS,
    PromptUsage,
    before_error,
    error_reply,
    is_clients_fault,
    stream_with_prompt_usage,
    with_prompt_usage,
)

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The type that Anthropic's API has for errors of each status; all others are ``api_error``."""


class Dialect:
    """A `Dialect` is the form of answers of OpenAI's completions, and what those of other APIs have in its place."""

    done_mark: bytes = DATA_DONE
    """Bytes that the last event of a whole stream has."""
    error_mark: bytes = ERROR_EVENT
    """Bytes that every event has by which an engine ends a stream early."""
    usage_mark: bytes = PROMPT_TOKENS
    """Bytes that every event with a usage has."""
    token_mark: bytes = b""
    """Bytes that an event has once for each piece of the answer; empty where `TokenCount` finds out by itself."""

    def has_done(self, events: bytes) -> bool:
        """Tells whether the event that ends a stream is among these whole events."""
        return has_done(events)

    def has_begun(self, events: bytes, *, needs_text: bool) -> bool:
        """Tells whether whole events from a stream's start say anything of the answer yet. Raises `CorruptAnswer`."""
        return response.has_begun(events, needs_text=needs_text)

    def check_whole(self, body: bytes, *, needs_text: bool) -> None:
        """Checks an answer that is not streamed. Raises `CorruptAnswer` for a body that is no whole answer."""
        response.check_whole(body, needs_text=needs_text)

    def before_error(self, events: bytes) -> tuple[bytes, bytes]:
        """Splits whole events at the engine's own error event. The second part is empty where there is none."""
        return before_error(events)

    def is_clients_fault(self, error_events: bytes) -> bool:
        """Tells whether the error event says that nobody else could serve the request either."""
        return is_clients_fault(error_events)

    def error_reply(self, error_events: bytes) -> tuple[int, bytes] | None:
        """Returns the status and the body that the engine would have sent for this error before a stream; None where
        the event does not tell."""
        return error_reply(error_events)

    def with_prompt_usage(self, body: bytes, prompt: PromptUsage) -> bytes:
        """Returns a whole answer with the prompt's tokens as the prefiller counted them."""
        return with_prompt_usage(body, prompt)

    def stream_with_prompt_usage(self, events: bytes, prompt: PromptUsage) -> bytes:
        """Does the same as `with_prompt_usage` for whole events."""
        return stream_with_prompt_usage(events, prompt)

    def error_body(self, error: ProxyError) -> dict[str, Any]:
        """Returns the error object that a client of this API reads."""
        return error.body()

    def error_event(self, error: ProxyError) -> bytes:
        """Returns the event by which a stream under way ends early."""
        return event(self.error_body(error))

    def reply(self, reply: EngineReply) -> EngineReply:
        """Returns the engine's own refusal in the form of this API."""
        return reply


_typed: Final = msgspec.json.Decoder(TypedEvent)
_fields: Final = msgspec.json.Decoder(Fields)


class _TypedEvents(Dialect):
    """`_TypedEvents` are streams each of whose events tells its type, on a line of its own and in its data."""

    _last: frozenset[str]
    _first: frozenset[str]
    """The types of events that come before anything was written."""
    _errors: frozenset[str]

    def has_done(self, events: bytes) -> bool:
        if events.find(self.done_mark) < 0:
            return False
        return any(self._type(raw_event) in self._last for raw_event in split(events))

    def has_begun(self, events: bytes, *, needs_text: bool) -> bool:
        for raw_event in split(events):
            kind = self._type(raw_event)
            if kind is None:
                raise CorruptAnswer("its answer is not understood")
            if kind in self._errors:
                raise CorruptAnswer("it reported an error")
            if kind and kind not in self._first:
                return True
        return False

    def before_error(self, events: bytes) -> tuple[bytes, bytes]:
        start = 0
        for raw_event in split(events):
            if self._type(raw_event) in self._errors:
                return events[:start], events[start:]
            start += len(raw_event)
        return events, b""

    def stream_with_prompt_usage(self, events: bytes, prompt: PromptUsage) -> bytes:
        return b"".join([self._event_with_usage(raw_event, prompt) for raw_event in split(events)])

    def _event_with_usage(self, raw_event: bytes, prompt: PromptUsage) -> bytes:
        data = data_of(raw_event)
        if data is None or data.find(self.usage_mark) < 0:
            return raw_event
        counted = self._counted(data, prompt)
        return raw_event if counted is data else raw_event.replace(data, counted, 1)

    def _counted(self, data: bytes, prompt: PromptUsage) -> bytes:
        """Returns an event's data with the prompt's tokens as the prefiller counted them."""
        return data

    def _type(self, raw_event: bytes) -> str | None:
        """Returns the type of an event; empty for a comment, and None where it cannot be read. An event that is an
        error object and tells no type is an ``error``."""
        data = data_of(raw_event)
        if data is None or data == b"[DONE]":
            return ""
        try:
            told = _typed.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return told.type if told.type or bytes(told.error) == b"null" else "error"


class MessagesDialect(_TypedEvents):
    """A `MessagesDialect` is the form of ``/v1/messages``, which is Anthropic's."""

    done_mark = b"message_stop"
    error_mark = b'"error"'
    usage_mark = b'"input_tokens"'
    token_mark = b'"content_block_delta"'
    _last = frozenset({"message_stop"})
    _first = frozenset({"message_start", "ping"})
    _errors = frozenset({"error"})

    def check_whole(self, body: bytes, *, needs_text: bool) -> None:
        message = _read_object(body)
        if message.get("type") != "message" or not isinstance(message.get("content"), list):
            raise CorruptAnswer("its answer is no message")
        if message.get("stop_reason") is None:
            raise CorruptAnswer("its answer has no end")

    def with_prompt_usage(self, body: bytes, prompt: PromptUsage) -> bytes:
        return _with_usage(body, prompt)

    def _counted(self, data: bytes, prompt: PromptUsage) -> bytes:
        fields = _fields.decode(data)
        if "message" in fields:  # the first event, which has a message without its text
            return encode(fields | {"message": msgspec.Raw(_with_usage(bytes(fields["message"]), prompt))})
        return _with_usage(data, prompt)

    def error_body(self, error: ProxyError) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}

    def error_event(self, error: ProxyError) -> bytes:
        return b"event: error\n" + event(self.error_body(error))

    def is_clients_fault(self, error_events: bytes) -> bool:
        error = _error_in(error_events)
        return error.get("type") == "invalid_request_error"

    def error_reply(self, error_events: bytes) -> tuple[int, bytes] | None:
        return None

    def reply(self, reply: EngineReply) -> EngineReply:
        """Returns the refusal in Anthropic's form. An engine may write one in OpenAI's, where its server refuses a body
        before the API sees it."""
        refusal = _object_or_none(reply.content)
        error = None if refusal is None else refusal.get("error")
        if refusal is None or refusal.get("type") == "error" or not isinstance(error, dict):
            return reply
        kind = _ANTHROPIC_TYPES.get(reply.status, "api_error")
        body = {"type": "error", "error": {"type": kind, "message": str(error.get("message", ""))}}
        return EngineReply(reply.status, msgspec.json.encode(body), reply.content_type, reply.retry_after)


class ResponsesDialect(_TypedEvents):
    """A `ResponsesDialect` is the form of ``/v1/responses``."""

    done_mark = b"omplete"  # two types have that
    error_mark = b'"error"'
    usage_mark = b'"input_tokens"'
    token_mark = b'.delta"'
    _last = frozenset({"response.completed", "response.incomplete"})
    _first = frozenset({"response.created", "response.in_progress", "response.queued"})
    _errors = frozenset({"error", "response.failed"})

    def check_whole(self, body: bytes, *, needs_text: bool) -> None:
        answer = _read_object(body)
        if answer.get("object") != "response" or not isinstance(answer.get("output"), list):
            raise CorruptAnswer("its answer is no response")
        if answer.get("status") in (None, "failed", "in_progress"):
            raise CorruptAnswer(f"its answer has the status {answer.get('status')!r}")

    def with_prompt_usage(self, body: bytes, prompt: PromptUsage) -> bytes:
        return _with_usage(body, prompt)

    def _counted(self, data: bytes, prompt: PromptUsage) -> bytes:
        fields = _fields.decode(data)
        if "response" not in fields:
            return data
        return encode(fields | {"response": msgspec.Raw(_with_usage(bytes(fields["response"]), prompt))})

    def error_event(self, error: ProxyError) -> bytes:
        """Returns the event with the members that the API's events of this type have, and with the object that OpenAI's
        clients raise an error for."""
        body = {"type": "error", "code": error.code or error.type, "message": error.message, "param": error.param}
        return b"event: error\n" + event(body | {"sequence_number": 0} | error.body())

    def is_clients_fault(self, error_events: bytes) -> bool:
        error = _error_in(error_events)
        code = error.get("code")
        is_4xx = isinstance(code, int) and 400 <= code < 500 and code != 429
        return is_4xx or error.get("type") == "invalid_request_error"

    def error_reply(self, error_events: bytes) -> tuple[int, bytes] | None:
        return None


OPENAI: Final = Dialect()
_DIALECTS: Final[dict[str, Dialect]] = {
    MESSAGES: MessagesDialect(),
    f"{MESSAGES}/count_tokens": MessagesDialect(),
    RESPONSES: ResponsesDialect(),
}


def dialect_of(endpoint: str) -> Dialect:
    """Returns the dialect of the answers at `endpoint`."""
    return _DIALECTS.get(endpoint, OPENAI)


def _read_object(body: bytes) -> dict[str, Any]:
    answer = _object_or_none(body)
    if answer is None:
        raise CorruptAnswer("its answer is not understood")
    if answer.get("error") is not None:
        raise CorruptAnswer("it reported an error")
    return answer


def _object_or_none(body: bytes) -> dict[str, Any] | None:
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _error_in(error_events: bytes) -> dict[str, Any]:
    told = _object_or_none(data_of(split(error_events)[0]) or b"") or {}
    error = told.get("error")
    return error if isinstance(error, dict) else told


def _with_usage(body: bytes, prompt: PromptUsage) -> bytes:
    """Returns an object with the prompt's part of its ``usage`` as the prefiller told it, in `prompt.details`."""
    fields = _fields.decode(body)
    usage = fields.get("usage")
    if usage is None or bytes(usage) == b"null" or prompt.details is None:
        return body
    return encode(fields | {"usage": msgspec.Raw(encode(_fields.decode(usage) | _fields.decode(prompt.details)))})
