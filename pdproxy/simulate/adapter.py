"""The module shows simulated engines to the proxy: they hand KV over as the built-in ones do, and say as little as
possible.

A request travels in a few bytes instead of as JSON with a whole prompt, because no engine here reads the prompt. But
what depends on an adapter (whose memory holds the KV, which signals come, what frees it) is as for the built-in engine.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdproxy.admission.room import UNKNOWN_CACHE, KvCache
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
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
from pdproxy.engines.traits import EngineTraits, KvReady, ReleaseSignal
from pdproxy.openai.body import Fields
from pdproxy.openai.request import GenerationRequest
from pdproxy.openai.usage import PromptUsage
from pdproxy.simulate.messages import CANCEL, FACTS, CancelAsk, DecodeAsk, PrefillAsk, Told, encode, told

MODEL = "simulated"
LEASE_S = 60.0
GROUP, NUM_SHARED = "group", "num_shared"
"""The fields of a request whose prompt begins like others."""
_HANDOFF = msgspec.Raw(b"1")
_ANSWER: Fields = msgspec.json.decode(
    b'{"id":"cmpl-0","object":"text_completion","created":1,"model":"simulated","choices":[{"index":0,"text":"a",'
    b'"logprobs":null,"finish_reason":"length"}]}',
    type=Fields,
)
"""The reply to a request for one token."""


def make_adapter(one: InstanceSettings, settings: Settings) -> SimulatedAdapter:
    """Returns the adapter for an instance; it is an `assemble.MakeAdapter`."""
    return SimulatedAdapter(lease_s=settings.engine_lease_s or LEASE_S)


class SimulatedAdapter:
    """SimulatedAdapter speaks for simulated engines. It implements `engines.adapter.Adapter`."""

    name = "simulated"
    looks = (FACTS,)

    def __init__(self, *, lease_s: float) -> None:
        self.traits = EngineTraits(
            ready=KvReady.SIGNALS,
            page_owner="decode",
            freed=ReleaseSignal.SIGNALS,
            lease_s=lease_s,
            shows_first_token=True,
            resumes=True,
            changes_role=True,
        )

    def read_facts(self, answers: Mapping[str, bytes]) -> EngineInfo:
        word = told.decode(answers[FACTS])
        is_decoder = word.role == "decode"
        return EngineInfo(
            epoch=word.epoch,
            role=None if word.is_both else word.role,
            models=frozenset((MODEL,)),
            num_pages=word.num_pages if is_decoder else 0,
            num_occupied=word.num_occupied if is_decoder else None,
            cache=_cache(word),
            chunk_size=word.chunk_size,
            receivers=(Receiver(rank=0, host=word.name, port=1),) if is_decoder else (),
        )

    def hands_over(self, request: GenerationRequest, prompt_ids: list[int] | None) -> bool:
        return True

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        return _ONE_RANK

    def leg_headers(self, request_id: str, attempt: str) -> Mapping[str, str]:
        return _NO_HEADERS

    def prefill_body(self, request: GenerationRequest, info: AttemptInfo) -> bytes:
        decoder = info.decoder
        name, epoch = decoder.receivers[0].host, decoder.epoch or ""
        ask = PrefillAsk(info.attempt, name, epoch, _num_prompt_tokens(request))
        if info.num_answer_tokens:
            ask.num_answer_tokens = info.num_answer_tokens
            ask.num_tokens += info.num_answer_tokens
        return _encoded(ask, request)

    def one_token_body(self, request: GenerationRequest) -> bytes:
        return _encoded(PrefillAsk("", "", "", _num_prompt_tokens(request)), request)

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
        num_tokens = int(body)
        is_whole = request.max_tokens == 1
        return PrefillReply(
            fields=_ANSWER if is_whole else {},
            handoff=None if is_whole else _HANDOFF,
            is_whole=is_whole,
            usage=PromptUsage(num_tokens),
            has_text=True,
        )

    def decode_leg(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, with_ids: bool = False
    ) -> DecodeLeg:
        ask = DecodeAsk(info.attempt, _num_answer_tokens(request), info.num_answer_tokens, 0)
        return DecodeLeg(encode(ask))

    def local_body(
        self, request: GenerationRequest, resumption: Resumption | None = None, *, with_ids: bool = False
    ) -> bytes:
        num_shown = 0 if resumption is None else resumption.num_answer_tokens
        ask = DecodeAsk("", _num_answer_tokens(request), num_shown, _num_prompt_tokens(request) + num_shown)
        return encode(ask)

    def prompt_ids(self, reply: PrefillReply) -> list[int] | None:
        """Returns zeros: the ids are not looked at, but they are counted."""
        return None if reply.usage is None else [0] * reply.usage.tokens

    def abandon(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, is_decode_sent: bool
    ) -> ReleaseCall | ReleaseMode:
        return ReleaseCall("decode", Call(CANCEL, encode(CancelAsk(info.attempt))))

    def read_errand(self, status: int, body: bytes) -> bool:
        if status != 200:
            raise MalformedReply(f"it answers a cancel with HTTP {status}")
        return body == b"1"


def _cache(word: Told) -> KvCache:
    if not word.num_cache_tokens:
        return UNKNOWN_CACHE
    return KvCache(word.num_cache_tokens, used=word.num_cache_used, is_queueing=word.num_cache_waiting > 0)


_ONE_RANK = frozenset((0,))
_NO_HEADERS: Mapping[str, str] = {}


def _encoded(ask: PrefillAsk, request: GenerationRequest) -> bytes:
    group = request.fields.get(GROUP)
    if group is not None:
        ask.group, ask.num_shared = int(bytes(group)), int(bytes(request.fields[NUM_SHARED]))
    return encode(ask)


def _num_prompt_tokens(request: GenerationRequest) -> int:
    """Returns the length of a prompt in tokens. For ids it is told; a canary's prompt is words, and its bytes are
    counted, which are few."""
    return request.num_prompt_ids or request.num_prompt_bytes


def _num_answer_tokens(request: GenerationRequest) -> int:
    """Returns the length of the answer: every answer is as long as it may be."""
    return request.max_tokens or 1
