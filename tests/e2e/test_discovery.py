"""Engines as pods of a cluster: added, relabelled, ended and killed under load, as a stand-in of the API server tells.

The pods have addresses of their own on loopback, and all the same port.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.e2e.cluster import Cluster, Process, free_ports, started
from tests.e2e.test_replicas import TERM_S, leader_of
from tests.fakes.kubernetes_api import KubernetesApi, kubeconfig, pod, terminating
from tests.helpers.name_server import NameServer
from tests.helpers.store_process import StoreProcess
from tests.helpers.warmed import Program

pytest.importorskip("lightkube")
pytestmark = pytest.mark.engine

NUM_CLIENTS = 6
PRE_STOP_S = 1.0
"""The pause between the word that a pod ends and the signal to its engine, as docs/discovery.md asks for."""

HEARD_S = 0.25
"""Seconds after which the proxy has heard what the cluster said, on a machine with others at work."""


class Pods:
    """The pods of a cluster, which are engines of this machine."""

    def __init__(self, cluster: Cluster, api: KubernetesApi) -> None:
        self.cluster = cluster
        self.api = api
        self.port = free_ports(1)[0]
        self.told_at: dict[str, float] = {}
        """When the cluster said of a pod that it ends."""
        self._num = 0

    def run(self, *roles: str) -> list[str]:
        """Starts an engine for each role, whose pods are there and not ready."""
        return [self._run(role) for role in roles]

    def _run(self, role: str) -> str:
        self._num += 1
        name, host = f"{role}-{self._num}", f"127.0.0.{10 + self._num}"
        options = ["--chunk-size", "64", "--host", host]
        process = self.cluster.start_engine(name, role, options, port=self.port)
        process.url = f"http://{host}:{self.port}"
        self.api.put("pods", self.pod(name, is_ready=False))
        return name

    def pod(self, name: str, app: str = "llm", *, is_ready: bool = True) -> dict[str, Any]:
        process = self.cluster.processes[name]
        host = process.url.split("/")[2].partition(":")[0]
        uid = f"{name}-{process.pid}"
        return pod(name, host, ports={"http": self.port}, is_ready=is_ready, uid=uid, app=app, role=name.split("-")[0])

    async def ready(self, *names: str) -> None:
        """Waits for the engines, as a kubelet does, and says that their pods are ready."""
        async with httpx.AsyncClient() as client:
            for name in names:
                await until(lambda name=name: _answers(client, self.cluster.url(name)), f"{name} does not start")
                self.api.put("pods", self.pod(name))

    def relabel(self, name: str, app: str) -> None:
        self.api.put("pods", self.pod(name, app))

    async def end(self, name: str) -> None:
        """Ends a pod in order."""
        self.api.change("pods", name, terminating)
        self.told_at[name] = time.monotonic()
        await asyncio.sleep(PRE_STOP_S)
        process = self.cluster.processes.pop(name)
        process.ask_to_end()
        assert await asyncio.to_thread(process.child.wait, 30) == 0
        self.api.remove("pods", name)

    async def kill(self, name: str) -> None:
        """Ends an engine at once. The cluster hears of it later."""
        process = self.cluster.processes.pop(name)
        process.signal(signal.SIGKILL)
        await asyncio.to_thread(process.end)
        await asyncio.sleep(0.5)
        self.api.remove("pods", name)


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health", timeout=5)).status_code == 200
    except httpx.TransportError:
        return False


async def until(holds: Callable[[], Any], what: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


def start_proxy(cluster: Cluster, folder: Path, api: KubernetesApi, *options: str) -> None:
    """Starts a proxy that knows of the cluster what a pod's kubeconfig tells."""
    config = kubeconfig(folder, api.url)
    (port,) = free_ports(1)
    selectors = ["--prefill-selector", "app=llm,role=prefill", "--decode-selector", "app=llm,role=decode"]
    command = [sys.executable, "-m", "pdproxy", "serve", "--discover", "kubernetes", *selectors]
    command += ["--model", str(cluster.model), "--chunk-size", "64", "--port", str(port), "--drain-grace-s", "0"]
    log = folder / "proxy.log"
    with log.open("ab") as output:
        child = subprocess.Popen(
            [*command, *options], env={**os.environ, "KUBECONFIG": str(config)}, stdout=output, stderr=output
        )
    cluster.processes["proxy"] = Process("proxy", f"http://127.0.0.1:{port}", cast(Program, child), log)


Asked = list[tuple[float, str, str]]
"""Of each request when it was sent, and which instances served it."""


