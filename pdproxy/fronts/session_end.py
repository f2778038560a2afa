"""One end of a session, which outlives the connections that carry it.

What must hold: what one end sends is handled at the other exactly once and in order, or the session is over. So each
end counts the frames that it sends and keeps them until the other says that it has handled them; when a connection has
taken the place of another, both say how many they have handled, and the rest is sent again. A violation would be seen
as a frame that is missing, comes twice, or comes before another.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from pdproxy.fronts.channel import Handlers, OutboxLine
from pdproxy.fronts.connection import Connection, encode, framed
from pdproxy.fronts.handshake import Handled, OfLink

log = logging.getLogger(__name__)

MAX_TAPE_BYTES = 16 << 20
"""The most bytes that are kept because the other end has not said that it has handled them."""
MAX_UNTOLD_BYTES = 1 << 20
"""The number of handled bytes after which the other end is told before the next beat."""
_OF_LINK = (*OfLink.__args__,)


class Broken(Exception):
    """The two ends of a session have lost track of each other, so that it cannot go on."""


class SessionEnd(OutboxLine):
    """`SessionEnd` sends and handles what belongs to one session. `on_own` takes the messages of the link itself.

    `on_broken` is called, with the reason, when the session cannot go on; to `end` it is the caller's part. Mutable
    state: what is to be sent at the end of this turn; the tape, which holds the frames from `num_acknowledged` on; how
    many frames were sent and handled; the connection, while there is one.
    """

    def __init__(
        self,
        decode: Callable[[bytes], list[Any]],
        handlers: Callable[[], Handlers],
        on_own: Callable[[Any], object],
        on_broken: Callable[[str], object],
    ) -> None:
        super().__init__(self._send_now)
        self._decode = decode
        self._handlers = handlers
        self._on_own = on_own
        self._on_broken = on_broken
        self._tape: deque[bytes] = deque()
        self.connection: Connection | None = None
        self._num_untold_bytes = 0
        self.num_kept_bytes = 0
        self.num_sent = 0
        self.num_handled = 0

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def flush(self) -> None:
        """Sends now what was to be sent."""
        self._outbox.flush()

    def _send_now(self, outgoing: list[Any]) -> None:
        if self.is_over:
            return
        try:
            frame = framed(encode(outgoing))
        except Exception as error:  # a bug: the other end would wait for what it never hears
            log.exception("a message for the other process cannot be written")
            self._on_broken(repr(error))
            return
        self._tape.append(frame)
        self.num_sent += 1
        self.num_kept_bytes += len(frame)
        if self.num_kept_bytes > MAX_TAPE_BYTES:
            self._on_broken(f"the other end has not taken {self.num_kept_bytes} bytes")
        elif self.connection is not None:
            self.connection.write(frame)

    def acknowledge(self, num_handled: int) -> None:
        """Forgets the frames that the other end has handled. Raises `Broken` where it cannot have."""
        num_new = num_handled - (self.num_sent - len(self._tape))
        if not 0 <= num_new <= len(self._tape):
            raise Broken(f"{num_handled} frames cannot have been handled of {self.num_sent}")
        for _ in range(num_new):
            self.num_kept_bytes -= len(self._tape.popleft())

    # ── connections ─────────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, connection: Connection, num_handled: int) -> None:
        """Goes on with a new connection, whose other end has handled so many frames. Raises `Broken`."""
        self.acknowledge(num_handled)
        self.connection = connection
        self._num_untold_bytes = 0
        connection.max_frame_bytes = MAX_TAPE_BYTES
        connection.on_frame = self.take
        for frame in self._tape:
            connection.write(frame)

    def detach(self) -> None:
        """Goes on without a connection: what is sent waits for the next."""
        self.connection = None

    def end(self) -> None:
        """Ends the session. Nothing more is handled or sent. Idempotent."""
        self.is_over = True
        self.connection = None
        self._outbox.clear()
        self._tape.clear()
        self.num_kept_bytes = 0

    # ── handling ────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, frame: bytes) -> None:
        """Handles a frame. One that cannot be handled ends the session."""
        try:
            received = self._decode(frame)
            if isinstance(received[0], _OF_LINK):
                self._take_own(received[0])
            else:
                self.num_handled += 1
                self._take_all(received)
                self._tell(len(frame))
        except Broken as error:
            self._on_broken(str(error))
        except Exception as error:  # of one end or the other: they do not understand each other any more
            log.exception("a message of the other process cannot be handled")
            self._on_broken(repr(error))

    def _take_all(self, received: list[Any]) -> None:
        handlers = self._handlers()
        for message in received:
            if self.is_over:  # by what was handled before it
                return
            handlers[type(message)](message)

    def _take_own(self, message: Any) -> None:
        if not isinstance(message, Handled):
            self._on_own(message)
        else:
            self.acknowledge(message.num_handled)

    def _tell(self, num_bytes: int) -> None:
        self._num_untold_bytes += num_bytes
        if self._num_untold_bytes > MAX_UNTOLD_BYTES and self.connection is not None:
            self.connection.send(Handled(self.told()))

    def told(self) -> int:
        """Returns how many frames were handled, to be told to the other end now."""
        self._num_untold_bytes = 0
        return self.num_handled


def decoder(incoming: Any) -> Callable[[bytes], list[Any]]:
    """Returns the function that decodes frames with messages of the union `incoming`, and with those of the link."""
    return msgspec.msgpack.Decoder(list[incoming | OfLink]).decode
