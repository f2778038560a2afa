"""The built-in engine: the prefiller pushes KV to the decoder's receivers, the decoder continues from the handoff.

Wire format: ``transfer.wire`` (`PushParams`, `Handoff`, `ResumeParams`, `BufferFacts`). The decoder's answer starts
with the first token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy.engines.base import Call, MalformedReply, PrefillReply, Push, Resumption
from pdproxy.reply.seam import PromptUsage
from pdproxy.request.openai import Fields, GenerationRequest, encode, prefill_fields, with_token_ids
from transfer.wire import BufferFacts, PushParams, ResumeParams

PARAMS = "kv_transfer_params"


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    text: str | None = None
    message: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Prompt(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Cancelled(msgspec.Struct):
    released: bool


_fields = msgspec.json.Decoder(Fields)
_answer = msgspec.json.Decoder(_Answer)
_prompt = msgspec.json.Decoder(_Prompt)
_facts = msgspec.json.Decoder(BufferFacts)
_cancelled = msgspec.json.Decoder(_Cancelled)


class BuiltinAdapter:
    """Implements `engines.base.Adapter`."""

    name = "builtin"
    resumes = True

    def ranks(self, decoder: BufferFacts) -> frozenset[int]:
        return frozenset(receiver.rank for receiver in decoder.receivers)

    def prefill_body(self, request: GenerationRequest, push: Push) -> bytes:
        params = PushParams(
            attempt=push.attempt,
            receivers=push.decoder.receivers,
            timeout_s=push.timeout_s,
            notify=push.notify,
            prompt_token_ids=push.prompt_ids,
            num_answer_tokens=push.num_answer_tokens,
        )
        return encode(_prefill_fields(request) | {PARAMS: msgspec.Raw(msgspec.json.encode(params))})

    def one_token_body(self, request: GenerationRequest) -> bytes:
        return encode(_prefill_fields(request))

    def decode_body(self, request: GenerationRequest, handoff: msgspec.Raw, *, with_ids: bool = False) -> bytes:
        return encode(_decode_fields(request, with_ids) | {PARAMS: handoff})

    def local_body(
        self, request: GenerationRequest, resumption: Resumption | None = None, *, with_ids: bool = False
    ) -> bytes:
        fields = _decode_fields(request, with_ids)
        if resumption is None:
            return encode(fields)
        params = ResumeParams(prompt_token_ids=resumption.token_ids, num_answer_tokens=resumption.num_answer_tokens)
        return encode(fields | {PARAMS: msgspec.Raw(msgspec.json.encode(params))})

    def prompt_ids(self, handoff: msgspec.Raw) -> list[int] | None:
        try:
            return _prompt.decode(handoff).prompt_token_ids
        except msgspec.DecodeError:
            return None

    def read_prefill(self, body: bytes) -> PrefillReply:
        try:
            fields, answer = _fields.decode(body), _answer.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedReply(f"its reply is not a one-token answer: {error}") from None
        if len(answer.choices) != 1:
            raise MalformedReply(f"its reply has {len(answer.choices)} choices")
        handoff = fields.pop(PARAMS, None)
        return PrefillReply(
            fields=fields,
            handoff=None if handoff is None or bytes(handoff) == b"null" else handoff,
            usage=_prompt_usage(answer.usage),
            has_text=_has_text(answer.choices[0]),
        )

    def cancel_call(self, attempt: str) -> Call:
        return Call("/kv_transfer/cancel", msgspec.json.encode({"attempt": attempt}))

    def read_cancel(self, body: bytes) -> bool:
        try:
            return _cancelled.decode(body).released
        except msgspec.DecodeError as error:
            raise MalformedReply(f"its answer to a cancel is not understood: {error}") from None

    def read_facts(self, body: bytes) -> BufferFacts:
        try:
            return _facts.decode(body)
        except msgspec.DecodeError as error:
            raise MalformedReply(f"its /kv_buffer is not understood: {error}") from None


def _decode_fields(request: GenerationRequest, with_ids: bool) -> Fields:
    return with_token_ids(request.fields) if with_ids else request.fields


def _prompt_usage(usage: _Usage | None) -> PromptUsage | None:
    if usage is None or usage.prompt_tokens is None:
        return None
    details = usage.prompt_tokens_details
    return PromptUsage(usage.prompt_tokens, None if bytes(details) == b"null" else details)


def _prefill_fields(request: GenerationRequest) -> Fields:
    """With `min_tokens`, which this engine takes on a one-token leg: the first token may not end the answer either."""
    kept = {name: request.fields[name] for name in ("min_tokens",) if name in request.fields}
    return prefill_fields(request.fields) | kept


def _has_text(choice: _Choice) -> bool:
    message = choice.message or {}
    return bool(choice.text) or any(value for name, value in message.items() if name != "role")
