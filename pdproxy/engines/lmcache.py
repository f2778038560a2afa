"""The module holds the adapter of vLLM with LMCache's PD connector.

The prefiller pushes KV into the decoder's PD buffer, under names made of the tokens. The proxy tells the prefiller
where the decoder takes KV in (``disagg_spec``), waits for one ``ProxyNotif`` per rank and sends the decoder a plain
request. The decoder finds the KV by hashing the prompt, chunk by chunk. The last chunk may be short. Two consequences
decide everything here.

**Both legs must hash alike.** A decoder that was started with ``skip_last_n_tokens: 1``, as all of LMCache's examples
are, looks for the KV of all tokens but the last. So it finds the last page in two cases only: it gets one token more
than was prefilled (the prefiller's first token, as LMCache's example proxy does), or the prefiller got one less. A
decoder that was started without it looks for the whole prompt, and computes the last token once more. `first_token`
says how the decoders were started and which of the ways the proxy takes:

=============  ======================  ==================  ====================  ===========
first_token    skip_last_n_tokens      prefill leg         decode leg            first token
=============  ======================  ==================  ====================  ===========
``decoder``    none                    the request         the request           decoder's
``auto``       1                       less its last id    the request           decoder's
``prefiller``  1                       the prompt          with that token       prefiller's
=============  ======================  ==================  ====================  ===========

There are two exceptions. With ``prefiller`` the proxy does as with ``auto`` where it makes a difference to the answer
that the token came from the prompt's side. With ``auto`` it does as with ``prefiller`` where nobody knows the ids of a
text beforehand. Where neither way is possible, both legs get the request as it came. The answer is right then, but the
decoder reads the last chunk again, and the page pushed for that chunk stays in its buffer.

**A page is free when it has been read, and only then.** Nothing else ever drops it. So a one-token request for the same
prompt, whose answer nobody reads, takes out KV that nobody asks for any more.

Source: LMCache 0.5.6 (`pd_backend`, `pd_backend_async`, `vllm_v1_adapter`) and its example `disagg_proxy_server.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pdproxy.config.values import FirstToken, Role
from pdproxy.engines.adapter import (
    AttemptInfo,
    Call,
    DecodeLeg,
    MalformedReply,
    PrefillReply,
    ReleaseCall,
    ReleaseMode,
    Resumption,
)
from pdproxy.engines.info import EngineInfo, Receiver
from pdproxy.engines.model_cards import PATH as MODEL_CARDS
from pdproxy.engines.model_cards import read_model_cards
from pdproxy.engines.one_token import OneToken, is_whole, read_one_token
from pdproxy.engines.traits import ALL_ENDPOINTS, EngineTraits, KvReady, ReleaseSignal
from pdproxy.engines.vllm_answers import VLLM_SHAPE
from pdproxy.engines.vllm_metrics import VllmMetrics, read_metrics
from pdproxy.openai.body import Fields
from pdproxy.openai.first_token import Opening
from pdproxy.openai.request import (
    GenerationRequest,
    PromptKind,
    encode,
    one_token_fields,
    prefill_fields,
    with_token_ids,
)
from pdproxy.openai.usage import PromptUsage

PARAMS = "kv_transfer_params"
_PROMPT = "prompt"
WRITING_S = 5.0
"""The seconds for which a prefiller whose leg was closed may still write: to the end of the step it is in, and of the
transfer.
"""
READING_S = 1.0
"""The seconds for which a decoder whose leg was closed may still read."""
_HEALTH, _METRICS = "/health", "/metrics"
_USUAL_MAX_TOKENS = 16
"""The number of tokens that vLLM gives a completion where the client does not say."""
_NOT_TO_BE_SAVED = msgspec.Raw(b'{"lmcache.skip_save":true}')
"""The parameters of a prompt whose KV goes nowhere. LMCache's asynchronous prefiller dies of a prompt that it is to
save and has no receiver for.
"""
_BROKEN_CHARACTER = "\ufffd"

_INDIFFERENT = frozenset(
    {
        "model", "prompt", "max_tokens", "stream", "stream_options", "n", "best_of", "user", "priority", "request_id",
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids",
        "logprobs", "ignore_eos", "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
        "add_special_tokens", "return_token_ids", "return_tokens_as_token_ids", "include_stop_str_in_output",
    }
)  # fmt: skip
"""The fields of a completion which mean the same whether a token is the prompt's last or the answer's first.

