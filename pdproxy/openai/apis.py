"""The module reads the bodies of the APIs beside OpenAI's completions: ``/v1/messages``, ``/v1/responses``, and those
which one instance answers as they are (``/tokenize``, ``/v1/embeddings`` and the like).

Of such a body only that is checked which the proxy goes by. The engine objects to the rest, in its own words. What
clients may not set is left out, as in any body (`request.allowed_fields`), and numbers that no engine can read are
refused. A violation would be a field of the client's that reaches an engine as ``kv_transfer_params``, or an engine
that is asked for more than the proxy has counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from pdproxy.errors import InvalidRequest
from pdproxy.ids import fresh_id
from pdproxy.openai.body import Fields, ModelName
from pdproxy.openai.numbers import check_numbers, may_overflow
from pdproxy.openai.priority import PriorityLimits, read_priority
from pdproxy.openai.request import (
    EQUALLY_URGENT,
    FALSE,
    MESSAGES,
    ONE,
    RESPONSES,
    GenerationRequest,
    PromptKind,
    allowed_fields,
    parse,
    parse_object,
    positive,
    read_field,
    refuse,
    required,
)
from pdproxy.openai.timeout import read_timeout

COUNT_TOKENS = "/v1/messages/count_tokens"
EMBEDDINGS = "/v1/embeddings"
PASSED: Mapping[str, str] = {
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    EMBEDDINGS: "embeddings",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/score": "score",
    "/v1/score": "score",
    "/pooling": "pooling",
    "/classify": "classify",
    COUNT_TOKENS: "count_tokens",
}
"""The paths whose bodies one instance answers as they are, each with the reason that metrics tell."""
UNREAD = frozenset({"/tokenize", "/detokenize", COUNT_TOKENS})
"""The passed paths at which no model reads anything."""
KEPT_RESPONSE = "kept_response"
"""The reason for a request that only the decoder can serve which has what it refers to."""

Parse = Callable[[str, bytes, Mapping[str, str], PriorityLimits], GenerationRequest]

_MARKED_ID = re.compile(r"resp_[0-9a-f]{32}([0-9a-f]{8})")
"""An id that the proxy has made: a random part, and the mark of the decoder that keeps the response."""
_MEDIA = re.compile(
    rb'"type"\s*:\s*"(?:image|document|input_image|input_file|input_audio|image_url|computer_screenshot)"'
)
_CLIENT_TOOLS = frozenset({"function", "custom", "namespace"})
"""The types of tools which the client runs (a namespace has more of them). All others are the engine's."""
_RESPONSE_ONLY_ONCE = ("request_id", "store", "background")


class _Messages(msgspec.Struct):
    """`_Messages` is what is looked at in a body of ``/v1/messages``."""

    model: ModelName | None = None
    stream: bool | None = None
    max_tokens: int | None = None


class _Tool(msgspec.Struct):
    type: str = "function"


class _Responses(msgspec.Struct):
    """`_Responses` is what is looked at in a body of ``/v1/responses``."""

    model: ModelName | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    tools: list[_Tool] | None = None


class _Passed(msgspec.Struct):
    model: ModelName | None = None
    stream: bool | None = None


_messages = msgspec.json.Decoder(_Messages)
_responses = msgspec.json.Decoder(_Responses)
_passed = msgspec.json.Decoder(_Passed)
_items = msgspec.json.Decoder(list[msgspec.Raw])
_text_or_items = msgspec.json.Decoder(str | list[msgspec.Raw])


def parser_of(endpoint: str) -> Parse:
    """Returns the function that reads the bodies of `endpoint`. It raises `InvalidRequest` naming the field."""
    if endpoint == MESSAGES:
        return parse_messages
    if endpoint == RESPONSES:
        return parse_responses
    return parse_passed if endpoint in PASSED else parse


def parse_messages(
    endpoint: str, body: bytes, headers: Mapping[str, str], priorities: PriorityLimits = EQUALLY_URGENT
) -> GenerationRequest:
    """Reads and checks a body of ``/v1/messages``. Raises `InvalidRequest`."""
    given = parse_object(body, is_ascii=body.isascii())
    options = read_field(_messages, body)
    messages = read_field(_items, required(given, "messages"), "messages")
    refuse(not messages, "messages", "messages is empty")
    max_tokens = positive(options.max_tokens, "max_tokens")
    if max_tokens is None:
        raise InvalidRequest("max_tokens is missing", param="max_tokens")
    return _request(
        endpoint,
        body,
        given,
        headers,
        priorities,
        model=options.model,
        stream=options.stream is True,
        max_tokens=max_tokens,
        num_messages=len(messages),
    )


