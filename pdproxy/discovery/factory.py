"""The module makes the discovery that the options ask for. What a way of it needs is imported only where it is used."""

from __future__ import annotations

from pdproxy.config.settings import Settings
from pdproxy.discovery.discovery import Discovery, Source
from pdproxy.errors import ConfigError

FOR_PODS = (
    "prefill_selector",
    "decode_selector",
    "prefill_service",
    "decode_service",
    "discover_preset",
    "discover_namespace",
    "discover_port",
    "inference_pool",
)
"""The options that mean something with ``discover`` alone."""


def make_discovery(settings: Settings) -> Discovery | None:
    """Returns what finds the instances; None where all are given. Nothing is asked yet. Raises `ConfigError`."""
    alone = next((name for name in FOR_PODS if getattr(settings, name)), None)
    if settings.discover is None and alone is not None:
        raise ConfigError(f"{alone}: means nothing without discover; give --discover kubernetes as well")
    sources = _dns(settings)
    if settings.discover == "kubernetes":
        sources.append(_kubernetes(settings))
    return Discovery(sources) if sources else None


def _dns(settings: Settings) -> list[Source]:
    services = settings.services()
    if not services:
        return []
    from pdproxy.discovery.dns import DnsService, NameServers

    servers = NameServers(settings.dns_server)
    return [DnsService(one, servers.addresses, interval_s=settings.dns_interval_s) for one in services]


def _kubernetes(settings: Settings) -> Source:
    from pdproxy.discovery.api_server import kubernetes_client, own_namespace
    from pdproxy.discovery.kubernetes import KubernetesPods, queries

    asked = queries(
        {"prefill": settings.prefill_selector, "decode": settings.decode_selector},
        {"prefill": settings.prefill_service, "decode": settings.decode_service},
        settings.discover_preset,
    )
    if settings.inference_pool is not None and not all(one.labels for one in asked):
        raise ConfigError("inference_pool: it has pods and no services; give prefill_selector and decode_selector")
    return KubernetesPods(
        asked,
        kubernetes_client,
        namespace=settings.discover_namespace or own_namespace(),
        engine=settings.flag_engine,
        port=settings.discover_port,
        pool=settings.inference_pool,
        complete=settings.found,
    )
