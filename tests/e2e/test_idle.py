"""Waiting costs nothing: three idle processes together stay under 5 % of one core."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import Cluster, running

pytestmark = pytest.mark.engine

WATCHED_S = 4.0


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads so far (proc(5), fields 14 and 15 of ``stat``)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def share_of_a_core(cluster: Cluster) -> dict[str, float]:
    before = {name: cpu_seconds(p.pid) for name, p in cluster.processes.items()}
    await asyncio.sleep(WATCHED_S)
    return {name: (cpu_seconds(p.pid) - before[name]) / WATCHED_S for name, p in cluster.processes.items()}


async def test_idle_processes_use_no_cpu(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    engine = ("--chunk-size", "64", "--served-model-name", "tiny")
    async with running(tiny_model(), tmp_path, engine=engine) as cluster:
        async with httpx.AsyncClient(base_url=cluster.proxy, timeout=30) as client:
            # One request first, so that every connection and NIXL's own threads are there.
            body = {"model": "tiny", "prompt": "hello " * 100, "max_tokens": 4, "temperature": 0}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        await cluster.settled()
        shares = await share_of_a_core(cluster)
        print({name: f"{share:.2%}" for name, share in shares.items()})
        assert sum(shares.values()) < 0.05, shares
