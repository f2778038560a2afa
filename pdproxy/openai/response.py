"""The module looks at answers in OpenAI's shape. It tells whether a decoder's answer is good enough to be passed on,
and writes a prefiller's answer as a stream.

It does no I/O. An engine may say HTTP 200 and then nothing, or an error. So the first event that says anything is
looked at before the client sees a byte.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from pdproxy.openai.answer import Choice, Chunk, Explanation, Refusal
from pdproxy.openai.body import Fields
from pdproxy.openai.request import GenerationRequest, encode
from pdproxy.openai.sse import DONE, data_of, event, split

BROKEN_FINISHES: Final = frozenset({"error", "abort"})


class CorruptAnswer(Exception):
    """`CorruptAnswer` says that the engine answered with HTTP 200, but that its body is not an answer."""


_decoder: Final = msgspec.json.Decoder(Chunk)
_refusal: Final = msgspec.json.Decoder(Refusal)
_explanation: Final = msgspec.json.Decoder(Explanation)


def _read(data: bytes) -> Chunk:
    try:
        answer = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CorruptAnswer("its answer is not understood") from None
    if answer.error is not None:
        raise CorruptAnswer("it reported an error")
    return answer


def has_begun(events: bytes, *, needs_text: bool) -> bool:
    """Tells whether whole events from the start of a stream say anything yet. (A chat's role alone says nothing.)

    With `needs_text`, an answer that ends without any text is a corrupt one. Raises `CorruptAnswer`.
    """
    if events.find(b"data") < 0:  # comments and empty events, which cost nothing to send
        return False
    for raw_event in split(events):  # noqa: SIM110 (it must not look further, and compiled code might)
        if _says_something(raw_event, needs_text):
            return True
    return False


def _says_something(raw_event: bytes, needs_text: bool) -> bool:
    data = data_of(raw_event)
    if data is None:
        return False
    if data == b"[DONE]":
        raise CorruptAnswer("its answer is empty")
    for choice in _read(data).choices:  # noqa: SIM110
        if _choice_says_something(choice, needs_text):
            return True
    return False


def _choice_says_something(choice: Choice, needs_text: bool) -> bool:
    if choice.finish_reason in BROKEN_FINISHES:
        raise CorruptAnswer(f"its answer ended with {choice.finish_reason!r}")
    if choice.says_something:
        return True
    if choice.finish_reason is not None and needs_text:
        raise CorruptAnswer("its answer is empty")
    return choice.finish_reason is not None


def check_whole(body: bytes, *, needs_text: bool) -> None:
    """Checks an answer that is not streamed. Raises `CorruptAnswer` for a body that is no whole answer."""
    choices = _read(body).choices
    if not choices:
        raise CorruptAnswer("its answer is empty")
    for choice in choices:
        if choice.finish_reason is None:
            raise CorruptAnswer("its answer is empty")
    for choice in choices:
        _choice_says_something(choice, needs_text)


def error_code(body: bytes) -> str | None:
    """Returns the code of an answer that is an error object; None where it is not one, or where its code is no text."""
    try:
        code = _refusal.decode(body).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return code if isinstance(code, str) else None


def error_message(body: bytes) -> str:
    """Returns the message of an answer that is an error object; empty where it has none."""
    try:
        return _explanation.decode(body).error.message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def finish_reason(fields: Fields) -> str | None:
    """Returns the finish reason of a whole answer with one choice. Raises `CorruptAnswer` where the answer cannot be
    read.
    """
    return _read(encode(fields)).choices[0].finish_reason


def as_json(fields: Fields) -> bytes:
    """Returns a whole answer as the client gets it."""
    return encode(fields)


def as_stream(fields: Fields, request: GenerationRequest) -> bytes:
    """Returns a whole answer with one choice as the events that a streaming client would have seen."""
    answer = {name: msgspec.json.decode(raw) for name, raw in fields.items()}
    head = {
        "id": answer.get("id"),
        "object": "chat.completion.chunk" if request.is_chat else "text_completion",
        "created": answer.get("created") or int(time.time()),
        "model": answer.get("model"),
    }
    choice = answer["choices"][0]
    choices = _chat_chunks(choice) if request.is_chat else [_completion_chunk(choice)]
    choices[-1] |= {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
    chunks: list[dict[str, Any]] = [head | {"choices": [chunk]} for chunk in choices]
    if request.include_usage:
        chunks = [chunk | {"usage": None} for chunk in chunks]
        chunks.append(head | {"choices": [], "usage": answer.get("usage")})
    return b"".join(map(event, chunks)) + DONE


def _completion_chunk(choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": 0,
        "text": choice.get("text") or "",
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice.get("finish_reason"),
    }


def _chat_chunks(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the chunks of a chat's answer: the role, then everything the message has, then how it ended."""
    message = {name: value for name, value in (choice.get("message") or {}).items() if value is not None}
    role = message.pop("role", "assistant")
    if message.get("tool_calls"):
        message["tool_calls"] = [call | {"index": i} for i, call in enumerate(message["tool_calls"])]
    return [
        _chat_chunk({"role": role, "content": ""}),
        _chat_chunk(message, logprobs=choice.get("logprobs")),
        _chat_chunk({}, finish=choice.get("finish_reason")),
    ]


def _chat_chunk(delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
