"""Replicas that agree by Leases of a cluster, with real engines and a stand-in for the API server: the leader is
killed, another one leads, and clients of the others get their answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tests.e2e.cluster import Cluster, Process, free_ports, started
from tests.e2e.test_replicas import OPTIONS, TERM_S, ask, leader_of, replica
from tests.helpers.store_process import StoreProcess
from tests.helpers.warmed import Program

pytest.importorskip("lightkube")
pytestmark = pytest.mark.engine


def start_replica(cluster: Cluster, store: StoreProcess, name: str) -> None:
    port, notify = free_ports(2)
    command = [sys.executable, "-m", "pdproxy", "serve", "--coordinator", store.url, *OPTIONS, "--drain-grace-s", "0"]
    command += [
        "--prefill",
        cluster.url("prefill-0"),
        "--decode",
        cluster.url("decode-0"),
        "--model",
        str(cluster.model),
    ]
    command += ["--port", str(port), "--proxy-port", str(notify)]
    log = cluster.folder / f"{name}.log"
    with log.open("ab") as output:
        environment = {**os.environ, **store.environment}
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    cluster.processes[name] = Process(name, f"http://127.0.0.1:{port}", cast(Program, child), log)


async def test_a_leader_is_killed_and_another_leads(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    names = ["proxy-0", "proxy-1"]
    with StoreProcess("kubernetes", tmp_path / "store") as store, started(tiny_model(), tmp_path) as cluster:
        cluster.start_engine("prefill-0", "prefill", ["--chunk-size", "64"])
        cluster.start_engine("decode-0", "decode", ["--chunk-size", "64"])
        for name in names:
            start_replica(cluster, store, name)
        for name in names:
            await cluster.wait_ready(name)
        leader = await leader_of(cluster, names)
        [other] = [name for name in names if name != leader]
        assert await ask(cluster, other, "who leads?") == "ok"
        term = (await replica(cluster, other))["term"]
        process = cluster.processes.pop(leader)
        process.signal(signal.SIGKILL)
        process.end()
        began = time.monotonic()
        assert await ask(cluster, other, "and now?") == "ok"
        assert time.monotonic() - began < TERM_S + 4.0
        told = await replica(cluster, other)
        assert told["leads"]
        assert told["term"] > term
