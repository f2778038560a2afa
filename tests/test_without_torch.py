"""The proxy alone needs neither torch nor NIXL: it starts, explains itself and serves where they are not installed, and
where torch is installed, none of its processes loads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import free_ports

HIDDEN = ("torch", "functorch", "torchgen", "nixl")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Every installed package but torch, NIXL and what belongs to them, for an interpreter without site-packages."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(HIDDEN):
            (packages / entry.name).symlink_to(entry)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(Path(__file__).parents[1])])}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_fixture_hides_torch(environment: dict[str, str]) -> None:
    assert "No module named 'torch'" in run(environment, "-c", "import torch").stderr


def test_import(environment: dict[str, str]) -> None:
    result = run(environment, "-c", "import pdproxy, pdproxy.assemble, pdproxy.cli, transfer, transfer.geometry")
    assert result.returncode == 0, result.stderr


def test_pages(environment: dict[str, str], tiny_model: Callable[..., Path]) -> None:
    arguments = [
        "-m",
        "pdproxy",
        "pages",
        "--model",
        str(tiny_model()),
        "--pd-buffer-size",
        "1MiB",
        "--chunk-size",
        "64",
    ]
    result = run(environment, *arguments, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["pages"] == 16


def test_serve(environment: dict[str, str], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    port, notify, no_prefiller, no_decoder = free_ports(4)
    engines = ["--prefill", f"http://127.0.0.1:{no_prefiller}", "--decode", f"http://127.0.0.1:{no_decoder}"]
    command = [
        sys.executable,
        "-S",
        "-m",
        "pdproxy",
        "serve",
        "--port",
        str(port),
        "--proxy-port",
        str(notify),
        *engines,
        "--drain-grace-s",
        "0",
    ]
    with (tmp_path / "proxy.log").open("wb") as log:
        proxy = subprocess.Popen([*command, "--model", str(tiny_model())], env=environment, stdout=log, stderr=log)
    try:
        body = {"model": "x", "prompt": "hello"}
        reply = post_when_up(proxy, f"http://127.0.0.1:{port}/v1/completions", body)
        assert reply.status_code == 503, reply.text
        assert reply.json()["error"]["code"] == "no_ready_instance"
        proxy.terminate()
        assert proxy.wait(timeout=20) == 0, (tmp_path / "proxy.log").read_text()
    finally:
        proxy.kill()
        proxy.wait()


def test_torch_that_is_there_is_not_loaded(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    port, notify, no_prefiller, no_decoder, *kv = free_ports(6)
    command = [*(sys.executable, "-m", "pdproxy", "serve", "--port", str(port), "--proxy-port", str(notify))]
    command += ["--workers", "2", "--drain-grace-s", "0", "--model", str(tiny_model()), "--pd-buffer-size", "1MiB"]
    # The kind of engine of which fronts read the model as well.
    command += ["--engine", "lmcache", "--decoder-init-port", str(kv[0]), "--decoder-alloc-port", str(kv[1])]
    command += ["--prefill", f"http://127.0.0.1:{no_prefiller}", "--decode", f"http://127.0.0.1:{no_decoder}"]
    with (tmp_path / "proxy.log").open("wb") as log:
        proxy = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        assert post_when_up(proxy, f"http://127.0.0.1:{port}/v1/completions", {"model": "x", "prompt": "hello"})
        fronts = Path(f"/proc/{proxy.pid}/task/{proxy.pid}/children").read_text().split()
        assert len(fronts) == 2
        for process in (proxy.pid, *fronts):
            loaded = Path(f"/proc/{process}/maps").read_text()
            assert "pydantic_core" in loaded
            assert "libtorch" not in loaded
        proxy.terminate()
        assert proxy.wait(timeout=20) == 0, (tmp_path / "proxy.log").read_text()
        assert "PyTorch" not in (tmp_path / "proxy.log").read_text()
    finally:
        proxy.kill()
        proxy.wait()


def post_when_up(proxy: subprocess.Popen[bytes], url: str, body: dict[str, str]) -> httpx.Response:
    deadline = time.monotonic() + 30
    while True:
        try:
            return httpx.post(url, json=body, timeout=10)
        except httpx.TransportError:
            assert proxy.poll() is None, "the proxy ended"
            assert time.monotonic() < deadline, "the proxy did not come up"
            time.sleep(0.1)
