"""The module holds the shapes in which a request's body is read. They are msgspec's, and have a module of their own
because they cannot be compiled."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Fields = dict[str, msgspec.Raw]

MAX_MODEL_CHARS = 256
"""The most characters of a model's name, because it is logged, shown and echoed in errors."""
ModelName = Annotated[str, msgspec.Meta(max_length=MAX_MODEL_CHARS)]
TokenId = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

NULL = msgspec.Raw(b"null")


class Message(msgspec.Struct):
    """A `Message` is what is checked of one chat message. A `content` part other than text makes a request
    `has_media`.
    """

    class Part(msgspec.Struct):
        type: str = "text"

    role: str
    content: str | list[Part | str] | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class TextMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A `TextMessage` is a message that gives a chat template nothing but text."""

    role: str
    content: str | list[TextPart]
    name: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Options(msgspec.Struct):
    """`Options` are the fields that are looked at besides the prompt. A null field counts as absent."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    echo: msgspec.Raw = NULL
    prompt_logprobs: msgspec.Raw = NULL
    stop: msgspec.Raw = NULL
    return_token_ids: msgspec.Raw = NULL


read_fields = msgspec.json.Decoder(Fields)
read_more = msgspec.json.Decoder(Fields | None)
read_options = msgspec.json.Decoder(Options)
read_prompt = msgspec.json.Decoder(str | list[TokenId | str | list[TokenId]])
read_messages = msgspec.json.Decoder(list[Message])
read_text_messages = msgspec.json.Decoder(list[TextMessage])
