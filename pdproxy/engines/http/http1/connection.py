"""The module holds one connection to an engine. It knows who listens to it now, and whether it can be used again.

A connection carries one call at a time. Between two calls it is kept alive, and must be silent. It is closed where the
engine says something unasked, or ends it.

However much an engine sends at a time, it gets the event loop for a moment only. Then it is the turn of the others.
"""

from __future__ import annotations

import asyncio
import select
from time import monotonic
from typing import Protocol

from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.aio.write_batch import BatchedTransport, batched
from pdproxy.engines.http.base import SLICE_BYTES, TURN_S

FRESH_S = 0.01
"""The seconds for which a kept connection may be used again without a look at its socket: a live event loop has noticed
what happened before.
"""
LARGE_READ_BYTES = 64 * 1024
"""The size from which on one read is all that a turn of the event loop has. uvloop reads up to 32 times in a row as
long as each read fills its 250 KiB, and all that could be dealt with quickly would be dealt with in one turn.
"""


class Listener(Protocol):
    """A `Listener` hears the answer to its call."""

    __slots__ = ()

    def received(self, data: bytes) -> None: ...

    def lost(self, error: Exception | None) -> None:
        """Takes note that nothing more will come. Without an error, the engine has closed the connection. It is the
        last call.
        """


class Keeper(Protocol):
    """A `Keeper` keeps a connection between two calls."""

    __slots__ = ()

    descriptors: DescriptorBudget
    """The count of all that the proxy has open."""

    def keep(self, connection: Connection) -> None:
        """Takes a connection that can be used for another call."""

    def forget(self, connection: Connection) -> None:
        """Takes note that the engine has ended a connection that was kept until now."""


class Connection:
    """A `Connection` is made within the loop that it belongs to. It has all methods of an `asyncio.Protocol`, and no
    such base, which a compiled class cannot have.

    Mutable state: the transport as long as it is open, and whether it reads; the listener while there is a call;
    whether it is paused; what was read and it has yet to hear, from which index on; since when it is kept, on the
    loop's clock.
    """

    __slots__ = (
        "_heard",
        "_is_paused",
        "_is_reading",
        "_keeper",
        "_listener",
        "_poll",
        "_transport",
        "_unheard",
        "kept_at",
        "loop",
        "slice_bytes",
    )

    def __init__(self, keeper: Keeper) -> None:
        self.loop = asyncio.get_running_loop()
        self._keeper = keeper
        self._transport: BatchedTransport | None = None
        self._listener: Listener | None = None
        self._is_paused = False
        self._is_reading = True
        self._unheard = b""
        self._heard = 0
        self._poll: select.poll | None = None
        self.kept_at = 0.0
        self.slice_bytes = SLICE_BYTES
        """The most bytes of this call's answer that the listener hears at a time."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def can_be_used(self, kept_s: float) -> bool:
        """Tells whether nothing has come in the `kept_s` seconds since it was kept, its end included."""
        if self._transport is None:
            return False
        return kept_s < FRESH_S or not self._is_readable(self._transport)

    def send(self, listener: Listener, head: bytes, body: bytes) -> None:
        """Sends one request, in one write. `listener` hears the answer. The connection must be open, and without a
        call.
        """
        assert self._transport is not None
        assert self._listener is None
        self._listener = listener
        self.slice_bytes = SLICE_BYTES
        self._transport.writelines((head, body))

    # ── for the listener ────────────────────────────────────────────────────────────────────────────────────────────

    def pause(self) -> None:
        """Takes nothing more from the engine, which then has to wait. Idempotent, like `resume`."""
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._read(is_wanted=False)

    def resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            if self._unheard:  # not at once: the listener may be in the middle of something
                self.loop.call_soon(self._hear_on)
            else:
                self._read(is_wanted=True)

    def hand_back(self, *, is_reusable: bool) -> None:
        """Gives the connection back after the answer was heard to its end, to be kept or closed.

        It is closed where the engine did not wait for the request's end, because it has not read the request; and where
        more has come than the answer.
        """
        self._listener = None
        transport = self._transport
        if transport is None:
            return
        if not is_reusable or self._unheard or transport.is_closing() or transport.get_write_buffer_size():
            self.abort()
            return
        self.resume()
        self._keeper.keep(self)

    def abort(self) -> None:
        """Closes the connection at once. Nobody hears of it. Idempotent."""
        transport, self._transport = self._transport, None
        self._listener = None
        self._unheard = b""
        if transport is not None:
            transport.abort()

    # ── for the event loop ──────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = batched(transport, self.loop)
        self._keeper.descriptors.num_opened += 1

    def data_received(self, data: bytes) -> None:
        listener = self._listener
        if listener is not None:
            if len(data) > self.slice_bytes or len(data) >= LARGE_READ_BYTES:
                self._hear(data)
            else:
                listener.received(data)
        elif self._transport is not None:
            self._lose(None)

    def eof_received(self) -> None:
        self._lose(None)

    def pause_writing(self) -> None:
        """Does nothing: nobody waits until a request is sent."""

    def resume_writing(self) -> None:
        """Does nothing, as `pause_writing` does."""

    def connection_lost(self, error: Exception | None) -> None:
        self._keeper.descriptors.num_opened -= 1
        try:
            # This is rare: as long as something is not heard, nothing is read, not even an end.
            if self._unheard and self._listener is not None:
                rest, self._unheard = self._unheard[self._heard :], b""
                self._listener.received(rest)
        finally:
            self._lose(error)

    def _hear(self, data: bytes) -> None:
        """Has the listener hear many bytes. No more are read from the engine until it has."""
        self._unheard, self._heard = data, 0
        if len(data) >= LARGE_READ_BYTES:
            self._read(is_wanted=False)
        self._hear_on()

    def _hear_on(self) -> None:
        """Has the listener hear one slice after another until `TURN_S` is over. It hears the rest in later turns,
        unless it is paused or has had enough. Where nothing is left of earlier turns, more is read."""
        if not self._unheard:
            self._read(is_wanted=not self._is_paused)
            return
        until = monotonic() + TURN_S  # uvloop's own clock stands still within a turn
        while self._unheard and not self._is_paused and self._listener is not None:
            unheard, start, size = self._unheard, self._heard, self.slice_bytes
            self._heard = start + size
            if self._heard >= len(unheard):  # the last slice: then the listener may hand the connection back
                self._unheard = b""
            try:
                self._listener.received(unheard[start : start + size])
            except Exception as bug:  # the loop does the same where `data_received` raises
                self.loop.call_exception_handler({"message": "a listener met a bug", "exception": bug})
                self._lose(bug)
            if monotonic() >= until:
                break
        if not self._is_paused and (self._unheard or not self._is_reading):
            self._read(is_wanted=False)
            self.loop.call_soon(self._hear_on)

    def _read(self, *, is_wanted: bool) -> None:
        transport = self._transport
        if transport is not None and is_wanted is not self._is_reading:
            self._is_reading = is_wanted
            if is_wanted:
                transport.resume_reading()
            else:
                transport.pause_reading()

    def _lose(self, error: Exception | None) -> None:
        """Ends the connection at the first thing that happens. What the loop says of it later is no news."""
        if self._transport is None:
            return
        listener = self._listener
        self.abort()
        if listener is not None:
            listener.lost(error)
        else:
            self._keeper.forget(self)

    def _is_readable(self, transport: BatchedTransport) -> bool:
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(self._poll.poll(0))
