"""The module says how the flags of LMCache's example proxy, which this proxy takes too, are meant."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.errors import ConfigError

LMCACHE_SIGNAL_PORT = 7500
"""The port to which prefillers send their notifications in LMCache's own examples."""
REFERENCE_FLAGS = frozenset(
    {"prefiller_host", "prefiller_port", "num_prefillers", "decoder_host", "decoder_port", "num_decoders"}
)


def pair_hosts_and_ports(what: str, hosts: Sequence[str], ports: Sequence[int], count: int) -> list[tuple[str, int]]:
    """Pairs hosts and ports by the reference proxy's rule: one of each with a count, one host or one port for all, or
    lists of one length.

    Returns no pairs without hosts. Raises `ConfigError` for lists that do not fit.
    """
    if not hosts:
        return []
    if len(hosts) == len(ports) == 1:
        return [(hosts[0], ports[0] + index) for index in range(count)]
    if len(hosts) == 1:
        return [(hosts[0], port) for port in ports]
    if len(ports) == 1:
        return [(host, ports[0]) for host in hosts]
    if len(hosts) != len(ports):
        raise ConfigError(
            f"{what}_host, {what}_port: {len(hosts)} hosts and {len(ports)} ports cannot be paired; "
            "give one of either, or as many ports as hosts"
        )
    return list(zip(hosts, ports, strict=True))
