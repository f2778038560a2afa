"""The module has the shapes in which answers are read: choices, usage, errors, and the cards of ``GET /v1/models``.

They are msgspec's, and have a module of their own because they cannot be compiled. A reader that looks at more makes a
subclass, or a struct of its own around these. The module does no I/O.
"""

from __future__ import annotations

from typing import Any

import msgspec

NULL = msgspec.Raw(b"null")
"""The bytes of a field that says nothing."""


class Choice(msgspec.Struct):
    """A `Choice` is one choice of a whole answer, or of one chunk of a stream."""

    text: str | None = None
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        """Returns the text of the completion or of the message, which may be empty."""
        parts = self.delta or self.message
        text = self.text if parts is None else parts.get("content")
        return text if isinstance(text, str) else ""

    @property
    def has_parts(self) -> bool:
        """Tells whether something of a message besides its role is there."""
        parts = self.delta or self.message or {}
        return any(value for name, value in parts.items() if name != "role")

    @property
    def says_something(self) -> bool:
        """Tells whether a text is there, or something of a message besides its role."""
        return bool(self.text) or self.has_parts


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """A `Usage` counts tokens. None stands for what was not told."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: msgspec.Raw = NULL

    @property
    def cached_tokens(self) -> int | None:
        """Returns how many tokens of the prompt the engine had cached, or None where it does not tell."""
        try:
            details = _details.decode(self.prompt_tokens_details)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return None if details is None else details.cached_tokens


class Chunk(msgspec.Struct):
    """A `Chunk` is a whole answer or one chunk of a stream, without its usage."""

    choices: list[Choice] = []
    error: Any = None


class CountedChunk(Chunk):
    """A `CountedChunk` is a `Chunk` with its usage."""

    usage: Usage | None = None


class PrefilledChoice(Choice):
    """A `PrefilledChoice` is the choice of an answer to a prefill leg."""

    prompt_token_ids: msgspec.Raw = NULL


class PrefilledAnswer(msgspec.Struct):
    """A `PrefilledAnswer` holds what is looked at in every answer to a prefill leg, in one reading."""

    choices: list[PrefilledChoice]
    usage: Usage | None = None
    error: Any = None
    kv_transfer_params: msgspec.Raw = NULL
    prompt_token_ids: msgspec.Raw = NULL


class PromptCount(msgspec.Struct):
    """A `PromptCount` is what is looked at in a usage before anything in it is changed."""

    prompt_tokens: Any = None
    prompt_tokens_details: msgspec.Raw = NULL


class Counted(msgspec.Struct):
    """A `Counted` is any answer, or one chunk of a stream, of which only the usage is looked at."""

    usage: PromptCount | None = None


class Refusal(msgspec.Struct):
    """A `Refusal` is an error object of which only the code is looked at."""

    class Error(msgspec.Struct):
        code: str | int | None = None

    error: Error


class Explanation(msgspec.Struct):
    """An `Explanation` is an error object of which only the message is looked at."""

    class Error(msgspec.Struct):
        message: str

    error: Error


class TypedEvent(msgspec.Struct):
    """A `TypedEvent` is what is looked at in any event of the APIs whose events tell their type."""

    type: str = ""
    error: msgspec.Raw = NULL


class ModelCard(msgspec.Struct):
    """A `ModelCard` is one name under which a model is served.

    `root` is the model's folder, and `parent` the model that an adapter belongs to.
    """

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[ModelCard]


_cards = msgspec.json.Decoder(_Cards)
_details = msgspec.json.Decoder(_Details | None)


def read_cards(body: bytes) -> list[ModelCard]:
    """Returns the cards of ``GET /v1/models``. Raises `msgspec.DecodeError` and `UnicodeDecodeError`."""
    return _cards.decode(body).data
