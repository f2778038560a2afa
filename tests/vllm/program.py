"""A program that serves, with all of its processes in a group of their own: started, frozen, thawed and killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TAIL_CHARS = 4000


@dataclass
class Program(ABC):
    """It may be started again when it has ended; each start writes a log of its own.

    Mutable state: the group's leader since the last start, the groups and the logs of all starts, and whether it has
    been ready since the last one and is frozen.
    """

    name: str
    folder: Path
    """Where its logs are."""
    child: subprocess.Popen[bytes] | None = field(default=None, init=False)
    groups: list[int] = field(default_factory=list, init=False)
    logs: list[Path] = field(default_factory=list, init=False)
    is_frozen: bool = field(default=False, init=False)
    is_ready: bool = field(default=False, init=False)

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """What it has besides ours."""

    @abstractmethod
    def answers(self) -> bool:
        """Asks it, and waits only briefly."""

    @property
    def pid(self) -> int:
        """Of the group and its leader; there must have been a start."""
        assert self.child is not None
        return self.child.pid

    @property
    def status(self) -> int | None:
        """Its leader's, once that has ended."""
        return None if self.child is None else self.child.poll()

    @property
    def is_running(self) -> bool:
        return self.child is not None and self.status is None

    def start(self) -> None:
        """It is not ready yet."""
        assert not self.is_running
        self.logs.append(self.folder / f"{self.name}-{len(self.logs) + 1}.log")
        with self.logs[-1].open("wb") as output:
            self.child = subprocess.Popen(
                self.command(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment(),
                # Not a session of its own: where the kernel shares cores between sessions, those that spin starve the
                # others for many seconds.
                process_group=0,
            )
        self.groups.append(self.pid)
        self.is_frozen = self.is_ready = False

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)
        self.is_frozen = False

    def kill(self) -> None:
        """At once, and with all that its processes share in memory. Raises `TimeoutError` when the kernel keeps one."""
        if self.child is None:
            return
        shared = self.shared_files()
        self.signal(signal.SIGKILL)
        self.child.wait(timeout=30)
        self.wait_until_gone(30)
        for file in shared:
            file.unlink(missing_ok=True)
        self.is_ready = False

    def wait_until_gone(self, timeout_s: float) -> None:
        """All of its processes. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while is_group_alive(self.pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"of {self.name} there is still: {self.whereabouts()}")
            time.sleep(0.05)

    def shared_files(self) -> set[Path]:
        """What its processes have mapped in /dev/shm, and would leave there when killed."""
        found: set[Path] = set()
        for process in _processes(self.pid):
            with contextlib.suppress(OSError):
                maps = (process / "maps").read_text()
                found.update(Path(path) for path in re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE))
        return found

    def cpu_s(self) -> float:
        """Processor time that its processes have taken; less than before where one has ended."""
        total = 0
        for process in _processes(self.pid):
            with contextlib.suppress(OSError):
                user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
                total += int(user) + int(system)
        return total / os.sysconf("SC_CLK_TCK")

    def whereabouts(self) -> str:
        """Of each process its state, and where in the kernel it waits: ``1234 S poll_schedule_timeout``."""
        found = []
        for process in _processes(self.pid):
            with contextlib.suppress(OSError):
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                found.append(f"{process.name} {state} {(process / 'wchan').read_text()}")
        return ", ".join(found) or "none"

    def tail(self, num_starts: int = 1) -> str:
        """How the logs of its last starts end."""
        ends = (f"── {log.name} ──\n{log.read_text(errors='replace')[-TAIL_CHARS:]}" for log in self.logs[-num_starts:])
        return "\n".join(ends)


def is_group_alive(group: int) -> bool:
    """Zombies count as dead."""
    return any(True for _ in _processes(group))


def _processes(group: int) -> Iterator[Path]:
    """Their folders in /proc, without zombies."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                yield stat.parent
