"""The module holds the adapter of the built-in engine.

The prefiller pushes KV to the decoder's receivers, and the decoder continues from the handoff. Wire format:
``transfer.wire`` (`PushParams`, `Handoff`, `ResumeParams`, `BufferFacts`). The decoder's answer starts with the first
token.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdproxy.engines import model_cards
from pdproxy.engines.adapter import (
    AttemptInfo,
    DecodeLeg,
    MalformedReply,
    PrefillReply,
    ReleaseCall,
    ReleaseMode,
    Resumption,
)
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.kv_push import (
    BUFFER,
    HEALTH,
    SENDER_ENDED,
    cancelling,
    push_params,
    read_buffer,
    read_cancelled,
    receiver_ranks,
)
from pdproxy.engines.one_token import OUT_OF_TOKENS, OneToken, read_one_token
from pdproxy.engines.traits import EngineTraits, KvReady, ReleaseSignal
from pdproxy.openai.assembled import WholeShape
from pdproxy.openai.body import Fields
from pdproxy.openai.request import GenerationRequest, encode, prefill_fields, with_token_ids
from pdproxy.openai.response import BROKEN_FINISHES
from transfer.trust import AttemptKey
from transfer.wire import ResumeParams

PARAMS = "kv_transfer_params"
_HEAD, _END = ("id", "object", "created", "model", "choices", "usage"), ("logprobs", "finish_reason")
_SHAPE = WholeShape(
    completion=_HEAD,
    completion_choice=("index", "text", *_END),
    chat=_HEAD,
    chat_choice=("index", "message", *_END),
    message=("role", "content", "refusal"),
    usage=("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"),
)


class _Prompt(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


_prompt = msgspec.json.Decoder(_Prompt)


class BuiltinAdapter:
    """Implements `engines.adapter.Adapter`. A decoder drops KV that nobody has asked for after `lease_s` seconds.

    With an `attempt_key` every attempt is signed, and decoders with the same key can tell it from a stranger's.
    """

    name = "builtin"
    looks = (HEALTH, BUFFER, model_cards.PATH)

    def __init__(self, *, attempt_key: AttemptKey | None = None, lease_s: float = 60.0) -> None:
        self._attempt_key = attempt_key
        self.traits = EngineTraits(
            ready=KvReady.SIGNALS,
            page_owner="decode",
            freed=ReleaseSignal.SIGNALS,
            lease_s=lease_s,
            shows_first_token=True,
            streams_whole=_SHAPE,
            resumes=True,
            kv_lost_code="kv_transfer_failed",
            receiver_lost_code="kv_receiver_lost",
            stale_term_code="stale_term",
            term_path=BUFFER,
            peer_ended_path=SENDER_ENDED,
            changes_role=True,
        )

    def read_facts(self, answers: Mapping[str, bytes]) -> EngineInfo:
        return read_buffer(answers[BUFFER], answers[model_cards.PATH])

    def hands_over(self, request: GenerationRequest, prompt_ids: list[int] | None) -> bool:
        return True

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        return receiver_ranks(decoder)

    def leg_headers(self, request_id: str, attempt: str) -> Mapping[str, str]:
        return {}

    def prefill_body(self, request: GenerationRequest, info: AttemptInfo) -> bytes:
        fields = _prefill_fields(request)
        fields[PARAMS] = push_params(info, self._attempt_key, info.prompt_ids)
        return encode(fields)

    def one_token_body(self, request: GenerationRequest) -> bytes:
        return encode(_prefill_fields(request))

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
        """Reads the reply. Raises `MalformedReply` where it has neither a handoff nor an end.

        The engine respects `min_tokens` on this leg, so that an end is a real end. A reply without a handoff that
        merely ran into its single token would be a silently short answer.
        """
        reply = read_one_token(body)
        is_whole = reply.params is None
        if is_whole:
            _check_finished(request, reply.finish_reason)
        return PrefillReply(
            fields=_as_answer(reply) if is_whole or request.max_tokens == 1 else {},
            handoff=reply.params,
            is_whole=is_whole,
            usage=reply.usage,
            has_text=reply.has_text,
        )

    def decode_leg(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, with_ids: bool = False
    ) -> DecodeLeg:
        assert reply is not None
        assert reply.handoff is not None
        return DecodeLeg(encode(_decode_fields(request, with_ids) | {PARAMS: reply.handoff}))

    def local_body(
        self, request: GenerationRequest, resumption: Resumption | None = None, *, with_ids: bool = False
    ) -> bytes:
        fields = _decode_fields(request, with_ids)
        if resumption is None:
            return encode(fields)
        params = ResumeParams(prompt_token_ids=resumption.token_ids, num_answer_tokens=resumption.num_answer_tokens)
        return encode(fields | {PARAMS: msgspec.Raw(msgspec.json.encode(params))})

    def prompt_ids(self, reply: PrefillReply) -> list[int] | None:
        try:
            return None if reply.handoff is None else _prompt.decode(reply.handoff).prompt_token_ids
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def abandon(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, is_decode_sent: bool
    ) -> ReleaseCall | ReleaseMode:
        return cancelling(info)

    def read_errand(self, status: int, body: bytes) -> bool:
        return read_cancelled(status, body)


def _check_finished(request: GenerationRequest, reason: str | None) -> None:
    """Raises `MalformedReply` where the answer did not come to an end."""
    if reason is None or reason in BROKEN_FINISHES or (reason == OUT_OF_TOKENS and request.max_tokens != 1):
        raise MalformedReply(f"it neither finished the answer (finish_reason {reason!r}) nor handed it over")


def _as_answer(reply: OneToken) -> Fields:
    return {name: raw for name, raw in reply.fields.items() if name != PARAMS}


def _decode_fields(request: GenerationRequest, with_ids: bool) -> Fields:
    return with_token_ids(request.fields) if with_ids else request.fields


def _prefill_fields(request: GenerationRequest) -> Fields:
    """Returns the prefill leg's fields with `min_tokens`, which this engine respects there: the first token may not end
    the answer too early.
    """
    fields = prefill_fields(request.fields)
    if "min_tokens" in request.fields:
        fields["min_tokens"] = request.fields["min_tokens"]
    return fields
