"""The module writes what one turn of the event loop has to say to many sockets in one go, at the turn's end.

To write to a socket whose reader sleeps wakes that reader, which takes longer than the write itself. A busy loop finds
dozens of sockets readable in one turn and has a little to write for each. Where it writes at once, a fast reader at the
other end has dealt with it and sleeps again before the next write. What is written in a row finds the reader awake.

What must hold: the bytes of one socket go out in the order in which they were written, nothing waits longer than one
round of the loop, or for more than `MAX_WRITES` others, and nothing that was written before its transport closes is
lost. A violation would be seen as a garbled answer, as one that hangs until something else happens, or as an empty one.
(The round ends with the callbacks that were due, or, on uvloop, with what has come meanwhile.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

log = logging.getLogger(__name__)

MAX_WRITES: Final = 16
"""The most writes that wait for the turn's end: the next one sends them all. From here on more in a row save little."""
MIN_WRITES: Final = 4
"""The number of writes in one turn from which on it pays to let those of the next turn wait."""
PROBE_WRITES: Final = 16
"""The number of writes after which one turn's are counted again, as long as it does not pay: to learn of a turn's end
costs a callback."""
MAX_BYTES: Final = 64 * 1024
"""The most bytes of a write that waits. With more, the write itself takes so long that nothing is saved."""


class WriteBatch:
    """A `WriteBatch` has the writes of one event loop wait for the end of its turn, where that pays.

    Mutable state: the transports with something that waits; how many writes the turn has had, while its end is awaited;
    how many came since, while it is not; whether the last turn that was counted had enough of them.
    """

    __slots__ = ("_does_pay", "_is_open", "_num_direct", "_num_writes", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[BatchedTransport] = []
        self._is_open = False
        self._num_writes = 0
        self._num_direct = 0
        self._does_pay = False

    def may_wait(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Tells whether a write may wait, because `loop` will call for what waits. Counts the write."""
        if not self._is_open:
            self._num_direct += 1
            if not self._does_pay and self._num_direct < PROBE_WRITES:
                return False
            loop.call_soon(self._end_turn)
            self._is_open, self._num_direct, self._num_writes = True, 0, 0
        self._num_writes += 1
        return True

    def add(self, transport: BatchedTransport) -> None:
        """Has `transport` flushed at the turn's end, or now where `MAX_WRITES` wait."""
        transport.is_listed = True
        self._waiting.append(transport)
        if len(self._waiting) >= MAX_WRITES:
            self._flush()

    def _end_turn(self) -> None:
        self._is_open = False
        self._does_pay = self._num_writes >= MIN_WRITES
        self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.is_listed = False
        for transport in waiting:
            try:
                transport.flush()
            except Exception:  # one broken transport must not keep the others from their bytes
                log.exception("a write met a bug")
                with contextlib.suppress(Exception):
                    transport.abort()


class BatchedTransport:
    """A `BatchedTransport` is a transport whose small writes may wait for the end of the loop's turn. All else it does
    as `transport` does, and at once; what was written before goes first.

    It has the methods of `asyncio.Transport` that are used here, and no such base, which a compiled class cannot have.
    Where the other end stops sending, the loop closes `transport` itself: a protocol that does not keep it open has
    to `flush` in `eof_received`. Mutable state: what waits, and its size in bytes; whether the batch lists it.
    """

    __slots__ = ("_batch", "_loop", "_num_bytes", "_pieces", "_transport", "is_listed")

    def __init__(self, transport: asyncio.Transport, batch: WriteBatch, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._batch = batch
        self._loop = loop
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self.is_listed = False
        """True while the batch has it in its list, also where it was flushed meanwhile: the batch counts transports."""

    def write(self, data: Any) -> None:
        """Writes bytes, or anything that has bytes."""
        if not isinstance(data, bytes):
            data = bytes(data)  # what waits must not change
        if not self._waits(len(data)):
            self._transport.write(data)
        elif data:
            self._pieces.append(data)
            if not self.is_listed:
                self._batch.add(self)

    def writelines(self, pieces: Sequence[bytes]) -> None:
        num_bytes = 0
        for piece in pieces:
            num_bytes += len(piece)
        if not self._waits(num_bytes):
            self._transport.writelines(pieces)
        else:
            self._pieces += pieces
            if not self.is_listed:
                self._batch.add(self)

    def _waits(self, num_bytes: int) -> bool:
        """Tells whether a write of `num_bytes` waits. If not, what waits is written now.

        Nothing waits for a socket that takes less than it is given: its transport is to notice at once, and to say so.
        """
        waits = (
            self._num_bytes + num_bytes <= MAX_BYTES
            and self._batch.may_wait(self._loop)
            and not self._transport.get_write_buffer_size()
        )
        if waits:
            self._num_bytes += num_bytes
        elif self._pieces:
            self.flush()
        return waits

    def flush(self) -> None:
        """Writes what waits, unless the transport was closed meanwhile."""
        pieces = self._pieces
        self._pieces, self._num_bytes = [], 0
        if not pieces or self._transport.is_closing():
            return
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    def close(self) -> None:
        if self._pieces:
            self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Closes the transport at once. What waits is not written."""
        self._pieces, self._num_bytes = [], 0
        self._transport.abort()

    def write_eof(self) -> None:
        if self._pieces:
            self.flush()
        self._transport.write_eof()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + self._num_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._transport.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()


_all: WeakKeyDictionary[asyncio.AbstractEventLoop, WriteBatch] = WeakKeyDictionary()


def batched(transport: asyncio.BaseTransport, loop: asyncio.AbstractEventLoop) -> BatchedTransport:
    """Returns `transport` with its writes batched among all those of `loop`."""
    batch = _all.get(loop) or _all.setdefault(loop, WriteBatch())
    return BatchedTransport(cast(asyncio.Transport, transport), batch, loop)
