"""Which port the proxy takes KV signals on, and whether it listens on one at all."""

from __future__ import annotations

import logging
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from pdproxy.assemble import Proxy, assemble
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings, load
from pdproxy.errors import ConfigError, InvalidRequest

PAIR: dict[str, Any] = {"prefill": ("http://127.0.0.1:1",), "decode": ("http://127.0.0.1:2",), "probe_interval_s": 60.0}


def newcomer(engine: str, **more: Any) -> InstanceSettings:
    fields = {"name": "new", "role": "prefill", "url": "http://127.0.0.1:3", "engine": engine} | more
    return InstanceSettings(**fields)


class Running(AsyncExitStack):
    """Proxies that have started, until the end of the test."""

    async def start(self, **options: Any) -> Proxy:
        proxy = assemble(Settings(**(PAIR | {"port": 0} | options)))
        await self.enter_async_context(proxy.app.router.lifespan_context(proxy.app))
        return proxy


def port_of(proxy: Proxy) -> int:
    return int(proxy.signal_address().rpartition(":")[2])


async def test_two_proxies_on_one_machine() -> None:
    async with Running() as running:
        ports = {port_of(await running.start()) for _ in range(2)}
        assert len(ports) == 2
        assert 7500 not in ports


async def test_a_port_that_was_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with Running() as running:
        assert port_of(await running.start(proxy_port=port)) == port
        with pytest.raises(ConfigError, match=f"proxy_host, proxy_port: cannot listen on 127.0.0.1:{port}"):
            await running.start(proxy_port=port)


@pytest.mark.parametrize("engine", ["vllm_nixl", "sglang", "mooncake"])
async def test_no_socket_in_front_of_engines_that_do_not_signal(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with caplog.at_level(logging.INFO):
            async with Running() as running:
                proxy = await running.start(engine=engine, proxy_port=port, proxy_host="127.0.0.1")
                assert proxy.signal_address() == ""
        assert "KV signals" not in caplog.text


async def test_nobody_needs_an_address_where_nobody_signals() -> None:
    assemble(Settings(**PAIR, engine="vllm_nixl", proxy_host="0.0.0.0"))
    with pytest.raises(ConfigError, match="notify_host"):
        assemble(Settings(**PAIR, proxy_host="0.0.0.0"))


async def test_the_socket_is_opened_for_the_first_who_signals() -> None:
    async with Running() as running:
        proxy = await running.start(engine="vllm_nixl")
        proxy.membership.add(newcomer("vllm_nixl"))
        assert proxy.signal_address() == ""
        proxy.membership.add(newcomer("builtin", name="other", url="http://127.0.0.1:4"))
        with socket.create_connection(("127.0.0.1", port_of(proxy))):
            pass


async def test_a_socket_that_cannot_be_opened_keeps_the_newcomer_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with Running() as running:
            proxy = await running.start(engine="vllm_nixl", proxy_port=port)
            with pytest.raises(InvalidRequest, match="proxy_port: cannot listen"):
                proxy.membership.add(newcomer("builtin"))
            assert proxy.pool.find("new") is None
            assert proxy.signal_address() == ""


async def test_lmcache_cannot_join_where_its_prefillers_would_speak_to_nobody() -> None:
    async with Running() as running:
        proxy = await running.start()
        with pytest.raises(InvalidRequest, match=r"proxy_port: 'new' .* took a free one"):
            proxy.membership.add(newcomer("lmcache"))
        assert proxy.pool.find("new") is None
        told = await running.start(proxy_port=0)
        told.membership.add(newcomer("lmcache"))


@pytest.mark.parametrize(
    ("flags", "port"),
    [
        ("--prefill http://p:1 --decode http://d:1", 0),
        ("--prefill http://p:1 --decode http://d:1 --engine vllm_nixl", 0),
        ("--prefill http://p:1 --decode http://d:1 --engine lmcache", 7500),
        ("--prefill http://p:1 --decode http://d:1 --engine lmcache --proxy-port 7600", 7600),
        ("--prefill http://p:1 --decode http://d:1 --proxy-port 7600", 7600),
        ("--prefiller-port 7100 --decoder-port 7200", 7500),
        ("--prefiller-port 7100 --decoder-port 7200 --proxy-port 0", 0),
        ("--prefiller-port 7100 --decoder-port 7200 --engine builtin", 0),
    ],
)
def test_the_usual_port_is_lmcaches_alone(flags: str, port: int, tmp_path: Path) -> None:
    settings = load(flags.split())
    assert settings.signal_port(settings.fleet()) == port


async def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    async with Running() as running:
        proxy = await running.start(proxy_host="::1")
        assert proxy.signal_address() == f"tcp://[::1]:{port_of(proxy)}"
