"""What SIGTERM leaves of a built-in engine: nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import Process, free_ports, started

pytestmark = pytest.mark.engine

LIMIT_S = 30.0
SHARED = Path("/dev/shm")
OPTIONS = ("--chunk-size", "64", "--heartbeat-s", "0.2", "--writer-timeout-s", "2")


def children(pid: int) -> set[int]:
    return {int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()}


def is_listened_to(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def shared_by(*pids: int) -> set[str]:
    """Segments that are mapped by these processes and have a name."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {line.split()[-1] for line in maps.splitlines() if str(SHARED) in line and "(deleted)" not in line}


def wait_until_serving(process: Process) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until and process.child.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{process.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(process.log.read_text())


def test_an_engine_that_is_asked_to_end_closes_itself_and_leaves_nothing(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with started(tiny_model("llama"), tmp_path) as cluster:
        (port,) = free_ports(1)
        flags = ["--role", "both", "--model", str(cluster.model), "--port", str(port), *OPTIONS]
        engine = cluster.start("both-0", "decode", port, ["transfer.engine", *flags, "--data-plane", "process"])
        wait_until_serving(engine)
        (receiver,) = httpx.get(f"{engine.url}/kv_buffer").json()["receivers"]
        ports = [int(engine.url.rsplit(":", 1)[1]), receiver["port"]]
        helpers = children(engine.pid)
        segments = shared_by(engine.pid, *helpers)
        assert helpers, "its data plane is a process"
        assert all(map(is_listened_to, ports))
        os.kill(engine.pid, signal.SIGTERM)
        os.kill(engine.pid, signal.SIGTERM)  # as process managers do
        assert engine.child.wait(LIMIT_S) == 0, engine.log.read_text()
        assert not any(map(is_listened_to, ports))
        assert not [pid for pid in helpers if Path(f"/proc/{pid}").exists()]
        assert not [name for name in segments if Path(name).exists()]
        assert "Traceback" not in engine.log.read_text()


def test_a_close_that_is_stuck_in_a_thread_ends_the_process_all_the_same(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with started(tiny_model("llama"), tmp_path) as cluster:
        (port,) = free_ports(1)
        flags = ["--role", "prefill", "--model", str(cluster.model), "--port", str(port), *OPTIONS]
        engine = cluster.start("prefill-0", "prefill", port, ["tests.helpers.faulty_engine", "stuck", *flags])
        wait_until_serving(engine)
        os.kill(engine.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.child.wait(LIMIT_S)
        assert engine.child.poll() == 1, engine.log.read_text()
        assert "Timeout (0:00:00.5" in engine.log.read_text(), "where it was stuck is told"
