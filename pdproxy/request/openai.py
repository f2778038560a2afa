"""The client's request body: looked at, checked by field name, rewritten for the legs; never rebuilt.

The JSON object is kept as raw field values in their order, so that what is only passed on reaches the engines byte for
byte. That matters: the order of keys inside ``tools`` changes the rendered prompt, and with it the KV.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pdproxy.errors import InvalidRequest
from pdproxy.request import priority, timeout
from pdproxy.request.priority import PriorityLimits, read_priority
from pdproxy.request.timeout import read_timeout

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

Fields = dict[str, msgspec.Raw]

ONE = msgspec.Raw(b"1")
TRUE = msgspec.Raw(b"true")
FALSE = msgspec.Raw(b"false")

TOKEN_IDS = "return_token_ids"
"""vLLM's name for: put ``token_ids`` into every choice."""
EQUALLY_URGENT = PriorityLimits(least=0, most=0)

_OURS = frozenset({priority.FIELD, timeout.FIELD})
_FORBIDDEN = frozenset({"kv_transfer_params", "ec_transfer_params"})
_MORE = "vllm_xargs"
"""What is in it vLLM puts where its own arguments are, the forbidden ones among them."""
_LEAST = ("min_tokens", "min_completion_tokens")
_DROPPED_FROM_PREFILL = frozenset({*_LEAST, "stream_options"})
_ONE_IN_PREFILL = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")

_fields = msgspec.json.Decoder(Fields)
T = TypeVar("T")


class PromptKind(enum.Enum):
    TEXT = "text"
    IDS = "ids"
    CHAT = "chat"
    BATCH = "batch"
    """Several prompts in one body."""


class Message(msgspec.Struct):
    """What is checked of one chat message; `content` parts other than text make a request `has_media`."""

    class Part(msgspec.Struct):
        type: str = "text"

    role: str
    content: str | list[Part | str] | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One validated body and what routing needs of it.

    `fields` are the client's, less what clients may not set and what is for this proxy to keep.
    """

    endpoint: str
    fields: Fields
    model: str | None
    stream: bool
    include_usage: bool
    n: int
    """Answers wanted; the larger of ``n`` and ``best_of``."""
    max_tokens: int | None
    prompt_kind: PromptKind
    has_media: bool
    """Some content is not text, so that its tokens cannot be counted here."""
    reads_prompt: bool
    """The answer contains something of the prompt (``echo``, ``prompt_logprobs``), which a decoder never reads."""
    has_stop: bool
    wants_token_ids: bool
    timeout_s: float | None
    """What the client gives the whole request; None: as long as it takes."""
    priority: int
    """Within the operator's limits; higher goes first."""

    @property
    def is_chat(self) -> bool:
        return self.endpoint == CHAT

    @property
    def prompt_field(self) -> str:
        return "messages" if self.is_chat else "prompt"

    def value(self, name: str) -> Any:
        """The field as Python values; None where it is absent or null."""
        raw = self.fields.get(name)
        return None if raw is None else msgspec.json.decode(raw)

    @property
    def is_greedy(self) -> bool:
        """Whoever answers finds the same tokens."""
        return bool(self.value("temperature") == 0)

    @property
    def num_sequences(self) -> int:
        """Answers to be written, all prompts together."""
        return self.n * (len(self.value("prompt")) if self.prompt_kind is PromptKind.BATCH else 1)

    @property
    def prompt_ids(self) -> list[int] | None:
        """The prompt's ids where the client sent ids."""
        if self.prompt_kind is not PromptKind.IDS:
            return None
        prompt = self.value("prompt")
        return prompt[0] if isinstance(prompt[0], list) else prompt

    @property
    def prompt_text(self) -> str | None:
        """The prompt where the client sent text."""
        if self.prompt_kind is not PromptKind.TEXT:
            return None
        prompt = self.value("prompt")
        return prompt[0] if isinstance(prompt, list) else prompt  # type: ignore[no-any-return]


def parse(
    endpoint: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    priorities: PriorityLimits = EQUALLY_URGENT,
) -> GenerationRequest:
    """`headers` have lower-case names. Raises `InvalidRequest` naming the field, or the header."""
    headers = {} if headers is None else headers
    given = _parse_object(body)
    fields = _allowed({name: raw for name, raw in given.items() if name not in _OURS})
    stream = _optional(fields, "stream", bool) or False
    options = _optional(fields, "stream_options", StreamOptions)
    _refuse(options is not None and not stream, "stream_options", "stream_options needs stream: true")
    kind, has_media = _chat_kind(fields) if endpoint == CHAT else (_prompt_kind(fields), False)
    return GenerationRequest(
        endpoint=endpoint,
        fields=fields,
        model=_optional(fields, "model", str),
        stream=stream,
        include_usage=bool(options and options.include_usage),
        n=max(_count(fields, "n") or 1, _count(fields, "best_of") or 1),
        max_tokens=_max_tokens(fields),
        prompt_kind=kind,
        has_media=has_media,
        reads_prompt=_is_set(fields, "echo") or _is_set(fields, "prompt_logprobs"),
        has_stop=_is_set(fields, "stop"),
        wants_token_ids=_is_set(fields, TOKEN_IDS),
        timeout_s=read_timeout(given, headers),
        priority=read_priority(given, headers, priorities),
    )


