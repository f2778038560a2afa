"""The module reads the KV events of engines: vLLM's wire, which SGLang has taken over.

An event batch is a MessagePack array: a time, the events, and the data-parallel rank. An event is an object with its
name as ``type`` (vLLM today), or an array that begins with its name (SGLang, earlier releases of vLLM). Fields are only
ever added, in arrays at the end, and those that this module does not know are skipped. An event of another name, or a
field of another kind, is refused: it might say that blocks are gone.

Sources: vLLM 0.32, ``vllm/distributed/kv_events.py``; SGLang, ``sglang/srt/disaggregation/kv_events.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

BlockHash = bytes | int
"""The engine's own name of a block. Nobody else can compute it."""

MAX_HASH_BYTES = 64
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The sequence number that follows the last batch of a replay."""
IN_MEMORY = frozenset({None, "GPU"})
"""The media of blocks that a prompt finds without their being loaded from elsewhere."""


class MalformedEvents(ValueError):
    """A `MalformedEvents` says that a message is no event batch, or has an event that is not known here."""


class _Event(msgspec.Struct, tag=True, gc=False):
    """An `_Event` is one event in the form of an object."""


class BlockStored(_Event):
    """`BlockStored` says that blocks came into the cache: `block_hashes`, in order, of `block_size` tokens each, which
    hold `token_ids` and follow the block `parent_block_hash`, or begin a prompt where that is None.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: Any = None
    """The LoRA adapter's name. SGLang has other facts in this place, of blocks that depend on more than on tokens."""
    extra_keys: list[Any] | None = None
    """The facts besides its tokens on which each block depends, by block."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(_Event):
    """`BlockRemoved` says that one copy of each of these blocks is no longer in the cache."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(_Event):
    """`AllBlocksCleared` says that the cache is empty."""


class _StoredInOrder(BlockStored, array_like=True, tag="BlockStored", gc=False):
    """`_StoredInOrder` is the same as `BlockStored`, as an array."""


class _RemovedInOrder(BlockRemoved, array_like=True, tag="BlockRemoved", gc=False):
    """`_RemovedInOrder` is the same as `BlockRemoved`, as an array."""


class _ClearedInOrder(AllBlocksCleared, array_like=True, tag="AllBlocksCleared", gc=False):
    """`_ClearedInOrder` is the same as `AllBlocksCleared`, as an array."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True):
    """A `_Batch` is a batch whose events have not been read."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class EventBatch(msgspec.Struct):
    """An `EventBatch` holds what an engine did to its cache in one step. `ts` is the engine's time in seconds."""

    ts: float
    events: Iterable[Event]
    data_parallel_rank: int | None = None


_batch = msgspec.msgpack.Decoder(_Batch)
_object = msgspec.msgpack.Decoder(Event)
_in_order = msgspec.msgpack.Decoder(_StoredInOrder | _RemovedInOrder | _ClearedInOrder)


def read_batch(payload: bytes) -> EventBatch:
    """Returns the batch in the last frame of a message. Its events are read one by one as they are asked for, once,
    because there may be very many. Raises `MalformedEvents`, as asking for events does."""
    try:
        batch = _batch.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedEvents(str(error)) from None
    return EventBatch(batch.ts, map(_read, batch.events), batch.data_parallel_rank)


def read_sequence(frames: Sequence[bytes]) -> int:
    """Returns the sequence number of a message, which stands before its last frame. Raises `MalformedEvents`."""
    if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
        raise MalformedEvents(f"a message of {len(frames)} frames has no sequence number before its last one")
    return int.from_bytes(frames[-2], "big")


def _read(raw: msgspec.Raw) -> Event:
    """Reads one event, in the form that its first byte tells. Raises `MalformedEvents`."""
    first = memoryview(raw)[0] if memoryview(raw).nbytes else 0
    is_array = first & 0xF0 == 0x90 or first in (0xDC, 0xDD)
    try:
        event: Event = (_in_order if is_array else _object).decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedEvents(str(error)) from None
    if isinstance(event, AllBlocksCleared):
        return event
    if any(isinstance(name, bytes) and len(name) > MAX_HASH_BYTES for name in event.block_hashes):
        raise MalformedEvents(f"a block's hash has more than {MAX_HASH_BYTES} bytes")
    if isinstance(event, BlockStored) and event.block_size < 1:
        raise MalformedEvents(f"a block has {event.block_size} tokens")
    return event
