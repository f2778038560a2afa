"""A real store's server as a process, to be killed, frozen and started again: empty, or with its data.

Of Kubernetes' API server, which is not to be had, it is a stand-in on the wire.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Literal

import httpx

from tests.fakes.kubernetes_api import kubeconfig
from tests.helpers.ports import free_ports
from tests.helpers.store_servers import program

Kind = Literal["redis", "etcd", "kubernetes"]
ROOT = Path(__file__).parents[2]
READY_S = 20


class StoreProcess:
    """``with StoreProcess("redis", folder) as server:`` starts it and ends it. It keeps its port and its folder across
    starts, and writes everything to disk before it answers. Mutable state: the process, while it runs.
    """

    def __init__(self, kind: Kind, folder: Path, *, replica_of: StoreProcess | None = None) -> None:
        """`replica_of`: another redis, which this one follows until it is promoted."""
        self.kind = kind
        self.folder = folder
        self.port, self._peer_port = free_ports(2)
        self.log = folder.with_name(f"{folder.name}.log")
        self._replica_of = replica_of
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.kind if self.kind == "kubernetes" else f"{self.kind}://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client of the store needs in its environment."""
        if self.kind != "kubernetes":
            return {}
        return {"KUBECONFIG": str(kubeconfig(self.folder.parent, f"http://127.0.0.1:{self.port}"))}

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, forget: bool = False) -> None:
        """Starts the server and waits until it answers. `forget`: it begins with no data."""
        assert self._process is None, "it runs"
        if forget:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        limit = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > limit:
                self.kill()
                raise AssertionError(f"{self.kind} did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends it at once, also where it is frozen. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Has it end by itself, with its data written."""
        process, self._process = self._process, None
        assert process is not None
        process.terminate()
        process.wait(READY_S)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def promote(self) -> None:
        """Makes a primary of a redis that followed another. It may begin as a follower again at the next start."""
        self.command("REPLICAOF NO ONE")

    def command(self, line: str) -> bytes:
        """Sends one command to a redis, and returns the first line of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=READY_S) as connection:
            connection.sendall(line.encode() + b"\r\n")
            return connection.makefile("rb").readline().rstrip()

    def __enter__(self) -> StoreProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _command(self) -> list[str]:
        if self.kind == "kubernetes":
            return [sys.executable, "-m", "tests.fakes.kubernetes_api", str(self.port), str(self.folder / "leases")]
        path = str(program(self.kind))
        if self.kind == "etcd":
            client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
            command = [path, "--name", "only", "--data-dir", str(self.folder), "--logger", "zap"]
            command += ["--listen-client-urls", client, "--advertise-client-urls", client]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            command += ["--initial-cluster", f"only={peer}"]
            # The shortest lease is three halves of the election time-out: by default two seconds.
            return [*command, "--heartbeat-interval", "20", "--election-timeout", "200"]
        command = [path, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0"]
        if self._replica_of is not None:
            command += ["--replicaof", "127.0.0.1", str(self._replica_of.port)]
        return command

    def _answers(self) -> bool:
        try:
            if self.kind == "redis":
                return self.command("PING") == b"+PONG"
            path = "version" if self.kind == "kubernetes" else "health"
            reply = httpx.get(f"http://127.0.0.1:{self.port}/{path}", timeout=READY_S, trust_env=False)
            return self.kind == "kubernetes" or reply.json().get("health") == "true"
        except (OSError, httpx.HTTPError):
            return False