def prefill_fields(fields: Fields) -> Fields:
    """The prefill leg's fields: one token, one answer, not streamed; everything else as it came."""
    leg: Fields = {}
    for name, raw in fields.items():
        if name in _DROPPED_FROM_PREFILL:
            continue
        leg[name] = ONE if name in _ONE_IN_PREFILL else FALSE if name == "stream" else raw
    leg.setdefault("max_tokens", ONE)
    return leg


def one_token_fields(fields: Fields) -> Fields:
    """Those of a prefill leg that nothing follows: its token is the answer, which may have to have one."""
    return prefill_fields(fields) | {name: fields[name] for name in _LEAST if name in fields}


def with_token_ids(fields: Fields) -> Fields:
    """The fields of a leg whose answer says which tokens it is made of."""
    return fields | {TOKEN_IDS: TRUE}


def whole_body(request: GenerationRequest, *, with_ids: bool) -> bytes:
    """The client's body for one engine that does all of it; `with_ids` as in `with_token_ids`."""
    return encode(with_token_ids(request.fields) if with_ids else request.fields)


def encode(fields: Fields) -> bytes:
    return msgspec.json.encode(fields)


def _allowed(fields: Fields) -> Fields:
    """What clients may set. Raises `InvalidRequest`."""
    more = _optional(fields, _MORE, Fields)
    allowed = {name: raw for name, raw in fields.items() if not _is_forbidden(name)}
    if more is not None and any(map(_is_forbidden, more)):
        allowed[_MORE] = msgspec.Raw(encode({name: raw for name, raw in more.items() if not _is_forbidden(name)}))
    return allowed


def _is_forbidden(name: str) -> bool:
    """Fields with which a stranger could read another request's KV or kill an engine."""
    return name in _FORBIDDEN or name.startswith("bootstrap_")


def _parse_object(body: bytes) -> Fields:
    try:
        if not body.isascii():
            body.decode()
        return _fields.decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    except msgspec.ValidationError:
        raise InvalidRequest("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _decode(raw: msgspec.Raw, type_: type[T] | Any, param: str) -> T:
    try:
        return msgspec.json.decode(raw, type=type_)
    except msgspec.ValidationError as error:
        raise _wrong_type(error, param) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from None


def _wrong_type(error: msgspec.ValidationError, param: str) -> InvalidRequest:
    """msgspec's ``Expected `str`, got `int` - at `$[0].role` `` as ``messages[0].role: …``."""
    text, _, path = str(error).partition(" - at ")
    inner = re.search(r"`\$([^`]*)`", path)
    where = param + (inner.group(1) if inner else "")
    return InvalidRequest(f"{where}: {text[:1].lower()}{text[1:]}", param=where)


def _optional(fields: Fields, name: str, type_: type[T]) -> T | None:
    raw = fields.get(name)
    return None if raw is None else _decode(raw, type_ | None, name)


def _count(fields: Fields, name: str) -> int | None:
    number = _optional(fields, name, int)
    _refuse(number is not None and number < 1, name, f"{name} must be at least 1")
    return number


def _max_tokens(fields: Fields) -> int | None:
    newer, older = _count(fields, "max_completion_tokens"), _count(fields, "max_tokens")
    return newer if newer is not None else older


def _is_set(fields: Fields, name: str) -> bool:
    raw = fields.get(name)
    return raw is not None and bytes(raw) not in (b"null", b"false", b"[]", b'""')


def _prompt_kind(fields: Fields) -> PromptKind:
    prompt: Any = _decode(_required(fields, "prompt"), str | list[int | str | list[int]], "prompt")
    if isinstance(prompt, str):
        return PromptKind.TEXT
    _refuse(not prompt, "prompt", "prompt is empty")
    kinds = {type(part) for part in prompt}
    _refuse(len(kinds) > 1, "prompt", "prompt mixes text, ids and lists of ids")
    if kinds == {int}:
        return PromptKind.IDS
    if len(prompt) > 1:
        return PromptKind.BATCH
    _refuse(prompt[0] == [], "prompt[0]", "prompt[0] is empty")
    return PromptKind.TEXT if kinds == {str} else PromptKind.IDS


def _chat_kind(fields: Fields) -> tuple[PromptKind, bool]:
    messages: list[Message] = _decode(_required(fields, "messages"), list[Message], "messages")
    _refuse(not messages, "messages", "messages is empty")
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    has_media = any(isinstance(part, Message.Part) and part.type not in ("text", "refusal") for part in parts)
    return PromptKind.CHAT, has_media


def _required(fields: Fields, name: str) -> msgspec.Raw:
    raw = fields.get(name)
    if raw is None or bytes(raw) == b"null":
        raise InvalidRequest(f"{name} is missing", param=name)
    return raw


def _refuse(condition: bool, param: str, message: str) -> None:
    if condition:
        raise InvalidRequest(message, param=param)
