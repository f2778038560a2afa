"""Stand-ins for LMCache's prefillers and decoders as processes, and a proxy in front of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pdproxy.assemble import Proxy, assemble
from pdproxy.config.settings import Settings, load
from pdproxy.engines.lmcache_config import REFERENCE_BYTES_PER_TOKEN
from pdproxy.launch.ports import is_free
from tests.e2e.cluster import free_ports
from tests.fakes.calls import Answer, AsgiCall, Call, Sent
from tests.helpers.standin_words import MODEL

ROOT = Path(__file__).parents[2]
CHUNK = 4
START_S = 30.0
SETTLE_S = 30.0
HASTY = {
    "PDPROXY_PROBE_INTERVAL_S": "0.1",
    "PDPROXY_PROBE_SUCCESSES": "1",
    "PDPROXY_RETRIES": "0",
    "PDPROXY_SLOW_START_S": "0",
}
"""What a test has no patience for, as an environment: the command line is the reference proxy's."""


@dataclass
class Engine:
    """One stand-in."""

    child: subprocess.Popen[bytes]
    port: int
    init_ports: list[int] = field(default_factory=list)
    alloc_ports: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=20, verify=False)

    async def control(self, **what: Any) -> None:
        (await self.client.post("/control", json=what)).raise_for_status()

    async def books(self) -> dict[str, Any]:
        books: dict[str, Any] = (await self.client.get("/books")).json()
        return books

    async def until(self, name: str, least: int) -> None:
        """Its book `name` says so much."""
        async with asyncio.timeout(SETTLE_S):
            while (await self.books())[name] < least:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


