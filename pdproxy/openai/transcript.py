"""The module keeps what a client has seen of a streamed answer, so that another decoder can continue where one has
died.

While all is well this costs one reference per piece: the events are kept as they came and read only when a decoder is
lost. Memory is bounded. A longer stream is not continued.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdproxy.openai.answer import Choice
from pdproxy.openai.body import Fields
from pdproxy.openai.sse import data_of, split


class NotReadableError(Exception):
    """`NotReadableError` says that the kept events do not tell the answer's tokens. The message says why."""


@dataclass(slots=True)
class Shown:
    """`Shown` is what one answer has shown so far. `id` and `created` are those of its first chunk."""

    id: str | None = None
    created: int | None = None
    first_chunk: Fields = field(default_factory=dict)
    answer_ids: list[int] = field(default_factory=list)
    """The ids of every token of the answer whose event the client has."""
    is_finished: bool = False
    """Tells that a finish reason was shown: only the usage and the end can be missing."""
    has_usage: bool = False
    is_done: bool = False


class _Choice(Choice):
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    created: int | None = None
    choices: list[_Choice] = []
    usage: Any = None


_chunk = msgspec.json.Decoder(_Chunk)


class Transcript:
    """A `Transcript` keeps a stream's events up to `limit_bytes`.

    Mutable state: the whole events, piece by piece; their size; whether they became too many to keep.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_over = False

    @property
    def num_bytes(self) -> int:
        """Returns the number of bytes shown so far, kept or not."""
        return self._num_bytes

    def add(self, events: bytes) -> None:
        """Takes whole events that the client gets, with ``token_ids`` in their choices."""
        self._num_bytes += len(events)
        if self._num_bytes <= self._limit_bytes:
            self._pieces.append(events)
        elif not self._is_over:
            self._is_over = True
            self._pieces.clear()

    def read(self) -> Shown:
        """Returns what was shown. Raises `NotReadableError`."""
        if self._is_over:
            raise NotReadableError(f"the answer is longer than the {self._limit_bytes} bytes that are kept of it")
        shown = Shown()
        for piece in self._pieces:
            for raw_event in split(piece):
                _read_event(shown, raw_event)
        return shown

    def __repr__(self) -> str:
        return f"<Transcript {self._num_bytes} bytes{', too long to keep' if self._is_over else ''}>"


def _read_event(shown: Shown, raw_event: bytes) -> None:
    data = data_of(raw_event)
    shown.is_done = shown.is_done or data == b"[DONE]"
    if data is None or data == b"[DONE]":
        return
    try:
        chunk = _chunk.decode(data)
        shown.first_chunk = shown.first_chunk or msgspec.json.decode(data, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise NotReadableError("an event of it is not understood") from None
    shown.id = shown.id if shown.id is not None else chunk.id
    shown.created = shown.created if shown.created is not None else chunk.created
    shown.has_usage = shown.has_usage or (chunk.usage is not None and not chunk.choices)
    for choice in chunk.choices:
        _read_choice(shown, choice)


def _read_choice(shown: Shown, choice: _Choice) -> None:
    if choice.token_ids is not None:
        shown.answer_ids += choice.token_ids
    elif choice.says_something:
        raise NotReadableError("the decoder did not say which tokens its text is made of")
    shown.is_finished = shown.is_finished or choice.finish_reason is not None
