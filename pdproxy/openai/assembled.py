"""The module puts a whole answer together from the events of a stream, as the engine itself would have written it.

A client that wants its answer whole is served from a stream all the same: its first event proves that the decoder has
the KV, and silence shows. Nothing is guessed. A thing that is not known to be the same in both forms raises
`NotAssembledError`. Then the answer has to be asked for as a whole. The module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pdproxy.openai.body import Fields
from pdproxy.openai.request import encode
from pdproxy.openai.response import BROKEN_FINISHES, CorruptAnswer
from pdproxy.openai.sse import data_of, split

_NULL = msgspec.Raw(b"null")
_WORDS_OF_A_DELTA = frozenset({"role", "content"})
_EMPTY = (b"null", b"[]", b'""', b"{}")
_LISTS = frozenset({"token_ids"})
"""The lists of a choice which grow event by event. All other fields of a choice are told once."""
_DETAILS = "completion_tokens_details"
"""The field which vLLM puts into the usage of a chat where it looks for reasoning in all chats. Its whole answers strip
what its streams do not strip.
"""

T = TypeVar("T")


class NotAssembledError(Exception):
    """`NotAssembledError` says that the stream holds something whose form in a whole answer nobody knows. The message
    names it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeShape:
    """A `WholeShape` names the fields that a kind's whole answers always have, in their order. A field that no event
    told is null.
    """

    completion: tuple[str, ...]
    completion_choice: tuple[str, ...]
    chat: tuple[str, ...]
    chat_choice: tuple[str, ...]
    message: tuple[str, ...]
    usage: tuple[str, ...]


class _PlainDelta(msgspec.Struct, forbid_unknown_fields=True):
    content: str


class _PlainChoice(msgspec.Struct, forbid_unknown_fields=True):
    index: int
    text: str | None = None
    delta: _PlainDelta | None = None
    logprobs: None = None
    finish_reason: None = None
    stop_reason: None = None
    token_ids: None = None
    prompt_token_ids: None = None


class _PlainChunk(msgspec.Struct, forbid_unknown_fields=True):
    """A `_PlainChunk` is an event that tells a text, and else only what all events of its stream tell. Nearly every
    event is one.
    """

    id: str
    created: int
    model: str
    choices: list[_PlainChoice]
    object: str = ""
    usage: None = None


_plain = msgspec.json.Decoder(_PlainChunk)
_fields = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])
_text = msgspec.json.Decoder(str | None)
_index = msgspec.json.Decoder(int)


class AssembledAnswer:
    """An `AssembledAnswer` is one answer, from its first event to its last, over all engines that write it.

    Mutable state: what was told of the whole answer, and of each choice by its index; how many bytes the events had.
    """

    __slots__ = ("_choices", "_fields", "_is_chat", "_limit_bytes", "_num_bytes", "_num_choices")

    def __init__(self, *, is_chat: bool, num_choices: int, limit_bytes: int) -> None:
        """Makes an answer of whose events at most `limit_bytes` are taken."""
        self._is_chat = is_chat
        self._num_choices = num_choices
        self._limit_bytes = limit_bytes
        self.clear()

    def clear(self) -> None:
        """Forgets everything, because the answer begins anew."""
        self._fields: Fields = {}
        self._choices: dict[int, _Choice] = {}
        self._num_bytes = 0

    @property
    def has_begun(self) -> bool:
        """Tells whether something of a choice is there."""
        return bool(self._choices)

    @property
    def num_bytes(self) -> int:
        """Returns the size of the events so far, in bytes. At most so much is kept."""
        return self._num_bytes

    def add(self, events: bytes) -> None:
        """Takes whole events. Raises `NotAssembledError`, and `CorruptAnswer` for what is no part of an answer."""
        self._num_bytes += len(events)
        if self._num_bytes > self._limit_bytes:
            raise CorruptAnswer(too_large(self._limit_bytes))
        if events.find(b"data") < 0:  # comments and empty events, which cost nothing to send
            return
        for raw_event in split(events):
            data = data_of(raw_event)
            if data is not None and data != b"[DONE]" and not self._add_plain(data):
                self._add_chunk(_read(_fields, data))

    def body(self, shape: WholeShape) -> bytes:
        """Returns the whole answer as JSON.

        Raises `CorruptAnswer` where a part of the answer is missing, and `NotAssembledError` where the stream told too
        little or too much.
        """
        choices = [self._choice(index).whole(shape) for index in range(self._num_choices)]
        if "usage" not in self._fields:
            raise NotAssembledError("its stream tells no usage")
        usage = _read(_fields, self._fields["usage"])
        if self._is_chat and usage.get(_DETAILS, _NULL) != _NULL:
            raise NotAssembledError("it looks for reasoning in its chats")
        known: Fields = self._fields | {
            "object": _raw("chat.completion" if self._is_chat else "text_completion"),
            "choices": _raw(choices),
            "usage": _raw(_shaped(usage, shape.usage)),
        }
        return encode(_shaped(known, shape.chat if self._is_chat else shape.completion))

    def _add_plain(self, data: bytes) -> bool:
        """Takes an event that only continues a text, for a fraction of the work of any other event.

        Returns False, and takes nothing, where it is another kind of event.
        """
        try:
            chunk = _plain.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        if len(chunk.choices) != 1:
            return False
        plain = chunk.choices[0]
        choice = self._choices.get(plain.index)
        delta = plain.delta
        text = plain.text if not self._is_chat else None if delta is None else delta.content
        if choice is None or text is None:
            return False
        choice.add_text(text)
        return True

    def _add_chunk(self, chunk: Fields) -> None:
        choices = chunk.pop("choices", None)
        _keep(self._fields, chunk)
        for fields in [] if choices is None else _read(_choices, choices):
            index = _read(_index, fields.pop("index", b"0"))
            choice = self._choices.get(index)
            if choice is None:
                if not 0 <= index < self._num_choices:
                    raise CorruptAnswer(f"its answer has a choice {index}, of {self._num_choices}")
                choice = self._choices[index] = _Choice(index, is_chat=self._is_chat)
            choice.add(fields)

    def _choice(self, index: int) -> _Choice:
        choice = self._choices.get(index)
        if choice is None or not choice.is_finished:
            raise CorruptAnswer("its answer broke off")
        return choice

    def __repr__(self) -> str:
        return f"<AssembledAnswer {len(self._choices)} of {self._num_choices} choices, {self._num_bytes} bytes>"