def parse_responses(
    endpoint: str, body: bytes, headers: Mapping[str, str], priorities: PriorityLimits = EQUALLY_URGENT
) -> GenerationRequest:
    """Reads and checks a body of ``/v1/responses``. Raises `InvalidRequest`.

    One instance answers it as it is where that has to be the decoder which has the previous response, and where the
    answer is written in the background: no leg would be there to say when the KV was taken.
    """
    given = parse_object(body, is_ascii=body.isascii())
    options = read_field(_responses, body)
    items = read_field(_text_or_items, required(given, "input"), "input")
    refuse(not items, "input", "input is empty")
    previous = options.previous_response_id
    return _request(
        endpoint,
        body,
        given,
        headers,
        priorities,
        model=options.model,
        stream=options.stream is True,
        max_tokens=positive(options.max_output_tokens, "max_output_tokens"),
        num_messages=1 if isinstance(items, str) else len(items),
        is_passed=previous is not None or options.background is True,
        keeper=None if previous is None else keeper_in(previous),
        runs_tools=any(tool.type not in _CLIENT_TOOLS for tool in options.tools or ()),
    )


def parse_passed(
    endpoint: str, body: bytes, headers: Mapping[str, str], priorities: PriorityLimits = EQUALLY_URGENT
) -> GenerationRequest:
    """Reads a body that one instance answers as it is: its model, and that it is a JSON object. Raises
    `InvalidRequest`."""
    given = parse_object(body, is_ascii=body.isascii())
    options = read_field(_passed, body)
    return _request(
        endpoint,
        body,
        given,
        headers,
        priorities,
        model=options.model,
        stream=options.stream is True,
        max_tokens=None,
        num_messages=0,
        is_passed=True,
    )


def _request(
    endpoint: str,
    body: bytes,
    given: Fields,
    headers: Mapping[str, str],
    priorities: PriorityLimits,
    *,
    model: str | None,
    stream: bool,
    max_tokens: int | None,
    num_messages: int,
    is_passed: bool = False,
    keeper: str | None = None,
    runs_tools: bool = False,
) -> GenerationRequest:
    if may_overflow(body):
        check_numbers(given)
    return GenerationRequest(
        endpoint=endpoint,
        fields=allowed_fields(given),
        model=model,
        stream=stream,
        include_usage=True,
        n=1,
        max_tokens=max_tokens,
        prompt_kind=PromptKind.API,
        num_prompt_bytes=len(body),
        is_ascii=body.isascii() and body.find(b"\\") < 0,
        num_prompt_ids=None,
        num_messages=num_messages,
        num_sequences=1,
        has_media=_MEDIA.search(body) is not None,
        has_text_only=False,
        reads_prompt=False,
        has_stop=False,
        wants_token_ids=False,
        timeout_s=read_timeout(given, headers),
        priority=read_priority(given, headers, priorities),
        is_passed=is_passed,
        keeper=keeper,
        runs_tools=runs_tools,
    )


# ── legs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def api_prefill_fields(request: GenerationRequest) -> Fields:
    """Returns the prefill leg's fields: one token, not streamed, and nothing that the prefiller would keep. The rest
    stays as it came."""
    if request.endpoint == MESSAGES:
        return request.fields | {"max_tokens": ONE, "stream": FALSE}
    fields = {name: raw for name, raw in request.fields.items() if name not in _RESPONSE_ONLY_ONCE}
    return fields | {"max_output_tokens": ONE, "stream": FALSE, "store": FALSE}


def marked(request: GenerationRequest, mark: str) -> Fields:
    """Returns the fields with an id for the response from which the decoder that keeps it can be told later. An id of
    the client's own stays."""
    if "request_id" in request.fields:
        return request.fields
    return request.fields | {"request_id": msgspec.Raw(b'"resp_%b%b"' % (fresh_id().encode(), mark.encode()))}


def keeper_in(response_id: str) -> str:
    """Returns the mark of the decoder that keeps the response; empty where the id is none of the proxy's."""
    match = _MARKED_ID.fullmatch(response_id)
    return "" if match is None else match[1]
