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
from dataclasses import replace
from typing import Final

import msgspec

from pdproxy.config.values import Role
from pdproxy.engines import model_cards
from pdproxy.engines.adapter import (
    AttemptInfo,
    Call,
    MalformedReply,
    PrefillReply,
    ReleaseCall,
    ReleaseMode,
)
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.model_cards import read_model_cards
from pdproxy.engines.traits import ALL_ENDPOINTS, EngineTraits, KvReady, ReleaseSignal
from pdproxy.engines.vllm_answers import VLLM_SHAPE, read_version
from pdproxy.engines.vllm_legs import VllmLegs, decode_fields
from pdproxy.engines.vllm_metrics import CacheReader, GivenCache, VllmMetrics
from pdproxy.openai.answer import read_cards
from pdproxy.openai.apis import api_prefill_fields
from pdproxy.openai.request import (
    GenerationRequest,
    PromptKind,
    encode,
    prefill_fields,
)

NOBODY: Final = msgspec.Raw(b'"pdproxy-abandoned"')
"""The name of a model that no engine serves."""

_KEEP_KV: Final = msgspec.Raw(b'{"do_remote_decode":true}')
_HEALTH: Final = "/health"
_METRICS: Final = "/metrics"
_VERSION: Final = "/version"
_REFUSALS_FREE: Final = (0, 32)
"""The first version of vLLM with which a decoder that refuses a decode leg tells the prefiller so. (Some earlier
versions do so too, but die where they cannot reach the prefiller.)
"""


class VllmNixlAdapter(VllmLegs):
    """A `VllmNixlAdapter` is for engines that run vLLM's own NixlConnector."""

    name = "vllm_nixl"

    def __init__(
        self,
        role: Role,
        *,
        lease_s: float = 30.0,
        data_parallel_rank: int | None = None,
        data_parallel_size: int | None = None,
        given: GivenCache = GivenCache(),  # noqa: B008 (it cannot change)
    ) -> None:
        """Makes the adapter. `lease_s` is vLLM's ``kv_lease_duration``, in seconds. `data_parallel_rank` is the only
        rank that this instance stands for, of `data_parallel_size` where that is known. `given` is what the
        configuration says of its cache.
        """
        super().__init__(data_parallel_rank)
        self._cache = CacheReader(given, data_parallel_rank, data_parallel_size)
        self._role: Role = role
        self.traits = EngineTraits(
            ready=KvReady.PREFILL_REPLY,
            page_owner="prefill",
            freed=ReleaseSignal.FIRST_EVENT,
            lease_s=lease_s,
            is_lease_strict=True,
            streams_whole=VLLM_SHAPE,
            endpoints=ALL_ENDPOINTS,
            divided=ALL_ENDPOINTS,
            changes_role=True,
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
        metrics = self._cache.read(answers[_METRICS], answers[model_cards.PATH])
        cards = read_model_cards(answers[model_cards.PATH])
        return EngineInfo(
            epoch=metrics.process_start,
            counts=metrics.counts,
            num_ranks=metrics.num_ranks,
            models=cards.names,
            cards=cards.cards,
            agreement=_agreement(metrics, answers),
            num_pages=metrics.num_usable_blocks if self._role == "prefill" else 0,
            num_occupied=metrics.num_used_blocks if self._role == "prefill" else None,
            cache=metrics.cache,
            chunk_size=metrics.block_size,
            max_model_len=cards.max_model_len,
        )

    # ── the legs ──

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        return frozenset()

    def prefill_params(self, info: AttemptInfo) -> msgspec.Raw:
        return _KEEP_KV

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
        fields = decode_fields(request, reply)
        if request.prompt_kind is PromptKind.API:
            fields = api_prefill_fields(replace(request, fields=fields))
        else:
            fields = prefill_fields(fields)
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
        version = read_version.decode(answers[_VERSION]).version
        roots = [card.root for card in read_cards(answers[model_cards.PATH]) if card.parent is None]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReply(f"its {_VERSION} or {model_cards.PATH} is not understood: {error}") from None
    known = {"vllm": version, "model": roots[0] if roots else None, "cache_dtype": metrics.labels.get("cache_dtype")}
    return {name: value for name, value in known.items() if value is not None}


def _refusals_free(decoder: EngineInfo) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", decoder.agreement.get("vllm", ""))
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _REFUSALS_FREE
