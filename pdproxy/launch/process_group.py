"""The module keeps the programs of a test by name, whichever process has that name now, for code that ends and starts
them on purpose."""

from __future__ import annotations

import os
import signal
import time

from pdproxy.launch.errors import LaunchError, describe
from pdproxy.launch.process import Process, Program
from pdproxy.launch.supervisor import Supervisor, probe, probing_client


class ProcessGroup:
    """ProcessGroup starts, ends and freezes programs; `supervisor` owns every process and stops what is left.

    Names are those of programs that were started. Mutable state: the latest process of each name; the names whose end
    was asked for, or has been noted.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._running: dict[str, Process] = {}
        self._doomed: set[str] = set()

    def spawn(self, *programs: Program) -> None:
        """Starts the programs as one stage. A process that had one of these names before must be gone."""
        self._supervisor.spawn(*programs)
        for process in self._supervisor.processes[-len(programs) :]:
            self._running[process.name] = process
            self._doomed.discard(process.name)

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def is_gone(self, name: str) -> bool:
        return self._running[name].status is not None

    def kill(self, name: str) -> None:
        self._doomed.add(name)
        self._running[name].kill()

    def terminate(self, name: str) -> None:
        self._doomed.add(name)
        self._running[name].terminate()

    def freeze(self, name: str) -> None:
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    async def until_gone(self, name: str) -> None:
        """Waits until the process has ended, however long that takes."""
        await self._running[name].exited.wait()

    async def until_healthy(self, name: str, timeout_s: float) -> None:
        """Waits until the process answers. Raises `NotReadyInTime`, and `LaunchError` where it has ended. When a proxy
        gives it requests is the proxy's affair."""
        process = self._running[name]
        async with probing_client() as client:
            await probe(client, process, time.monotonic() + timeout_s, timeout_s)
        if process.status is not None:
            raise LaunchError("\n  ".join([f"{name} ended before it answered:", *process.tail]))

    @property
    def crashed(self) -> dict[str, str]:
        """Returns the processes that ended by themselves: by name, how each ended, with its last lines."""
        return {
            name: "\n  ".join([f"{name} {describe(process.status)}", *process.tail])
            for name, process in self._running.items()
            if process.status is not None and name not in self._doomed
        }

    def _signal(self, name: str, number: signal.Signals) -> None:
        if not self.is_gone(name):
            os.kill(self.pid(name), number)
