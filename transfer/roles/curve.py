"""The lock of the control sockets: CURVE, which encrypts, with one key pair that the whole fleet has.

There is one pair because a prefiller and a decoder of one fleet trust each other with all of its KV already. A pair for
each of them would have to be handed out and taken back. It would keep nobody out whom the shared one lets in.
"""

from __future__ import annotations

import zmq
from zmq.utils import z85

from transfer.roles.control import Complaints, ControlSocket
from transfer.trust import FleetKey

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = "kv"
MECHANISM = b"CURVE"


def lock_client(socket: zmq.Socket[bytes], key: FleetKey) -> None:
    """Makes `socket` show the fleet's key and speak to its owners only. Call this before ``connect``."""
    secret, public = _pair(key)
    socket.set(zmq.CURVE_SECRETKEY, secret)
    socket.set(zmq.CURVE_PUBLICKEY, public)
    socket.set(zmq.CURVE_SERVERKEY, public)


class Doorkeeper:
    """A `Doorkeeper` lets those in who have the fleet's key, at the bound socket of one context.

    What must hold: no message of anybody without the key is ever handed on. A violation would be seen as an answer
    to a socket that has no key, a wrong key or an older protocol, or as such a socket among the receiver's peers.

    ZMQ asks whether a client may come in by messages (RFC 27); without somebody who answers them it would take anybody,
    which `ZAP_ENFORCE_DOMAIN` forbids.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: FleetKey, complaints: Complaints) -> None:
        self._secret, public = _pair(key)
        self._welcome = z85.decode(public)
        self._complaints = complaints
        self._socket = ControlSocket(context, zmq.ROUTER, self._hear)
        self._socket.raw.bind(ZAP_ADDRESS)

    def lock(self, socket: zmq.Socket[bytes]) -> None:
        """Opens `socket` to owners of the key only. Call this before ``bind``."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
        socket.set(zmq.ZAP_DOMAIN, DOMAIN.encode())
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def listen(self) -> None:
        """Answers ZMQ's questions about clients from now on, on this event loop."""
        self._socket.listen()

    def close(self) -> None:
        """Lets nobody new in from now on. Idempotent."""
        self._socket.close(0)

    def _hear(self, frames: list[bytes]) -> None:
        asker, empty, _version, request, _domain, address, _identity, mechanism, *credentials = frames
        is_one_of_us = mechanism == MECHANISM and credentials == [self._welcome]
        if not is_one_of_us:
            self._complaints.add("refused a prefiller at %s: it has not the fleet's key", address.decode())
        verdict = (b"200", b"OK") if is_one_of_us else (b"400", b"not of this fleet")
        self._socket.send([asker, empty, ZAP_VERSION, request, *verdict, b"", b""])


def _pair(key: FleetKey) -> tuple[bytes, bytes]:
    """Returns the secret and the public half of the key pair, as ZMQ takes them."""
    secret = z85.encode(key.curve_secret)
    return secret, zmq.curve_public(secret)
