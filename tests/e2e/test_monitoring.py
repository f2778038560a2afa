"""A real Prometheus scrapes a real replica: every query of the board and the rules runs, and no alert fires."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, free_ports, started
from tests.helpers import programs
from tests.helpers.store_process import StoreProcess
from tests.helpers.watched_metrics import RULES, panels, queries, rules

pytestmark = pytest.mark.engine

READY_S = 30
FIRST_RATES_S = 40
QUIET_TITLES = {"Errors and retries", "Instances not ready", "Calls that did not go well", "Failed"}
"""Panels with targets that show nothing while all is well, or while requests are few."""


@asynccontextmanager
async def watched(model: Path, folder: Path) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """A ready fleet with one replica of the proxy, and a Prometheus that looks at it each second."""
    program = programs.prometheus()
    store = StoreProcess("redis", folder / "store")
    store.start()
    try:
        with started(model, folder) as cluster:
            cluster.start_engine("prefill-0", "prefill", ["--chunk-size", "64"])
            cluster.start_engine("decode-0", "decode", ["--chunk-size", "64"])
            cluster.start_proxy(["--chunk-size", "64", "--coordinator", store.url, "--term-s", "3"])
            await cluster.wait_ready()
            with _prometheus(program, folder, cluster.proxy) as url:
                async with httpx.AsyncClient(base_url=url, timeout=10) as client:
                    yield cluster, client
    finally:
        store.kill()


@contextmanager
def _prometheus(program: Path, folder: Path, proxy: str) -> Iterator[str]:
    """A Prometheus, once it is ready; its address."""
    (port,) = free_ports(1)
    targets = [{"targets": [proxy.removeprefix("http://")]}]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [{"job_name": "pdproxy", "static_configs": targets}],
    }
    file, log, url = folder / "prometheus.json", folder / "prometheus.log", f"http://127.0.0.1:{port}"
    file.write_text(json.dumps(config))
    command = [program, f"--config.file={file}", f"--storage.tsdb.path={folder / 'series'}"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=output)
    try:
        _wait_ready(url, process, log)
        yield url
    finally:
        process.kill()
        process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < limit:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


async def result(client: httpx.AsyncClient, query: str) -> list[Any]:
    """What a query finds now, with what the board puts in for its variables."""
    query = query.replace("$__rate_interval", "1m").replace("$job", ".*")
    reply = await client.get("/api/v1/query", params={"query": query})
    told = reply.json()
    assert told["status"] == "success", (query, told)
    found: list[Any] = told["data"]["result"]
    return found


async def test_everything_that_is_asked_for_is_found(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    async with watched(tiny_model(), tmp_path) as (cluster, client):
        await _two_scrapes_with_requests_between(cluster, client)
        names = set((await client.get("/api/v1/label/__name__/values")).json()["data"])
        records = {rule["record"] for rule in rules() if "record" in rule}
        assert records <= names, "a recorded figure that nothing was recorded for"
        for where, query in queries():
            found = await result(client, query)  # none is refused
            assert found or not where.startswith("scale"), f"{where}: a pool would never be scaled by this"
            missing = set(re.findall(r"(?<![:\w])(?:pdproxy|process)_\w+\b(?!:)", query)) - names
            # These begin with the first of their kind.
            assert missing <= {"pdproxy_errors_total", "pdproxy_local_errors_total"}, where
        for panel in panels():
            for target in panel.get("targets", []):
                if panel["title"] not in QUIET_TITLES:
                    assert await result(client, target["expr"]), f"{panel['title']}: nothing: {target['expr']}"
        alerts = (await client.get("/api/v1/alerts")).json()["data"]["alerts"]
        assert not [one for one in alerts if one["state"] == "firing"]
        loaded = (await client.get("/api/v1/rules")).json()["data"]["groups"]
        assert {rule["health"] for group in loaded for rule in group["rules"]} == {"ok"}


async def _two_scrapes_with_requests_between(cluster: Cluster, client: httpx.AsyncClient) -> None:
    """Asks until a rate of every kind can be worked out: it takes a look before a request and one after."""
    body = {"model": cluster.model.name, "prompt": "a story " * 40, "max_tokens": 8, "stream": True, "ignore_eos": True}
    limit = time.monotonic() + FIRST_RATES_S
    async with httpx.AsyncClient(timeout=30) as asker:
        while time.monotonic() < limit:
            (await asker.post(f"{cluster.proxy}/v1/completions", json=body)).raise_for_status()
            found = await result(client, "job:pdproxy_first_token_seconds:p95_5m > 0")
            if found and await result(client, "job_model:pdproxy_longest_token_gap_seconds:p95_5m > 0"):
                return
            await asyncio.sleep(0.5)
    raise AssertionError("no rate was worked out")
