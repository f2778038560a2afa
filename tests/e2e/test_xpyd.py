"""Two prefillers, two decoders and the proxy, started by one command and ended by one Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import re
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from itertools import product
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import free_ports
from tests.e2e.launcher import ROOT, launched, read_until

pytestmark = pytest.mark.engine

# The script would install first where scripts/test has not run it already; what it starts is the same.
SCRIPT = (
    [str(ROOT / "scripts/launch_xpyd.sh")] if (ROOT / ".venv").exists() else [sys.executable, "-m", "pdproxy", "up"]
)
INSTANCES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
NUM_PORTS = 8
MOST_REQUESTS = 200


def run_of_ports() -> int:
    """The first of `NUM_PORTS` neighbours on which nobody listens."""
    for first in free_ports(50):
        with suppress(OSError):
            for port in range(first, first + NUM_PORTS):
                socket.create_server(("127.0.0.1", port)).close()
            return first
    raise AssertionError("no free neighbours")


def launched_at(first: int, folder: Path) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    offsets = {"--prefill-port": 0, "--decode-port": 2, "--receiver-port": 4, "--port": 6, "--notify-port": 7}
    ports = [word for option, offset in offsets.items() for word in (option, str(first + offset))]
    options = ["--engine", "builtin", "--prefillers", "2", "--decoders", "2", "--chunk-size", "16"]
    return launched(*SCRIPT, *options, "--work-dir", str(folder), *ports)


async def use_all_pairs(url: str, model: str) -> set[tuple[str | None, str | None]]:
    """Requests of unlike lengths, some at a time, until every pair has served one."""
    pairs: set[tuple[str | None, str | None]] = set()
    places = iter(range(MOST_REQUESTS))

    async def ask(client: httpx.AsyncClient) -> None:
        for index in places:
            if len(pairs) == 4:
                return
            body = {"model": model, "prompt": "x" * (20 + 37 * index % 200), "max_tokens": 1 + index % 5}
            reply = await client.post(f"{url}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            if reply.headers["x-pdproxy-path"] == "disaggregated":
                pairs.add((reply.headers["x-pdproxy-prefiller"], reply.headers["x-pdproxy-decoder"]))

    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        await asyncio.gather(*(ask(client) for _ in range(5)))
    return pairs


async def fleet_key(port: int) -> str:
    """The fingerprint that the engine there tells."""
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        told: str = (await client.get(f"http://127.0.0.1:{port}/kv_buffer")).json()["fleet_key"]
        return told


def children_of(parent: int) -> list[int]:
    """Their pidfds: what a pid means may change once its process has ended."""
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [os.pidfd_open(int(pid)) for pid in pids]


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        return bool(poll.poll(0))
    finally:
        os.close(pidfd)


async def test_all_four_pairs_and_one_ctrl_c(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    first = run_of_ports()
    output: list[str] = []
    shutil.copytree(tiny_model(), tmp_path / "tiny-model")  # which a launch in this folder need not make
    async with launched_at(first, tmp_path) as process:
        await read_until(process, "serving on", output)
        pairs = await use_all_pairs(f"http://127.0.0.1:{first + 6}", "tiny-model")
        assert pairs == set(product(INSTANCES[:2], INSTANCES[2:]))

        keys = [await fleet_key(first + offset) for offset in range(4)]
        assert len(set(keys)) == 1, "one launch, one key"
        assert keys[0] != "none"

        children = children_of(process.pid)
        assert len(children) == len(INSTANCES) + 1
        process.send_signal(signal.SIGINT)
        await read_until(process, "stopped by SIGINT", output)
        assert await process.wait() == 0
        for child in children:
            assert has_ended(child)
    for port in range(first, first + NUM_PORTS):
        socket.create_server(("127.0.0.1", port)).close()
    text = "".join(output)
    for name in (*INSTANCES, "proxy"):
        assert re.search(rf"^{name} is ready after", text, re.MULTILINE), text
        assert re.search(rf"^{name} +│ .", text, re.MULTILINE), text
