"""The module holds the adapter of vLLM with pdproxy's own connector (`transfer.connectors.vllm`).

The prefiller pushes KV out of vLLM's blocks into the decoder's PD buffer, which the slots guard, and the decoder's
receivers tell the proxy of it: all that as with the built-in engine, in the words of ``transfer.wire``. The rest of the
bodies is vLLM's. The connector tells of its part at a port of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdproxy.engines import model_cards
from pdproxy.engines.adapter import AttemptInfo, NoHandoff, PrefillReply, ReleaseCall, ReleaseMode
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
from pdproxy.engines.traits import EngineTraits, KvReady, ReleaseSignal
from pdproxy.engines.vllm_answers import VLLM_SHAPE
from pdproxy.engines.vllm_legs import VllmLegs
from pdproxy.openai.request import GenerationRequest
from transfer.trust import AttemptKey


class _Handoff(msgspec.Struct):
    """The ``kv_transfer_params`` of a prefill reply, which go to the decoder as they are."""

    failure: str | None = None


_handoff = msgspec.json.Decoder(_Handoff)


class VllmTransferAdapter(VllmLegs):
    """Implements `engines.adapter.Adapter`. `kv_url` is where the instance's connector answers."""

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
            peer_ended_path=f"{kv_url}{SENDER_ENDED}",
        )

    @property
    def looks(self) -> tuple[str, ...]:
        return HEALTH, f"{self._kv_url}{BUFFER}", model_cards.PATH

    def read_facts(self, answers: Mapping[str, bytes]) -> EngineInfo:
        return read_buffer(answers[f"{self._kv_url}{BUFFER}"], answers[model_cards.PATH], kv_url=self._kv_url)

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        return receiver_ranks(decoder)

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
        """Reads the reply. Raises `MalformedReply`, and `NoHandoff` where the KV could not be sent."""
        reply = super().read_prefill(request, body)
        if reply.handoff is not None and not reply.is_whole and (failure := _failure_in(reply.handoff)) is not None:
            raise NoHandoff(f"its KV did not reach the decoder: {failure}")
        return reply

    def abandon(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, is_decode_sent: bool
    ) -> ReleaseCall | ReleaseMode:
        return cancelling(info)

    def read_errand(self, status: int, body: bytes) -> bool:
        return read_cancelled(status, body)

    def prefill_params(self, info: AttemptInfo) -> msgspec.Raw:
        return push_params(info, self._attempt_key, None)


def _failure_in(handoff: msgspec.Raw) -> str | None:
    """Returns why the KV was not sent; None where it was, or where the handoff says nothing of it."""
    try:
        return _handoff.decode(handoff).failure
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
