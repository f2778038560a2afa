"""A connection between a front and the leader: frames of messages, in order.

What one end sends in a turn of its event loop goes as one frame. A frame is its length in bytes (32 bits, big-endian)
and a MessagePack array of messages.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 28
"""The most bytes of a frame. The largest message has a whole prompt, in a call that frees LMCache's pages."""
LENGTH = struct.Struct(">I")
"""The length that is in front of a frame."""

Handlers = Mapping[type, Callable[[Any], object]]
"""The function that is called with each message of a class, by the class."""


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
            try:
                self._handle(frame)
            except Exception as error:  # of one end or the other: they do not understand each other any more
                log.exception("a message of the other process cannot be handled")
                self.close(repr(error))
                return
            if self.is_over:
                return
        if begin:
            del received[:begin]

    def _handle(self, frame: bytes) -> None:
        raise NotImplementedError

    def close(self, why: str) -> None:
        """Closes the connection, after what was sent. Idempotent."""
        raise NotImplementedError


class Channel(Frames):
    """`Channel` decodes messages of the union `incoming`, and calls what `handlers` has for the class of each.

    `on_lost` is called once, with the reason, when the connection is over; nothing is sent any more then. Mutable
    state: the transport, once connected; what is to be sent at the end of this turn.
    """

    def __init__(self, incoming: Any, on_lost: Callable[[str], object]) -> None:
        super().__init__()
        self.handlers: Handlers = {}
        self._decode = msgspec.msgpack.Decoder(list[incoming]).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[Any] = []
        self._why = "the connection was closed"
        self._loop: asyncio.AbstractEventLoop | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        if self._outgoing:
            self._flush()

    def send(self, message: Any) -> None:
        """Sends a message, with all others of this turn. Never waits. Does nothing once the connection is over."""
        if self.is_over:
            return
        if not self._outgoing and self._loop is not None:
            self._loop.call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if messages and self._transport is not None and not self._transport.is_closing():
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

    def _handle(self, frame: bytes) -> None:
        handlers = self.handlers
        for message in self._decode(frame):
            handlers[type(message)](message)

    def close(self, why: str) -> None:
        """Closes the connection, after what was sent. Idempotent."""
        self._why = why
        if self._transport is not None:
            self._flush()
            self._transport.close()

    @property
    def num_unsent_bytes(self) -> int:
        """The bytes that the other end has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over = True
        self._transport = self._loop = None
        self._outgoing.clear()
        self._on_lost(self._why if error is None else str(error))
