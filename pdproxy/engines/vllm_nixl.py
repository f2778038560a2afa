"""The module holds the adapter of vLLM with its NixlConnector.

The decoder pulls the KV out of the prefiller's own blocks, by what the prefiller's reply says. That reply's
``kv_transfer_params`` are opaque and go to the decoder byte for byte: with wrong ids the decoder answers with wrong
text, or dies. Blocks stay pinned at the prefiller until the decoder has told it that it has read them, or has no use
for them, or until their lease is over (``kv_lease_duration``). The word *seen* below means: seen with vLLM 0.32 and
NIXL 1.5.1 on a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pdproxy.config.values import Role
from pdproxy.engines import model_cards
from pdproxy.engines.adapter import (
    AttemptInfo,
    Call,
    DecodeLeg,
    MalformedReply,
    NoHandoff,
    PrefillReply,
    ReleaseCall,
    ReleaseMode,
    Resumption,
)
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.model_cards import read_model_cards
from pdproxy.engines.one_token import OneToken, is_whole, read_one_token
from pdproxy.engines.traits import EngineTraits, KvReady, ReleaseSignal
from pdproxy.engines.vllm_answers import VLLM_SHAPE
from pdproxy.engines.vllm_metrics import VllmMetrics, read_metrics
from pdproxy.openai.answer import read_cards
from pdproxy.openai.request import (
    TOKEN_IDS,
    TRUE,
    Fields,
    GenerationRequest,
    PromptKind,
    encode,
    one_token_fields,
    prefill_fields,
    whole_body,
    with_token_ids,
)

PARAMS = "kv_transfer_params"
PROMPT_IDS = "prompt_token_ids"
NOBODY = msgspec.Raw(b'"pdproxy-abandoned"')
"""The name of a model that no engine serves."""

_KEEP_KV = msgspec.Raw(b'{"do_remote_decode":true}')
_NULL = msgspec.Raw(b"null")
_IDS_FOLLOW = b'"%s":' % PROMPT_IDS.encode()
_START_OF_IDS = re.compile(rb"\[\s*[0-9]")
_HEALTH, _METRICS, _VERSION = "/health", "/metrics", "/version"
_REFUSALS_FREE = (0, 32)
"""The first version of vLLM with which a decoder that refuses a decode leg tells the prefiller so. (Some earlier
versions do so too, but die where they cannot reach the prefiller.)
"""
_NOT_WITH_IDS = frozenset({"suffix", "prompt_embeds"})
"""The fields with which a prompt as ids is not the same as the text which the ids were made of."""
_NO_ENDS = frozenset({"tool_calls", "function_call"})
"""The reasons which vLLM gives for any answer with a call in it, even for one that was cut off."""


class _Version(msgspec.Struct):
    version: str


_version = msgspec.json.Decoder(_Version)
_ids = msgspec.json.Decoder(list[int])
_object = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])


class VllmNixlAdapter:
    """Implements `engines.adapter.Adapter`."""

    name = "vllm_nixl"

    def __init__(self, role: Role, *, lease_s: float = 30.0, data_parallel_rank: int | None = None) -> None:
        """Makes the adapter. `lease_s` is vLLM's ``kv_lease_duration``, in seconds. `data_parallel_rank` is the only
        rank that this instance stands for.
        """
        self._role: Role = role
        self._rank = data_parallel_rank
        self.traits = EngineTraits(
            ready=KvReady.PREFILL_REPLY,
            page_owner="prefill",
            freed=ReleaseSignal.FIRST_EVENT,
            lease_s=lease_s,
            is_lease_strict=True,
            streams_whole=VLLM_SHAPE,
        )

    # ── looking at it ──

    @property
    def looks(self) -> tuple[str, ...]:
        return _HEALTH, _METRICS, model_cards.PATH, _VERSION

    def read_facts(self, answers: Mapping[str, bytes]) -> EngineInfo:
        """Reads the facts. The agreement is what enters vLLM's own compatibility hash and can be seen from outside.

        Two engines that differ in it refuse each other's KV (unless told not to check). Tensor parallelism and block
        size may differ.
        """
        metrics = read_metrics(answers[_METRICS], self._rank)
        cards = read_model_cards(answers[model_cards.PATH])
        return EngineInfo(
            epoch=metrics.process_start,
            models=cards.names,
            cards=cards.cards,
            agreement=_agreement(metrics, answers),
            num_pages=metrics.num_usable_blocks if self._role == "prefill" else 0,
            num_occupied=metrics.num_used_blocks if self._role == "prefill" else None,
            chunk_size=metrics.block_size,
            max_model_len=cards.max_model_len,
        )

    # ── the legs ──

    def hands_over(self, request: GenerationRequest, prompt_ids: list[int] | None) -> bool:
        return True

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        return frozenset()

    def leg_headers(self, request_id: str, attempt: str) -> Mapping[str, str]:
        """Returns ``x-request-id``, from which vLLM makes its own ids, and the rank. The id is never the same for two
        attempts.

        By vLLM's ids the decoder names the blocks to the prefiller.
        """
        headers = {"x-request-id": f"{request_id}-{attempt}"}
        return headers if self._rank is None else headers | {"x-data-parallel-rank": str(self._rank)}

    def prefill_body(self, request: GenerationRequest, info: AttemptInfo) -> bytes:
        fields = prefill_fields(request.fields)
        if _ids_can_follow(request):
            fields[TOKEN_IDS] = TRUE
        fields[PARAMS] = self._params(info)
        return encode(fields)

    def _params(self, info: AttemptInfo) -> msgspec.Raw:
        """Returns the ``kv_transfer_params`` of a prefill leg."""
        return _KEEP_KV

    def one_token_body(self, request: GenerationRequest) -> bytes:
        return encode(one_token_fields(request.fields))

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
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
        fields = _decode_fields(request, reply)
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

    # ── an early end ──

    def abandon(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, is_decode_sent: bool
    ) -> ReleaseCall | ReleaseMode:
        """Says how the blocks become free.

        Seen: a closed prefill leg frees its blocks within a second. A closed decode leg does so too once the decoder
        has it, whether it waits for its turn there, pulls or has pulled. Blocks that nobody asks for stay for the
        lease. To free these, the decoder is sent its leg with an unknown model, so that it refuses it. The decoder then
        tells the prefiller, seen to take 0.05 to 0.5 s even with all its own places taken, and moves nothing.

        (A prefiller that had just finished when its leg was closed keeps the blocks for the lease. Nobody can tell.)
        """
        if is_decode_sent or reply is None or reply.handoff is None:
            return ReleaseMode.FREE
        fields = prefill_fields(_decode_fields(request, reply))
        if _refusals_free(info.decoder):
            fields |= {"model": NOBODY}
        return ReleaseCall("decode", Call(request.endpoint, encode(fields)))

    def read_errand(self, status: int, body: bytes) -> bool:
        """Tells whether the blocks are free.

        404 means that the decoder refused as was asked for. 200 means that an older decoder, or one that looks at no
        model's name, has pulled the KV and answered with a token.
        """
        return status in (200, 404)


# ── facts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _agreement(metrics: VllmMetrics, answers: Mapping[str, bytes]) -> dict[str, str]:
    try:
        version = _version.decode(answers[_VERSION]).version
        roots = [card.root for card in read_cards(answers[model_cards.PATH]) if card.parent is None]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReply(f"its {_VERSION} or {model_cards.PATH} is not understood: {error}") from None
    known = {"vllm": version, "model": roots[0] if roots else None, "cache_dtype": metrics.labels.get("cache_dtype")}
    return {name: value for name, value in known.items() if value is not None}


def _refusals_free(decoder: EngineInfo) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", decoder.agreement.get("vllm", ""))
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _REFUSALS_FREE


# ── ids, which vLLM is asked for so that the decoder need not tokenize again ────────────────────────────────────────


def _ids_can_follow(request: GenerationRequest) -> bool:
    """Tells whether the decoder can take the ids that the prefiller has read for the prompt itself."""
    if request.prompt_kind is PromptKind.CHAT:
        return not request.has_media
    return request.prompt_kind is PromptKind.TEXT and _NOT_WITH_IDS.isdisjoint(request.fields)


def _decode_fields(request: GenerationRequest, reply: PrefillReply | None) -> Fields:
    assert reply is not None
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
