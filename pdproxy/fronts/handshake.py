"""The messages of a link itself, and how its two ends prove to each other that they belong to one fleet.

Each end proves that it knows the fleet's secret, over both ends' nonces and all that the two agree on; neither says
the secret. What follows is neither encrypted nor sealed by that: where others can reach the wire, TLS does it.
"""

from __future__ import annotations

import hmac
import secrets
import ssl
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from pdproxy.errors import ConfigError
from pdproxy.fronts import messages
from pdproxy.fronts.connection import encode

LINK = 1
"""The number of the link's own messages. Both ends must have the same."""
MAX_STRANGER_BYTES = 4096
"""The most bytes of a frame of somebody who has not proved anything."""
BEATS = 6
"""The number of beats in a lease."""

Purpose = Literal["front", "operators"]
PURPOSES = get_args(Purpose)
Reason = Literal["protocol", "term", "secret", "lapsed", "taken", "late", "operators"]
REASONS: dict[str, str] = {
    "protocol": "the two ends are of versions that do not understand each other: run the same on all replicas",
    "term": "it leads another term",
    "secret": "the two ends have different secrets: give all replicas of a fleet the same",
    "lapsed": "it does not lead any more",
    "taken": "another process is linked as the same front: give each replica a name of its own",
    "late": "a younger connection of this front was faster",
    "operators": "the pages for operators do not answer there",
}
"""The reasons for which a leader refuses a connection, in words."""


@dataclass(frozen=True, slots=True)
class Lead:
    """`Lead` says who leads: the term, ``host:port``, the fleet's secret, and how long a front's lease lasts."""

    term: int
    address: str
    secret: str
    ttl_s: float

    @property
    def place(self) -> tuple[str, int]:
        """The host and the port."""
        host, _, port = self.address.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)


class Peer(msgspec.Struct, array_like=True, frozen=True):
    """A front, by an id that no other process has, and one that is started again neither."""

    id: str
    replica: str = ""
    pid: int = 0


# ── before the ends know each other ─────────────────────────────────────────────────────────────────────────────────


class Hello(msgspec.Struct, array_like=True, tag=100):
    """A front says who it is, to whom it wants to speak, and what for. `attempt` grows with each of its connections."""

    link: int
    protocol: int
    purpose: str
    term: int
    peer: Peer
    process: str
    attempt: int
    nonce: bytes


class Challenge(msgspec.Struct, array_like=True, tag=101):
    """The leader asks the front to prove itself."""

    nonce: bytes


class Refused(msgspec.Struct, array_like=True, tag=102):
    """The leader speaks no further. `reason` is a key of `REASONS`."""

    reason: str
    term: int


class Proof(msgspec.Struct, array_like=True, tag=103):
    """The front has proved itself. It has a session, or none (""), and has handled so many frames of it."""

    mac: bytes
    session: str
    num_handled: int


class Admitted(msgspec.Struct, array_like=True, tag=104):
    """The leader has proved itself, and has handled so many frames of this session, which may be a new one.

    No session at all ("") says that the front's is over: it gives it up, and comes again without.
    """

    mac: bytes
    session: str
    num_handled: int


# ── afterwards ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Beat(msgspec.Struct, array_like=True, tag=110):
    """The front is there, and has handled so many frames."""

    number: int
    num_handled: int


class Answer(msgspec.Struct, array_like=True, tag=111):
    """The leader has heard the beat of this number, and has handled so many frames."""

    number: int
    num_handled: int


class Handled(msgspec.Struct, array_like=True, tag=112):
    """One end has handled so many frames. It says so between beats when they were large."""

    num_handled: int


class Goodbye(msgspec.Struct, array_like=True, tag=113):
    """The front ends, and its session with it."""


OfLink = Beat | Answer | Handled | Goodbye
Early = Hello | Challenge | Refused | Proof | Admitted
read_early = msgspec.msgpack.Decoder(list[Early]).decode
"""The function that decodes a frame of somebody who has not proved anything."""


def read_one(frame: bytes) -> Any:
    """Returns the one message of a stranger's frame; None where it is anything else."""
    try:
        (message,) = read_early(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return message


def hello(purpose: Purpose, term: int, peer: Peer, process: str, attempt: int) -> Hello:
    """Returns a front's first message, with a nonce that it has not used before."""
    return Hello(LINK, messages.PROTOCOL, purpose, term, peer, process, attempt, secrets.token_bytes(32))


def prove(
    secret: str, end: Literal["front", "leader"], first: Hello, nonce: bytes, session: str, num_handled: int
) -> bytes:
    """Returns what only somebody who knows the secret can say here, at one end, and only now."""
    return hmac.digest(secret.encode(), encode([end, first, nonce, session, num_handled]), "sha256")


def is_proved(secret: str, end: Literal["front", "leader"], first: Hello, nonce: bytes, said: Proof | Admitted) -> bool:
    """Tells whether the other end, which is the `end` of the link, knows the secret."""
    return hmac.compare_digest(prove(secret, end, first, nonce, said.session, said.num_handled), said.mac)


def tls_contexts(certfile: str, keyfile: str, cafile: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the TLS contexts of a leader's and of a front's end. Both show the certificate, and ask for one that
    `cafile` has signed. Raises `ConfigError` where the files cannot be used."""
    contexts = []
    for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
        try:
            context = ssl.create_default_context(purpose, cafile=cafile)
            # The host's name is not checked. A leader is whoever the store says, at the address that it says, which is
            # often a bare IP address of a pod; the fleet's own CA, and the secret, tell who belongs to the fleet.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(certfile, keyfile)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the link's TLS files {certfile}, {keyfile}, {cafile}: {error}") from None
        contexts.append(context)
    return contexts[0], contexts[1]
