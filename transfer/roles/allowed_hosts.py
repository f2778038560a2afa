"""`AllowedHosts` limits the addresses that a receiver signals to. A sender that asks for pages names an address, and
may name anybody's."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from transfer.errors import TransferError

THIS_MACHINE = ("localhost", "127.0.0.0/8", "[::1]")
EVERYWHERE = "*"
_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_PATTERN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\](?:/[0-9]+)?|[^:\[\]\s]+)(?::(?P<port>[0-9]{1,5}))?")
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")

_Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A `_Pattern` is a host, network, name or ``*``, with one port or any."""

    host: str | _Network
    port: int | None

    def allows(self, host: str | IPv4Address | IPv6Address, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        if isinstance(self.host, str):
            return self.host == EVERYWHERE or (isinstance(host, str) and _is_named(self.host, host))
        return not isinstance(host, str) and host in self.host


class AllowedHosts:
    """`AllowedHosts` holds patterns of ``host`` or ``host:port``. An address is allowed if any of them allows it.

    A host is an IP address, a network (``10.0.0.0/8``, ``[fd00::]/8``), a name, a name with a wildcard in front
    (``*.example.com``), or ``*``. Names are compared as text and never looked up; an IP address matches no name. Raises
    `TransferError` for a pattern that is none of these.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._texts = tuple(patterns)
        self._patterns = tuple(_parse(text) for text in self._texts)

    def __repr__(self) -> str:
        return f"<AllowedHosts {', '.join(self._texts)}>"

    def allows(self, address: str) -> bool:
        """Tells whether signals may go to `address`. False for anything that is not exactly ``tcp://host:port``."""
        parts = _ADDRESS.fullmatch(address)
        if parts is None:
            return False
        host, port = _host(parts["host"]), int(parts["port"])
        return any(pattern.allows(host, port) for pattern in self._patterns)


def _parse(text: str) -> _Pattern:
    parts = _PATTERN.fullmatch(text)
    if parts is None:
        raise TransferError(f"{text!r} is no host or host:port")
    host, port = parts["host"].lower(), None if parts["port"] is None else int(parts["port"])
    if host == EVERYWHERE:
        return _Pattern(host, port)
    try:
        return _Pattern(ipaddress.ip_network(host.replace("[", "").replace("]", "")), port)
    except ValueError as error:
        if _NAME.fullmatch(host) and not re.fullmatch(r"[0-9.]+", host):
            return _Pattern(host.removesuffix("."), port)
        raise TransferError(f"{text!r} is no host or host:port: {error}") from None


def _host(text: str) -> str | IPv4Address | IPv6Address:
    bare = text.strip("[]").lower()
    try:
        return ipaddress.ip_address(bare)
    except ValueError:
        return bare.removesuffix(".")


def _is_named(pattern: str, name: str) -> bool:
    return name.endswith(pattern[1:]) and len(name) >= len(pattern) if pattern.startswith("*.") else name == pattern
