"""The whole proxy over real sockets: HTTP to engines and clients, ZMQ for signals, and an end in order."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
import zmq

from pdproxy.assemble import assemble
from pdproxy.config import InstanceSettings, Settings
from pdproxy.server import Server
from tests.fakes.fake_engine import WORDS, FakeEngine, as_asgi
from tests.fakes.proxy_harness import until
from transfer.wire import Signal, encode

TEXT = "".join(WORDS)


class Listening(uvicorn.Server):
    """A uvicorn that leaves signals alone and says which port it got."""

    async def serve_until_cancelled(self, started: asyncio.Event) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup()
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.force_exit = True
            await self.shutdown()


def port_of(server: uvicorn.Server) -> int:
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port


@asynccontextmanager
async def served(engine: FakeEngine) -> AsyncIterator[str]:
    config = uvicorn.Config(partial(as_asgi, engine), port=0, log_config=None, lifespan="off", interface="asgi3")
    server, started = Listening(config), asyncio.Event()
    task = asyncio.create_task(server.serve_until_cancelled(started))
    await started.wait()
    yield f"http://127.0.0.1:{port_of(server)}"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Running:
    """A proxy's server under test."""

    def __init__(self, server: Server, url: str, client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        self.server = server
        self.client = client
        self.prefiller, self.decoder = engines
        self.proxy = server._proxy

    async def post(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "tiny", "prompt": "a b", **body})


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Running]:
    engines = [FakeEngine("prefill"), FakeEngine("decode")]
    engines[0].decoders = [engines[1]]
    context = zmq.Context()
    sender = context.socket(zmq.PUSH)
    async with AsyncExitStack() as stack:
        stack.callback(context.term)
        stack.callback(sender.close, 0)
        urls = [await stack.enter_async_context(served(engine)) for engine in engines]
        instances = tuple(
            InstanceSettings(name=engine.role, role=engine.role, url=url)
            for engine, url in zip(engines, urls, strict=True)
        )
        defaults: dict[str, Any] = {"port": 0, "proxy_port": 0, "instances": instances}
        proxy = assemble(Settings(**(defaults | options)))
        server = Server(proxy)
        is_connected = False

        def tell(said: Signal) -> None:
            nonlocal is_connected
            if not is_connected:
                sender.connect(proxy.orchestrator._notify())
                is_connected = True
            sender.send(encode(said))

        engines[1].sink = tell
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        await until(lambda: proxy.pool.is_ready)
        url = f"http://127.0.0.1:{port_of(server)}"
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            for engine in engines:
                engine.forget()
            yield Running(server, url, client, engines)
        server.handle_exit(signal.SIGTERM, None)
        async with asyncio.timeout(10):
            await task
        proxy.check_integrity()
        assert proxy.board.statistics().num_open == 0


async def test_served_whole_and_streamed() -> None:
    async with running() as house:
        reply = await house.post()
        assert reply.json()["choices"][0]["text"] == TEXT
        assert reply.headers["x-pdproxy-path"] == "disaggregated"
        async with house.client.stream(
            "POST", "/v1/completions", json={"model": "tiny", "prompt": "a", "stream": True}
        ) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == TEXT


async def test_many_at_once() -> None:
    async with running() as house:
        replies = await asyncio.gather(*(house.post() for _ in range(50)))
        assert {reply.json()["choices"][0]["text"] for reply in replies} == {TEXT}
        assert len({reply.headers["x-pdproxy-attempt"] for reply in replies}) == 50


@pytest.mark.parametrize("point", ["prefill", "prefill_done", "decode", "first", "middle"])
async def test_closed_connection_frees_everything(point: str) -> None:
    async with running() as house:
        engine = house.prefiller if point.startswith("prefill") else house.decoder
        engine.hang_at.add(point)
        request = house.client.build_request(
            "POST", "/v1/completions", json={"model": "tiny", "prompt": "a", "stream": True}
        )
        task = asyncio.create_task(house.client.send(request, stream=True))
        await engine.reached(point)
        if point == "middle":
            await (await task).aclose()
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(5):
            await house.proxy.orchestrator.idle()
            await house.proxy.reaper.idle()
        assert house.proxy.pool.of_role("decode")[0].admission.held == 0


async def test_first_signal_lets_requests_finish() -> None:
    async with running(drain_timeout_s=5.0) as house:
        gate = asyncio.Event()
        passed = house.decoder.pass_point

        async def wait_at_first(point: str) -> None:
            await passed(point)
            if point == "first":
                await gate.wait()

        house.decoder.pass_point = wait_at_first  # type: ignore[method-assign]
        task = asyncio.create_task(house.post())
        await house.decoder.reached("first")
        house.server.handle_exit(signal.SIGTERM, None)
        await until(lambda: house.proxy.orchestrator.is_draining)
        gate.set()
        assert (await task).json()["choices"][0]["text"] == TEXT


async def test_second_signal_ends_them_now() -> None:
    async with running(drain_timeout_s=60.0) as house:
        house.decoder.hang_at.add("first")
        task = asyncio.create_task(house.post())
        await house.decoder.reached("first")
        for _ in range(2):
            house.server.handle_exit(signal.SIGTERM, None)
        async with asyncio.timeout(5):
            reply = await task
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
