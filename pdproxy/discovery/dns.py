"""Services that are found by DNS: each address behind a name is one instance. Kubernetes names the pods of a headless
service so, and asks for no rights; outside of a cluster, Consul and Docker do.

What must hold: an address that the name has is in the fleet after the next look, one that it has lost gets nothing new,
and a look that failed changes nothing. A violation would be seen as a fleet that is gone while its engines are well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

import anyio
import dns.asyncresolver
import dns.exception
import dns.resolver

from pdproxy.config.instances import SERVICE_PREFIX, InstanceSettings
from pdproxy.config.values import MAX_NAME_CHARS
from pdproxy.discovery.discovery import Tell
from pdproxy.errors import ConfigError
from pdproxy.fleet.roster import Entry

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""The longest time in seconds for one look."""
ABSENT_S = 30.0
"""Seconds for which a name must be said not to exist before its instances leave. Name servers that start say so."""

Resolve = Callable[[str], Awaitable[frozenset[str]]]
"""A function that returns the addresses of a name; none where it is said to have none. Raises `ResolveError`."""


class ResolveError(Exception):
    """Nothing is known of a name for now. The message says why."""


class NameServers:
    """NameServers asks the name servers of this machine, or the one at `server`, as HOST:PORT. Raises `ConfigError`."""

    def __init__(self, server: str | None = None) -> None:
        self._server = None if server is None else _place(server)

    async def addresses(self, name: str) -> frozenset[str]:
        """Returns the addresses of the name. Raises `ResolveError`.

        An engine may have an address of each family, and is one instance: so those of IPv6 count where there are none
        of IPv4.
        """
        try:
            resolver = self._resolver()
            return await _ask(resolver, name, "A") or await _ask(resolver, name, "AAAA")
        except dns.resolver.NXDOMAIN:
            return frozenset()
        except (dns.exception.DNSException, OSError, ValueError) as error:  # ValueError: of a resolv.conf
            raise ResolveError(str(error) or type(error).__name__) from None

    def _resolver(self) -> dns.asyncresolver.Resolver:
        """Returns a resolver by the machine's present settings, which may change while the proxy runs."""
        resolver = dns.asyncresolver.Resolver(configure=self._server is None)
        if self._server is not None:
            resolver.nameservers, resolver.port = [self._server[0]], self._server[1]
        return resolver


async def _ask(resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> frozenset[str]:
    answer = await resolver.resolve(name, kind, lifetime=LOOK_S, search=True, raise_on_no_answer=False)
    return frozenset(record.to_text() for record in answer.rrset or ())


def _place(server: str) -> tuple[str, int]:
    with suppress(ValueError):
        parts = urlsplit(f"//{server}")
        if parts.hostname:
            return str(ip_address(parts.hostname)), parts.port or 53
    raise ConfigError(f"dns_server: {server!r} is not ADDRESS:PORT of a name server")


class DnsService:
    """DnsService finds the instances of one service, which are all as `service` says but for name and address.

    Implements `discovery.Source`. Mutable state: the addresses it found; since when the name is said not to exist; what
    was last complained of.
    """

    def __init__(
        self,
        service: InstanceSettings,
        resolve: Resolve,
        *,
        interval_s: float,
        absent_s: float = ABSENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interval_s` is the time between two looks."""
        self._service = service
        self._url = urlsplit(service.url.removeprefix(SERVICE_PREFIX))
        self._resolve = resolve
        self._interval_s = interval_s
        self._absent_s = absent_s
        self._clock = clock
        self._addresses: frozenset[str] = frozenset()
        self._absent_since: float | None = None
        self._complaint = ""

    async def run(self, tell: Tell) -> None:
        while True:
            await self.look(tell)
            await anyio.sleep(self._interval_s)

    @property
    def complaints(self) -> list[str]:
        return [f"{self}: {self._complaint}"] if self._complaint else []

    async def look(self, tell: Tell) -> None:
        """Looks once."""
        name = self._url.hostname or ""
        try:
            found = await self._resolve(name)
        except ResolveError as error:
            self._absent_since = None
            self._complain(f"the instances stay as they are, for {name} cannot be resolved: {error}")
            return
        if found:
            self._absent_since, self._complaint = None, ""
        elif self._is_early():
            self._complain(f"{name} has no address")
            return
        if found != self._addresses:
            log.info("%s has %d addresses", name, len(found))
        self._addresses = found
        tell(self._entry(address) for address in sorted(found))

    def _is_early(self) -> bool:
        """Tells whether a name without an address may have one in a moment."""
        if self._absent_since is None:
            self._absent_since = self._clock()
        return self._clock() - self._absent_since < self._absent_s

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            self._complaint = what
            log.warning("%s: %s", self, what)

    def _entry(self, address: str) -> Entry:
        host = f"[{address}]" if ":" in address else address
        port = "" if self._url.port is None else f":{self._url.port}"
        name = f"{self._service.name[: MAX_NAME_CHARS - 1 - len(address)]}-{address}"
        url = f"{self._url.scheme}://{host}{port}{self._url.path}"
        return Entry(self._service.model_copy(update={"name": name, "url": url}))

    def __str__(self) -> str:
        return self._service.url

    def __repr__(self) -> str:
        return f"<DnsService {self._service.url}: {len(self._addresses)} addresses>"
