"""Long prompts over a PD buffer that holds one of them: the deadlock this project exists to prevent.

Two defences, the proxy's admission and the receiver's whole-request reservation. Either alone must suffice; with both
off the deadlock happens, and must end by deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import Cluster, running

pytestmark = pytest.mark.engine

CHUNK = 16
PROMPT_PAGES = 20
BUFFER_PAGES = 30
BYTES_PER_TOKEN = 1024
"""Of the tiny llama: 4 layers × 2 KV heads × 16 dims × 2 × 4 bytes."""

ENGINE = ("--chunk-size", str(CHUNK), "--served-model-name", "tiny")
BUFFER = ("--pd-buffer-size", str(BUFFER_PAGES * CHUNK * BYTES_PER_TOKEN))
PROXY = ("--chunk-size", str(CHUNK), "--retries", "0")


def prompt(number: int) -> list[int]:
    return [10 + (number * 7 + i) % 480 for i in range(PROMPT_PAGES * CHUNK)]


async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt(number), "max_tokens": 4, "temperature": 0}
    return await client.post("/v1/completions", json=body)


async def check_capacity(cluster: Cluster) -> None:
    facts = await cluster.get("decode-0", "/kv_buffer")
    assert facts["num_pages"] == BUFFER_PAGES < 3 * PROMPT_PAGES


@pytest.mark.parametrize(
    ("decode", "proxy"),
    [
        pytest.param((), (), id="both defences"),
        pytest.param((), ("--no-admission",), id="receiver alone"),
        pytest.param(("--reservation", "incremental"), (), id="proxy alone"),
    ],
)
async def test_thirty_requests_all_complete(
    decode: tuple[str, ...], proxy: tuple[str, ...], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    async with running(
        tiny_model(), tmp_path, engine=ENGINE, decode=(*BUFFER, *decode), proxy=(*PROXY, *proxy)
    ) as cluster:
        await check_capacity(cluster)
        async with httpx.AsyncClient(base_url=cluster.proxy, timeout=120) as client:
            replies = await asyncio.gather(*(ask(client, number) for number in range(30)))
        assert [r.status_code for r in replies] == [200] * 30, [r.text for r in replies if r.status_code != 200]
        assert {r.headers["x-pdproxy-path"].split(";")[0] for r in replies} == {"disaggregated"}
        await cluster.settled()


async def test_without_either_defence_it_deadlocks_until_the_deadline(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    limit_s = 3.0
    proxy = (*PROXY, "--no-admission", "--kv-timeout-s", str(limit_s), "--request-timeout-s", str(2 * limit_s))
    decode = (*BUFFER, "--reservation", "incremental")
    async with running(tiny_model(), tmp_path, engine=ENGINE, decode=decode, proxy=proxy) as cluster:
        await check_capacity(cluster)
        async with httpx.AsyncClient(base_url=cluster.proxy, timeout=60) as client:
            started = time.monotonic()
            replies = await asyncio.gather(*(ask(client, number) for number in range(3)))
            took = time.monotonic() - started
            stuck = [r for r in replies if r.status_code != 200]
            assert len(stuck) >= 2, "nobody got stuck: the deadlock was not reached"
            assert {r.status_code for r in stuck} <= {502, 504}
            assert {r.json()["error"]["code"] for r in stuck} <= {"deadline_exceeded", "kv_transfer_failed"}
            assert limit_s <= took < 3 * limit_s
            # It ended by itself: everything is back, and the next request is served.
            await cluster.settled()
            assert (await ask(client, 99)).status_code == 200
        await cluster.settled()