def start_engine(role: str, port: int, *options: str, chunk: int = CHUNK) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.helpers.lmcache_standin", role, "--port", str(port)]
    command += ["--chunk-size", str(chunk), *options]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def has_started(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    assert await asyncio.to_thread(child.stdout.readline) == b"ready\n"


def joined(ports: Sequence[int]) -> str:
    return ",".join(str(port) for port in ports)


@dataclass
class LmcacheCluster:
    prefillers: list[Engine]
    decoders: list[Engine]
    flags: list[str]
    """The reference proxy's, for these."""

    @property
    def prefiller(self) -> Engine:
        return self.prefillers[0]

    @property
    def decoder(self) -> Engine:
        return self.decoders[0]

    async def emptied(self) -> None:
        """Every decoder's PD buffer."""
        for decoder in self.decoders:
            async with asyncio.timeout(SETTLE_S):
                while (books := await decoder.books())["held"] or books["running"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async def aclose(self) -> None:
        for engine in (*self.prefillers, *self.decoders):
            await engine.client.aclose()
            engine.kill()
            for pipe in (engine.child.stdin, engine.child.stdout):
                assert pipe is not None
                pipe.close()


@asynccontextmanager
async def standins(
    *, num_prefillers: int = 1, num_decoders: int = 1, tp: int = 1, num_pages: int = 16, skip: int = 1
) -> AsyncIterator[LmcacheCluster]:
    """Running ones; ports count up from one decoder to the next, as the reference proxy wants it on one host."""
    proxy, notify, *prefill_ports = free_ports(2 + num_prefillers)
    base = in_a_row(num_decoders * (1 + 2 * tp))
    decode, init, alloc = base, base + num_decoders, base + num_decoders * (1 + tp)
    inits, allocs = (
        [init + rank * num_decoders for rank in range(tp)],
        [alloc + rank * num_decoders for rank in range(tp)],
    )
    prefillers = [
        Engine(start_engine("prefiller", port, "--tp", str(tp), "--notify", f"127.0.0.1:{notify}"), port)
        for port in prefill_ports
    ]
    decoders = []
    for number in range(num_decoders):
        mine = [port + number for port in inits], [port + number for port in allocs]
        options = ["--tp", str(tp), "--init-ports", joined(mine[0]), "--alloc-ports", joined(mine[1])]
        options += ["--num-pages", str(num_pages), "--skip-last-n-tokens", str(skip)]
        decoders.append(Engine(start_engine("decoder", decode + number, *options), decode + number, *mine))
    flags = ["--host", "127.0.0.1", "--port", str(proxy)]
    flags += ["--prefiller-host", "127.0.0.1", "--prefiller-port", joined(prefill_ports)]
    flags += ["--decoder-host", "127.0.0.1", "--decoder-port", str(decode), "--num-decoders", str(num_decoders)]
    flags += ["--decoder-init-port", joined(inits), "--decoder-alloc-port", joined(allocs)]
    flags += ["--proxy-host", "127.0.0.1", "--proxy-port", str(notify), "--chunk-size", str(CHUNK)]
    flags += ["--pd-buffer-size", str(num_pages * CHUNK * REFERENCE_BYTES_PER_TOKEN)]
    cluster = LmcacheCluster(prefillers, decoders, flags)
    try:
        await asyncio.gather(*(has_started(engine.child) for engine in (*prefillers, *decoders)))
        yield cluster
    finally:
        await cluster.aclose()


def in_a_row(count: int) -> int:
    """The first of so many free ports."""
    while True:
        first = free_ports(1)[0]
        if all(is_free(port) for port in range(first, first + count)):
            return first


# ── the proxy as a process ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Served:
    """A proxy as its clients see it."""

    client: httpx.AsyncClient
    child: subprocess.Popen[bytes]
    log: Path

    async def held(self) -> int:
        status = (await self.client.get("/status")).json()
        return sum(ledger["held"] for ledger in status["ledger"].values())

    async def settled(self) -> None:
        async with asyncio.timeout(SETTLE_S):
            while await self.held():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def proxy_process(
    flags: Sequence[str], folder: Path, *, url: str | None = None, **environment: str
) -> AsyncIterator[Served]:
    """``pdproxy serve``, ready."""
    log = folder / "proxy.log"
    child = start_proxy(flags, log, environment)
    base_url = url or f"http://127.0.0.1:{flags[list(flags).index('--port') + 1]}"
    try:
        async with httpx.AsyncClient(base_url=base_url, timeout=20, verify=False) as client:
            assert await is_ready(client, child), log.read_text()
            yield Served(client, child, log)
    finally:
        child.terminate()
        await asyncio.to_thread(child.wait)


def start_proxy(flags: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PDPROXY_", "OTEL_"))}
    command = [sys.executable, "-m", "pdproxy", "serve", "--drain-grace-s", "0", *flags]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=kept | HASTY | environment)


async def is_ready(client: httpx.AsyncClient, child: subprocess.Popen[bytes]) -> bool:
    """Waits for it."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        with suppress(httpx.TransportError):
            if (await client.get("/ready")).status_code == 200:
                return True
        await asyncio.sleep(0.05)
    return False


# ── the proxy in this process ───────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Here:
    """A proxy whose clients can leave at any instant."""

    proxy: Proxy

    def call(self, path: str = "/v1/completions", **body: Any) -> Call:
        fields = {"model": MODEL} | body
        return AsgiCall(self.proxy.app, Sent(path, json.dumps(fields).encode()))

    async def ask(self, path: str = "/v1/completions", **body: Any) -> Answer:
        return await self.call(path, **body).answer()

    @property
    def held(self) -> int:
        return sum(one.held for one in self.proxy.pool.instances)

    async def settled(self) -> None:
        """Nothing is held, expected or running any more."""
        async with asyncio.timeout(SETTLE_S):
            await self.proxy.orchestrator.idle()
            await self.proxy.reaper.idle()
        assert self.held == 0
        assert self.proxy.board.statistics().num_open == 0
        self.proxy.check_integrity()


@asynccontextmanager
async def proxy_here(flags: Sequence[str], **options: Any) -> AsyncIterator[Here]:
    """Ready; nothing is left on the way out."""
    hasty = {"probe_interval_s": 0.1, "probe_successes": 1, "retries": 0, "slow_start_s": 0.0, "assemble_min_tokens": 0}
    proxy = assemble(settings(flags, hasty | options))
    async with proxy.app.router.lifespan_context(proxy.app):
        async with asyncio.timeout(START_S):
            while not all(one.is_ready for one in proxy.pool.instances):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        here = Here(proxy)
        await here.settled()
        yield here
        await here.settled()


def settings(flags: Sequence[str], options: dict[str, Any]) -> Settings:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return load([*flags, *given])
