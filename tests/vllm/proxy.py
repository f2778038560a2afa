"""Our proxy as a user starts it, in front of real engines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.cluster import free_ports
from tests.vllm.engines import LEASE_S, Fleet

START_TIMEOUT_S = 60.0
_numbers = itertools.count()


@dataclass
class Proxy:
    url: str
    child: subprocess.Popen[bytes]
    log: Path

    async def status(self) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=10) as client:
            body: dict[str, Any] = (await client.get(f"{self.url}/status")).json()
            return body

    async def held(self) -> int:
        """Slots, over all prefillers."""
        status = await self.status()
        down = _down(status)
        return sum(ledger["held"] for name, ledger in status["ledger"].items() if name not in down)

    async def settled(self, within_s: float = 5.0) -> float:
        """Seconds until no slot was held and nobody was served."""
        started = time.monotonic()
        while await self.held() or _under_way(await self.status()):
            waited = time.monotonic() - started
            assert waited < within_s, f"still held after {within_s:g} s: {await self.status()}\n{self.tail()}"
            await asyncio.sleep(0.05)
        return time.monotonic() - started

    async def metric(self, name: str) -> float:
        """The sum over all samples of this name."""
        async with httpx.AsyncClient(timeout=10) as client:
            page = (await client.get(f"{self.url}/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def wait_ready(self) -> None:
        """Until every engine is."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.child.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if all(instance["state"] == "ready" for instance in (await self.status())["fleet"]):
                    return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"the proxy was not ready within {START_TIMEOUT_S:g} s\n{self.tail()}")

    def stop(self) -> None:
        self.child.terminate()
        try:
            self.child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


@contextlib.asynccontextmanager
async def serving(fleet: Fleet, prefill: Sequence[str], decode: Sequence[str], *options: str) -> AsyncIterator[Proxy]:
    """`prefill` and `decode` are URLs; `options` are for ``pdproxy serve``. Afterwards no slot may be held."""
    what = ["--engine", "vllm_nixl", "--prefill", ",".join(prefill), "--decode", ",".join(decode)]
    async with _serving(fleet, *what, *options) as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def serving_ours(
    fleet: Fleet, prefill: Mapping[str, str], decode: Mapping[str, str], *options: str, kv_port: int | None = None
) -> AsyncIterator[Proxy]:
    """The same in front of engines with our own connector: names and URLs. `kv_port` stands for the decoders'."""
    table = '[[instances]]\nname = "{0}"\nrole = "{1}"\nurl = "{2}"\nkv_port = {3}\nengine = "vllm_transfer"\n'
    file = fleet.folder / f"proxy-{next(_numbers)}.toml"
    written = [table.format(name, "prefill", url, fleet[name].kv_port) for name, url in prefill.items()]
    written += [table.format(name, "decode", url, kv_port or fleet[name].kv_port) for name, url in decode.items()]
    file.write_text("".join(written))
    model = fleet[next(iter(prefill))].model
    async with _serving(fleet, "--config", str(file), "--model", str(model), *options) as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def serving_events(fleet: Fleet, prefill: str, decode: str, *options: str) -> AsyncIterator[Proxy]:
    """In front of engines that publish what happens in their prefix caches, by name."""
    table = '[[instances]]\nname = "{0}"\nrole = "{1}"\nurl = "{2}"\nengine = "vllm_nixl"\n'
    table += 'kv_events = "{3}"\nkv_events_replay = "{4}"\n'
    file = fleet.folder / f"proxy-{next(_numbers)}.toml"
    engines = {"prefill": fleet[prefill], "decode": fleet[decode]}
    written = [table.format(one.name, role, one.url, one.events, one.events_replay) for role, one in engines.items()]
    file.write_text("".join(written))
    async with _serving(fleet, "--config", str(file), *options) as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def _serving(fleet: Fleet, *options: str) -> AsyncIterator[Proxy]:
    log = fleet.folder / f"proxy-{next(_numbers)}.log"
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "pdproxy", "serve"]
    if "--model" not in options:
        command += ["--model", str(fleet.model)]
    command += ["--port", str(port), "--proxy-port", "0", "--drain-grace-s", "0", "--engine-lease-s", str(LEASE_S)]
    command += ["--probe-interval-s", "0.5", "--slow-start-s", "0", "--canary-timeout-s", "60", *options]
    proxy = Proxy(f"http://127.0.0.1:{port}", _start(command, log), log)
    try:
        await proxy.wait_ready()
        yield proxy
        await proxy.settled(LEASE_S + 5)
    finally:
        proxy.stop()


def _down(status: dict[str, Any]) -> set[str]:
    """The instances that are dead, as far as anybody can tell: what they held is not known to be free."""
    return {one["name"] for one in status["fleet"] if one["state"] == "down"}


def _under_way(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in status["in_flight"] if not one.get("orphan") or one["owner"] not in _down(status)]


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0)
