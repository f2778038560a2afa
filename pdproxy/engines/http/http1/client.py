"""The module implements `EngineClient` for HTTP/1.1 in clear text: a call costs little more than its system calls.

Like the other client it limits nothing and repeats nothing, and it keeps connections alive for a shorter time than
engines do. It finds out that the engine has closed a connection before a request is on it. Then it uses another
connection, and nobody hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.engines.http.base import EngineBroken, EngineClient, EngineUnreachable
from pdproxy.engines.http.http1.connection import Connection
from pdproxy.engines.http.http1.leg import Http1Leg
from pdproxy.engines.http.http1.origin import Origin
from pdproxy.engines.http.http1.request_head import HeadWriter

_DEFAULT_PORT: Final = 80

Place = tuple[Origin, HeadWriter]


def can_reach(url: str) -> bool:
    """Tells whether this client is enough for the engine at `url`: no encryption there, and no password in the URL."""
    parts = urlsplit(url)
    return parts.scheme == "http" and bool(parts.hostname) and "@" not in parts.netloc and url.isascii()


class Http1Client(EngineClient):
    """An `Http1Client` is for the instance at `url`, which gets `api_key` with every call.

    Other places, such as a bootstrap server at another port, never get the key: they have not asked for it, and whoever
    listens there need not be the engine.

    Raises `ValueError` for a `url` that it cannot reach. Mutable state: the places that were called besides `url`;
    whether it is closed.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        api_key: str | None = None,
        descriptors: DescriptorBudget | None = None,
    ) -> None:
        if not can_reach(url):
            raise ValueError(f"not an address of HTTP in clear text: {url}")
        self._connect_timeout_s = connect_timeout_s
        self._descriptors = descriptors or DescriptorBudget()
        self._home = self._place(url, {"authorization": f"Bearer {api_key}"} if api_key else {})
        self._netloc = urlsplit(url).netloc
        self._path = urlsplit(url).path.rstrip("/")
        self._others: dict[str, Place] = {}
        self._is_closed = False

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Has `callback` called when the engine ends a connection that nobody uses, as a process that goes does.

        It is not called for each of many. It must not raise.
        """
        self._home[0].on_lost = callback

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Http1Leg:
        """Does the same as `EngineClient.post`. Raises `EngineBroken` also for headers that nobody can send."""
        (origin, heads), target = self._find(path)
        try:
            head = heads.post(target, headers, len(body))
        except ValueError as error:
            raise EngineBroken(str(error)) from error
        connection = self._reuse(origin) or await origin.connect(self._connect_timeout_s)
        leg = _ask(connection, head, body)
        body = b""  # what was not sent yet, the connection has
        try:
            await leg.arrival()
        except BaseException:
            leg.close()
            raise
        return leg

    async def get(self, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        deadline = asyncio.get_running_loop().time() + timeout_s
        (origin, heads), target = self._find(path)
        try:
            head = heads.get(target, headers)
        except ValueError as error:
            raise EngineBroken(str(error)) from error
        connection = self._reuse(origin) or await origin.connect(timeout_s)
        leg = _ask(connection, head, b"")
        try:
            async with asyncio.timeout_at(deadline):
                await leg.arrival()
                return leg.status, await leg.read()
        except TimeoutError:
            raise EngineBroken(f"no answer within {timeout_s:g} s") from None
        finally:
            leg.close()

    async def aclose(self) -> None:
        """Closes the connections that are kept. Idempotent.

        The owners of legs under way close those. The other connections are gone one turn of the loop later.
        """
        self._is_closed = True
        for origin, _ in (self._home, *self._others.values()):
            origin.close()
        await asyncio.sleep(0)

    def _reuse(self, origin: Origin) -> Connection | None:
        if self._is_closed:
            raise EngineUnreachable("it was taken out of the fleet")
        return origin.reuse()

    def _find(self, path: str) -> tuple[Place, str]:
        """Returns the place of a path or a whole URL, and its target there. Raises `EngineUnreachable`."""
        if path.startswith("/"):
            return self._home, self._path + path
        if not can_reach(path):
            raise EngineUnreachable(f"not an address of HTTP in clear text: {path}")
        parts = urlsplit(path)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        if parts.netloc == self._netloc:
            return self._home, target
        if parts.netloc not in self._others:
            self._others[parts.netloc] = self._place(path, {})
        return self._others[parts.netloc], target

    def _place(self, url: str, standing: Mapping[str, str]) -> Place:
        parts = urlsplit(url)
        origin = Origin(parts.hostname or "", parts.port or _DEFAULT_PORT, self._descriptors)
        return origin, HeadWriter(parts.netloc, standing)


def _ask(connection: Connection, head: bytes, body: bytes) -> Http1Leg:
    """Sends a request and returns its leg, which has the connection from here on.

    Nothing may be awaited between the lending of the connection and this call: nobody would close it then.
    """
    leg = Http1Leg(connection)
    connection.send(leg, head, body)
    return leg
