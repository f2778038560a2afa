"""The module runs one started program: its process group, its output and its end are events of the running loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

GUARD = Path(__file__).with_name("guard.py")
NUM_TAIL_LINES = 12


class Sink(Protocol):
    """Sink takes the lines of all programs."""

    def __call__(self, name: str, line: str, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Program is what to start."""

    name: str
    command: tuple[str, ...]
    ready_url: str | None = None
    """Holds the address that answers 200 once the program can do its work; None means that the program is ready as soon
    as it runs.
    """
    env: Mapping[str, str] = field(default_factory=dict)
    """Holds the variables on top of this process's own environment."""
    is_captured: bool = True
    """False for a program that writes to this process's own stdout and stderr, not to the sink."""
    grace_s: float = 0.0
    """Holds the seconds that the program may take to end once it was asked, if that is more than the supervisor gives
    to every program."""


class Process:
    """Process is a program that was started, until it has been reaped.

    State: `status` is None while it runs; `exited` is set once it has been reaped, its process group killed, and the
    last of its output passed on. Until it is reaped its pid, and so its group's id, cannot be given to anyone else.
    """

    def __init__(self, program: Program, sink: Sink, on_exit: Callable[[Process], None]) -> None:
        self.program = program
        self.status: int | None = None
        self.exited = asyncio.Event()
        self.tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._sink = sink
        self._on_exit = on_exit
        self._rest = b""
        self.started_at = time.monotonic()
        self._popen = _popen(program)
        try:
            self._pidfd = os.pidfd_open(self._popen.pid)
        except BaseException:
            self._popen.kill()
            self._popen.wait()
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._reap)
        if self._popen.stdout is not None:
            os.set_blocking(self._popen.stdout.fileno(), False)
            self._loop.add_reader(self._popen.stdout.fileno(), self._read)

    def __repr__(self) -> str:
        state = "running" if self.status is None else f"status {self.status}"
        return f"<Process {self.program.name!r} pid {self.pid} {state}>"

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def pid(self) -> int:
        return self._popen.pid

    def terminate(self) -> None:
        """Asks the program to end; how its own children end is its affair for now."""
        # Not `Popen.terminate`: that may reap, and reaping belongs to `_reap`.
        if self.status is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends the program and everything in its group. It is safe at any time."""
        if self.status is None:
            os.killpg(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.kill()
        self.status = self._popen.wait()
        try:
            self._read()
            self._close_output()
        finally:
            # Whatever has become of its last lines, it has ended.
            self.exited.set()
            self._on_exit(self)

    def _read(self) -> None:
        """Reads all the output there is just now, and passes it on line by line."""
        output = self._popen.stdout
        while output is not None and not output.closed:
            try:
                block = os.read(output.fileno(), 65536)
            except BlockingIOError:
                return
            if not block:
                self._close_output()
                return
            *lines, self._rest = (self._rest + block).split(b"\n")
            for line in lines:
                self._pass_on(line)

    def _close_output(self) -> None:
        output = self._popen.stdout
        if output is None or output.closed:
            return
        self._loop.remove_reader(output.fileno())
        output.close()
        if self._rest:
            self._pass_on(self._rest)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.tail.append(text)
        self._sink(self.name, text)


def _popen(program: Program) -> subprocess.Popen[bytes]:
    """Starts the program in a session of its own, so that a Ctrl-C at the terminal reaches the supervisor alone."""
    guard = (sys.executable, "-I", "-S", str(GUARD), str(os.getpid()))
    return subprocess.Popen(
        (*guard, *program.command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if program.is_captured else None,
        stderr=subprocess.STDOUT if program.is_captured else None,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **program.env},
        start_new_session=True,
        bufsize=0,
    )
