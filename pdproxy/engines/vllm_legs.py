"""The module holds the legs of vLLM, whichever connector carries its KV, and however that is told.

The prefill reply's ``kv_transfer_params`` are the connector's, and go to the decoder byte for byte. The ids that the
prefiller has read go along, so that the decoder need not tokenize again. The word *seen* below means: seen with vLLM
0.32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pdproxy.engines.adapter import Adapter, AttemptInfo, DecodeLeg, NoHandoff, PrefillReply, Resumption
from pdproxy.engines.api_reply import read_api_prefill
from pdproxy.engines.one_token import OneToken, is_whole, read_one_token
from pdproxy.openai.apis import api_prefill_fields
from pdproxy.openai.body import Fields
from pdproxy.openai.request import (
    TOKEN_IDS,
    TRUE,
    GenerationRequest,
    PromptKind,
    encode,
    one_token_fields,
    prefill_fields,
    whole_body,
    with_token_ids,
)

PARAMS: Final = "kv_transfer_params"
PROMPT_IDS: Final = "prompt_token_ids"

_NULL: Final = msgspec.Raw(b"null")
_IDS_FOLLOW: Final = b'"%s":' % PROMPT_IDS.encode()
_START_OF_IDS: Final = re.compile(rb"\[\s*[0-9]")
_NO_ENDS: Final = frozenset({"tool_calls", "function_call"})
"""The reasons which vLLM gives for any answer with a call in it, even for one that was cut off."""

_ids: Final = msgspec.json.Decoder(list[int])
_object: Final = msgspec.json.Decoder(Fields)
_choices: Final = msgspec.json.Decoder(list[Fields])


class VllmLegs(Adapter):
    """`VllmLegs` are the part of vLLM's adapters that does not depend on the connector."""

    def __init__(self, data_parallel_rank: int | None = None) -> None:
        """Makes the legs. `data_parallel_rank` is the only rank that this instance stands for."""
        self._rank = data_parallel_rank

    def hands_over(self, request: GenerationRequest, prompt_ids: list[int] | None) -> bool:
        return True

    def leg_headers(self, request_id: str, attempt: str) -> Mapping[str, str]:
        """Returns ``x-request-id``, from which vLLM makes its own ids, and the rank. The id is never the same for two
        attempts: by vLLM's ids its connectors tell requests apart.
        """
        headers = {"x-request-id": f"{request_id}-{attempt}"}
        return headers if self._rank is None else headers | {"x-data-parallel-rank": str(self._rank)}

    def prefill_body(self, request: GenerationRequest, info: AttemptInfo) -> bytes:
        if request.prompt_kind is PromptKind.API:
            return encode(api_prefill_fields(request) | {PARAMS: self.prefill_params(info)})
        fields = prefill_fields(request.fields)
        if _ids_can_follow(request):
            fields[TOKEN_IDS] = TRUE
        fields[PARAMS] = self.prefill_params(info)
        return encode(fields)

    def prefill_params(self, info: AttemptInfo) -> msgspec.Raw:
        """Returns the ``kv_transfer_params`` of a prefill leg. Each connector has its own."""
        raise NotImplementedError

    def one_token_body(self, request: GenerationRequest) -> bytes:
        return encode(one_token_fields(request.fields))

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
        if request.prompt_kind is PromptKind.API:
            return read_api_prefill(request, body)
        reply = read_one_token(body)
        may_end = request.max_tokens == 1 or reply.finish_reason not in _NO_ENDS
        is_all = may_end and is_whole(request, reply.finish_reason)
        if reply.params is None and not is_all:
            raise NoHandoff(f"it kept no KV for the decoder (finish_reason {reply.finish_reason!r})")
        return PrefillReply(
            fields=_as_asked(reply, request) if is_all or request.max_tokens == 1 else {},
            handoff=reply.params,
            is_whole=is_all,
            usage=reply.usage,
            has_text=reply.has_text,
            prompt_ids=reply.prompt_ids if _ids_can_follow(request) else None,
        )

    def decode_leg(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, with_ids: bool = False
    ) -> DecodeLeg:
        """Returns a leg whose prompt the decoder does not tokenize again.

        A chat's ids go inside the handoff, where vLLM reads them if all content is text. A text's ids replace the text.
        """
        fields = decode_fields(request, reply)
        return DecodeLeg(encode(with_token_ids(fields) if with_ids else fields))

    def local_body(
        self, request: GenerationRequest, resumption: Resumption | None = None, *, with_ids: bool = False
    ) -> bytes:
        return whole_body(request, with_ids=with_ids)

    def prompt_ids(self, reply: PrefillReply) -> list[int] | None:
        try:
            return None if reply.prompt_ids is None else _ids.decode(reply.prompt_ids)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


# ── ids, which vLLM is asked for so that the decoder need not tokenize again ────────────────────────────────────────


def _ids_can_follow(request: GenerationRequest) -> bool:
    """Tells whether the decoder can take the ids that the prefiller has read for the prompt itself."""
    if request.prompt_kind is PromptKind.CHAT:
        return not request.has_media
    if request.prompt_kind is not PromptKind.TEXT:
        return False
    # With one of these fields, ids are not the same prompt as the text which they were made of.
    return "suffix" not in request.fields and "prompt_embeds" not in request.fields


def decode_fields(request: GenerationRequest, reply: PrefillReply | None) -> Fields:
    """Returns the decode leg's fields: those of the request, with the handoff and the ids that the prefiller told."""
    assert reply is not None
    if reply.handoff is None and request.prompt_kind is PromptKind.API:
        return request.fields  # the first token was the last: the decoder says so in the API's own form
    assert reply.handoff is not None
    if reply.prompt_ids is None or not _are_ids(reply.prompt_ids):
        return request.fields | {PARAMS: reply.handoff}
    if request.prompt_kind is PromptKind.TEXT:
        return request.fields | {"prompt": reply.prompt_ids, PARAMS: reply.handoff}
    return request.fields | {PARAMS: _with_ids(reply.handoff, reply.prompt_ids)}


def _are_ids(raw: msgspec.Raw) -> bool:
    """Tells whether `raw` is an array that begins with a number. (The proxy trusts the engine for the rest: there may
    be 128,000 of them.)
    """
    return _START_OF_IDS.match(raw) is not None


def _with_ids(handoff: msgspec.Raw, ids: msgspec.Raw) -> msgspec.Raw:
    """Returns the handoff's own bytes with the ids added at the end; returns the handoff unchanged where that makes no
    sense.
    """
    try:
        params = _object.decode(handoff)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return handoff
    if PROMPT_IDS in params:
        return handoff
    comma = b"," if params else b""
    return msgspec.Raw(b"".join((memoryview(handoff)[:-1], comma, _IDS_FOLLOW, ids, b"}")))


def _as_asked(reply: OneToken, request: GenerationRequest) -> Fields:
    """Returns the answer as vLLM writes it where nobody asks for what only the proxy wants."""
    fields = {name: _NULL if name == PARAMS else raw for name, raw in reply.fields.items()}
    if request.wants_token_ids:
        return fields
    nulls: dict[str, Any] = dict.fromkeys((PROMPT_IDS, "token_ids"), _NULL)
    choices = [choice | _common(nulls, choice) for choice in _choices.decode(fields["choices"])]
    return fields | _common(nulls, fields) | {"choices": msgspec.Raw(msgspec.json.encode(choices))}


def _common(fields: Fields, other: Fields) -> Fields:
    return {name: raw for name, raw in fields.items() if name in other}
