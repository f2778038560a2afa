"""Processes that a test can kill, freeze and measure, without importing torch once for each of them.

    python -m tests.helpers.zygote tests.helpers.transfer_process …

imports these modules and from then on only forks: every child is a real process, ready in a fraction of the time. A
child answers commands, which may overlap, over a socket of its own. Nothing survives the test: children die with the
zygote, frozen ones too, and the zygote with the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.helpers.on_device import ucx_tls

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"UCX_NET_DEVICES": "lo", "UCX_TLS": ucx_tls("tcp,sm,self"), "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "WARN"}
START_LIMIT_S = 60.0
LIMIT_S = 15.0
MAX_MESSAGE_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1


class CommandFailed(Exception):
    """What a command raised in the child: the name of the exception, and its text."""


# ── in the test ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Zygote:
    """A context manager; on leaving it kills and reaps whatever it has forked."""

    def __init__(self, *modules: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_LIMIT_S)
        self._children: list[Child] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.zygote", *modules],
                cwd=ROOT,
                env={**os.environ, **QUIET},
                stdin=theirs.fileno(),
            )

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.reap_all()
        finally:
            self._control.close()
            try:
                self._process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def fork(self, role: str, *arguments: Any, **environment: str) -> Child:
        """A child in which `ROLES[role](*arguments)` of a module answers; `environment` is set before that."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(
                self._control, [json.dumps(["fork", role, arguments, environment]).encode()], [theirs.fileno()]
            )
            child = Child(self, self._answer(), ours)
        self._children.append(child)
        return child

    def reap(self, child: Child) -> int:
        """Wait for a process that is ending. Its exit code; negative: the signal that ended it."""
        self._children.remove(child)
        self._control.send(json.dumps(["reap", child.pid]).encode())
        return self._answer()

    def reap_all(self) -> None:
        """Kill what is left of the children."""
        for child in list(self._children):
            child.kill()

    def _answer(self) -> int:
        data = self._control.recv(MAX_MESSAGE_BYTES)
        assert data, "the zygote has died"
        return int(json.loads(data))


class Child:
    """One process: commands are sent with `say` and their answers fetched with `answer`, in any order."""

    def __init__(self, zygote: Zygote, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._zygote = zygote
        self._socket = connection
        self._numbers = itertools.count()
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._is_over = False

    def say(self, *command: Any) -> int:
        """Returns what `answer` wants to know. Commands are begun in the order in which they are sent."""
        number = next(self._numbers)
        self._socket.settimeout(LIMIT_S)
        self._socket.send(json.dumps([number, *command]).encode())
        return number

    def answer(self, number: int, limit_s: float = LIMIT_S) -> Any:
        """Raises `CommandFailed` with what the command raised, and `TimeoutError`."""
        deadline = time.monotonic() + limit_s
        while number not in self._answers:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._socket.recv(MAX_MESSAGE_BYTES)
            assert data, f"process {self.pid} has died"
            told, is_good, value = json.loads(data)
            self._answers[told] = is_good, value
        is_good, value = self._answers.pop(number)
        if not is_good:
            raise CommandFailed(value)
        return value

    def ask(self, *command: Any, limit_s: float = LIMIT_S) -> Any:
        return self.answer(self.say(*command), limit_s)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)  # its own until it is reaped

    def freeze(self) -> None:
        """On return it stands still: `SIGSTOP` itself only asks for that."""
        self.signal(signal.SIGSTOP)
        self.wait_stopped()

    def wait_stopped(self) -> None:
        """Wait until it stands still, by whosever signal."""
        deadline = time.monotonic() + LIMIT_S
        while self._state() != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def stops(self, number: int) -> bool:
        """Wait until it stands still, or has answered without ever doing so."""
        deadline = time.monotonic() + LIMIT_S
        while self._state() != "T":
            assert time.monotonic() < deadline
            with contextlib.suppress(TimeoutError):
                self.answer(number, 0.001)
                return False
        return True

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Idempotent; on return it is gone."""
        if not self._is_over:
            self._is_over = True
            self.signal(signal.SIGKILL)
            self._zygote.reap(self)
            self._socket.close()

    def close(self) -> None:
        """Ask it to end by itself, which it must do."""
        self.ask("close")
        assert self.exit_status() == 0

    def exit_status(self) -> int:
        """Wait until it has ended, which it does by itself. Negative: the signal that ended it."""
        self._socket.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionResetError):  # where it has left a command unread
            while self._socket.recv(MAX_MESSAGE_BYTES):
                pass  # an answer that nobody wants any more
        self._is_over = True
        self._socket.close()
        return self._zygote.reap(self)

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def _state(self) -> str:
        """``R``, ``S``, ``T`` …: proc(5), field 3 of ``stat``."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]


# ── in the processes ────────────────────────────────────────────────────────────────────────────────────────────────


def main(names: list[str]) -> None:
    os.dup2(2, 1)  # UCX reports a dead peer on standard output
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    die_with_parent()
    roles: dict[str, Any] = {}
    for name in names:
        roles |= importlib.import_module(name).ROLES
    pids: set[int] = set()
    try:
        while True:
            data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
            if not data:
                return
            kind, *arguments = json.loads(data)
            if kind == "reap":
                _, status = os.waitpid(arguments[0], 0)
                pids.discard(arguments[0])
                answer = os.waitstatus_to_exitcode(status)
            else:
                answer = os.fork()
                if answer == 0:
                    pids.clear()
                    control.close()
                    _be_child(roles, socket.socket(fileno=fds[0]), *arguments)
                os.close(fds[0])
                pids.add(answer)
            control.send(json.dumps(answer).encode())
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Also when this process is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _be_child(
    roles: dict[str, Any], connection: socket.socket, role: str, arguments: list[Any], environment: dict[str, str]
) -> None:
    """Ends as soon as nothing is left to be done: taking the interpreter apart would cost a second or two."""
    die_with_parent()
    os.environ.update(environment)
    asyncio.run(_serve(roles[role], arguments, connection))
    leftover = threading.enumerate()[1:]
    print(*leftover, file=sys.stderr, end="", flush=True)
    os._exit(bool(leftover))


async def _serve(role: Any, arguments: list[Any], connection: socket.socket) -> None:
    """Begin each command as it comes; `close` is the last one."""
    end = role(*arguments)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    while data := await loop.sock_recv(connection, MAX_MESSAGE_BYTES):
        number, name, *rest = json.loads(data)
        task = asyncio.create_task(_execute(end, connection, number, name, rest))
        if name == "close":
            return await task
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    os._exit(1)  # the test is gone


async def _execute(end: Any, connection: socket.socket, number: int, name: str, arguments: list[Any]) -> None:
    try:
        answer = [number, True, await getattr(end, name)(*arguments)]
    except Exception as error:  # border: told to whoever asked
        answer = [number, False, f"{type(error).__name__}: {error}"]
    await asyncio.get_running_loop().sock_sendall(connection, json.dumps(answer).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
