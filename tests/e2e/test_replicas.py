"""Several replicas of a proxy, with real engines and real stores, and what happens when one of them goes or is lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, started
from tests.helpers.store_process import Kind, StoreProcess

pytestmark = pytest.mark.engine

TERM_S = 4.5
OPTIONS = ("--chunk-size", "64", "--term-s", f"{TERM_S:g}", "--probe-interval-s", "1", "--log-level", "info")


@asynccontextmanager
async def replicas(model: Path, folder: Path, kind: Kind, num: int = 2) -> AsyncIterator[tuple[Cluster, StoreProcess]]:
    """One prefiller, one decoder with a small buffer, a store, and `num` replicas ``proxy-0`` and so on."""
    store = StoreProcess(kind, folder / "store")
    store.start()
    try:
        with started(model, folder) as cluster:
            cluster.start_engine("prefill-0", "prefill", ["--chunk-size", "64"])
            cluster.start_engine("decode-0", "decode", ["--chunk-size", "64"])
            for number in range(num):
                cluster.start_proxy([*OPTIONS, "--coordinator", store.url], f"proxy-{number}")
            for number in range(num):
                await cluster.wait_ready(f"proxy-{number}")
            yield cluster, store
    finally:
        store.kill()


async def replica(cluster: Cluster, name: str) -> dict[str, Any]:
    """What a replica's parent says of itself."""
    async with httpx.AsyncClient(timeout=10) as client:
        reply = await client.get(f"{cluster.url(name)}/status")
        reply.raise_for_status()
        told: dict[str, Any] = reply.json()["replica"]
        return told


async def ask(cluster: Cluster, name: str, prompt: str, num_tokens: int = 8) -> str:
    body = {"model": cluster.model.name, "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as client:
        try:
            async with client.stream("POST", f"{cluster.url(name)}/v1/completions", json=body) as answer:
                text = b"".join([piece async for piece in answer.aiter_raw()])
        except httpx.TransportError as error:
            return type(error).__name__
    is_whole = text.endswith(b"data: [DONE]\n\n") and b'"error"' not in text
    return "ok" if answer.status_code == 200 and is_whole else f"{answer.status_code} {text[-200:]!r}"


@pytest.mark.parametrize("kind", ["redis", "etcd"])
async def test_every_replica_serves_and_one_leads(tiny_model: Callable[..., Path], tmp_path: Path, kind: Kind) -> None:
    async with replicas(tiny_model(), tmp_path, kind) as (cluster, _):
        for number in range(2):
            assert await ask(cluster, f"proxy-{number}", f"who is {number}?") == "ok"
        told = [await replica(cluster, f"proxy-{number}") for number in range(2)]
        assert told[0]["name"] == told[1]["name"], "both show the leader's page"
        assert len(told[0]["fronts"]) == 2


async def load(
    cluster: Cluster, names: list[str], seconds: float, outcomes: Counter[str], slowest: list[float]
) -> None:
    """Clients of each of these replicas."""
    ends_at = time.monotonic() + seconds

    async def one(name: str, number: int) -> None:
        count = 0
        while time.monotonic() < ends_at:
            count += 1
            began = time.monotonic()
            outcomes[await ask(cluster, name, f"{name}, client {number}, request {count}", 4 + 16 * (count % 3))] += 1
            slowest[0] = max(slowest[0], time.monotonic() - began)

    await asyncio.gather(*(one(name, number) for name in names for number in range(4)))


async def leader_of(cluster: Cluster, names: list[str]) -> str:
    """The name of the process whose replica leads."""
    told = await replica(cluster, names[0])
    return next(name for name in names if told["name"].endswith(f"-{cluster.processes[name].pid}"))


async def test_whoever_leads_goes_and_others_notice_a_pause_at_most(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The leader is asked to end, the next one is killed, the third stands still and goes on when another leads, and
    the store begins anew with nothing. Clients are at replicas that nothing happens to."""
    names = [f"proxy-{number}" for number in range(4)]
    async with replicas(tiny_model(), tmp_path, "redis", num=4) as (cluster, store):
        present = list(names)
        for what in ("ended", "killed", "frozen", "forgotten"):
            leader = await leader_of(cluster, present)
            spared = [name for name in present if name != leader]
            outcomes, slowest = Counter[str](), [0.0]
            loading = asyncio.create_task(load(cluster, spared, 2.2 * TERM_S, outcomes, slowest))
            await asyncio.sleep(1.0)
            process = cluster.processes[leader]
            if what == "ended":
                process.signal(signal.SIGTERM)
            elif what == "killed":
                process.signal(signal.SIGKILL)
            elif what == "frozen":
                process.signal(signal.SIGSTOP)
                await asyncio.sleep(1.5 * TERM_S)
                process.signal(signal.SIGCONT)
            else:
                store.kill()
                store.start(forget=True)
            await loading
            if what in ("ended", "killed"):
                present.remove(leader)
                process.end()
                del cluster.processes[leader]
            assert outcomes.keys() == {"ok"}, (what, outcomes)
            assert slowest[0] < TERM_S + 4.0, (what, slowest)
            told = [await replica(cluster, name) for name in present]
            assert len({one["name"] for one in told}) == 1, (what, told)
        cluster.processes["proxy"] = cluster.processes[await leader_of(cluster, present)]
        await cluster.settled()
        witness = (await cluster.get("decode-0", "/kv_buffer"))["num_reservations_waited"]
        assert witness == 0, "a decoder was promised more than it has"
        del cluster.processes["proxy"]
