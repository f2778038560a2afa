"""A connection between a front and the leader: frames of messages, in order.

What one end sends in a turn of its event loop goes as one frame, with what may wait a moment and was said before. A
frame is its length in bytes (32 bits, big-endian) and a MessagePack array of messages.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import msgspec

from pdproxy.fronts.outbox import Outbox

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 28
"""The most bytes of a frame. The largest message has a whole prompt, in a call that frees LMCache's pages."""
LENGTH = struct.Struct(">I")
"""The length that is in front of a frame."""

Handlers = Mapping[type, Callable[[Any], object]]
"""The function that is called with each message of a class, by the class."""


class Line(Protocol):
    """`Line` takes messages for the other process. What is sent while nobody can hear it is lost."""

    def send(self, message: Any) -> None:
        """Sends a message, with all others of this turn. Never waits."""
        ...

    def send_soon(self, message: Any) -> None:
        """Sends a message that may wait a moment for others. Never waits."""
        ...

    @property
    def frame(self) -> object:
        """The identity of the frame that is sent next. As long as it stays the same, a message in it may still
        change."""
        ...

    @property
    def num_unsent_bytes(self) -> int:
        """The bytes that the other process has not taken yet."""
        ...


class OutboxLine:
    """`OutboxLine` sends by way of an `Outbox`, until it `is_over`. Implements `Line`, but for the bytes."""

    def __init__(self, write: Callable[[list[Any]], object]) -> None:
        """Takes the function that sends a frame."""
        self.is_over = False
        self._outbox = Outbox(write)

    def send(self, message: Any) -> None:
        """Sends a message, with all others of this turn. Never waits. Does nothing once this is over."""
        if not self.is_over:
            self._outbox.send(message)

    def send_soon(self, message: Any) -> None:
        """Sends a message that may wait a moment for others. Never waits. Does nothing once this is over."""
        if not self.is_over:
            self._outbox.send_soon(message)

    @property
    def frame(self) -> int:
        """The number of the frame that is sent next."""
        return self._outbox.frame


class Frames(asyncio.Protocol):
    """`Frames` cuts what comes into frames. A subclass handles them, in order, until `is_over`.

    Mutable state: what has come of a frame; how long one may be; whether the connection is over.
    """

    def __init__(self) -> None:
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.is_over = False
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        received = self._received
        if not received and self._is_one_frame(data):
            self._take(data[LENGTH.size :])
            return
        received += data
        begin = 0
        while len(received) - begin >= LENGTH.size:
            (length,) = LENGTH.unpack_from(received, begin)
            if length > self.max_frame_bytes:
                self.close(f"a frame of {length} bytes")
                return
            end = begin + LENGTH.size + length
            if len(received) < end:
                break
            frame = bytes(memoryview(received)[begin + LENGTH.size : end])
            begin = end
            if not self._take(frame):
                return
        if begin:
            del received[:begin]

    def _is_one_frame(self, data: bytes) -> bool:
        """Tells whether this is a whole frame and nothing else, as it is as a rule."""
        num_bytes = len(data) - LENGTH.size
        return 0 <= num_bytes <= self.max_frame_bytes and LENGTH.unpack_from(data)[0] == num_bytes

    def _take(self, frame: bytes) -> bool:
        """Handles a frame. Returns whether another one may be handled."""
        try:
            self._handle(frame)
        except Exception as error:  # of one end or the other: they do not understand each other any more
            log.exception("a message of the other process cannot be handled")
            self.close(repr(error))
            return False
        return not self.is_over

    def _handle(self, frame: bytes) -> None:
        raise NotImplementedError

    def close(self, why: str) -> None:
        """Closes the connection, after what was sent. Idempotent."""
        raise NotImplementedError


class Channel(Frames):
    """`Channel` decodes messages of the union `incoming`, and calls what `handlers` has for the class of each.

    `on_lost` is called once, with the reason, when the connection is over; nothing is sent any more then. Implements
    `Line`. Mutable state: the transport, once connected; what is to be sent.
    """

    def __init__(self, incoming: Any, on_lost: Callable[[str], object]) -> None:
        super().__init__()
        self.handlers: Handlers = {}
        self._decode = msgspec.msgpack.Decoder(list[incoming]).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._outbox = Outbox(self._send_now)
        self._why = "the connection was closed"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._outbox.flush()

    def send(self, message: Any) -> None:
        """Sends a message, with all others of this turn. Never waits. Does nothing once the connection is over."""
        if self._transport is not None:
            self._outbox.send(message)
        elif not self.is_over:  # not connected yet
            self._outbox.keep(message)

    def send_soon(self, message: Any) -> None:
        """Sends a message that may wait a moment for others. Never waits. Does nothing once the connection is over."""
        if self._transport is not None:
            self._outbox.send_soon(message)
        elif not self.is_over:
            self._outbox.keep(message)

    def _send_now(self, messages: list[Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            try:
                self._write(self._transport, messages)
            except Exception as error:  # a bug: the other end would wait for what it never hears
                log.exception("a message for the other process cannot be written")
                self._why = repr(error)
                self._transport.abort()

    def _write(self, transport: asyncio.Transport, messages: list[Any]) -> None:
        frame = self._encode(messages)
        if len(frame) > MAX_FRAME_BYTES and len(messages) > 1:
            half = len(messages) // 2
            self._write(transport, messages[:half])
            self._write(transport, messages[half:])
        else:
            transport.write(LENGTH.pack(len(frame)) + frame)

    def data_received(self, data: bytes) -> None:
        self._outbox.hold()
        try:
            super().data_received(data)
        finally:
            self._outbox.let_go()

    def _handle(self, frame: bytes) -> None:
        handlers = self.handlers
        for message in self._decode(frame):
            handlers[type(message)](message)

    def close(self, why: str) -> None:
        """Closes the connection, after what was sent. Idempotent."""
        self._why = why
        if self._transport is not None:
            self._outbox.flush()
            self._transport.close()

    @property
    def frame(self) -> object:
        """The number of the frame that is sent next."""
        return self._outbox.frame

    @property
    def num_unsent_bytes(self) -> int:
        """The bytes that the other end has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over = True
        self._transport = None
        self._outbox.clear()
        self._on_lost(self._why if error is None else str(error))
