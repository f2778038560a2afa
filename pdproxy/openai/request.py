"""The module reads the client's request body, checks it by field name, and rewrites it for the legs. It never rebuilds
it.

The JSON object is kept as raw field values in their order, so that what is only passed on reaches the engines byte for
byte. That matters: the order of keys inside ``tools`` changes the rendered prompt, and with it the KV.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from pdproxy.errors import InvalidRequest
from pdproxy.openai import priority, timeout
from pdproxy.openai.body import (
    NULL,
    Fields,
    Message,
    Options,
    read_fields,
    read_messages,
    read_more,
    read_options,
    read_prompt,
    read_text_messages,
)
from pdproxy.openai.numbers import check_numbers, has_long_integer, may_overflow
from pdproxy.openai.priority import PriorityLimits, read_priority
from pdproxy.openai.timeout import read_timeout

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
"""Anthropic's generation endpoint, which vLLM serves as well."""

ONE: Final = msgspec.Raw(b"1")
TRUE: Final = msgspec.Raw(b"true")
FALSE: Final = msgspec.Raw(b"false")

TOKEN_IDS: Final = "return_token_ids"
"""vLLM's name for the option that puts ``token_ids`` into every choice."""
EQUALLY_URGENT: Final = PriorityLimits(least=0, most=0)

_OURS: Final = frozenset({priority.FIELD, timeout.FIELD})
_FORBIDDEN: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
_FORBIDDEN_PREFIX: Final = "bootstrap_"
_MORE: Final = "vllm_xargs"
"""The field whose members vLLM puts where its own arguments are. So a forbidden field must not be among them either."""
_PROMPTS: Final = frozenset({"prompt", "messages"})
_API_PROMPT: Final = {MESSAGES: "messages", RESPONSES: "input"}
"""The field of each API's body that has most of the prompt."""
_LEAST: Final = ("min_tokens", "min_completion_tokens")
_DROPPED_FROM_PREFILL: Final = frozenset({*_LEAST, "stream_options"})
_ONE_IN_PREFILL: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")
_SET_IN_PREFILL: Final = {"stream": FALSE} | dict.fromkeys(_ONE_IN_PREFILL, ONE)
_UNSET: Final = (b"null", b"false", b"[]", b'""')
_SHORT_BYTES: Final = 4096
"""The body length in bytes up to which reading a body twice takes almost no time."""
_DIGITS_AND_SPACES: Final = b"0123456789 \t\r\n"
_QUOTE: Final = ord('"')

T = TypeVar("T")


class PromptKind(enum.Enum):
    TEXT = "text"
    IDS = "ids"
    CHAT = "chat"
    BATCH = "batch"
    """The body has several prompts."""
    API = "api"
    """The prompt is in several fields, of which the engine makes one: ``/v1/messages``, ``/v1/responses``."""


_TEXT: Final = PromptKind.TEXT
_IDS: Final = PromptKind.IDS
_CHAT: Final = PromptKind.CHAT
_BATCH: Final = PromptKind.BATCH
_API: Final = PromptKind.API


class Prompt:
    """A `Prompt` says what kind of prompt a body has."""

    __slots__ = ("has_media", "has_text_only", "kind", "num_bytes", "num_ids", "num_messages", "num_prompts")

    def __init__(
        self,
        kind: PromptKind,
        num_bytes: int,
        *,
        num_prompts: int = 1,
        num_ids: int | None = None,
        num_messages: int = 0,
        has_media: bool = False,
        has_text_only: bool = True,
    ) -> None:
        self.kind = kind
        self.num_bytes = num_bytes
        self.num_prompts = num_prompts
        self.num_ids = num_ids
        self.num_messages = num_messages
        self.has_media = has_media
        self.has_text_only = has_text_only


