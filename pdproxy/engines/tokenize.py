"""The module asks an engine which tokens it makes of a prompt, with ``POST /tokenize``, and reads the answer.

vLLM, SGLang and the built-in engine have that endpoint. vLLM's takes fewer fields than its chat endpoint. So this
module puts into the template's variables what the chat endpoint puts there. Where something else may still make a
difference, the answer may be wrong. `is_certain` tells that.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy.engines.adapter import Call, MalformedReply
from pdproxy.errors import InvalidRequest
from pdproxy.openai.body import Fields
from pdproxy.openai.request import GenerationRequest, encode

PATH = "/tokenize"
_OF_TEXT = ("model", "add_special_tokens")
_OF_CHAT = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template",
)  # fmt: skip
_NULL = msgspec.Raw(b"null")
_UNSET = (b"null", b'"auto"', b"[]", b"{}", b'{"type":"text"}')
_KWARGS = "chat_template_kwargs"
_UNCERTAIN = ("response_format", "functions", "truncate_prompt_tokens", "suffix", "prompt_embeds")
"""The fields of which ``/tokenize`` knows nothing, though some model's prompt may depend on them."""


class _Tokens(msgspec.Struct):
    count: int
    tokens: msgspec.Raw = _NULL


_tokens = msgspec.json.Decoder(_Tokens)
_ids = msgspec.json.Decoder(list[int])


def tokenize_call(request: GenerationRequest) -> Call:
    """Returns the call that asks for the tokens of `request`'s prompt, which is a text or a chat. Raises
    `InvalidRequest`.
    """
    if not request.is_chat:
        fields = _given(request, _OF_TEXT) | {"prompt": msgspec.Raw(msgspec.json.encode(request.prompt_text))}
        return Call(PATH, encode(fields))
    return Call(PATH, encode(_given(request, _OF_CHAT) | _template_kwargs(request)))


def is_certain(request: GenerationRequest) -> bool:
    """Tells whether the answer must be what the engine makes of the request itself."""
    if any(_is_set(request, name) for name in _UNCERTAIN):
        return False
    if _is_set(request, "tools") and _is_set(request, "tool_choice"):
        return False
    # Older vLLMs do not turn thinking on or off by the effort.
    return not _is_set(request, "reasoning_effort") or "enable_thinking" in (_kwargs(request) or {})


def read_tokens(body: bytes, *, with_ids: bool) -> tuple[int, list[int] | None]:
    """Returns the number of tokens, and their ids if asked for, else None. Raises `MalformedReply`."""
    try:
        told = _tokens.decode(body)
        return told.count, _ids.decode(told.tokens) if with_ids else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReply(f"its {PATH} is not understood: {error}") from None


def _given(request: GenerationRequest, names: tuple[str, ...]) -> Fields:
    return {name: request.fields[name] for name in names if name in request.fields}


def _is_set(request: GenerationRequest, name: str) -> bool:
    return bytes(request.fields.get(name, _NULL)) not in _UNSET


def _kwargs(request: GenerationRequest) -> dict[str, Any] | None:
    """Returns the client's own variables for the template, or None. Raises `InvalidRequest`."""
    try:
        kwargs = request.value(_KWARGS)
    except RecursionError:
        raise InvalidRequest(f"{_KWARGS} is nested too deeply", param=_KWARGS) from None
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidRequest(f"{_KWARGS}: expected an object", param=_KWARGS)
    return kwargs


def _template_kwargs(request: GenerationRequest) -> Fields:
    """Returns the template's variables as vLLM's chat endpoint makes them: documents and effort beat the client's own
    values.
    """
    kwargs = _kwargs(request)
    own = {name: request.fields[name] for name in ("documents", "reasoning_effort") if _is_set(request, name)}
    if not own:
        return _given(request, (_KWARGS,))
    merged: dict[str, Any] = (kwargs or {}) | own
    if "reasoning_effort" in own:
        merged.setdefault("enable_thinking", bytes(own["reasoning_effort"]) != b'"none"')
    return {_KWARGS: msgspec.Raw(msgspec.json.encode(merged))}