Other fields do not: a seed, a stop string, a grammar, a penalty for what was said, or a length to be reached.
"""
_PROMPTS = frozenset({"model", "prompt", "add_special_tokens", "truncate_prompt_tokens"})
"""The fields of a completion which say what its prompt is."""
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})
"""The values with which any other field does nothing."""
_IDS = frozenset({"prompt_token_ids", "token_ids"})


class _Way(enum.Enum):
    """A `_Way` says what the two legs get of a prompt."""

    WHOLE = "both get the request as it came"
    SHORT = "the prefiller gets all but the last id"
    EXTENDED = "the decoder gets the prefiller's token as well"


@dataclass(frozen=True, slots=True)
class LMCacheBuffer:
    """An `LMCacheBuffer` is a decoder's PD buffer, as its operator knows it: no endpoint tells of it. Ports are in the
    order of the ranks.
    """

    host: str
    init_ports: tuple[int, ...]
    alloc_ports: tuple[int, ...]
    num_pages: int
    """The number of pages of each rank."""
    page_bytes: int
    chunk_size: int


class _Spec(msgspec.Struct, frozen=True):
    """A `_Spec` is ``disagg_spec``, in the order of LMCache's example."""

    req_id: str
    receiver_host: str
    receiver_init_port: list[int]
    receiver_alloc_port: list[int]


class _Params(msgspec.Struct, frozen=True, omit_defaults=True):
    """`_Params` are the ``kv_transfer_params`` of a prefill leg. Without `ret_first_tok` the reply has none, which
    shows that the way is `SHORT`.
    """

    ret_first_tok: bool = False
    disagg_spec: _Spec | None = None
    prompt_token_ids: list[int] | None = None
    """vLLM's name for the ids of a chat that is rendered and tokenized."""


class _Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """`_Told` is the ``kv_transfer_params`` of a prefill reply, and also this proxy's handoff, which never leaves the
    proxy.
    """

    first_tok: int | None = None
    prompt_token_ids: list[int] | None = None


_told = msgspec.json.Decoder(_Told | None)