class _Choice:
    """A `_Choice` is one choice of the answer.

    Mutable state: its text piece by piece; who says it; its lists, each as the insides of the arrays that came; its
    log-probabilities, which are such lists or null; all else that was told, with its last value.
    """

    __slots__ = ("_fields", "_index", "_is_chat", "_lists", "_logprobs", "_role", "_texts")

    def __init__(self, index: int, *, is_chat: bool) -> None:
        self._index = index
        self._is_chat = is_chat
        self._texts: list[str] = []
        self._role = _raw("assistant")
        self._lists: dict[str, list[bytes]] = {}
        self._logprobs: dict[str, list[bytes] | None] | None = None
        self._fields: Fields = {}

    @property
    def is_finished(self) -> bool:
        return "finish_reason" in self._fields

    def add(self, fields: Fields) -> None:
        """Takes one event's choice. Raises the same errors as `AssembledAnswer.add`."""
        if self._is_chat:
            self._add_delta(fields.pop("delta", _NULL))
        else:
            self._add_text(fields.pop("text", _NULL))
        self._add_logprobs(fields.pop("logprobs", _NULL))
        for name in _LISTS & fields.keys():
            told = fields.pop(name)
            if told != _NULL:
                _extend(self._lists.setdefault(name, []), told)
        _keep(self._fields, fields)
        reason = self._fields.get("finish_reason")
        if reason is not None and _read(_text, reason) in BROKEN_FINISHES:
            raise CorruptAnswer(f"its answer ended with {bytes(reason).decode()}")

    def add_text(self, text: str) -> None:
        """Takes an event's text, piece by piece."""
        self._texts.append(text)

    def whole(self, shape: WholeShape) -> Fields:
        text = _raw("".join(self._texts) if self._texts else None)
        known: Fields = {"index": _raw(self._index)}
        if self._is_chat:
            known["message"] = _raw(_shaped({"role": self._role, "content": text}, shape.message))
        else:
            known["text"] = text
        if self._logprobs is not None:
            joined = {name: _NULL if told is None else _joined(told) for name, told in self._logprobs.items()}
            known["logprobs"] = _raw(joined)
        known |= {"logprobs": known.get("logprobs", _NULL), "finish_reason": self._fields["finish_reason"]}
        known |= {name: _joined(told) for name, told in self._lists.items()}
        return _shaped(known | self._fields, shape.chat_choice if self._is_chat else shape.completion_choice)

    def _add_delta(self, raw: msgspec.Raw) -> None:
        if raw == _NULL:
            return
        delta = _read(_fields, raw)
        for name in delta.keys() - _WORDS_OF_A_DELTA:
            if bytes(delta[name]) not in _EMPTY:
                raise NotAssembledError(f"its stream tells {name!r}")
        if delta.get("role", _NULL) != _NULL:
            self._role = delta["role"].copy()
        self._add_text(delta.get("content", _NULL))

    def _add_text(self, raw: msgspec.Raw) -> None:
        text = _read(_text, raw)
        if text is not None:
            self.add_text(text)

    def _add_logprobs(self, raw: msgspec.Raw) -> None:
        if raw == _NULL:
            return
        if self._logprobs is None:
            self._logprobs = {}
        for name, told in _read(_fields, raw).items():
            pieces = self._logprobs.setdefault(name, None)
            if told == _NULL:
                continue
            if pieces is None:
                pieces = self._logprobs[name] = []
            _extend(pieces, told)


def too_large(limit_bytes: int) -> str:
    """Returns what is wrong with a whole answer of more bytes than the option allows."""
    return f"its answer is larger than the {limit_bytes} bytes of --max-answer-bytes"


def _keep(fields: Fields, told: Fields) -> None:
    """Copies the fields that were told into `fields`, except nulls, which say nothing. An uncopied value would keep its
    whole event in memory.
    """
    for name, raw in told.items():
        if raw != _NULL:
            fields[name] = raw.copy()


def _extend(pieces: list[bytes], raw: msgspec.Raw) -> None:
    """Adds the inside of an array to `pieces`, the insides of earlier arrays. Raises `CorruptAnswer` for anything
    else.
    """
    array = bytes(raw)
    if not array.startswith(b"["):
        raise CorruptAnswer("its answer has something else where a list belongs")
    inside = array[1:-1].strip()
    if inside:
        pieces.append(inside)


def _joined(pieces: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def _shaped(known: Fields, names: tuple[str, ...]) -> Fields:
    """Returns the named fields in their order, null where they are not known, and after them the known fields without a
    name there.
    """
    return {name: known.get(name, _NULL) for name in names} | known


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _read(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CorruptAnswer("an event of its answer cannot be read") from None
