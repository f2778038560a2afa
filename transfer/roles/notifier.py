"""The notifier tells proxies what became of an attempt. Nobody waits for an answer: a proxy that is gone must not slow
an engine down."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

import msgspec
import zmq

from transfer.roles.control import MAX_REASON_CHARS, Complaints
from transfer.wire import KvGranted, KvReady, Signal, encode

log = logging.getLogger(__name__)

MAX_PROXIES = 64
SEND_QUEUE = 10_000
"""The most signals that wait to leave for one proxy. Any further one is dropped."""
LINGER_MS = 200
SCHEME = "tcp://"
MAX_ANSWER_BYTES = 4096
"""The most bytes of a message from a proxy. Only ZMQ's own handshake is expected from there."""


class Notifier:
    """A `Notifier` has one PUSH socket per proxy address. Beyond `MAX_PROXIES` it closes the one that was used least
    recently.

    Mutable state: `_sockets`. It must be used on the event loop's thread only.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._complaints = Complaints(log)
        self._sockets: OrderedDict[str, zmq.SyncSocket] = OrderedDict()

    def tell(self, address: str | None, signal: Signal) -> None:
        """Queues `signal` for the proxy at `address` (``tcp://host:port``). Without an address it does nothing. Never
        blocks."""
        if address is None:
            return
        try:
            self._socket(address).send(encode(_shortened(signal)), zmq.NOBLOCK)
        except (zmq.ZMQError, ValueError) as error:
            self._complaints.add("signal %s to %s was dropped: %s", type(signal).__name__, address, error)

    async def aclose(self) -> None:
        """Closes the sockets. Queued signals have `LINGER_MS` to leave. Signals told later are dropped."""
        for socket in self._sockets.values():
            socket.close(linger=LINGER_MS)
        self._sockets.clear()
        await asyncio.to_thread(self._context.term)

    def _socket(self, address: str) -> zmq.SyncSocket:
        if address not in self._sockets:
            self._sockets[address] = self._connect(address)
        self._sockets.move_to_end(address)
        if len(self._sockets) > MAX_PROXIES:
            self._sockets.popitem(last=False)[1].close(linger=LINGER_MS)
        return self._sockets[address]

    def _connect(self, address: str) -> zmq.SyncSocket:
        """Returns a new socket that is connected to `address`. Raises `zmq.ZMQError`, or `ValueError` for an address
        that is none."""
        if not address.startswith(SCHEME):
            raise ValueError(f"an address begins with {SCHEME}")
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.SNDHWM, SEND_QUEUE)
        socket.set(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        socket.set(zmq.RCVHWM, 1)
        socket.set(zmq.IPV6, "[" in address)  # a name stands for an IPv4 address: proxies listen there
        try:
            socket.connect(address)
        except (zmq.ZMQError, ValueError):
            socket.close()
            raise
        return socket


def _shortened(signal: Signal) -> Signal:
    """Returns the signal with a reason of at most `MAX_REASON_CHARS`. Reasons are for people, and a peer may have
    written this one, so the proxy must not get it at any length."""
    if isinstance(signal, KvGranted | KvReady) or len(signal.reason) <= MAX_REASON_CHARS:
        return signal
    return msgspec.structs.replace(signal, reason=signal.reason[:MAX_REASON_CHARS])
