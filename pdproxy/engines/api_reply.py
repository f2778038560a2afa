"""The module reads what vLLM answers to a prefill leg of ``/v1/messages`` and ``/v1/responses``: a whole answer of at
most one token in the API's own form, with ``kv_transfer_params`` beside it.

That token is never shown. Where it ends the answer the decoder finds the same, and writes the answer in the form that
the client asked for. So nothing is translated. The word *seen* means: seen in the source of vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy.engines.adapter import MalformedReply, NoHandoff, PrefillReply
from pdproxy.openai.request import MESSAGES, GenerationRequest
from pdproxy.openai.usage import PromptUsage

_NULL = msgspec.Raw(b"null")
_CUT_OFF = frozenset({None, "max_tokens", "incomplete"})
"""The ends of an answer that was to go on: Anthropic's stop reason, or the status of a response."""


class _Usage(msgspec.Struct):
    """A `_Usage` is a prompt's part of a usage. In Anthropic's the three numbers add up to the prompt."""

    input_tokens: int = 0
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    input_tokens_details: msgspec.Raw = _NULL


class _Reply(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NULL
    stop_reason: str | None = None
    status: str | None = None
    usage: _Usage | None = None
    error: Any = None


_reply = msgspec.json.Decoder(_Reply)


def read_api_prefill(request: GenerationRequest, body: bytes) -> PrefillReply:
    """Reads the reply to a prefill leg. Its `handoff` is None where the first token has ended the answer. Raises
    `MalformedReply`; `NoHandoff` where the answer was to go on and no KV was kept."""
    try:
        reply = _reply.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReply(f"its reply is not understood: {error}") from None
    if reply.error is not None:
        raise MalformedReply("it reported an error")
    is_message = request.endpoint == MESSAGES
    end = reply.stop_reason if is_message else reply.status
    handoff = None if bytes(reply.kv_transfer_params) == b"null" else reply.kv_transfer_params
    if handoff is None and end in _CUT_OFF:
        raise NoHandoff(f"it kept no KV for the decoder ({'stop_reason' if is_message else 'status'} {end!r})")
    usage = None if reply.usage is None else _prompt_usage(reply.usage, is_message=is_message)
    return PrefillReply(fields={}, handoff=handoff, is_whole=False, usage=usage, has_text=False)


def _prompt_usage(usage: _Usage, *, is_message: bool) -> PromptUsage:
    """Returns the prompt's tokens, and the members of the client's usage that tell of them. Only the prefiller knows
    what it had cached."""
    if is_message:
        told = {
            "cache_read_input_tokens": usage.cache_read_input_tokens,
            "cache_creation_input_tokens": usage.cache_creation_input_tokens,
        }
        num_tokens = usage.input_tokens + sum(filter(None, told.values()))
        known: dict[str, Any] = {name: number for name, number in told.items() if number is not None}
    else:
        num_tokens = usage.input_tokens
        has_details = bytes(usage.input_tokens_details) != b"null"
        known = {"input_tokens_details": usage.input_tokens_details} if has_details else {}
    details = msgspec.json.encode({"input_tokens": usage.input_tokens} | known)
    return PromptUsage(num_tokens, msgspec.Raw(details))
