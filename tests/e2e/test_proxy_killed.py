"""A proxy killed with −9 cannot tidy up after itself: the engines do, within the time the attempts were given."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import Cluster, running

pytestmark = pytest.mark.engine

LEASE_S = 4.0
CHUNK = 64


async def ask(client: httpx.AsyncClient, number: int) -> None:
    """A request that will never see its end."""
    prompt = [10 + (number + i) % 480 for i in range(40 * CHUNK)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4000, "temperature": 0, "stream": True}
    with contextlib.suppress(httpx.TransportError):
        await client.post("/v1/completions", json=body)


async def busy(cluster: Cluster) -> None:
    """Until the decoder writes answers while others' KV is still on its way."""
    while True:
        decoding = (await cluster.statistics("decode-0"))["sequences"]["decoding"]
        facts = await cluster.get("decode-0", "/kv_buffer")
        if decoding and facts["num_free"] < facts["num_pages"]:
            return
        await asyncio.sleep(0.01)


async def test_engines_are_empty_again_after_the_lease(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    engine = ("--chunk-size", str(CHUNK), "--served-model-name", "tiny")
    phases = ("--prefill-timeout-s", "2", "--kv-timeout-s", "1", "--first-byte-timeout-s", "1")
    decode = ("--pd-buffer-size", str(100 * CHUNK * 1024))
    proxy = ("--chunk-size", str(CHUNK), *phases)
    async with running(tiny_model(), tmp_path, engine=engine, decode=decode, proxy=proxy) as cluster:
        async with httpx.AsyncClient(base_url=cluster.proxy, timeout=60) as client:
            requests = [asyncio.create_task(ask(client, number)) for number in range(12)]
            async with asyncio.timeout(30):
                await busy(cluster)
            killed = cluster.processes.pop("proxy")
            killed.child.kill()
            killed.child.wait()
            await asyncio.gather(*requests)
        # Nobody says anything to the engines any more. Their own clocks run out.
        deadline = asyncio.get_running_loop().time() + LEASE_S + 4
        while left := await cluster.engine_leftovers():
            assert asyncio.get_running_loop().time() < deadline, left
            await asyncio.sleep(0.1)
