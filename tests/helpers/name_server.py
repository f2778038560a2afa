"""A real dnsmasq for tests, whose names change while it runs.

The program is the one that `PDPROXY_DNSMASQ` names, or the one on PATH, or that of Debian's package, which apt fetches
once, without root, into ``${XDG_CACHE_HOME:-~/.cache}/pdproxy/servers``. Nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

import dns.exception
import dns.message
import dns.query
import pytest

from scripts.dev.common.debian import NotToBeHadError, cache_folder, has_apt, unpacked
from tests.helpers.ports import free_ports
from tests.helpers.store_servers import REQUIRE

# Those libraries of the program that not every machine has.
PACKAGES = ["dnsmasq-base", "libnetfilter-conntrack3", "libnftables1", "libnfnetlink0", "libmnl0", "libnftnl11"]
PACKAGES += ["libjansson4", "libxtables12"]
HOW = "install dnsmasq (Debian and Ubuntu: the package dnsmasq-base), or name it in PDPROXY_DNSMASQ"
READY_S = 10


def dnsmasq() -> tuple[Path, dict[str, str]]:
    """The program, and the environment that it needs. Skips the test, loudly, where there is none."""
    try:
        return _found()
    except NotToBeHadError as error:
        if os.environ.get(REQUIRE) == "1":
            raise
        pytest.skip(f"NOT TESTED against a real name server: {error}")


@cache
def _found() -> tuple[Path, dict[str, str]]:
    if named := os.environ.get("PDPROXY_DNSMASQ") or shutil.which("dnsmasq"):
        return Path(named), {}
    kept = cache_folder() / "dnsmasq"
    if not kept.exists():
        if not has_apt():
            raise NotToBeHadError(HOW)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch, suppress(FileExistsError):
            unpacked(PACKAGES, Path(scratch)).rename(kept)
    libraries = {str(one.parent) for one in kept.rglob("*.so.*")}
    path, environment = kept / "usr/sbin/dnsmasq", {"LD_LIBRARY_PATH": ":".join(sorted(libraries))}
    done = subprocess.run([path, "--version"], env={**os.environ, **environment}, capture_output=True, check=False)
    if done.returncode != 0:
        raise NotToBeHadError(f"Debian's dnsmasq does not run here: {done.stderr.decode().strip()}; {HOW}")
    return path, environment


class NameServer:
    """``with NameServer(folder) as server:`` starts it. It answers for names below `zone` alone."""

    zone = "svc.test"

    def __init__(self, folder: Path) -> None:
        self._hosts = folder / "hosts"
        self._hosts.write_text("")
        self._names: set[str] = set()
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set(self, **addresses: list[str]) -> None:
        """Gives the names below the zone these addresses, and no others any."""
        expected = {**{name: [] for name in self._names}, **addresses}
        self._names = set(addresses)
        lines = [f"{address} {name}.{self.zone}\n" for name, all_of in addresses.items() for address in all_of]
        self._hosts.write_text("".join(lines))
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)
            self._until(lambda: all(self._holds(name, all_of) for name, all_of in expected.items()))

    def _holds(self, name: str, addresses: list[str]) -> bool:
        kind = "AAAA" if any(":" in one for one in addresses) else "A"
        query = dns.message.make_query(f"{name}.{self.zone}", kind)
        try:
            answer, _ = dns.query.udp_with_fallback(query, "127.0.0.1", timeout=0.5, port=self.port)
        except (dns.exception.Timeout, OSError):
            return False
        found = {item.to_text() for rrset in answer.answer for item in rrset}
        return found == {one for one in addresses if (":" in one) == (kind == "AAAA")}

    def start(self) -> None:
        path, environment = dnsmasq()
        command = [path, "--no-daemon", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--no-poll", "--user="]
        command += [f"--port={self.port}", "--listen-address=127.0.0.1", "--bind-interfaces", "--pid-file="]
        command += [f"--addn-hosts={self._hosts}", f"--local=/{self.zone}/", "--local-ttl=0"]
        self._process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._until(lambda: self._holds("nobody", []) and self._answers())

    def _answers(self) -> bool:
        with suppress(dns.exception.Timeout, OSError):
            dns.query.udp(dns.message.make_query(self.zone, "A"), "127.0.0.1", timeout=0.2, port=self.port)
            return True
        return False

    def _until(self, is_so: Callable[[], bool]) -> None:
        limit = time.monotonic() + READY_S
        while not is_so():
            assert self._process is not None
            assert self._process.poll() is None, "dnsmasq has ended"
            assert time.monotonic() < limit, "dnsmasq does not answer"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> NameServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
