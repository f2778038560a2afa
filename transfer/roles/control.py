"""What both roles do on their control sockets: send now or not at all, read in turns, and complain in measure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 20
"""ZMQ drops the connection that sends more, unread."""
RECEIVE_QUEUE = 100
"""Messages of one connection that may wait to be read; its sender waits then."""
READ_AT_ONCE = 32
"""Messages read before everybody else gets a turn: reading what is there does not suspend by itself."""
LOG_BURST = 20
MAX_REASON_CHARS = 1000
MALFORMED = (ValueError, msgspec.DecodeError, RecursionError)
"""What unpacking frames, text and msgpack raises for bytes that are no message."""


def limit_intake(socket: zmq.asyncio.Socket) -> None:
    """Whoever connects cannot make us hold more than `RECEIVE_QUEUE` messages of `MAX_MESSAGE_BYTES`."""
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.set(zmq.RCVHWM, RECEIVE_QUEUE)


async def in_turns(socket: zmq.asyncio.Socket) -> AsyncIterator[list[bytes]]:
    """What comes in, message by message, for ever; whoever floods the socket does not keep the loop to itself."""
    while True:
        for _ in range(READ_AT_ONCE):
            yield await socket.recv_multipart()
        await asyncio.sleep(0)


def send_now(socket: zmq.asyncio.Socket, frames: Sequence[bytes]) -> bool:
    """Queue a message without waiting. On a full queue or a closed socket it is dropped, and the log says so.

    Both protocols live with a lost message: whatever is waited for has a deadline. False where a ROUTER that must reach
    its peer (``ROUTER_MANDATORY``) has no connection to it, which is no news for the log.
    """
    if socket.closed:
        return True
    sent = asyncio.ensure_future(socket.send_multipart(frames, zmq.NOBLOCK))  # done already
    error = sent.exception()
    if isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH:
        return False
    if error is not None:
        _dropped.add("a control message was dropped: %s", error)
    return True


def notice_dead_hosts(socket: zmq.asyncio.Socket, timeout_s: float) -> None:
    """A peer whose machine is gone has its connection closed after about `timeout_s`. A process that stands still keeps
    it: its machine answers for it."""
    probe_s = max(1, round(timeout_s / 4))
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, probe_s)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, probe_s)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)


class Complaints:
    """Warnings about what peers send: `burst` of them at once, then one per second. The rest is counted.

    Mutable state: `_room` (how many may be logged now), `_at` (when that was so), `_num_untold`.
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
        """Log it, as `logging` would, or count it."""
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