@dataclass(slots=True, init=False)
class GenerationRequest:
    """A `GenerationRequest` is one validated body and what routing needs of it. Nobody changes it.

    `fields` are the client's, less those that clients may not set and those that the proxy keeps to itself. (Its
    ``__init__`` is written out, because the one that `dataclasses` makes is never compiled.)
    """

    endpoint: str
    fields: Fields
    model: str | None
    stream: bool
    include_usage: bool
    n: int
    """The number of answers wanted: the larger of ``n`` and ``best_of``."""
    max_tokens: int | None
    prompt_kind: PromptKind
    num_prompt_bytes: int
    """The number of bytes of the prompt's JSON, which is at least as long as the text it stands for."""
    is_ascii: bool
    """Tells that all of the body is ASCII without a backslash, so that no escape stands for another character."""
    num_prompt_ids: int | None
    """The number of the prompt's ids, where the client sent one prompt as ids; else None."""
    num_messages: int
    num_sequences: int
    """The number of answers to be written, for all prompts together."""
    has_media: bool
    """Tells that some content is not text, so that its tokens cannot be counted here."""
    has_text_only: bool
    """Tells that the prompt is a text, ids, or messages made of roles, names and text, without calls of tools or media.
    """
    reads_prompt: bool
    """Tells that the answer contains something of the prompt (``echo``, ``prompt_logprobs``), which a decoder never
    reads.
    """
    has_stop: bool
    wants_token_ids: bool
    timeout_s: float | None
    """The seconds which the client gives the whole request; None where it sets no limit."""
    priority: int
    """The priority within the operator's limits. A higher number goes first."""
    is_passed: bool
    """Tells that one instance answers the body as it is, without legs."""
    keeper: str | None
    """The mark of the decoder that has what the body refers to, and must be asked (``previous_response_id``)."""
    runs_tools: bool
    """Tells that the engine may run tools, and go on writing after each, within this one request."""

    def __init__(
        self,
        *,
        endpoint: str,
        fields: Fields,
        model: str | None,
        stream: bool,
        include_usage: bool,
        n: int,
        max_tokens: int | None,
        prompt_kind: PromptKind,
        num_prompt_bytes: int,
        is_ascii: bool,
        num_prompt_ids: int | None,
        num_messages: int,
        num_sequences: int,
        has_media: bool,
        has_text_only: bool,
        reads_prompt: bool,
        has_stop: bool,
        wants_token_ids: bool,
        timeout_s: float | None,
        priority: int,
        is_passed: bool = False,
        keeper: str | None = None,
        runs_tools: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.fields = fields
        self.model = model
        self.stream = stream
        self.include_usage = include_usage
        self.n = n
        self.max_tokens = max_tokens
        self.prompt_kind = prompt_kind
        self.num_prompt_bytes = num_prompt_bytes
        self.is_ascii = is_ascii
        self.num_prompt_ids = num_prompt_ids
        self.num_messages = num_messages
        self.num_sequences = num_sequences
        self.has_media = has_media
        self.has_text_only = has_text_only
        self.reads_prompt = reads_prompt
        self.has_stop = has_stop
        self.wants_token_ids = wants_token_ids
        self.timeout_s = timeout_s
        self.priority = priority
        self.is_passed = is_passed
        self.keeper = keeper
        self.runs_tools = runs_tools

    @property
    def num_prompts(self) -> int:
        return self.num_sequences // self.n

    @property
    def is_chat(self) -> bool:
        return self.prompt_kind is _CHAT

    @property
    def is_rendered(self) -> bool:
        """Tells whether the engine's chat template makes the prompt."""
        return self.prompt_kind is _CHAT or self.prompt_kind is _API

    @property
    def prompt_field(self) -> str:
        if self.prompt_kind is _CHAT:
            return "messages"
        return _API_PROMPT.get(self.endpoint, "prompt") if self.prompt_kind is _API else "prompt"

    def value(self, name: str) -> Any:
        """Returns the field as Python values; None where it is absent or null."""
        raw = self.fields.get(name)
        return None if raw is None else msgspec.json.decode(raw)

    @property
    def is_greedy(self) -> bool:
        """Tells whether every engine finds the same tokens, because the temperature is 0."""
        return bool(self.value("temperature") == 0)

    @property
    def prompt_ids(self) -> list[int] | None:
        """Returns the prompt's ids where the client sent ids, else None. Reads them anew each time."""
        if self.prompt_kind is not _IDS:
            return None
        prompt = self.value("prompt")
        return prompt[0] if isinstance(prompt[0], list) else prompt

    @property
    def prompt_text(self) -> str | None:
        """Returns the prompt where the client sent one text, else None. Reads it anew each time."""
        if self.prompt_kind is not _TEXT:
            return None
        prompt = self.value("prompt")
        return prompt[0] if isinstance(prompt, list) else prompt  # type: ignore[no-any-return]


def parse(
    endpoint: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    priorities: PriorityLimits = EQUALLY_URGENT,
) -> GenerationRequest:
    """Reads and checks a body. `headers` have lower-case names.

    Raises `InvalidRequest` naming the field or the header at fault.
    """
    headers = {} if headers is None else headers
    is_ascii = body.isascii()
    given = parse_object(body, is_ascii=is_ascii)
    options = _options_of(given, body)
    wants = options.stream_options
    refuse(wants is not None and not options.stream, "stream_options", "stream_options needs stream: true")
    prompt = _chat(required(given, "messages")) if endpoint == CHAT else prompt_of(required(given, "prompt"))
    n, best_of = positive(options.n, "n") or 1, positive(options.best_of, "best_of") or 1
    n = n if n > best_of else best_of
    return GenerationRequest(
        endpoint=endpoint,
        fields=allowed_fields(given),
        model=options.model,
        stream=options.stream is True,
        include_usage=wants is not None and wants.include_usage is True,
        n=n,
        max_tokens=_max_tokens(options),
        prompt_kind=prompt.kind,
        num_prompt_bytes=prompt.num_bytes,
        is_ascii=is_ascii and body.find(b"\\") < 0,
        num_prompt_ids=prompt.num_ids,
        num_messages=prompt.num_messages,
        num_sequences=n * prompt.num_prompts,
        has_media=prompt.has_media,
        has_text_only=prompt.has_text_only,
        reads_prompt=_is_set(options.echo) or _is_set(options.prompt_logprobs),
        has_stop=_is_set(options.stop),
        wants_token_ids=_is_set(options.return_token_ids),
        timeout_s=read_timeout(given, headers),
        priority=read_priority(given, headers, priorities),
    )


def prefill_fields(fields: Fields) -> Fields:
    """Returns the prefill leg's fields: one token, one answer, not streamed. Everything else stays as it came."""
    leg = {name: _SET_IN_PREFILL.get(name, raw) for name, raw in fields.items() if name not in _DROPPED_FROM_PREFILL}
    leg.setdefault("max_tokens", ONE)
    return leg


def one_token_fields(fields: Fields) -> Fields:
    """Returns the fields of a prefill leg without a decode leg. Its token is the answer, so the client's least number
    of tokens stays.
    """
    return prefill_fields(fields) | {name: fields[name] for name in _LEAST if name in fields}


def with_token_ids(fields: Fields) -> Fields:
    """Returns the fields of a leg whose answer says which tokens it is made of."""
    return fields | {TOKEN_IDS: TRUE}


def whole_body(request: GenerationRequest, *, with_ids: bool) -> bytes:
    """Returns the client's body for one engine that does all the work. `with_ids` asks for ids, as `with_token_ids`
    does.
    """
    return encode(with_token_ids(request.fields) if with_ids else request.fields)


def encode(fields: Fields | list[Any]) -> bytes:
    """Returns the JSON of an object, or of a list of them."""
    return msgspec.json.encode(fields)


# ── the object ──────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_object(body: bytes, *, is_ascii: bool) -> Fields:
    """Returns the fields unread. All of the body is JSON then, and its strings are valid UTF-8. Raises
    `InvalidRequest`.
    """
    try:
        if not is_ascii:
            body.decode()
        return read_fields.decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    except msgspec.ValidationError:
        raise InvalidRequest("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _options_of(given: Fields, body: bytes) -> Options:
    """Returns what is looked at besides the prompt. Engines can read every number outside the prompt then. Raises
    `InvalidRequest`.
    """
    rest = body if len(body) <= _SHORT_BYTES else _without_prompt(given)
    if may_overflow(rest):
        check_numbers({name: raw for name, raw in given.items() if name not in _PROMPTS})
    return read_field(read_options, rest)


def _without_prompt(given: Fields) -> bytes:
    """Returns the body without its prompt. A long body is long by its prompt, which need not be read once more."""
    return encode({name: raw for name, raw in given.items() if name not in _PROMPTS})


def allowed_fields(given: Fields) -> Fields:
    """Returns the fields that clients may set and engines are to see. Raises `InvalidRequest`."""
    fields = given
    for name in given:
        if name in _OURS or _is_forbidden(name):
            fields = {name: raw for name, raw in given.items() if name not in _OURS and not _is_forbidden(name)}
            break
    if _MORE in fields:
        more = read_field(read_more, fields[_MORE], _MORE)
        if more is not None and any(map(_is_forbidden, more)):
            rest = {name: raw for name, raw in more.items() if not _is_forbidden(name)}
            fields = fields | {_MORE: msgspec.Raw(encode(rest))}
    return fields


def _is_forbidden(name: str) -> bool:
    """Tells whether a stranger could use this field to read another request's KV or to kill an engine."""
    return name in _FORBIDDEN or name.startswith(_FORBIDDEN_PREFIX)


# ── its fields ──────────────────────────────────────────────────────────────────────────────────────────────────────


def read_field(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, param: str = "") -> T:
    """Returns what `decoder` makes of `raw`. Raises `InvalidRequest` naming what in `param`, or in the body, is
    wrong.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _wrong_type(error, param) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param or 'the body'} is not valid JSON: {error}", param=param or None) from None


def _wrong_type(error: msgspec.ValidationError, param: str) -> InvalidRequest:
    """Turns msgspec's ``Expected `str`, got `int` - at `$[0].role` `` into ``messages[0].role: …``."""
    text, _, path = str(error).partition(" - at ")
    inner = re.search(r"`\$([^`]*)`", path)
    where = (param + (inner.group(1) if inner else "")).lstrip(".")
    return InvalidRequest(f"{where}: {text[:1].lower()}{text[1:]}", param=where)


def required(fields: Fields, name: str) -> msgspec.Raw:
    raw = fields.get(name)
    if raw is None or raw == NULL:
        raise InvalidRequest(f"{name} is missing", param=name)
    return raw


def positive(number: int | None, name: str) -> int | None:
    if number is not None and number < 1:
        raise InvalidRequest(f"{name} must be at least 1", param=name)
    return number


def _max_tokens(options: Options) -> int | None:
    newer = positive(options.max_completion_tokens, "max_completion_tokens")
    older = positive(options.max_tokens, "max_tokens")
    return newer if newer is not None else older


def _is_set(raw: msgspec.Raw) -> bool:
    return raw is not NULL and bytes(raw) not in _UNSET


def refuse(condition: bool, param: str, message: str) -> None:
    if condition:
        raise InvalidRequest(message, param=param)


# ── its prompt ──────────────────────────────────────────────────────────────────────────────────────────────────────


def prompt_of(raw: msgspec.Raw) -> Prompt:
    """Returns the kind of a completion's prompt. The usual kinds are told by their bytes, without reading the JSON.

    Raises `InvalidRequest`.
    """
    view = memoryview(raw)
    num_bytes = len(view)
    if view[0] == _QUOTE:
        return Prompt(_TEXT, num_bytes)
    if num_ids := _count_ids(bytes(view)):
        return Prompt(_IDS, num_bytes, num_ids=num_ids)
    prompt: Any = read_field(read_prompt, raw, "prompt")
    refuse(not prompt, "prompt", "prompt is empty")
    kinds = {type(part) for part in prompt}
    refuse(len(kinds) > 1, "prompt", "prompt mixes text, ids and lists of ids")
    if kinds == {int}:
        return Prompt(_IDS, num_bytes, num_ids=len(prompt))
    if len(prompt) > 1:
        empty = prompt.index([]) if [] in prompt else None
        refuse(empty is not None, f"prompt[{empty}]", f"prompt[{empty}] is empty")
        return Prompt(_BATCH, num_bytes, num_prompts=len(prompt))
    refuse(prompt[0] == [], "prompt[0]", "prompt[0] is empty")
    return Prompt(_TEXT, num_bytes) if kinds == {str} else Prompt(_IDS, num_bytes, num_ids=len(prompt[0]))


def _count_ids(prompt: bytes) -> int:
    """Returns the number of ids in a JSON array of plain numbers, or in an array with such an array as its only item.

    Returns 0 where the commas alone do not show that it is one. (To read 128,000 ids takes ten times as long.)
    """
    commas = prompt.translate(None, _DIGITS_AND_SPACES)
    if commas.startswith(b"[[") and commas.endswith(b"]]"):
        commas = commas[1:-1]
    num_commas = len(commas) - 2
    is_flat = num_commas > 0 and commas.count(b",") == num_commas
    return num_commas + 1 if is_flat and not has_long_integer(prompt) else 0


def _chat(raw: msgspec.Raw) -> Prompt:
    num_bytes = len(memoryview(raw))
    try:  # most chats are text
        if num_texts := len(read_text_messages.decode(raw)):
            return Prompt(_CHAT, num_bytes, num_messages=num_texts)
    except msgspec.DecodeError:
        pass
    messages = read_field(read_messages, raw, "messages")
    refuse(not messages, "messages", "messages is empty")
    has_media = False
    for message in messages:
        has_media = has_media or (isinstance(message.content, list) and any(map(_is_media, message.content)))
    return Prompt(_CHAT, num_bytes, num_messages=len(messages), has_media=has_media, has_text_only=False)


def _is_media(part: Message.Part | str) -> bool:
    return isinstance(part, Message.Part) and part.type not in ("text", "refusal")
