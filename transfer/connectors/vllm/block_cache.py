"""The blocks that a decoder's vLLM has in its prefix cache, as its receiver sees them. What is there need not be sent.

vLLM keeps its table of blocks in the process of the scheduler. Where the worker is in the same one, as with one rank on
a GPU, blocks are looked up there; with several ranks, and on a CPU, rank 0's receiver asks the scheduler's process over
a socket. Blocks are looked up and not pinned: the scheduler may be asleep, and the table is its own. So a block may be
gone when its request is scheduled. The scheduler's half sees that then, and the prompt is computed again: slower, and
never wrong.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from transfer.connectors.vllm.private_socket import listen_privately, remove

log = logging.getLogger(__name__)

DEADLINE_S = 0.02
"""The longest time, in seconds, for which a receiver waits for the scheduler's process. Its event loop stands still
meanwhile."""
PAUSE_S = 1.0
"""The seconds without a question behind one that was not answered in time."""
KEYS_AT_ONCE = 4096
"""The most names in one message. Of a prompt with more the next ones are asked for where all of these are there."""
MAX_MESSAGE_BYTES = 1 << 20

_pools: dict[str, Any] = {}


class _Question(msgspec.Struct, frozen=True, array_like=True):
    number: int
    keys: list[bytes]


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    number: int
    num_found: int


_question = msgspec.msgpack.Decoder(_Question)
_answer = msgspec.msgpack.Decoder(_Answer)


def publish(engine: str, pool: Any) -> None:
    """Shows the block pool of this process's scheduler to the worker in the same process."""
    _pools[engine] = pool


def is_published(engine: str) -> bool:
    """Tells whether the scheduler of this engine is in this process."""
    return engine in _pools


class BlockCache:
    """A `BlockCache` is the `EngineCache` of the vLLM engine of this name. Keys are vLLM's block hashes.

    Mutable state: `_asks`, the connection to the scheduler's process once that has come to `_listener`; `_number`, the
    last question's; `_silent_until`, the time before which nothing is asked.
    """

    def __init__(self, engine: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._listener: socket.socket | None = None
        self._asks: socket.socket | None = None
        self._path = ""
        self._number = 0
        self._silent_until = 0.0

    def listen(self) -> str:
        """Lets the scheduler's process connect to the path that is returned, which `BlockAnswers` removes. Raises
        `TransferError` where there can be no such path."""
        self.close()
        self._listener, self._path = listen_privately(socket.SOCK_SEQPACKET, 1)
        self._listener.setblocking(False)
        return self._path

    def pin(self, attempt: str, keys: Sequence[bytes]) -> int:
        """Returns how many of the first `keys` are in the cache, 0 where that cannot be learned in `DEADLINE_S`. They
        are not kept there."""
        pool = _pools.get(self._engine)
        return self._ask(keys) if pool is None else num_found(pool, keys)

    def unpin(self, attempt: str) -> None:
        """Does nothing: nothing is pinned."""

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        for one in (self._listener, self._asks):
            if one is not None:
                one.close()
        self._listener = self._asks = None
        if self._path:
            remove(self._path)

    def _ask(self, keys: Sequence[bytes]) -> int:
        deadline = self._clock() + DEADLINE_S
        if deadline < self._silent_until:
            return 0
        found = 0
        try:
            while found < len(keys) and (asks := self._connection()) is not None:
                some = list(keys[found : found + KEYS_AT_ONCE])
                num_there = self._ask_one(asks, some, deadline)
                found += num_there
                if num_there < len(some):
                    break
        except (TimeoutError, BlockingIOError):
            self._silent_until = self._clock() + PAUSE_S
        except (OSError, msgspec.DecodeError) as error:
            log.warning("vLLM's scheduler tells no more what it has in its cache (%s): all is sent", error)
            self.close()
        return found

    def _ask_one(self, asks: socket.socket, keys: list[bytes], deadline: float) -> int:
        self._number += 1
        asks.setblocking(False)
        asks.send(msgspec.msgpack.encode(_Question(self._number, keys)))
        while True:
            left = deadline - self._clock()
            if left <= 0:
                raise TimeoutError
            asks.settimeout(left)
            if not (data := asks.recv(MAX_MESSAGE_BYTES)):
                raise ConnectionResetError("its process has ended")
            answer = _answer.decode(data)
            if answer.number == self._number:  # others come behind their deadline
                return answer.num_found

    def _connection(self) -> socket.socket | None:
        if self._asks is None and self._listener is not None:
            try:
                self._asks, _ = self._listener.accept()
            except BlockingIOError:  # the scheduler's process has not come yet
                return None
            self._listener.close()
            self._listener = None
        return self._asks


class BlockAnswers:
    """A `BlockAnswers` tells a `BlockCache` in another process what this process's scheduler has in its cache, from a
    thread of its own."""

    def __init__(self, engine: str, path: str) -> None:
        """Connects to `path` and removes it. Raises `OSError` where nobody listens there."""
        self._engine = engine
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        remove(path)
        self._thread = threading.Thread(target=self._answer, name="kv-blocks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        if self._thread.is_alive():
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which a close would not
            self._thread.join(5.0)
        self._socket.close()

    def _answer(self) -> None:
        try:
            while data := self._socket.recv(MAX_MESSAGE_BYTES):
                question = _question.decode(data)
                pool = _pools.get(self._engine)
                found = 0 if pool is None else num_found(pool, question.keys)
                self._socket.send(msgspec.msgpack.encode(_Answer(question.number, found)))
        except (OSError, msgspec.DecodeError) as error:
            log.warning("vLLM's cache is not told to the receiver any more: %s", error)


def num_found(pool: Any, keys: Sequence[bytes]) -> int:
    """Returns how many of the first `keys` are in the block pool. The scheduler may change it meanwhile."""
    try:
        return next((at for at, key in enumerate(keys) if pool.get_cached_block(key, [0]) is None), len(keys))
    except RuntimeError:  # the scheduler's thread changed what was being looked at
        return 0
