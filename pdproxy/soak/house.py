"""The processes under test, by name, whichever process has that name just now."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx

from pdproxy.launch.errors import NotReadyInTime, describe
from pdproxy.launch.process import Process
from pdproxy.launch.supervisor import Supervisor
from pdproxy.soak.plan import PROXY, Plan, engine_program, proxy_program

START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 20.0
"""For an engine to end after SIGTERM."""
RETURN_TIMEOUT_S = 30.0
"""For a proxy to take back an engine that answers; after that another may be afflicted all the same."""
PROBE_INTERVAL_S = 0.2


class House:
    """Starts, ends, freezes and restarts engines; `supervisor` owns every process and stops what is left.

    Mutable state: `_running`, the latest process of each name; `_doomed`, the names whose end somebody has asked for;
    `crashes`, those who ended unasked, or would not end when asked.
    """

    def __init__(self, supervisor: Supervisor, plan: Plan) -> None:
        self.plan = plan
        self.crashes: list[str] = []
        self._supervisor = supervisor
        self._running: dict[str, Process] = {}
        self._doomed: set[str] = set()

    async def start_engines(self) -> None:
        """All of them, until they answer. Raises `LaunchError`."""
        self._supervisor.spawn(*(engine_program(self.plan, engine) for engine in self.plan.engines))
        self._note_latest(len(self.plan.engines))
        await self._supervisor.until_ready(START_TIMEOUT_S)

    async def start_proxy(self) -> None:
        """Until a request would be served. Raises `LaunchError`."""
        self._supervisor.spawn(proxy_program(self.plan))
        self._note_latest(1)
        await self._supervisor.until_ready(START_TIMEOUT_S)

    @property
    def proxy_pid(self) -> int:
        return self._running[PROXY].pid

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

    async def restart(self, name: str) -> None:
        """When the old process is gone, a new one on the same ports, until it answers. Raises `NotReadyInTime`."""
        await self._until_gone(name)
        self._supervisor.spawn(engine_program(self.plan, self.plan.engine(name)))
        self._note_latest(1)
        self._doomed.discard(name)
        await self._until_healthy(name)

    async def until_serving(self, name: str) -> float:
        """Until the proxy gives it requests again, for `RETURN_TIMEOUT_S` at most; the seconds that took."""
        started = time.monotonic()
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            while (took := time.monotonic() - started) < RETURN_TIMEOUT_S:
                fleet = (await client.get(f"{self.plan.url}/status")).json()["fleet"]
                if any(one["name"] == name and one["state"] == "ready" for one in fleet):
                    break
                await asyncio.sleep(PROBE_INTERVAL_S)
        return took

    async def heal(self) -> None:
        """Everything thawed, and running again. Raises `NotReadyInTime`."""
        self.note_crashes()
        for engine in self.plan.engines:
            self.thaw(engine.name)
        gone = [e.name for e in self.plan.engines if e.name in self._doomed or self._is_dead(e.name)]
        await asyncio.gather(*(self.restart(name) for name in gone))
        for engine in self.plan.engines:
            await self._until_healthy(engine.name)

    def note_crashes(self) -> None:
        """Who has ended though nobody wanted it."""
        for name, process in self._running.items():
            if process.status is not None and name not in self._doomed:
                self._doomed.add(name)
                self.crashes.append("\n  ".join([f"{name} {describe(process.status)}", *process.tail]))

    async def _until_gone(self, name: str) -> None:
        process = self._running[name]
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.exited.wait()
        except TimeoutError:
            self.crashes.append(f"{name} went on for {END_TIMEOUT_S:g} s after SIGTERM")
            process.kill()
            await process.exited.wait()

    def _note_latest(self, count: int) -> None:
        for process in self._supervisor.processes[-count:]:
            self._running[process.name] = process

    def _is_dead(self, name: str) -> bool:
        return self._running[name].status is not None

    def _signal(self, name: str, number: signal.Signals) -> None:
        if not self._is_dead(name):
            os.kill(self._running[name].pid, number)

    async def _until_healthy(self, name: str) -> None:
        process, deadline = self._running[name], time.monotonic() + START_TIMEOUT_S
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while not await _is_healthy(client, f"{self.plan.engine(name).url}/health"):
                if process.status is not None or time.monotonic() > deadline:
                    raise NotReadyInTime(name, START_TIMEOUT_S, "none", process.tail)
                # HTTP offers nothing to wait on, so it is asked again.
                await asyncio.sleep(PROBE_INTERVAL_S)


async def _is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.TransportError:
        return False
