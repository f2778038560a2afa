"""Real processes on loopback: prefillers, decoders and the proxy, started for a test and gone after it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.ports import free_ports
from tests.helpers.warmed import Program, Warmed

START_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 30.0

TOKENIZER = ("transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama")
ENGINE = ("tests.helpers.preload_nixl", "transfer.engine.engine", "transfer.engine.server", *TOKENIZER)
PROXY = ("pdproxy.assemble", "pdproxy.serve", "pdproxy.telemetry.log", *TOKENIZER)
IMPORTS = {"prefill": ENGINE, "decode": ENGINE, "proxy": PROXY}
"""Of each role's processes. Prefillers, decoders and the proxy hash differently, as processes do."""


@functools.cache
def warmed(role: str) -> Warmed:
    """Of this test run; it imports while the caller goes on."""
    process = Warmed(*IMPORTS[role])
    atexit.register(process.close)
    return process


@dataclass
class Process:
    """One child in its own process group; `log` is its combined output."""

    name: str
    url: str
    child: Program
    log: Path

    @property
    def pid(self) -> int:
        return self.child.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def ask_to_end(self) -> None:
        """SIGTERM, thawed first."""
        if self.child.poll() is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)

    def end(self) -> None:
        """Once it was asked to; SIGKILL where it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=15)
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait(timeout=15)


@dataclass
class Cluster:
    """Started processes by name: ``prefill-0``, ``decode-0``, …, ``proxy``."""

    model: Path
    folder: Path
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def proxy(self) -> str:
        return self.processes["proxy"].url

    def url(self, name: str) -> str:
        return self.processes[name].url

    def start(self, name: str, role: str, port: int, command: Sequence[str]) -> Process:
        log = self.folder / f"{name}.log"
        process = Process(name, f"http://127.0.0.1:{port}", warmed(role).start(command, log), log)
        self.processes[name] = process
        return process

    def start_engine(self, name: str, role: str, options: Sequence[str] = (), port: int | None = None) -> Process:
        port = port or free_ports(1)[0]
        flags = ["--role", role, "--model", str(self.model), "--port", str(port), *options]
        return self.start(name, role, port, ["transfer.engine", *flags])

    def start_proxy(self, options: Sequence[str] = (), name: str = "proxy") -> Process:
        port, notify = free_ports(2)
        engines = {
            role: ",".join(p.url for n, p in self.processes.items() if n.startswith(role))
            for role in ("prefill", "decode")
        }
        flags = ["--prefill", engines["prefill"], "--decode", engines["decode"], "--model", str(self.model)]
        flags += ["--port", str(port), "--proxy-port", str(notify), "--drain-grace-s", "0", *options]
        return self.start(name, "proxy", port, ["pdproxy", "serve", *flags])

    async def wait_ready(self, name: str = "proxy") -> None:
        """Until a request through the proxy would succeed. Raises with the logs when a process dies or time is up."""
        async with httpx.AsyncClient() as client:
            deadline = time.monotonic() + START_TIMEOUT_S
            while time.monotonic() < deadline:
                dead = [p.name for p in self.processes.values() if p.child.poll() is not None]
                if dead:
                    break
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{self.url(name)}/ready", timeout=5)).status_code == 200:
                        return
                await asyncio.sleep(0.1)
        raise RuntimeError(f"not ready (dead: {dead})\n" + self.logs())

    def logs(self) -> str:
        return "\n".join(
            f"── {p.name} ──\n{p.log.read_text(errors='replace')[-4000:]}" for p in self.processes.values()
        )

    def stop(self) -> None:
        processes = list(reversed(self.processes.values()))
        for process in processes:
            process.ask_to_end()
        for process in processes:
            process.end()

    # ── what a test looks at ────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, name: str, path: str) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=20) as client:
            reply = await client.get(self.url(name) + path)
            reply.raise_for_status()
            body: dict[str, Any] = reply.json()
            return body

    async def statistics(self, name: str) -> dict[str, Any]:
        return await self.get(name, "/statistics")

    async def held(self) -> int:
        """Slots that the proxy says are held, over all decoders."""
        status = await self.get("proxy", "/status")
        return sum(ledger["held"] for ledger in status["ledger"].values())

    async def settled(self) -> None:
        """Wait until nothing is held anywhere: the proxy's slots, every PD buffer, every cache, every sequence."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while (left := await self.leftovers()) and time.monotonic() < deadline:  # noqa: ASYNC110 (no event to wait for)
            await asyncio.sleep(0.05)
        assert not left, f"still held after {SETTLE_TIMEOUT_S} s: {left}\n{self.logs()}"

    async def leftovers(self) -> dict[str, Any]:
        slots = await self.held()
        return {**({"slots": slots} if slots else {}), **await self.engine_leftovers()}

    async def engine_leftovers(self) -> dict[str, Any]:
        left: dict[str, Any] = {}
        for name in self.processes:
            if name.startswith("proxy"):
                continue
            facts, statistics = await self.get(name, "/kv_buffer"), await self.statistics(name)
            if facts["num_free"] != facts["num_pages"]:
                left[f"{name} PD buffer"] = facts
            cache = statistics["cache_pages"]
            if statistics["requests"] or statistics["pushes"] or cache["free"] != cache["total"]:
                left[name] = statistics
        return left


@contextlib.asynccontextmanager
async def running(
    model: Path,
    folder: Path,
    *,
    engine: Sequence[str] = ("--chunk-size", "64"),
    proxy: Sequence[str] = ("--chunk-size", "64"),
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    num_prefillers: int = 1,
    num_decoders: int = 1,
) -> AsyncIterator[Cluster]:
    """A ready cluster; everything is stopped on the way out, and nothing may be held then."""
    with started(model, folder) as cluster:
        for i in range(num_prefillers):
            cluster.start_engine(f"prefill-{i}", "prefill", [*engine, *prefill])
        for i in range(num_decoders):
            cluster.start_engine(f"decode-{i}", "decode", [*engine, *decode])
        cluster.start_proxy(proxy)
        await cluster.wait_ready()
        yield cluster


@contextlib.contextmanager
def started(model: Path, folder: Path) -> Iterator[Cluster]:
    for role in IMPORTS:
        warmed(role)
    cluster = Cluster(model, folder)
    try:
        yield cluster
    finally:
        cluster.stop()