class LMCacheAdapter:
    """Implements `engines.adapter.Adapter`. `buffer` is a decoder's, and None for a prefiller."""

    name = "lmcache"

    def __init__(
        self, role: Role, *, buffer: LMCacheBuffer | None, first_token: FirstToken = "auto", lease_s: float = 60.0
    ) -> None:
        self._role: Role = role
        self._buffer = buffer
        self._first_token = first_token
        self.traits = EngineTraits(
            ready=KvReady.SIGNALS,
            page_owner="decode",
            freed=ReleaseSignal.FIRST_EVENT,
            lease_s=lease_s,
            streams_whole=VLLM_SHAPE,
            endpoints=ALL_ENDPOINTS,
            prefiller_answers=False,  # a request that names no decoder ends it: its `transfer_spec` is None
        )

    # ── looking at it ──

    @property
    def looks(self) -> tuple[str, ...]:
        return (_HEALTH, MODEL_CARDS, _METRICS)

    def read_facts(self, answers: Mapping[str, bytes]) -> EngineInfo:
        cards = read_model_cards(answers[MODEL_CARDS])
        metrics = _metrics(answers[_METRICS])
        facts = EngineInfo(
            epoch=None if metrics is None else metrics.process_start,
            counts=() if metrics is None else metrics.counts,
            role=self._role,
            models=cards.names,
            cards=cards.cards,
            max_model_len=cards.max_model_len,
        )
        return facts if self._buffer is None else _with_buffer(facts, self._buffer)

    # ── the legs ──

    def hands_over(self, request: GenerationRequest, prompt_ids: list[int] | None) -> bool:
        """Tells whether a pair can serve the request without leaving pages behind.

        Where both legs would get the same prompt, and decoders do not look for all of it, its last page would stay in
        the PD buffer for ever. So would every page of a chat that the two legs render differently (a template may write
        the time). So a chat needs ids.
        """
        ids = _known_ids(request, prompt_ids)
        if request.is_chat and ids is None:
            return False
        return self._first_token == "decoder" or self._way(request, ids) is not _Way.WHOLE

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        """Returns the decoder's ranks. LMCache says only *that* a rank is ready; a prefiller that says which is
        understood, too (`kv_signals.board`).
        """
        return frozenset(receiver.rank for receiver in decoder.receivers)

    def leg_headers(self, request_id: str, attempt: str) -> Mapping[str, str]:
        """Returns vLLM's id of the request, under which LMCache keeps its ``disagg_spec``. It is never
        the same twice.
        """
        return {"x-request-id": f"{request_id}-{attempt}"}

    def prefill_body(self, request: GenerationRequest, info: AttemptInfo) -> bytes:
        ids = _known_ids(request, info.prompt_ids)
        way = self._way(request, ids)
        fields, spec = prefill_fields(request.fields), _spec(info)
        if way is _Way.SHORT and ids is not None:
            return encode(_shortened(fields, request, ids[:-1], spec))
        if way is _Way.EXTENDED:
            fields = with_token_ids(fields) if ids is None else fields | {_PROMPT: _raw(ids)}
        chat_ids = ids if request.is_chat else None
        return encode(fields | {PARAMS: _raw(_Params(ret_first_tok=True, disagg_spec=spec, prompt_token_ids=chat_ids))})

    def one_token_body(self, request: GenerationRequest) -> bytes:
        return encode(one_token_fields(request.fields) | {PARAMS: _NOT_TO_BE_SAVED})

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
        one = read_one_token(body)
        told = _read_told(one.fields.get(PARAMS))
        if told.first_tok is None and request.max_tokens != 1 and self._first_token != "decoder":
            # The prompt's last token was kept from it: what it made is nobody's, and its count is one short.
            return PrefillReply(
                fields=one.fields, handoff=_raw(told), is_whole=False, usage=_one_more(one.usage), has_text=False
            )
        return PrefillReply(
            fields=_as_asked(one, request),
            handoff=None if request.max_tokens == 1 else _raw(_Told(told.first_tok, _prompt_ids(one))),
            is_whole=is_whole(request, one.finish_reason),
            usage=one.usage,
            has_text=one.has_text and self._first_token == "decoder",  # else the decoder may not say it again
        )

    def decode_leg(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, with_ids: bool = False
    ) -> DecodeLeg:
        fields = with_token_ids(request.fields) if with_ids else request.fields
        ids = _known_ids(request, info.prompt_ids)
        way = self._way(request, ids)
        if way is _Way.EXTENDED and reply is not None:
            return _extended(fields, ids, reply) or DecodeLeg(encode(fields))
        if request.is_chat or way is _Way.SHORT:
            fields = fields | _ids_field(request, ids)
        return DecodeLeg(encode(fields))

    def local_body(
        self, request: GenerationRequest, resumption: Resumption | None = None, *, with_ids: bool = False
    ) -> bytes:
        if resumption is not None:
            raise ValueError("an answer that another engine began cannot be gone on with here")
        return encode(with_token_ids(request.fields) if with_ids else request.fields)

    def prompt_ids(self, reply: PrefillReply) -> list[int] | None:
        """Returns the ids that were prefilled; None for a prompt that was shortened, whose ids are not the client's."""
        return _read_told(reply.handoff).prompt_token_ids

    # ── an early end ──

    def abandon(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, is_decode_sent: bool
    ) -> ReleaseCall | ReleaseMode:
        """Returns a call which asks the decoder for one token of the same prompt. That takes the pages out of its
        buffer.

        The call must not come while the pages are being written. A page has its name from the moment it is allocated,
        and a page that is taken out then belongs to another request when the write arrives. Nor may it come while the
        closed leg may be reading them: LMCache does not bear that what it has just seen is gone. Perhaps nothing was
        pushed, because the prefiller had not begun yet, or the decoder has read it already. Then the call costs the
        decoder a prompt. But where something was pushed, nothing else frees it.
        """
        call = Call(request.endpoint, self._errand_body(request, info, reply))
        if is_decode_sent:
            return ReleaseCall("decode", call, self.traits.lease_s, delay_s=READING_S)
        return ReleaseCall("decode", call, self.traits.lease_s, delay_s=WRITING_S, or_ready=True)

    def read_errand(self, status: int, body: bytes) -> bool:
        return status == 200

    def _errand_body(self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None) -> bytes:
        """Returns the body of a request which finds every page and asks for no more, so that the decoder has no reason
        to refuse it.

        The decoder does not look for the last token of an `EXTENDED` prompt, so any token will do there.
        """
        ids = _known_ids(request, info.prompt_ids)
        way = self._way(request, ids)
        if way is _Way.EXTENDED and ids is None and reply is not None:
            ids = _read_told(reply.handoff).prompt_token_ids
        fields = {name: raw for name, raw in request.fields.items() if request.is_chat or name in _PROMPTS}
        if way is _Way.EXTENDED and ids is not None:
            fields |= {_PROMPT: _raw([*ids, 0])}
        elif request.is_chat or way is _Way.SHORT:
            fields |= _ids_field(request, ids)
        return encode(prefill_fields(fields))

    # ── which way ──

    def _way(self, request: GenerationRequest, ids: list[int] | None) -> _Way:
        if self._first_token == "decoder" or request.value("truncate_prompt_tokens") is not None:
            return _Way.WHOLE
        can_be_short = ids is not None and len(ids) > 1
        if _is_indifferent(request) and not (can_be_short and self._first_token == "auto"):
            return _Way.EXTENDED
        return _Way.SHORT if can_be_short else _Way.WHOLE


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _with_buffer(facts: EngineInfo, buffer: LMCacheBuffer) -> EngineInfo:
    ports = zip(buffer.init_ports, buffer.alloc_ports, strict=True)
    return replace(
        facts,
        num_pages=buffer.num_pages,
        chunk_size=buffer.chunk_size,
        page_bytes=buffer.page_bytes,
        receivers=tuple(
            Receiver(rank=rank, host=buffer.host, port=init, alloc_port=alloc)
            for rank, (init, alloc) in enumerate(ports)
        ),
    )


