"""A TCP connection between a front and the leader, which either may lose and make anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec

from pdproxy.fronts.channel import LENGTH, Frames

log = logging.getLogger(__name__)

LAST_WRITES_S = 5.0
"""The longest time in seconds that the other end of a connection that is closed may take for what was written."""

encode = msgspec.msgpack.Encoder().encode
"""The function that makes a frame's content of messages."""


def framed(content: bytes) -> bytes:
    """Returns a frame with its length in front."""
    return LENGTH.pack(len(content)) + content


class Connection(Frames):
    """`Connection` hands frames to `on_frame`. Writes never wait: who writes sees to it that they are bounded.

    `on_lost` is called once, with the reason, as soon as nothing comes any more. Mutable state: the transport, once
    connected; whether anything has come since somebody looked; the time limit, while there is one.
    """

    def __init__(self, on_made: Callable[[Connection], object], on_lost: Callable[[str], object]) -> None:
        super().__init__()
        self.on_frame: Callable[[bytes], object] = lambda frame: None
        self.on_room: Callable[[bool], object] = lambda has_room: None
        """The function that is told whether the other end takes what is written."""
        self.has_heard = False
        self.over = asyncio.Event()
        """Set when the connection is over."""
        self._on_made = on_made
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.is_over:  # it was given up while it was made
            self._transport.abort()
        else:
            self._on_made(self)

    @property
    def address(self) -> str:
        """The other end's host; empty where it is not known."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) and peer else ""

    def set_option(self, level: int, option: int, value: int) -> None:
        """Sets an option of the socket."""
        if self._transport is not None:
            self._transport.get_extra_info("socket").setsockopt(level, option, value)

    def limit(self, seconds: float | None) -> None:
        """Ends the connection after so many seconds, or never; it takes the place of the limit before."""
        if self._limit is not None:
            self._limit.cancel()
        loop = asyncio.get_running_loop()
        self._limit = None if seconds is None else loop.call_later(seconds, self.abort, f"it took over {seconds:g} s")

    def data_received(self, data: bytes) -> None:
        self.has_heard = True
        if not self.is_over:
            super().data_received(data)

    def _handle(self, frame: bytes) -> None:
        self.on_frame(frame)

    def write(self, frame: bytes) -> None:
        """Writes frames that have their lengths in front."""
        if self._transport is not None and not self.is_over:
            self._transport.write(frame)

    def send(self, message: Any) -> None:
        """Writes one message."""
        self.write(framed(encode([message])))

    def hold(self, is_held: bool) -> None:
        """Reads nothing while it is held, so that the other end has to wait."""
        if self._transport is None or self.is_over:
            return
        if is_held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.on_room(False)

    def resume_writing(self) -> None:
        self.on_room(True)

    def close(self, why: str, limit_s: float = LAST_WRITES_S) -> None:
        """Ends the connection after what was written, or after `limit_s`. Nothing more is handled. Idempotent."""
        if not self.is_over:
            self._end(why)
            if self._transport is not None:
                self._transport.close()
                # An end that reads nothing must not keep what was written, and the descriptor, for ever.
                self._limit = asyncio.get_running_loop().call_later(limit_s, self._transport.abort)

    def abort(self, why: str) -> None:
        """Ends the connection at once. Nothing more is handled. Idempotent."""
        if not self.is_over:
            self._end(why)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel_limit()
        self._transport = None
        if not self.is_over:
            self._end("it was closed" if error is None else str(error) or repr(error))

    def _cancel_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _end(self, why: str) -> None:
        self.is_over = True
        self._received.clear()
        self._cancel_limit()
        self.over.set()
        self._on_lost(why)
