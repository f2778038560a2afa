"""The built-in engine: the prefiller pushes KV to the decoder's receivers, the decoder continues from the handoff.

Wire format: ``transfer.wire`` (`PushParams`, `Handoff`, `BufferFacts`). The decoder's answer starts with the first
token and carries right usage, so that it reaches the client as it is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy.engines.base import Call, MalformedReply, PrefillReply, Push
from pdproxy.openai import Fields, GenerationRequest, encode, prefill_fields
from transfer.wire import BufferFacts, PushParams

PARAMS = "kv_transfer_params"


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Cancelled(msgspec.Struct):
    released: bool


_fields = msgspec.json.Decoder(Fields)
_answer = msgspec.json.Decoder(_Answer)
_facts = msgspec.json.Decoder(BufferFacts)
_cancelled = msgspec.json.Decoder(_Cancelled)


class BuiltinAdapter:
    """Implements `engines.base.Adapter`."""

    name = "builtin"

    def ranks(self, decoder: BufferFacts) -> frozenset[int]:
        return frozenset(receiver.rank for receiver in decoder.receivers)

    def prefill_body(self, request: GenerationRequest, push: Push) -> bytes:
        params = PushParams(
            attempt=push.attempt,
            receivers=push.decoder.receivers,
            timeout_s=push.timeout_s,
            notify=push.notify,
            prompt_token_ids=push.prompt_ids,
        )
        return encode(prefill_fields(request.fields) | {PARAMS: msgspec.Raw(msgspec.json.encode(params))})

    def one_token_body(self, request: GenerationRequest) -> bytes:
        return encode(prefill_fields(request.fields))

    def decode_body(self, request: GenerationRequest, handoff: msgspec.Raw) -> bytes:
        return encode(request.fields | {PARAMS: handoff})

    def local_body(self, request: GenerationRequest) -> bytes:
        return encode(request.fields)

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
            prompt_tokens=answer.usage.prompt_tokens if answer.usage else None,
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


def _has_text(choice: _Choice) -> bool:
    message = choice.message or {}
    return bool(choice.text) or any(value for name, value in message.items() if name != "role")
