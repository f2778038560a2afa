"""`pdproxy up FILE`: two engines of the file started here, one that was there before, and what a `kill -9` costs."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import Cluster, free_ports
from tests.e2e.launcher import launched, read_until

pytestmark = pytest.mark.engine

MOST_REQUESTS = 200
CHUNK = ("--chunk-size", "16")

FILE = """
chunk_size = 16
port = {port}
proxy_port = {notify}
probe_interval_s = 0.1
slow_start_s = 0
breaker_cool_off_s = 0.2

[[instances]]
name = "reader"
role = "prefill"
url = "http://127.0.0.1:{reader}"
launch = {{ env = {{ OMP_NUM_THREADS = "1" }} }}

[[instances]]
name = "near"
role = "decode"
url = "http://127.0.0.1:{near}"
receiver_ports = [{receiver}]
launch = true

[[instances]]
name = "far"
role = "decode"
url = "{far}"
"""


def launched_from(path: Path, *options: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    return launched(sys.executable, "-m", "pdproxy", "up", str(path), "--restart", "on-failure", *options)


async def used(url: str, model: str, wanted: set[str], at_once: int = 3) -> set[str]:
    """The decoders that have served, once all of these have; not one request may have failed."""
    decoders: set[str] = set()
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        for index in range(MOST_REQUESTS):
            body = {"model": model, "prompt": "x" * (20 + 37 * index % 200), "max_tokens": 3}
            replies = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for _ in range(at_once)))
            assert {reply.status_code for reply in replies} == {200}, replies[0].text
            decoders |= {reply.headers["x-pdproxy-decoder"] for reply in replies}
            if decoders >= wanted:
                break
    return decoders


def pid_of(path: Path, port: int, parent: int) -> int:
    """Of the child that was told this port."""
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "transfer.engine" in words and str(port) in words:
            return int(pid)
    raise AssertionError(f"nobody was started on port {port} by {path}")


@contextmanager
def cluster_of(model: Path, folder: Path) -> Iterator[Cluster]:
    """Its model is the one that a launch in this folder finds there, and need not make."""
    cluster = Cluster(Path(shutil.copytree(model, folder / "tiny-model")), folder)
    try:
        yield cluster
    finally:
        cluster.stop()


def far_decoder(cluster: Cluster) -> str:
    return cluster.start_engine("decode-far", "decode", [*CHUNK, "--served-model-name", cluster.model.name]).url


async def test_a_file_of_near_and_far_and_a_decoder_that_comes_back(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    names = ("port", "notify", "reader", "near", "receiver")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    output: list[str] = []
    with cluster_of(tiny_model(), tmp_path) as cluster:
        path = tmp_path / "fleet.toml"
        path.write_text(FILE.format(far=far_decoder(cluster), **ports))
        url = f"http://127.0.0.1:{ports['port']}"
        async with launched_from(path, "--work-dir", str(tmp_path)) as process:
            await read_until(process, "serving on", output)
            assert await used(url, cluster.model.name, {"near", "far"}) == {"near", "far"}

            os.kill(pid_of(path, ports["near"], process.pid), signal.SIGKILL)
            died = await read_until(process, "near was killed by SIGKILL", output)
            assert died == "near was killed by SIGKILL; starting it again in 1 s (1 of 5)\n"
            assert await used(url, cluster.model.name, {"far"}, at_once=1) == {"far"}
            await read_until(process, "near is ready again after", output)
            assert await used(url, cluster.model.name, {"near", "far"}) == {"near", "far"}

            process.send_signal(signal.SIGINT)
            await read_until(process, "stopped by SIGINT", output)
            assert await process.wait() == 0
        assert cluster.processes["decode-far"].child.poll() is None, "what was not started here is not stopped here"
    text = "".join(output)
    for name in ("reader", "near", "proxy"):
        assert re.search(rf"^{name} is ready after", text, re.MULTILINE), text
