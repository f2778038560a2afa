"""A decoder whose HTTP address answers while its receiver of KV is deaf: it is taken out, and nobody else is blamed."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, free_ports, started

pytestmark = pytest.mark.engine

OPTIONS = ("--chunk-size", "64", "--heartbeat-s", "0.1", "--writer-timeout-s", "0.8", "--data-plane", "thread")
PROXY = (
    "--chunk-size",
    "64",
    "--breaker-faults",
    "3",
    "--breaker-cool-off-s",
    "0.5",
    "--probe-interval-s",
    "0.3",
    "--when-no-decoder",
    "refuse",
)
LIMIT_S = 20.0


async def of(cluster: Cluster) -> dict[str, Any]:
    return {one["name"]: one for one in (await cluster.get("proxy", "/status"))["fleet"]}


async def ask(cluster: Cluster, client: httpx.AsyncClient) -> httpx.Response:
    body = {"model": cluster.model.name, "prompt": "Once upon a time", "max_tokens": 3, "ignore_eos": True}
    return await client.post(f"{cluster.proxy}/v1/completions", json=body, timeout=LIMIT_S)


def start(cluster: Cluster, name: str, role: str, *faults: str) -> None:
    (port,) = free_ports(1)
    flags = ["--role", role, "--model", str(cluster.model), "--port", str(port), *OPTIONS]
    cluster.start(name, role, port, ["tests.helpers.faulty_engine", *faults, *flags])


async def test_a_deaf_decoder_is_taken_out_and_its_prefiller_stays(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with started(tiny_model("llama"), tmp_path) as cluster:
        start(cluster, "prefill-0", "prefill", "impatient")
        start(cluster, "decode-0", "decode", "deaf", "unaware")
        start(cluster, "decode-1", "decode", "deaf")
        cluster.start_proxy(PROXY)
        await cluster.wait_ready()
        async with httpx.AsyncClient() as client:
            until = time.monotonic() + LIMIT_S
            while any(one["state"] != "ready" for one in (await of(cluster)).values()):
                assert time.monotonic() < until, await of(cluster)
                await asyncio.sleep(0.05)
            cluster.processes["decode-0"].signal(signal.SIGUSR1)
            until = time.monotonic() + LIMIT_S
            while (await of(cluster))["decode-0"]["breaker"]["num_opened"] == 0:
                assert time.monotonic() < until, await of(cluster)
                answers = await asyncio.gather(*(ask(cluster, client) for _ in range(4)))
                assert [answer.status_code for answer in answers] == [200] * 4, [a.text for a in answers]
            told = await of(cluster)
            assert told["prefill-0"]["state"] == "ready"
            breaker = told["prefill-0"]["breaker"]
            assert (breaker["num_faults"], breaker["num_opened"]) == (0, 0), "it was the decoder"
            assert told["decode-0"]["state"] == "ready", "its looks are answered"

            cluster.processes["decode-1"].signal(signal.SIGUSR1)  # this one notices it itself
            while (await of(cluster))["decode-1"]["state"] != "down":
                assert time.monotonic() < until, await of(cluster)
                await asyncio.sleep(0.05)
            assert "its receiver of KV at tcp://127.0.0.1" in (await of(cluster))["decode-1"]["why"]

            answer = await ask(cluster, client)
            assert answer.status_code in (502, 503), answer.text  # 503: while its breaker leaves it alone
            assert "decode-0" in answer.json()["error"]["message"]
            breaker = (await of(cluster))["prefill-0"]["breaker"]
            assert (breaker["num_faults"], breaker["num_opened"]) == (0, 0)
