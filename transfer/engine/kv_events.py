"""The engine's publisher says which chunks come into the prefix cache and which leave it, as vLLM does.

Whoever follows it knows what is cached. A batch of events has a number and goes out over a ZMQ PUB socket, as topic,
number and payload. The last batches are repeated over a ROUTER socket, from the number on that somebody asks for.

What must hold: what was published as stored and not as removed is in the cache, and can be found there by a prompt that
begins so. A violation would show as a prompt of which less is found than its events say.

Wire format: vLLM's, ``vllm/distributed/kv_events.py`` (seen with vLLM 0.32).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b

import msgspec
import zmq

from transfer.errors import TransferError

log = logging.getLogger(__name__)

NUM_KEPT = 10_000
"""The number of batches that are kept to be repeated."""
MAX_EVENTS = 1_000
"""The most events of one batch."""
POLL_S = 0.05
"""The longest time in seconds until somebody who asks for batches again is heard."""
CLOSE_S = 2.0
MEDIUM = "GPU"
"""The name by which followers know the memory that the engine computes with, whatever it is."""
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_TOPIC = b""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """`BlockStored` says that the chunk `block_hashes` holds `token_ids` and follows `parent_block_hash`."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """`BlockRemoved` says that these chunks are gone."""

    block_hashes: list[bytes]
    medium: str = MEDIUM


class _Batch(msgspec.Struct, array_like=True):
    """A `_Batch` is what one message carries."""

    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int = 0


class KvEventPublisher:
    """A `KvEventPublisher` binds to `address`, and to `replay_address` where batches are to be repeated. Both are
    ZMQ's, as ``tcp://*:5557``. `chunk_size` is the tokens of a chunk.

    Raises `TransferError` where it cannot bind. One thread calls `stored` and `removed`; a thread of its own sends.
    Chunks are known to others by a digest of their keys, which nobody can turn back.

    Mutable state: the keys that are published as stored, of the thread that calls; the events to be sent; the batches
    that are kept and the next one's number, of the thread that sends.
    """

    def __init__(self, address: str, replay_address: str | None, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._published: set[bytes] = set()
        self._events: queue.SimpleQueue[BlockStored | BlockRemoved | None] = queue.SimpleQueue()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=NUM_KEPT)
        self._number = 0
        self._context = zmq.Context()
        try:
            self._live = self._bind(zmq.PUB, address)
            self._replay = None if replay_address is None else self._bind(zmq.ROUTER, replay_address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransferError(f"kv_events: cannot listen on {address} and {replay_address}: {error}") from None
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def stored(self, parent: bytes | None, key: bytes, token_ids: Sequence[int]) -> None:
        """Tells that a chunk is in the cache. A chunk whose parent has been given up is kept quiet: no prompt that
        begins so can get to it."""
        if parent is not None and parent not in self._published:
            return
        self._published.add(key)
        parent_name = None if parent is None else _name(parent)
        self._events.put(BlockStored([_name(key)], parent_name, list(token_ids), self._chunk_size))

    def removed(self, keys: Sequence[bytes]) -> None:
        """Tells that chunks have been given up."""
        gone = [key for key in keys if key in self._published]
        self._published.difference_update(gone)
        if gone:
            self._events.put(BlockRemoved([_name(key) for key in gone]))

    def close(self) -> None:
        """Stops, after a moment in which what was told is sent. Idempotent."""
        self._events.put(None)
        self._thread.join(CLOSE_S)

    @property
    def addresses(self) -> tuple[str, str | None]:
        """The addresses that the sockets are bound to, with their ports."""
        return _bound(self._live), None if self._replay is None else _bound(self._replay)

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, "[" in address)
        socket.bind(address)
        return socket

    def _run(self) -> None:
        try:
            while self._send(self._take()):
                while self._replay is not None and self._replay.poll(0):
                    self._repeat(self._replay, self._replay.recv_multipart())
        except zmq.ZMQError:
            log.exception("KV events are no longer published")
        finally:
            self._context.destroy(linger=0)

    def _take(self) -> list[BlockStored | BlockRemoved | None]:
        """Returns the events that are there; none after `POLL_S` seconds without any."""
        events: list[BlockStored | BlockRemoved | None] = []
        with suppress(queue.Empty):
            events.append(self._events.get(timeout=POLL_S))
            while len(events) < MAX_EVENTS:
                events.append(self._events.get_nowait())
        return events

    def _send(self, told: list[BlockStored | BlockRemoved | None]) -> bool:
        """Sends the events as one batch. Returns False where the end was told."""
        events = [event for event in told if event is not None]
        if events:
            payload = msgspec.msgpack.encode(_Batch(time.time(), events))
            self._live.send_multipart([_TOPIC, self._number.to_bytes(_SEQUENCE_BYTES, "big"), payload])
            self._kept.append((self._number, payload))
            self._number += 1
        return len(events) == len(told)

    def _repeat(self, replay: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Sends the batches from the number on that the last of `frames` names, to whom the first one names. What is no
        such question gets no answer."""
        if len(frames) != 3 or len(frames[2]) != _SEQUENCE_BYTES:
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= start:
                replay.send_multipart([client, b"", _TOPIC, number.to_bytes(_SEQUENCE_BYTES, "big"), payload])
        replay.send_multipart([client, b"", b"", _END, b""])


def _name(key: bytes) -> bytes:
    return blake2b(key, digest_size=16, person=b"kv-event").digest()


def _bound(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()
