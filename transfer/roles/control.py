"""The part that both roles have in common on their control sockets: they send now or not at all, read in turns, and
limit their complaints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
import zmq

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 20
"""The most bytes of a message. ZMQ drops the connection that sends a larger one, and does not read it."""
RECEIVE_QUEUE = 100
"""The most messages of one connection that may wait to be read. Its sender waits then."""
READ_AT_ONCE = 32
"""The most messages that are read before other tasks get a turn."""
LOG_BURST = 20
"""The number of warnings that may be logged at once. After them there is one per second."""
MAX_REASON_CHARS = 1000
"""The most characters that are kept of a reason which a peer has written."""
MALFORMED = (ValueError, msgspec.DecodeError, RecursionError)
"""The exceptions that unpacking frames, text and msgpack raises for bytes that are no message."""


OnMessage: TypeAlias = Callable[[list[bytes]], None]
"""A function that takes one message, frame by frame, and raises nothing."""


class ControlSocket:
    """A `ControlSocket` is a ZMQ socket on the event loop. Each message that comes in is handed on, and each message
    that goes out goes at once.

    A small push waits for two messages, so there are no futures and no tasks in between. A peer that connects cannot
    make us hold more than `RECEIVE_QUEUE` messages of `MAX_MESSAGE_BYTES`, nor keep the loop to itself.

    `raw` is for options, `connect` and `bind`. Mutable state: `_loop` once it listens.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, on_message: OnMessage) -> None:
        self.raw = context.socket(kind)
        self.raw.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.raw.set(zmq.RCVHWM, RECEIVE_QUEUE)
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_closed(self) -> bool:
        return self.raw.closed

    def listen(self) -> None:
        """Hands on what comes in from now on, as a list of frames, on this event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.raw.fileno(), self._read)
        self._loop.call_soon(self._read)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queues a message without waiting. On a full queue it is dropped, and the log says so; on a closed socket it
        is dropped silently.

        Both protocols live with a lost message: everything that is waited for has a deadline. Returns False where a
        ROUTER that must reach its peer (``ROUTER_MANDATORY``) has no connection to it, which is no news for the log.
        """
        if self.raw.closed:
            return True
        try:
            self.raw.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            _dropped.add("a control message was dropped: %s", error)
        finally:  # a message that does not go out has used the socket, too
            self._look_again()
        return True

    def close(self, linger_ms: int) -> None:
        """Closes the socket. Queued messages may leave for `linger_ms` milliseconds. Idempotent."""
        if self._loop is not None and not self.raw.closed:
            self._loop.remove_reader(self.raw.fileno())
        self.raw.close(linger=linger_ms)

    def _read(self) -> None:
        for _ in range(READ_AT_ONCE):
            if self.raw.closed:
                return
            try:
                frames = self.raw.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)
        self._look_again()

    def _look_again(self) -> None:
        """Looks again for messages. The descriptor tells of a change once, and any other use of the socket may swallow
        that."""
        if self._loop is not None and not self.raw.closed and int(self.raw.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)


def notice_dead_hosts(socket: zmq.Socket[bytes], timeout_s: float) -> None:
    """Lets ZMQ close the connection to a peer whose machine is gone, after about `timeout_s`. A process that stands
    still keeps its connection: its machine answers for it."""
    probe_s = max(1, round(timeout_s / 4))
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, probe_s)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, probe_s)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)


class Complaints:
    """`Complaints` logs warnings about what peers send: `burst` of them at once, then one per second. The rest is
    counted.

    Mutable state: `_room` (how many may be logged now), `_at` (the time for which `_room` was worked out),
    `_num_untold`.
    """

    def __init__(
        self, logger: logging.Logger, burst: int = LOG_BURST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._burst = burst
        self._clock = clock
        self._room = float(burst)
        self._at = clock()
        self._num_untold = 0

    def add(self, text: str, *arguments: object) -> None:
        """Logs the warning, as `logging` would, or counts it."""
        now = self._clock()
        self._room = min(self._burst, self._room + now - self._at)
        self._at = now
        if self._room < 1:
            self._num_untold += 1
            return
        self._room -= 1
        if self._num_untold:
            text, arguments = f"{text} (and %d more before)", (*arguments, self._num_untold)
            self._num_untold = 0
        self._logger.warning(text, *arguments)


_dropped = Complaints(log)
