"""The module holds the adapter of vLLM with its MooncakeConnector.

Both legs are sent at once. The decoder asks the prefiller's workers for the KV, and those write it into the decoder's
blocks as soon as there is some. Facts are from vLLM 0.32. Prefillers and decoders meet by a `transfer_id`, a new one
for each attempt, and by the prefiller's engine id. That id changes with the prefiller's process; its bootstrap server
tells it.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from pdproxy.engines.one_token import OUT_OF_TOKENS, is_whole, read_one_token
from pdproxy.engines.traits import ALL_ENDPOINTS, EngineTraits, KvReady, ReleaseSignal
from pdproxy.engines.vllm_answers import VLLM_SHAPE
from pdproxy.engines.vllm_metrics import CacheReader, GivenCache
from pdproxy.openai.body import Fields
from pdproxy.openai.request import (
    FALSE,
    TRUE,
    GenerationRequest,
    encode,
    one_token_fields,
    prefill_fields,
    whole_body,
    with_token_ids,
)

PARAMS = "kv_transfer_params"
NOBODY = msgspec.Raw(b'"pdproxy-abandoned"')
"""The name of a model that no engine serves."""
_HEALTH, _METRICS = "/health", "/metrics"
_ENDS = frozenset({"stop", "stop_token_ids"})
"""The fields which may end an answer with its first token. The KV of an answer that has ended is not kept."""


class _Engine(msgspec.Struct):
    engine_id: str


_engines = msgspec.json.Decoder(dict[int, _Engine])


class MooncakeAdapter:
    """Implements `engines.adapter.Adapter`."""

    name = "mooncake"

    def __init__(
        self,
        role: Role,
        *,
        bootstrap: str | None,
        data_parallel_rank: int | None = None,
        data_parallel_size: int | None = None,
        lease_s: float = 480.0,
        given: GivenCache = GivenCache(),  # noqa: B008 (it cannot change)
    ) -> None:
        """Makes the adapter. `bootstrap` is ``host:port`` of a prefiller's bootstrap server, as decoders reach it; None
        for a decoder. `data_parallel_rank` is the only rank that this instance stands for, of `data_parallel_size`
        where that is known. `given` is what the configuration says of its cache.

        `lease_s` is the engine's ``VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT``, in seconds, after which it drops KV that
        nobody has asked for. What is asked for later is refused then, and is never another request's.
        """
        self._role: Role = role
        self._bootstrap = bootstrap if role == "prefill" else None
        self._query = None if self._bootstrap is None else f"http://{self._bootstrap}/query"
        self._rank = data_parallel_rank
        self._cache = CacheReader(given, data_parallel_rank, data_parallel_size)
        self.traits = EngineTraits(
            ready=KvReady.ENGINES,
            page_owner="prefill",
            freed=ReleaseSignal.FIRST_EVENT,
            lease_s=lease_s,
            streams_whole=VLLM_SHAPE,
            endpoints=ALL_ENDPOINTS,
        )

    # ── looking at it ──

    @property
    def looks(self) -> tuple[str, ...]:
        looks = (_HEALTH, _METRICS, model_cards.PATH)
        return looks if self._query is None else (*looks, self._query)

    def read_facts(self, answers: Mapping[str, bytes]) -> EngineInfo:
        """Reads the facts. The agreement is what the connector assumes: it copies block for block."""
        metrics = self._cache.read(answers[_METRICS], answers[model_cards.PATH])
        cards = read_model_cards(answers[model_cards.PATH])
        engine_id = None if self._query is None else self._engine_id(answers[self._query])
        agreement = {name: text for name, text in metrics.labels.items() if name == "cache_dtype"}
        if metrics.block_size is not None:
            agreement["block_size"] = str(metrics.block_size)
        return EngineInfo(
            epoch=metrics.process_start or engine_id,
            counts=metrics.counts,
            num_ranks=metrics.num_ranks,
            models=cards.names,
            cards=cards.cards,
            agreement=agreement,
            num_pages=metrics.num_usable_blocks if self._role == "prefill" else 0,
            num_occupied=metrics.num_used_blocks if self._role == "prefill" else None,
            cache=metrics.cache,
            chunk_size=metrics.block_size,
            max_model_len=cards.max_model_len,
            bootstrap=self._bootstrap,
            engine_id=engine_id,
        )

    def _engine_id(self, body: bytes) -> str:
        """Returns the id of the rank that is meant, or of the only rank. Raises `MalformedReply`.

        Workers register there one by one, at their start.
        """
        try:
            engines = _engines.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedReply(f"its bootstrap server's answer is not understood: {error}") from None
        if self._rank is not None and self._rank in engines:
            return engines[self._rank].engine_id
        if self._rank is None and len(engines) == 1:
            return next(iter(engines.values())).engine_id
        known = f"its bootstrap server knows data-parallel ranks {sorted(engines)}"
        raise MalformedReply(f"{known}: " + ("set data_parallel_rank" if engines else "it is not ready"))

    # ── the legs ──

    def hands_over(self, request: GenerationRequest, prompt_ids: list[int] | None) -> bool:
        return True

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        return frozenset()

    def leg_headers(self, request_id: str, attempt: str) -> Mapping[str, str]:
        """Returns ``x-request-id``, from which vLLM makes its own ids, and the rank. The id is never the same for two
        attempts.
        """
        headers = {"x-request-id": f"{request_id}-{attempt}"}
        return headers if self._rank is None else headers | {"x-data-parallel-rank": str(self._rank)}

    def prefill_body(self, request: GenerationRequest, info: AttemptInfo) -> bytes:
        """Returns a body that asks for one token which cannot be the last, whatever it is.

        The decoder is already under way, makes the first token itself, and would wait for ever for KV that was not
        kept.
        """
        fields = {name: raw for name, raw in prefill_fields(request.fields).items() if name not in _ENDS}
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer_id(info)}
        return encode(fields | {"ignore_eos": TRUE, PARAMS: _raw(params)})

    def one_token_body(self, request: GenerationRequest) -> bytes:
        return encode(one_token_fields(request.fields))

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
        """Reads the reply. Raises `NoHandoff` where the KV was not kept.

        The reply says nothing of the KV, which is kept where one token was too few for the answer. (A tool call's
        reason for an end is also told of a call that was cut off.) A request for one token does not need the KV.
        """
        reply = read_one_token(body)
        is_only = request.max_tokens == 1 and is_whole(request, reply.finish_reason)
        if not is_only and reply.finish_reason not in (OUT_OF_TOKENS, "tool_calls"):
            raise NoHandoff(f"it kept no KV for the decoder (finish_reason {reply.finish_reason!r})")
        return PrefillReply(fields=reply.fields, handoff=None, is_whole=False, usage=reply.usage, has_text=False)

    def decode_leg(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, with_ids: bool = False
    ) -> DecodeLeg:
        fields = with_token_ids(request.fields) if with_ids else request.fields
        return DecodeLeg(encode(fields | {PARAMS: _pull(info)}))

    def local_body(
        self, request: GenerationRequest, resumption: Resumption | None = None, *, with_ids: bool = False
    ) -> bytes:
        return whole_body(request, with_ids=with_ids)

    def prompt_ids(self, reply: PrefillReply) -> list[int] | None:
        return None

    # ── an early end ──

    def abandon(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, is_decode_sent: bool
    ) -> ReleaseCall | ReleaseMode:
        """Says how the blocks become free.

        A closed prefill leg frees its blocks. Once the prefiller has replied, it keeps the blocks for the decoder. The
        decoder gets them written, or tells the prefiller that it has no use for them, whatever becomes of the decode
        leg. A decoder that has not seen its leg is sent the leg with an unknown model, so that it refuses it. It tells
        the prefiller of that as well.
        """
        if is_decode_sent or reply is None:
            return ReleaseMode.FREE
        fields = {name: raw for name, raw in request.fields.items() if name != "stream_options"}
        fields |= {"model": NOBODY, "stream": FALSE, PARAMS: _pull(info)}
        return ReleaseCall("decode", Call(request.endpoint, encode(fields)))

    def read_errand(self, status: int, body: bytes) -> bool:
        """Tells whether the blocks are free. 404 means that the decoder refused, as was asked for."""
        return status == 404


def _transfer_id(info: AttemptInfo) -> str:
    return f"xfer-{info.attempt}"


def _pull(info: AttemptInfo) -> msgspec.Raw:
    return _raw(
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": info.prefiller.engine_id,
            "remote_bootstrap_addr": f"http://{info.prefiller.bootstrap}",
            "transfer_id": _transfer_id(info),
        }
    )


def _raw(value: Fields | Mapping[str, object]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
