"""The module holds the socket on which decoders (and LMCache's prefillers) tell what became of an attempt's KV."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from pdproxy.errors import ConfigError
from pdproxy.kv_signals.board import KvBoard
from transfer.wire import decode_signal

log = logging.getLogger(__name__)

RECEIVE_QUEUE = 100_000
"""The most signals that wait in the socket. A dropped one would cost its request the whole KV-ready deadline."""
MAX_SIGNAL_BYTES = 1 << 14
"""The most bytes of a signal. ZMQ drops a connection that sends a larger signal, and does not read the signal."""
READ_AT_ONCE = 32
"""The most signals that are read before other tasks get a turn: reading a signal that is there does not suspend by
itself.
"""
COMPLAINT_INTERVAL_S = 1.0
"""The least seconds between two log lines about nonsense on the socket, because a flood of nonsense must not flood the
log. Each line counts the rest.
"""


class SignalSocket:
    """A `SignalSocket` is a bound ZMQ PULL socket in front of `board`. Port 0 takes a free port.

    Raises `ConfigError` where it cannot bind. Mutable state: the socket, until `close`; `num_malformed`;
    `_complained_at`.
    """

    def __init__(self, board: KvBoard, host: str, port: int) -> None:
        self._board = board
        self.num_malformed = 0
        self._complained_at = float("-inf")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, RECEIVE_QUEUE)
        self._socket.set(zmq.MAXMSGSIZE, MAX_SIGNAL_BYTES)
        self._socket.set(zmq.LINGER, 0)
        self.port = self._bind(host, port)

    async def run(self) -> None:
        """Delivers signals until it is cancelled. It counts and forgets what is no signal: the socket is open to
        strangers.
        """
        while True:
            for _ in range(READ_AT_ONCE):
                frames = await self._socket.recv_multipart()
                try:
                    (payload,) = frames
                    self._board.deliver(decode_signal(payload))
                except (ValueError, msgspec.DecodeError, RecursionError) as error:
                    self._complain(frames, error)
            await asyncio.sleep(0)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def _complain(self, frames: Sequence[bytes], error: Exception) -> None:
        self.num_malformed += 1
        now = time.monotonic()
        if now - self._complained_at < COMPLAINT_INTERVAL_S:
            return
        self._complained_at = now
        num_bytes = sum(map(len, frames))
        text = "a message of %d bytes on the signal socket is no signal: %s (the %d. so far)"
        log.warning(text, num_bytes, error, self.num_malformed)

    def _bind(self, host: str, port: int) -> int:
        try:
            address = _address_of(host)
            self._socket.set(zmq.IPV6, ":" in address)
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ConfigError(f"proxy_host, proxy_port: cannot listen on {host}:{port}: {error}") from None
        endpoint = self._socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def _address_of(host: str) -> str:
    """Returns `host` as an address, because ZMQ binds to nothing else; IPv4 where the host has both. Raises
    `OSError`.
    """
    if host == "*":
        return host
    try:
        return socket.gethostbyname(host)
    except socket.gaierror:
        return f"[{socket.getaddrinfo(host, None, socket.AF_INET6)[0][4][0]}]"
