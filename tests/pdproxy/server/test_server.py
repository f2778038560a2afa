"""The whole proxy over real sockets: HTTP to engines and clients, ZMQ for signals, and an end in order."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from pdproxy import serve
from pdproxy.assemble import SETTLE_S, assemble
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.engines.adapter import AttemptInfo
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.errors import ConfigError
from pdproxy.openai.request import GenerationRequest
from pdproxy.serve import Server, listeners
from tests.fakes.fake_engine import WORDS, FakeEngine
from tests.fakes.proxy_harness import until
from tests.fakes.served_engine import port_of, served
from transfer.wire import Signal, encode

TEXT = "".join(WORDS)


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
        defaults: dict[str, Any] = {"port": 0, "proxy_port": 0, "drain_grace_s": 0.0, "instances": instances}
        proxy = assemble(Settings(**(defaults | options)))
        server = Server(proxy)
        is_connected = False

        def tell(said: Signal) -> None:
            nonlocal is_connected
            if not is_connected:
                sender.connect(proxy.orchestrator._disaggregated._notify())
                is_connected = True
            sender.send(encode(said))

        engines[1].sink = tell
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        await until(lambda: proxy.pool.is_ready)
        certificate = options.get("ssl_certfile")
        url = f"{'https' if certificate else 'http'}://127.0.0.1:{port_of(server)}"
        verify = ssl.create_default_context(cafile=certificate)
        async with httpx.AsyncClient(base_url=url, timeout=10, verify=verify) as client:
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


@pytest.mark.parametrize("query", ["", "?some=query"])
async def test_straight_to_the_route_or_through_the_app(query: str) -> None:
    """The answer is the same."""
    async with running() as house:
        for given in ({"x-request-id": "mine"}, {}):
            body = {"model": "tiny", "prompt": "a b"}
            reply = await house.client.post("/v1/completions" + query, json=body, headers=given)
            assert reply.json()["choices"][0]["text"] == TEXT
            assert reply.headers["x-request-id"].startswith(given.get("x-request-id", "req-"))
            assert int(reply.headers["content-length"]) == len(reply.content)
            assert "date" in reply.headers
            assert "server" not in reply.headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404), ("POST", "/health", 405), ("GET", "/ready", 200)],
)
async def test_what_is_no_generation_request_goes_to_the_app(method: str, path: str, status: int) -> None:
    async with running() as house:
        reply = await house.client.request(method, path, headers={"x-request-id": "mine"})
        assert (reply.status_code, reply.headers["x-request-id"]) == (status, "mine")
        assert (await house.post()).status_code == 200


async def test_pages_from_elsewhere_are_answered_through_the_app() -> None:
    shop = "https://shop.example"
    async with running(cors_origins=(shop,)) as house:
        for headers in ({"origin": shop}, {}):
            body = {"model": "tiny", "prompt": "a b"}
            reply = await house.client.post("/v1/completions", json=body, headers=headers)
            assert reply.json()["choices"][0]["text"] == TEXT
            assert reply.headers.get("access-control-allow-origin") == headers.get("origin")


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
        assert house.proxy.pool.of_role("decode")[0].held == 0


async def test_a_burst_that_holds_the_loop_for_long_makes_no_engine_look_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bodies of 16 MiB take tens of milliseconds each, one after the other, in one turn of the loop. The connections of
    all that were in that turn are there long before the loop looks for them."""
    encode_body = BuiltinAdapter.prefill_body

    def slowly(self: BuiltinAdapter, request: GenerationRequest, info: AttemptInfo) -> bytes:
        time.sleep(0.02)
        return encode_body(self, request, info)

    async with running(connect_timeout_s=0.1, assemble="none", retries=0) as house:
        monkeypatch.setattr(BuiltinAdapter, "prefill_body", slowly)
        replies = await asyncio.gather(*(house.post() for _ in range(30)))
        assert [reply.status_code for reply in replies] == [200] * 30
        assert all(instance.breaker.allows() for instance in house.proxy.pool.instances)


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
            house.server.handle_exit(signal.SIGINT, None)
        async with asyncio.timeout(5):
            reply = await task
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")


