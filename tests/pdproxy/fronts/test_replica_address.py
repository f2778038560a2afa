"""Where a replica is reached by others, and by its own fronts, and what is left of one that was killed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from pdproxy.config.settings import Settings
from pdproxy.coordination.store import Leader
from pdproxy.errors import ConfigError
from pdproxy.fronts import messages
from pdproxy.fronts.replica import Replica
from pdproxy.fronts.workers import Workers
from tests.e2e.cluster import free_ports
from tests.fakes.kubernetes_api import kubeconfig
from tests.pdproxy.server.test_serve_process import command, start

FLEET: dict[str, Any] = {"prefill": ("http://127.0.0.1:1",), "decode": ("http://127.0.0.1:2",)}


class Told:
    """What fronts were told of leaders, in place of `Workers`."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def follow(self, lead: messages.Lead) -> None:
        self.addresses.append(lead.address)


@contextmanager
def replica(**options: Any) -> Iterator[Replica]:
    one = Replica(Settings(**FLEET, coordinator="redis://127.0.0.1:1", replica_host="127.0.0.1", **options))
    try:
        yield one
    finally:
        one._held.close()


def test_a_replica_is_advertised_where_it_listens() -> None:
    with replica() as one:
        host, port = one.place
        assert one.address == f"{host}:{port}"
        assert port != 0


def test_a_store_whose_name_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*place: Any, **more: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    says = r"coordinator: nosuch.invalid has no address .*not known; correct the host, or give replica_host"
    with pytest.raises(ConfigError, match=says):
        Replica(Settings(**FLEET, coordinator="redis://nosuch.invalid:6379"))


def test_a_replica_listens_where_it_reaches_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightkube")
    for server in ("https://127.0.0.1:6443", "http://127.0.0.1"):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server)))
        one = Replica(Settings(**FLEET, coordinator="kubernetes://llm/pdproxy"))
        assert one.place[0] == "127.0.0.1"
        one._held.close()


def test_a_replica_behind_nat_is_advertised_elsewhere_and_its_own_fronts_go_straight_to_it() -> None:
    with replica(replica_advertise="proxy-0.example:9200") as one:
        assert one.address == "proxy-0.example:9200"
        told = Told()
        one.workers = cast(Workers, told)
        for address in (one.address, "proxy-1.example:9200"):
            one._tell(Leader(7, "member", address))
        assert told.addresses == ["{}:{}".format(*one.place), "proxy-1.example:9200"]


@pytest.mark.parametrize("address", ["proxy-0", "proxy-0:", ":9200", "proxy-0:0", "a b:1", "::1:9200"])
def test_an_advertised_address_needs_a_host_and_a_port(address: str) -> None:
    with pytest.raises((ValueError, ConfigError), match="replica_advertise"):
        Settings(**FLEET, replica_advertise=address)


async def test_a_killed_replica_leaves_no_folder_when_its_fronts_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    port, notify = free_ports(2)
    urls = [*FLEET["prefill"], *FLEET["decode"]]
    child = start(command(port, notify, *urls, "--coordinator", "redis://127.0.0.1:1"), tmp_path / "log")
    try:
        async with asyncio.timeout(30), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            while not await answers(client):  # noqa: ASYNC110 — a process that starts tells nobody
                await asyncio.sleep(0.05)
            [folder] = scratch.iterdir()
            assert {path.name for path in folder.iterdir()} == {"leader", "elsewhere"}
            child.kill()
            while folder.exists() or await answers(client):  # noqa: ASYNC110 — nor does one that ends
                await asyncio.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    assert "the parent has gone" in (tmp_path / "log").read_text()


async def answers(client: httpx.AsyncClient) -> bool:
    with suppress(httpx.TransportError):
        return (await client.get("/ready")).status_code == 503
    return False
