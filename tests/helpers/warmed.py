"""`python -m MODULE ARGUMENTS` without the seconds its imports take: forked from a process that has imported before.

    Warmed("transfer.engine.engine").start(["transfer.engine", "--role", …], log)

is a process of its own in every other respect: own session, own output, own threads and sockets, an end that waits for
what is left. All that is forked by one `Warmed` hashes alike; processes that must agree with nobody about hashes are
therefore forked by different ones. Nothing outlives the test run, frozen processes neither.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.helpers.zygote import LIMIT_S, MAX_MESSAGE_BYTES, ROOT, die_with_parent

IMPORT_LIMIT_S = 150.0
"""On a machine with ten others at work; two seconds on one that is idle."""
READY = b"ready"

# ── in the test ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Warmed:
    """Imports `modules` at once and beside the caller; the environment is that of this moment."""

    def __init__(self, *modules: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(IMPORT_LIMIT_S)
        self._has_imported = False
        with theirs:
            command = [sys.executable, "-m", "tests.helpers.warmed", *modules]
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=theirs.fileno())

    def start(self, command: Sequence[str], log: Path) -> Program:
        """``python -m *command``; what it prints is appended to `log`. Raises `TimeoutError`; then ask again."""
        if not self._has_imported:
            assert self._control.recv(MAX_MESSAGE_BYTES) == READY, "it could not import"
            self._has_imported = True
        with log.open("ab") as output:
            socket.send_fds(self._control, [json.dumps(["start", *command]).encode()], [output.fileno()])
        data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        assert data, "the warmed process has died"
        return Program(self, int(json.loads(data)), fds[0])

    def reap(self, pid: int) -> int:
        """Of a process that has ended: its exit code; negative: the signal that ended it."""
        self._control.send(json.dumps(["reap", pid]).encode())
        return int(json.loads(self._control.recv(MAX_MESSAGE_BYTES)))

    def close(self) -> None:
        """Whatever it has forked is killed."""
        self._control.close()
        try:
            self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Program:
    """What has been started, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, warmed: Warmed, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._warmed = warmed
        self._pidfd = pidfd

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)  # its own until it is reaped

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], timeout)[0]:
            os.close(self._pidfd)
            self.returncode = self._warmed.reap(self.pid)
        return self.returncode


# ── in the processes ────────────────────────────────────────────────────────────────────────────────────────────────


def main(modules: list[str]) -> None:
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    die_with_parent()
    for name in modules:
        importlib.import_module(name)
    assert os.listdir("/proc/self/task") == [str(os.getpid())], "a thread, which no fork would have"
    control.send(READY)
    pids: set[int] = set()
    try:
        _serve(control, pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    os._exit(0)  # taking the interpreter apart would cost a second or two


def _serve(control: socket.socket, pids: set[int]) -> None:
    """Until the test is gone; in the forked process `SystemExit` leads out of it, and `pids` are none."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not data:
            return
        kind, *words = json.loads(data)
        if kind == "reap":
            _, status = os.waitpid(words[0], 0)
            pids.discard(words[0])
            control.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            pids.clear()
            control.close()
            _become(words, fds[0])
        pids.add(pid)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [json.dumps(pid).encode()], [pidfd])
        os.close(pidfd)
        os.close(fds[0])


def _become(words: list[str], output: int) -> NoReturn:
    """Ends as any Python program does."""
    die_with_parent()
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv = words  # the module's path takes the first one's place
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main(sys.argv[1:])
