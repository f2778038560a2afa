"""Several replicas of a proxy, with real engines and real stores, and what happens when one of them goes or is lost."""

from __future__ import annotations

import asyncio
import json
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

TERM_S = 6.0
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
        print(json.dumps(told, indent=1))
        assert told[0] == told[1] or told[0]["name"] == told[1]["name"], "both show the leader's page"
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


@pytest.mark.parametrize("kind", ["redis"])
async def test_the_leader_is_killed_and_another_leads(
    tiny_model: Callable[..., Path], tmp_path: Path, kind: Kind
) -> None:
    """Clients of the other replicas notice nothing but a pause."""
    names = ["proxy-0", "proxy-1", "proxy-2"]
    async with replicas(tiny_model(), tmp_path, kind, num=3) as (cluster, _):
        leader = await leader_of(cluster, names)
        others = [name for name in names if name != leader]
        outcomes, slowest = Counter[str](), [0.0]
        loading = asyncio.create_task(load(cluster, others, 20.0, outcomes, slowest))
        await asyncio.sleep(3.0)
        cluster.processes[leader].signal(signal.SIGKILL)
        await loading
        print(outcomes, slowest)
        assert outcomes.keys() == {"ok"}, outcomes
        assert slowest[0] < TERM_S + 4.0
        assert await leader_of(cluster, others) in others
