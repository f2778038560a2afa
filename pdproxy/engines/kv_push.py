"""The module says what every engine tells and is told whose KV goes through ``transfer``: `BufferFacts`, `PushParams`,
and the call that cancels an attempt."""

from __future__ import annotations

import msgspec

from pdproxy.admission.room import UNKNOWN_CACHE, KvCache
from pdproxy.engines.adapter import AttemptInfo, Call, MalformedReply, ReleaseCall
from pdproxy.engines.info import EngineInfo, Receiver
from pdproxy.engines.model_cards import read_model_cards
from transfer.geometry import PageGroup
from transfer.trust import AttemptKey
from transfer.wire import BufferFacts, Endpoint, PushParams

HEALTH, BUFFER = "/health", "/kv_buffer"
BOTH = "both"
"""The role of an engine that takes whichever role the proxy gives it."""
CANCEL, SENDER_ENDED = "/kv_transfer/cancel", "/kv_transfer/sender_ended"


class _Cancelled(msgspec.Struct):
    released: bool


_buffer = msgspec.json.Decoder(BufferFacts)
_cancelled = msgspec.json.Decoder(_Cancelled)


def read_buffer(facts: bytes, cards: bytes, *, kv_url: str | None = None) -> EngineInfo:
    """Returns what an engine tells in ``GET /kv_buffer`` and ``GET /v1/models``. `kv_url` says where the first of the
    two was asked, if not at the engine's own address. Raises `MalformedReply`."""
    known = read_model_cards(cards)
    try:
        buffer = _buffer.decode(facts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReply(f"its {BUFFER} is not understood: {error}") from None
    return EngineInfo(
        epoch=buffer.epoch,
        role=None if buffer.role == BOTH else buffer.role,
        models=known.names,
        cards=known.cards,
        agreement=_agreement(buffer),
        num_pages=buffer.num_pages,
        num_occupied=_num_occupied(buffer),
        term=buffer.term,
        num_wrong_tags=buffer.num_wrong_tags,
        cache=_cache(buffer),
        chunk_size=buffer.chunk_size,
        page_bytes=buffer.page_bytes,
        max_model_len=buffer.max_model_len,
        groups=tuple(PageGroup(g.kind, g.num_layers, g.window, g.state_pages) for g in buffer.groups),
        windowed=buffer.windowed,
        receivers=tuple(Receiver(rank=one.rank, host=one.host, port=one.port) for one in buffer.receivers),
        kv_url=kv_url,
    )


def _cache(buffer: BufferFacts) -> KvCache:
    """Returns what an engine tells of its KV cache. Where layers keep different parts of a prompt, pages are no measure
    of tokens."""
    if not buffer.num_cache_pages or len(buffer.groups) > 1:
        return UNKNOWN_CACHE
    size, used = buffer.chunk_size, buffer.num_cache_pages - buffer.num_cache_free
    return KvCache(buffer.num_cache_pages * size, size, used * size, buffer.num_cache_waiting > 0)


def push_params(info: AttemptInfo, key: AttemptKey | None, prompt_ids: list[int] | None) -> msgspec.Raw:
    """Returns the ``kv_transfer_params`` of a prefill leg, signed with `key` if there is one."""
    params = PushParams(
        attempt=info.attempt,
        receivers=[Endpoint(rank=one.rank, host=one.host, port=one.port) for one in info.decoder.receivers],
        timeout_s=info.timeout_s,
        notify=info.notify,
        prompt_token_ids=prompt_ids,
        num_answer_tokens=info.num_answer_tokens,
        capability=None if key is None else key.sign(info.attempt, info.notify),
        decoder_epoch=info.decoder.epoch,
    )
    return msgspec.Raw(msgspec.json.encode(params))


def cancelling(info: AttemptInfo) -> ReleaseCall:
    """Returns the call that cancels the attempt. The decoder drops it at whatever point it is."""
    call = Call(f"{info.decoder.kv_url or ''}{CANCEL}", msgspec.json.encode({"attempt": info.attempt}))
    return ReleaseCall("decode", call)


def read_cancelled(status: int, body: bytes) -> bool:
    """Returns whether a cancelled attempt's pages are free. Raises `MalformedReply`."""
    if status != 200:
        raise MalformedReply(f"it answers a cancel with HTTP {status}")
    try:
        return _cancelled.decode(body).released
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReply(f"its answer to a cancel is not understood: {error}") from None


def receiver_ranks(decoder: EngineInfo) -> frozenset[int]:
    """Returns the ranks that say for themselves when an attempt's KV is there."""
    return frozenset(receiver.rank for receiver in decoder.receivers)


def _agreement(buffer: BufferFacts) -> dict[str, str]:
    """Returns what a prefiller and a decoder must have alike. An engine that tells no fleet key is not held to one."""
    told = {"fleet_key": buffer.fleet_key} if buffer.fleet_key else {}
    return {"model": buffer.model, "dtype": buffer.dtype, "chunk_size": str(buffer.chunk_size), **told}


def _num_occupied(buffer: BufferFacts) -> int | None:
    """Returns the pages that are not free, those in quarantine included; None for a prefiller, which has no
    PD buffer.
    """
    return max(0, buffer.num_pages - buffer.num_free) if buffer.num_pages else None
