"""The module holds the adapter of vLLM with pdproxy's own connector (`transfer.connectors.vllm`).

The prefiller pushes KV out of vLLM's blocks into the decoder's PD buffer, which the slots guard, and the decoder's
receivers tell the proxy of it: all that as with the built-in engine, in the words of ``transfer.wire``. The rest of the
bodies is vLLM's. The connector tells of its part at a port of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from pdproxy.engines import model_cards
from pdproxy.engines.adapter import AttemptInfo, NobodyReached, NoHandoff, PrefillReply, ReleaseCall, ReleaseMode
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
from pdproxy.engines.traits import ALL_ENDPOINTS, EngineTraits, KvReady, ReleaseSignal
from pdproxy.engines.vllm_answers import VLLM_SHAPE, Handoff, read_handoff
from pdproxy.engines.vllm_legs import VllmLegs
from pdproxy.openai.request import MESSAGES, GenerationRequest
from transfer.trust import AttemptKey


class VllmTransferAdapter(VllmLegs):
    """A `VllmTransferAdapter` is for engines with pdproxy's own connector, which answers at `kv_url`."""

    name = "vllm_transfer"

    def __init__(self, *, kv_url: str, attempt_key: AttemptKey | None = None, lease_s: float = 60.0) -> None:
        super().__init__()
        self._kv_url = kv_url
        self._attempt_key = attempt_key
        self.traits = EngineTraits(
            ready=KvReady.SIGNALS,
            page_owner="decode",
            freed=ReleaseSignal.SIGNALS,
            lease_s=lease_s,
            streams_whole=VLLM_SHAPE,
            endpoints=ALL_ENDPOINTS,
            divided=ALL_ENDPOINTS,
            peer_ended_path=f"{kv_url}{SENDER_ENDED}",
        )

    @property
    def looks(self) -> tuple[str, ...]:
        return HEALTH, f"{self._kv_url}{BUFFER}", model_cards.PATH

    def read_facts(self, answers: Mapping[str, bytes]) -> EngineInfo:
        """Reads the facts. The decoder's vLLM computes the last token of a prompt itself."""
        facts = read_buffer(answers[f"{self._kv_url}{BUFFER}"], answers[model_cards.PATH], kv_url=self._kv_url)
        return replace(facts, num_unsent=1)

    def hands_over(self, request: GenerationRequest, prompt_ids: list[int] | None) -> bool:
        """Tells whether a pair can serve the request. vLLM wants Anthropic's ``thinking`` to have fewer tokens than the
        answer, and lets only its own connector's prefill legs off."""
        return request.endpoint != MESSAGES or "thinking" not in request.fields

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        return receiver_ranks(decoder)

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
        """Reads the reply. Raises `MalformedReply`; `NoHandoff` where the KV could not be sent, and `NobodyReached`
        where that is because the decoder's receiver does not answer."""
        reply = super().read_prefill(request, body)
        if reply.handoff is not None and not reply.is_whole:
            handoff = _read(reply.handoff)
            if handoff.failure is not None:
                kind = NobodyReached if handoff.is_receiver_lost else NoHandoff
                raise kind(f"its KV did not reach the decoder: {handoff.failure}")
        return reply

    def abandon(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, is_decode_sent: bool
    ) -> ReleaseCall | ReleaseMode:
        return cancelling(info)

    def read_errand(self, status: int, body: bytes) -> bool:
        return read_cancelled(status, body)

    def prefill_params(self, info: AttemptInfo) -> msgspec.Raw:
        return push_params(info, self._attempt_key, None)


def _read(handoff: msgspec.Raw) -> Handoff:
    """Returns what the handoff says; that nothing has failed, where it is not understood."""
    try:
        return read_handoff.decode(handoff)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Handoff()
