"""A front's way to the leader: it connects, and each end proves to the other that it belongs to the fleet."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable
from typing import Any

from pdproxy.fronts.connection import Connection
from pdproxy.fronts.handshake import (
    BEATS,
    MAX_STRANGER_BYTES,
    REASONS,
    Admitted,
    Challenge,
    Hello,
    Lead,
    Peer,
    Proof,
    Purpose,
    Refused,
    hello,
    is_proved,
    prove,
    read_one,
)

log = logging.getLogger(__name__)

MIN_TRY_S = 1.0
"""The shortest time in seconds that a try is given, until both ends have proved themselves."""


class Introduction:
    """`Introduction` is a front's part in the handshake of one connection. `on_admitted` is called when it is through.

    Mutable state: the leader's nonce, once known; the reason of the leader's refusal.
    """

    def __init__(
        self,
        lead: Lead,
        first: Hello,
        told: Callable[[], tuple[str, int]],
        on_admitted: Callable[[Connection, Admitted], object],
    ) -> None:
        """`told` returns the session that the front has, and how many frames of it were handled."""
        self._lead = lead
        self._hello = first
        self._told = told
        self._on_admitted = on_admitted
        self._nonce = b""
        self.refused = ""

    def begin(self, connection: Connection) -> None:
        """Says who the front is, over a connection that was just made, and that ends where this takes too long."""
        connection.limit(try_s(self._lead))
        connection.max_frame_bytes = MAX_STRANGER_BYTES
        connection.on_frame = lambda frame: self._take(connection, read_one(frame))
        connection.send(self._hello)

    def _take(self, connection: Connection, message: Any) -> None:
        secret = self._lead.secret
        if isinstance(message, Challenge) and not self._nonce:
            self._nonce = message.nonce
            told = self._told()
            connection.send(Proof(prove(secret, "front", self._hello, message.nonce, *told), *told))
        elif isinstance(message, Admitted) and self._nonce:
            if is_proved(secret, "leader", self._hello, self._nonce, message):
                connection.limit(None)
                self._on_admitted(connection, message)
            else:
                self._refuse(connection, REASONS["secret"])
        elif isinstance(message, Refused):
            its_term = f" ({message.term}, not {self._lead.term})" if message.reason == "term" else ""
            self._refuse(connection, REASONS.get(message.reason, "it does not say why") + its_term)
        else:
            self._refuse(connection, "what is there is no leader of a fleet")

    def _refuse(self, connection: Connection, why: str) -> None:
        self.refused = why
        connection.abort(why)


def try_s(lead: Lead) -> float:
    """Returns the seconds that a try to reach the leader may take, once to connect and once to shake hands."""
    return max(MIN_TRY_S, 2 * lead.ttl_s / BEATS)


class Dialler:
    """`Dialler` makes a front's connections for one purpose. Mutable state: their number; the reasons that were logged
    why they could not be made, since one could."""

    def __init__(self, purpose: Purpose, front: Peer, tls: ssl.SSLContext | None) -> None:
        self._purpose = purpose
        self._front = front
        self._tls = tls
        self._process = secrets.token_hex(8)
        self._attempts = 0
        self._noted: set[str] = set()

    def introduce(
        self, lead: Lead, told: Callable[[], tuple[str, int]], on_admitted: Callable[[Connection, Admitted], object]
    ) -> Introduction:
        """Returns the handshake for the next connection."""
        self._attempts += 1
        first = hello(self._purpose, lead.term, self._front, self._process, self._attempts)
        return Introduction(lead, first, told, on_admitted)

    async def dial(self, lead: Lead, connection: Connection) -> bool:
        """Connects. Returns False, and says why in the log, where nobody is there."""
        try:
            host, port = lead.place
            async with asyncio.timeout(try_s(lead)):
                await asyncio.get_running_loop().create_connection(lambda: connection, host, port, ssl=self._tls)
        except (OSError, ValueError, OverflowError) as error:  # TimeoutError is one; the others are of the address
            connection.abort("it was not made")
            self.note(lead, str(error) or f"nobody answers within {try_s(lead):g} s")
            return False
        return True

    def note(self, lead: Lead, why: str) -> None:
        """Logs why the leader cannot be reached, once per reason."""
        said = f"{lead.address} {why}"
        if said not in self._noted:
            self._noted.add(said)
            log.warning("%s: no link to the leader of term %d at %s: %s", self._purpose, lead.term, lead.address, why)

    def forget_reasons(self) -> None:
        """Lets every reason be logged again, because the leader was reached."""
        self._noted.clear()
