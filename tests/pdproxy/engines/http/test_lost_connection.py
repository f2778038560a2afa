"""An engine that goes ends its connections: who minds its health hears of it, and waits for no further look."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from pdproxy.assemble import assemble
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.engines.http.http1 import origin
from pdproxy.engines.http.http1.client import Http1Client
from pdproxy.engines.http.http1.connection import Connection
from pdproxy.fleet.instance import Health
from tests.fakes.fake_engine import FakeEngine, error_reply
from tests.fakes.proxy_harness import proxy_in_front_of, until
from tests.fakes.raw_peer import Wire, raw_peer
from tests.fakes.served_engine import served

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class Engine:
    """Answers one request on each connection and goes when it is told to."""

    def __init__(self) -> None:
        self.goes = asyncio.Event()

    async def __call__(self, wire: Wire) -> None:
        await wire.request()
        await wire.send(OK)
        await self.goes.wait()


async def test_many_connections_are_one_loss() -> None:
    engine, losses = Engine(), []
    async with raw_peer(engine) as peer:
        client = Http1Client(f"http://127.0.0.1:{peer.port}", connect_timeout_s=2)
        client.on_lost(lambda: losses.append(1))
        for leg in await asyncio.gather(*(client.post("/", b"{}", {}) for _ in range(3))):
            assert await leg.read() == b"hi"
        assert len(client._home[0]._kept) == 3
        assert losses == []
        engine.goes.set()
        await until(lambda: not client._home[0]._kept)
        assert losses == [1]
        await client.aclose()


async def test_an_engine_that_keeps_no_connection_for_long_is_no_reason_for_a_look_each_time() -> None:
    engine, losses = Engine(), []
    engine.goes.set()
    async with raw_peer(engine) as peer:
        client = Http1Client(f"http://127.0.0.1:{peer.port}", connect_timeout_s=2)
        client.on_lost(lambda: losses.append(1))
        for _ in range(20):
            assert (await client.get("/", timeout_s=2)) == (200, b"hi")
            await until(lambda: not client._home[0]._kept)
        assert len(losses) == 1, f"{origin.LOST_EVERY_S} s have not passed"
        await client.aclose()


async def test_a_loss_is_told_whoever_finds_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may come between the end of a connection and the loop's word of it."""
    engine, losses = Engine(), []
    async with raw_peer(engine) as peer:
        client = Http1Client(f"http://127.0.0.1:{peer.port}", connect_timeout_s=2)
        client.on_lost(lambda: losses.append(1))
        await client.get("/", timeout_s=2)
        monkeypatch.setattr(Connection, "can_be_used", lambda self, kept_s: False)
        assert await client.get("/", timeout_s=2) == (200, b"hi")
        assert losses == [1]
        await client.aclose()


async def test_what_we_end_ourselves_is_no_loss() -> None:
    engine, losses = Engine(), []
    async with raw_peer(engine) as peer:
        client = Http1Client(f"http://127.0.0.1:{peer.port}", connect_timeout_s=2)
        client.on_lost(lambda: losses.append(1))
        await client.get("/", timeout_s=2)
        await client.aclose()
        await asyncio.sleep(0)
        assert losses == []


async def test_a_decoder_that_dies_is_down_long_before_the_next_look_at_it() -> None:
    engines = [FakeEngine("prefill"), FakeEngine("decode")]
    async with AsyncExitStack() as house, AsyncExitStack() as life:
        urls = [await stack.enter_async_context(served(one)) for one, stack in zip(engines, (house, life), strict=True)]
        instances = tuple(
            InstanceSettings(name=one.role, role=one.role, url=url) for one, url in zip(engines, urls, strict=True)
        )
        proxy = assemble(Settings(instances=instances, proxy_port=0, canary=False, probe_interval_s=60.0))
        decoder = proxy.pool.instances[1]
        async with proxy.app.router.lifespan_context(proxy.app):
            await until(lambda: proxy.pool.is_ready)
            # Its tokenizer is looked at behind that: an answer that is given on the way out is not a lost connection.
            await until(lambda: [call.path for call in engines[1].calls].count("/tokenize") == 2)
            client = decoder.client
            assert isinstance(client, Http1Client)
            await until(lambda: len(client._home[0]._kept) == 1)
            await life.aclose()
            await until(lambda: decoder.health is Health.DOWN)
            assert "cannot be reached" in decoder.why


async def test_who_cannot_be_asked_to_drop_pages_is_looked_at_at_once() -> None:
    """No leg of a request has met it: the prefiller was the first to notice."""
    async with proxy_in_front_of(probe_interval_s=60.0) as house:
        house.prefiller.fail_at["prefill"] = error_reply(500, "the decoder does not answer")
        house.client_of(house.decoder).is_up = False
        assert (await house.post()).status == 502
        decoder = house.proxy.pool.instances[1]
        await until(lambda: decoder.health is Health.DOWN)
        assert decoder.held >= 1, "who knows what it holds"
        house.client_of(house.decoder).is_up = True
        await house.settled()
        assert house.decoder.cancelled
