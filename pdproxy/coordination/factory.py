"""The module opens the store that a URL names. What a kind of store needs is imported only where it is asked for."""

from __future__ import annotations

import re

from pdproxy.coordination.store import Store
from pdproxy.errors import ConfigError

REDIS_SCHEMES = ("redis", "rediss", "unix")
ETCD_SCHEMES = ("etcd", "etcds")
KUBERNETES = "kubernetes"
_FLEET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def open_store(url: str, fleet: str, *, timeout_s: float) -> Store:
    """Returns the store at `url` for the fleet named `fleet`. Nothing is connected yet; call it inside an event loop.

    Each of the store's calls ends within `timeout_s` seconds. Raises `ConfigError` where the URL or the name cannot be
    used, or where a package is missing.
    """
    if not _FLEET.fullmatch(fleet):
        raise ConfigError(
            f"fleet_name: {fleet!r} becomes part of the store's keys; use letters, digits, dots, dashes and underscores"
        )
    scheme, separator, _ = url.partition("://")
    if separator and scheme in REDIS_SCHEMES:
        try:
            from pdproxy.coordination.redis_store import RedisStore
        except ModuleNotFoundError as error:
            if error.name != "redis":
                raise
            raise ConfigError(f"coordinator: {scheme}:// needs redis-py; pip install 'pdproxy[redis]'") from None
        return RedisStore(url, fleet, timeout_s=timeout_s)
    if separator and scheme in ETCD_SCHEMES:
        from pdproxy.coordination.etcd_store import EtcdStore

        return EtcdStore(url, fleet, timeout_s=timeout_s)
    if scheme == KUBERNETES:
        from pdproxy.coordination.kubernetes_store import KubernetesStore

        return KubernetesStore(url, fleet, timeout_s=timeout_s)
    known = ", ".join(f"{one}://" for one in (*REDIS_SCHEMES, *ETCD_SCHEMES))
    # The URL itself may hold a password.
    raise ConfigError(
        f"coordinator: the URL begins with {scheme[:20]!r}; it must begin with one of {known}, or be {KUBERNETES}"
    )


def server_of(url: str) -> str:
    """Returns the URL of the first server that the store's URL names. Raises `ConfigError` where it names a Kubernetes
    cluster and none is configured.
    """
    if url.partition("://")[0] != KUBERNETES:
        return url.partition(",")[0]
    from pdproxy.discovery.api_server import server_url

    return server_url("coordinator")