def _metrics(page: bytes) -> VllmMetrics | None:
    """Returns what tells processes apart; None where vLLM was started without its own metrics, which nothing else here
    needs.
    """
    try:
        return read_metrics(page)
    except MalformedReply:
        return None


def _read_told(raw: msgspec.Raw | None) -> _Told:
    try:
        return (None if raw is None else _told.decode(raw)) or _Told()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReply(f"its {PARAMS} are not understood: {error}") from None


def _prompt_ids(one: OneToken) -> list[int] | None:
    """Returns the prompt's ids. A completion tells them in its choice, a chat beside it."""
    ids: list[int] | None = one.choice.get("prompt_token_ids")
    if ids is None:
        ids = msgspec.json.decode(one.fields.get("prompt_token_ids", b"null"))
    return ids


def _as_asked(one: OneToken, request: GenerationRequest) -> Fields:
    """Returns the answer without ids that the client did not ask for."""
    fields = {name: raw for name, raw in one.fields.items() if name != PARAMS}
    if request.wants_token_ids or not _IDS & one.choice.keys():
        return fields
    choice = {name: value for name, value in one.choice.items() if name not in _IDS}
    return fields | {"choices": _raw([choice])}


def _one_more(usage: PromptUsage | None) -> PromptUsage | None:
    return None if usage is None else replace(usage, tokens=usage.tokens + 1)


def _is_unbroken(fields: Fields) -> bool:
    """Tells whether the first token is text by itself: no part of a character, and no token that shows only with the
    next one.
    """
    text = msgspec.json.decode(fields["choices"])[0].get("text")
    return bool(text) and _BROKEN_CHARACTER not in text


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _known_ids(request: GenerationRequest, prompt_ids: list[int] | None) -> list[int] | None:
    return prompt_ids if request.prompt_ids is None else request.prompt_ids


def _is_indifferent(request: GenerationRequest) -> bool:
    if request.prompt_kind not in (PromptKind.TEXT, PromptKind.IDS) or request.max_tokens == 1:
        return False
    return all(name in _INDIFFERENT or request.value(name) in _NEUTRAL for name in request.fields)


def _spec(info: AttemptInfo) -> _Spec:
    receivers = info.decoder.receivers
    return _Spec(
        req_id=info.attempt,
        receiver_host=receivers[0].host,
        receiver_init_port=[receiver.port for receiver in receivers],
        receiver_alloc_port=[receiver.alloc_port for receiver in receivers if receiver.alloc_port is not None],
    )


def _ids_field(request: GenerationRequest, ids: list[int] | None) -> Fields:
    """Returns the field that says which ids the prompt has. A chat keeps its messages, which vLLM does not look at
    then.
    """
    if ids is None:
        return {}
    return {PARAMS: _raw(_Params(prompt_token_ids=ids))} if request.is_chat else {_PROMPT: _raw(ids)}


def _shortened(fields: Fields, request: GenerationRequest, ids: list[int], spec: _Spec) -> Fields:
    """Returns the fields with a shorter prompt. A chat keeps its messages, which vLLM does not look at where it gets
    ids.
    """
    if request.is_chat:
        return fields | {PARAMS: _raw(_Params(disagg_spec=spec, prompt_token_ids=ids))}
    return fields | {_PROMPT: _raw(ids), PARAMS: _raw(_Params(disagg_spec=spec))}


def _extended(fields: Fields, ids: list[int] | None, reply: PrefillReply) -> DecodeLeg | None:
    """Returns the decode leg that continues after the prefiller's token; None where that token cannot be shown or
    continued.
    """
    told = _read_told(reply.handoff)
    ids = told.prompt_token_ids if ids is None else ids
    if ids is None or told.first_tok is None or not _is_unbroken(reply.fields):
        return None
    prompt = _raw([*ids, told.first_tok])
    return DecodeLeg(encode(fields | {_PROMPT: prompt, "max_tokens": _one_less(fields)}), Opening(reply.fields))


def _one_less(fields: Fields) -> msgspec.Raw:
    """Returns what is left of ``max_tokens``. Null means no limit, and stays null."""
    num_tokens = msgspec.json.decode(fields.get("max_tokens", b"%d" % _USUAL_MAX_TOKENS))
    return _raw(None if num_tokens is None else num_tokens - 1)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