async def test_second_signal_waits_for_no_decoder() -> None:
    """The first leaves decoders a while to confirm that they have dropped what was left."""
    async with running() as house:
        house.decoder.answers_cancel = False
        house.prefiller.hang_at.add("prefill_done")
        task = asyncio.create_task(house.post())
        await house.prefiller.reached("prefill_done")
        started = time.monotonic()
        for _ in range(2):
            house.server.handle_exit(signal.SIGINT, None)
        assert (await task).status_code == 503
    assert time.monotonic() - started < SETTLE_S


# ── TLS ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_certificate(folder: Path, *more: str) -> tuple[Path, Path]:
    """Self-signed, for 127.0.0.1: certificate and key."""
    if shutil.which("openssl") is None:
        pytest.skip("TLS is not tested: there is no openssl to make a certificate with")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        *(more or ("-nodes",)),
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(["openssl", "req", "-x509", "-days", "1", *names, *made], check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_https(tmp_path: Path, is_encrypted: bool) -> None:
    certificate, key = make_certificate(tmp_path, *(("-passout", "pass:word") if is_encrypted else ()))
    password = "word" if is_encrypted else None
    async with running(ssl_certfile=certificate, ssl_keyfile=key, ssl_keyfile_password=password) as house:
        assert house.client.base_url.scheme == "https"
        async with house.client.stream(
            "POST", "/v1/completions", json={"model": "tiny", "prompt": "a", "stream": True}
        ) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        with pytest.raises(httpx.HTTPError):
            await house.client.get(f"http://127.0.0.1:{house.client.base_url.port}/health")


async def test_a_handshake_that_stalls_is_cut_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "HANDSHAKE_S", 0.4)
    certificate, key = make_certificate(tmp_path)
    async with running(ssl_certfile=certificate, ssl_keyfile=key) as house:
        address, started = ("127.0.0.1", house.client.base_url.port), time.monotonic()
        silent, halting = [await asyncio.open_connection(*address) for _ in range(2)]
        halting[1].write(b"\x16\x03\x01")  # the beginning of a handshake
        assert (await house.post()).status_code == 200
        for reader, writer in (silent, halting):
            async with asyncio.timeout(5):
                with suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
        assert 0.3 < time.monotonic() - started < 5
        assert (await house.post()).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_certificates_that_cannot_work(tmp_path: Path) -> None:
    pair: dict[str, Any] = {"prefill": ("http://p:1",), "decode": ("http://d:1",), "proxy_port": 0}
    certificate, key = make_certificate(tmp_path, "-passout", "pass:word")
    nothing, text = tmp_path / "nothing.pem", tmp_path / "text.pem"
    text.write_text("not a certificate")
    for options in (
        {"ssl_certfile": nothing},
        {"ssl_certfile": text, "ssl_keyfile": text},
        {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_keyfile_password": "wrong"},
        {"ssl_certfile": certificate, "ssl_keyfile": key},
        {"ssl_keyfile": key},
    ):
        with pytest.raises(ConfigError, match="ssl_certfile"):
            Server(assemble(Settings(**pair, **options)))


# ── sockets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_port_of_each_address_of_the_host() -> None:
    bound = listeners("localhost", 0)
    try:
        assert len({one.getsockname()[1] for one in bound}) == 1
        assert {one.getsockname()[0] for one in bound} <= {"127.0.0.1", "::1"}
    finally:
        for one in bound:
            one.close()


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"host, port: cannot listen on 192\.0\.2\.1:0"):
        listeners("192.0.2.1", 0)


async def test_a_taken_port_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        pair: dict[str, Any] = {"prefill": ("http://p:1",), "decode": ("http://d:1",)}
        for options in ({"port": port, "proxy_port": 0}, {"port": 0, "proxy_port": port}):
            proxy = assemble(Settings(**pair, **options))
            name = "host, port" if options["port"] else "proxy_host, proxy_port"
            with pytest.raises(ConfigError, match=f"{name}: cannot listen on 127.0.0.1:{port}"):
                await Server(proxy).serve()
