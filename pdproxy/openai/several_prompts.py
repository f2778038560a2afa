"""The module divides a completion's body of several prompts into one request for each, and makes one answer of theirs.

The answer is what an engine would have written that takes all prompts itself: one id, choices that are numbered through
all prompts, one usage. What need not change keeps its bytes. The module does no I/O.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from pdproxy.openai.body import Fields
from pdproxy.openai.request import GenerationRequest, prompt_of
from pdproxy.openai.response import CorruptAnswer
from pdproxy.openai.sse import DONE, data_of, event, split

_NULL = msgspec.Raw(b"null")

_fields = msgspec.json.Decoder(Fields)
_prompts = msgspec.json.Decoder(list[msgspec.Raw])
_choices = msgspec.json.Decoder(list[Fields] | None)
_usage = msgspec.json.Decoder(dict[str, Any] | None)


def prompts_of(request: GenerationRequest) -> list[msgspec.Raw]:
    """Returns the prompts of a body that has several, unread."""
    return _prompts.decode(request.fields["prompt"])


def with_prompt(request: GenerationRequest, raw: msgspec.Raw) -> GenerationRequest:
    """Returns the request for one of its prompts alone, to which one answer is wanted."""
    prompt = prompt_of(raw)
    return replace(
        request,
        fields=request.fields | {"prompt": raw},
        prompt_kind=prompt.kind,
        num_prompt_bytes=prompt.num_bytes,
        num_prompt_ids=prompt.num_ids,
        num_sequences=1,
    )


class JoinedAnswer:
    """A `JoinedAnswer` is the whole answer that several whole answers make, each with one choice.

    Mutable state: the answers so far, by the index of their prompt.
    """

    def __init__(self) -> None:
        self._answers: dict[int, tuple[Fields, list[Fields], dict[str, Any] | None]] = {}

    def add(self, body: bytes, index: int) -> None:
        """Takes the answer to prompt `index`. Raises `CorruptAnswer`, and takes nothing then."""
        try:
            fields = _fields.decode(body)
            choices = _choices.decode(fields["choices"]) or []
            usage = _usage.decode(fields.get("usage", _NULL))
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
            raise CorruptAnswer("its answer is not understood") from None
        self._answers[index] = fields, choices, usage

    def fields(self) -> Fields:
        """Returns the answer: the fields of the first, the choices and the usage of all."""
        choices = [
            choice | {"index": _raw(index)} for index in sorted(self._answers) for choice in self._answers[index][1]
        ]
        usages = [usage for _, _, usage in self._answers.values() if usage is not None]
        fields = self._answers[0][0] | {"choices": _raw(choices)}
        return fields | ({"usage": _raw(_sum(usages))} if usages else {})


class JoinedStream:
    """A `JoinedStream` is one stream that several streams make, each with one choice.

    Mutable state: the id and the time of creation that all events have, once one has come; the usage of each stream
    that told one, and the rest of the event that told the latest.
    """

    def __init__(self) -> None:
        self._head: Fields = {}
        self._usages: list[dict[str, Any]] = []
        self._usage_event: Fields = {}

    def take(self, events: bytes, index: int) -> bytes:
        """Returns whole events of the stream that answers prompt `index` as the client gets them, possibly none: its
        usage is kept for the end. Raises `CorruptAnswer`."""
        try:
            return b"".join([self._taken(raw_event, index) for raw_event in split(events)])
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise CorruptAnswer("an event of its answer cannot be read") from None

    def end(self) -> bytes:
        """Returns what comes after the last event of all streams: the usage of all, if any told one, and the end."""
        if not self._usages:
            return DONE
        return event(self._usage_event | self._head | {"usage": _sum(self._usages)}) + DONE

    def _taken(self, raw_event: bytes, index: int) -> bytes:
        data = data_of(raw_event)
        if data is None:
            return raw_event
        if data == b"[DONE]":
            return b""
        chunk = _fields.decode(data)
        # A copy: a raw value keeps the whole event in memory.
        self._head = self._head or {name: chunk[name].copy() for name in ("id", "created") if name in chunk}
        choices = _choices.decode(chunk.get("choices", _NULL))
        usage = None if choices else _usage.decode(chunk.get("usage", _NULL))
        if usage is not None:
            self._usages.append(usage)
            self._usage_event = {name: raw.copy() for name, raw in chunk.items()}
            return b""
        if choices:
            chunk["choices"] = _raw([choice | {"index": _raw(index)} for choice in choices])
        return event(chunk | self._head)


def _sum(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one usage for all: numbers are added up, in objects as well. Null says nothing."""
    total: dict[str, Any] = {}
    for usage in usages:
        for name, value in usage.items():
            before = total.get(name)
            if isinstance(before, int) and isinstance(value, int):
                total[name] = before + value
            elif isinstance(before, dict) and isinstance(value, dict):
                total[name] = _sum([before, value])
            elif before is None:
                total[name] = value
    return total


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