async def stream(client: httpx.AsyncClient, cluster: Cluster, prompt: str, num_tokens: int, asked: Asked) -> str:
    """One streamed answer. Returns ``ok``, or what became of it."""
    sent_at = time.monotonic()
    body = {"model": cluster.model.name, "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    try:
        async with client.stream("POST", f"{cluster.proxy}/v1/completions", json=body) as answer:
            asked.append((sent_at, *(answer.headers.get(f"x-pdproxy-{one}", "") for one in ("prefiller", "decoder"))))
            text = b"".join([piece async for piece in answer.aiter_raw()])
            is_whole = text.endswith(b"data: [DONE]\n\n") and b'"error"' not in text
            return "ok" if answer.status_code == 200 and is_whole else f"{answer.status_code} {text[-200:]!r}"
    except httpx.TransportError as error:
        return type(error).__name__


class Load:
    """Clients that ask again and again while the block runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.outcomes = Counter[str]()
        self.asked: Asked = []
        self._cluster = cluster
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(NUM_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            count = 0
            while not self._is_over:
                count += 1
                prompt = f"client {number}, request {count}"
                self.outcomes[await stream(client, self._cluster, prompt, 4 + 16 * (count % 3), self.asked)] += 1


async def fleet(cluster: Cluster) -> dict[str, str]:
    """Returns the state of each instance of the fleet, by name."""
    told = (await cluster.get("proxy", "/status"))["fleet"]
    return {one["name"]: one["state"] for one in told if not one.get("leaving")}


async def is_fleet(cluster: Cluster, *names: str) -> None:
    async def so() -> bool:
        return await fleet(cluster) == dict.fromkeys(names, "ready")

    await until(so, f"the fleet is not {names}: {await fleet(cluster)}")


async def test_pods_come_and_go_under_load(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    async with KubernetesApi() as api:
        with started(tiny_model(), tmp_path) as cluster:
            pods = Pods(cluster, api)
            prefill, decode = pods.run("prefill", "decode")
            start_proxy(cluster, tmp_path, api, "--workers", "2")
            more = pods.run("prefill", "decode", "decode")
            await pods.ready(prefill, decode)
            await cluster.wait_ready()
            async with Load(cluster) as load:
                await pods.ready(*more)
                await is_fleet(cluster, prefill, decode, *more)

                # One is taken aside and comes back; the others end in order.
                pods.relabel(more[1], "debug")
                await is_fleet(cluster, prefill, decode, more[0], more[2])
                pods.relabel(more[1], "llm")
                await is_fleet(cluster, prefill, decode, *more)
                await asyncio.gather(pods.end(prefill), pods.end(decode))
                await is_fleet(cluster, *more)
            assert load.outcomes.keys() == {"ok"}, f"{load.outcomes}\n{cluster.logs()}"
            assert {name for _, *names in load.asked for name in names} >= {prefill, decode, *more}
            for sent_at, *names in load.asked:
                late = [name for name in names if sent_at > pods.told_at.get(name, sent_at) + HEARD_S]
                assert not late, "it got a request after the cluster said that it ends"

            async with Load(cluster) as load:
                await asyncio.sleep(0.5)
                await pods.kill(more[2])
                await is_fleet(cluster, *more[:2])
            cut = load.outcomes.total() - load.outcomes["ok"]
            assert cut <= NUM_CLIENTS, load.outcomes

            # The API server is away: nothing changes, and requests are served.
            await api.stop()
            async with Load(cluster) as load:
                await asyncio.sleep(1.0)
            await is_fleet(cluster, *more[:2])
            assert load.outcomes.keys() == {"ok"}, load.outcomes
            await api.start()
            await cluster.settled()


async def test_the_next_leader_knows_the_fleet_while_dns_is_away(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    store = StoreProcess("etcd", tmp_path / "store")
    store.start()
    try:
        with NameServer(tmp_path) as names, started(tiny_model(), tmp_path) as cluster:
            (port,) = free_ports(1)
            for role, host in (("prefill", "127.0.0.31"), ("decode", "127.0.0.32")):
                options = ["--chunk-size", "64", "--host", host]
                cluster.start_engine(role, role, options, port=port).url = f"http://{host}:{port}"
            names.set(prefill=["127.0.0.31"], decode=["127.0.0.32"])
            options = ["--coordinator", store.url, "--term-s", str(TERM_S), "--dns-server", names.address]
            options += ["--dns-interval-s", "0.5", "--chunk-size", "64", "--drain-grace-s", "0"]
            for role in ("prefill", "decode"):
                options += [f"--{role}", f"dns+http://{role}.{names.zone}:{port}"]
            proxies = ["proxy-0", "proxy-1"]
            for name in proxies:
                (own,) = free_ports(1)
                cluster.start(name, "proxy", own, ["pdproxy", "serve", "--port", str(own), *options])
            for name in proxies:
                await cluster.wait_ready(name)
            leader = await leader_of(cluster, proxies)
            (other,) = set(proxies) - {leader}

            names.stop()
            process = cluster.processes.pop(leader)
            process.signal(signal.SIGKILL)
            process.end()
            async with httpx.AsyncClient(timeout=60) as client:
                cluster.processes["proxy"] = cluster.processes.pop(other)
                assert await stream(client, cluster, "who leads?", 8, []) == "ok"
            assert set(await fleet(cluster)) == {"prefill-0-127.0.0.31", "decode-0-127.0.0.32"}
            await cluster.settled()
    finally:
        store.kill()
