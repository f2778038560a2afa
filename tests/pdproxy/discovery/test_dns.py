"""Services in DNS, looked up at a real name server."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import dns.asyncresolver
import pytest

from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings, load
from pdproxy.discovery.dns import DnsService, NameServers, ResolveError
from pdproxy.discovery.factory import make_discovery
from pdproxy.errors import ConfigError
from pdproxy.fleet.roster import Entry
from tests.helpers.name_server import NameServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NameServer]:
    with NameServer(tmp_path) as server:
        yield server


class Told:
    """What a source has told, and a clock that stands still."""

    def __init__(self, server: NameServer, *, url: str = f"dns+http://prefill.{NameServer.zone}:8100") -> None:
        self.urls: list[str] | None = None
        self.names: list[str] = []
        self.now = 0.0
        one = InstanceSettings(name="prefill-0", role="prefill", url=url, engine="vllm_nixl", chunk_size=16)
        servers = NameServers(server.address)
        self.service = DnsService(one, servers.addresses, interval_s=1.0, absent_s=30.0, clock=lambda: self.now)

    def __call__(self, entries: Iterable[Entry]) -> None:
        told = list(entries)
        assert all(one.settings.engine == "vllm_nixl" and one.settings.chunk_size == 16 for one in told)
        self.urls = [one.settings.url for one in told]
        self.names = [one.name for one in told]

    async def look(self) -> list[str] | None:
        await self.service.look(self)
        return self.urls


async def test_each_address_is_an_instance(server: NameServer) -> None:
    told = Told(server)
    server.set(prefill=["127.0.0.7", "127.0.0.8"])
    assert await told.look() == ["http://127.0.0.7:8100", "http://127.0.0.8:8100"]
    assert told.names == ["prefill-0-127.0.0.7", "prefill-0-127.0.0.8"]
    server.set(prefill=["127.0.0.8", "127.0.0.9"])
    assert await told.look() == ["http://127.0.0.8:8100", "http://127.0.0.9:8100"]


async def test_both_families_are_one_instance(server: NameServer) -> None:
    told = Told(server)
    server.set(prefill=["fd00::7"])
    assert await told.look() == ["http://[fd00::7]:8100"]
    server.set(prefill=["fd00::7", "127.0.0.7"])
    assert await told.look() == ["http://127.0.0.7:8100"]


async def test_more_addresses_than_a_datagram_holds(server: NameServer) -> None:
    told = Told(server)
    many = [f"127.0.{high}.{low}" for high in (1, 2) for low in range(1, 121)]
    server.set(prefill=many)
    assert len(await told.look() or ()) == len(many)


async def test_a_name_that_is_gone_is_gone_after_a_while(server: NameServer) -> None:
    told = Told(server)
    server.set(prefill=["127.0.0.7"])
    before = await told.look()
    assert told.service.complaints == []
    server.set()
    told.now = 5.0
    assert await told.look() == before
    assert told.service.complaints == [f"{told.service}: prefill.{NameServer.zone} has no address"]
    told.now = 34.9
    assert await told.look() == before
    told.now = 35.0
    assert await told.look() == []
    server.set(prefill=["127.0.0.7"])
    assert await told.look() == before


async def test_a_name_that_comes_back_begins_anew(server: NameServer) -> None:
    told = Told(server)
    server.set(prefill=["127.0.0.7"])
    before = await told.look()
    server.set()
    await told.look()
    server.set(prefill=["127.0.0.7"])
    told.now = 29.0
    await told.look()
    server.set()
    told.now = 40.0
    assert await told.look() == before


async def test_a_server_that_refuses_changes_nothing(server: NameServer) -> None:
    server.set(prefill=["127.0.0.7"])
    told = Told(server)
    before = await told.look()
    # dnsmasq refuses names outside of its zone where it has no server to ask.
    told.service._url = told.service._url._replace(netloc="prefill.elsewhere.example:8100")
    for told.now in (100.0, 200.0):
        assert await told.look() == before


async def test_a_server_that_is_away_changes_nothing(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(server)
    server.set(prefill=["127.0.0.7"])
    before = await told.look()
    assert before
    server.stop()
    monkeypatch.setattr("pdproxy.discovery.dns.LOOK_S", 0.3)
    for told.now in (100.0, 200.0):
        assert await told.look() == before


async def test_a_server_that_is_silent_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdproxy.discovery.dns.LOOK_S", 0.3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
        mute.bind(("127.0.0.1", 0))
        with pytest.raises(ResolveError):
            await NameServers(f"127.0.0.1:{mute.getsockname()[1]}").addresses("prefill.test")


@pytest.mark.parametrize("text", ["nameserver localhost\n", "nameserver 1.2.3.4.5\n", "search a..b\n", "", None])
async def test_settings_of_the_machine_that_are_none_change_nothing(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "resolv.conf"
    if text is not None:
        path.write_text(text)
    of_file = partial(dns.asyncresolver.Resolver, str(path))
    monkeypatch.setattr("pdproxy.discovery.dns.dns.asyncresolver.Resolver", of_file)
    with pytest.raises(ResolveError):
        await NameServers().addresses("prefill.test")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("dns+http://127.0.0.1:8100", "leave out dns\\+"),
        ("dns+ftp://prefill:8100", "not dns\\+http://name:port"),
        ("dns+prefill", "not dns\\+http://name:port"),
    ],
)
def test_urls_that_name_no_service(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_discovery(load(["--prefill", url, "--decode", "dns+http://decode:8200"]))


def test_a_name_server_has_an_address() -> None:
    settings = load(["--prefill", "dns+http://p:1", "--decode", "dns+http://d:1", "--dns-server", "localhost:53"])
    with pytest.raises(ConfigError, match="dns_server: 'localhost:53'"):
        make_discovery(settings)


def test_services_are_no_instances() -> None:
    settings = load(["--prefill", "dns+http://p.ns.svc:8100", "--decode", "http://d:8200"])
    assert [one.name for one in settings.fleet()] == ["decode-0"]
    assert [one.url for one in settings.services()] == ["dns+http://p.ns.svc:8100"]
    assert make_discovery(settings) is not None
    assert make_discovery(Settings(prefill=("http://p:1",), decode=("http://d:2",))) is None
