"""The module keeps the processes under test by name, whichever process has that name just now."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import httpx

from pdproxy.launch.process_group import ProcessGroup
from pdproxy.launch.supervisor import PROBE_INTERVAL_S, Supervisor
from scripts.dev.soak.outages import Outages
from scripts.dev.soak.plan import PROXY, Plan, engine_program, listening_proxy_program, proxy_program

EXIT_OVERSLEPT = os.EX_TEMPFAIL
START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 20.0
"""The seconds in which an engine has to end after SIGTERM."""
RETURN_TIMEOUT_S = 30.0
"""The seconds in which a proxy has to take back an engine that answers. After that, a fault may hit another engine even
if the proxy has not."""


class SoakCluster(ProcessGroup):
    """SoakCluster is the engines and the proxy under test.

    Mutable state: `crashes`, those who ended unasked, or would not end when asked; `num_overslept`, prefillers that
    ended themselves as they should (`has_overslept`); `outages` of the proxy.
    """

    def __init__(self, supervisor: Supervisor, plan: Plan) -> None:
        super().__init__(supervisor)
        self.plan = plan
        self.crashes: list[str] = []
        self.num_overslept = 0
        self.outages = Outages()

    async def start_engines(self) -> None:
        """Starts all engines, and returns when they answer. Raises `LaunchError`."""
        self.spawn(*(engine_program(self.plan, engine) for engine in self.plan.engines))
        await self._supervisor.until_ready(START_TIMEOUT_S)

    async def start_proxy(self) -> None:
        """Starts the proxy, and returns when a request would be served. Raises `LaunchError`."""
        self.spawn(proxy_program(self.plan))
        await self._supervisor.until_ready(START_TIMEOUT_S)

    @property
    def proxy_pid(self) -> int:
        return self.pid(PROXY)

    async def restart(self, name: str) -> None:
        """Starts a new process on the same ports when the old one is gone, and returns when it answers. Raises
        `LaunchError`."""
        await self._end(name)
        self.spawn(engine_program(self.plan, self.plan.engine(name)))
        await self.until_healthy(name, START_TIMEOUT_S)

    def kill_proxy(self) -> None:
        self.outages.begin()
        self.kill(PROXY)

    async def restart_proxy(self) -> None:
        """Starts a new proxy on the same ports when the old process is gone, and returns when it listens. Raises
        `LaunchError`."""
        await self.until_gone(PROXY)
        self.spawn(listening_proxy_program(self.plan))
        await self._until_proxy_listens()

    async def until_serving(self, name: str) -> float:
        """Waits until the proxy gives the engine requests again, for `RETURN_TIMEOUT_S` at most; returns the seconds
        that took."""
        started = time.monotonic()
        while (took := time.monotonic() - started) < RETURN_TIMEOUT_S:
            status = await self.proxy_status()
            if status is not None and any(o["name"] == name and o["state"] == "ready" for o in status["fleet"]):
                break
            await asyncio.sleep(PROBE_INTERVAL_S)
        return took

    async def proxy_status(self) -> dict[str, Any] | None:
        """Returns what the proxy says of itself; None where it was down or went down. Raises `httpx.HTTPError`."""
        mark = self.outages.mark()
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
                status: dict[str, Any] = (await client.get(f"{self.plan.url}/status")).json()
                return status
        except httpx.TransportError:
            if self.outages.excuse(mark):
                return None
            raise

    async def heal(self) -> None:
        """Thaws everything, and starts what has gone again. Raises `LaunchError`."""
        self.note_crashes()
        for engine in self.plan.engines:
            self.thaw(engine.name)
        gone = [e.name for e in self.plan.engines if e.name in self._doomed or self.is_gone(e.name)]
        if self.is_gone(PROXY) or PROXY in self._doomed:
            await self.restart_proxy()
        await asyncio.gather(*(self.restart(name) for name in gone))
        # The storm may have ended while a new proxy was being started.
        await self._until_proxy_listens()
        for engine in self.plan.engines:
            await self.until_healthy(engine.name, START_TIMEOUT_S)

    def has_overslept(self, name: str) -> bool:
        """Tells whether the engine has ended itself because it was stopped in the middle of a write for too long.

        Returns True once for each end, and counts it.
        """
        is_so = name not in self._doomed and self._running[name].status == EXIT_OVERSLEPT
        if is_so:
            self._doomed.add(name)
            self.num_overslept += 1
        return is_so

    def note_crashes(self) -> None:
        """Notes each process that has ended by itself, each once."""
        for name, words in self.crashed.items():
            if not self.has_overslept(name):
                self._doomed.add(name)
                self.crashes.append(words)

    async def _until_proxy_listens(self) -> None:
        await self.until_healthy(PROXY, START_TIMEOUT_S)
        self.outages.end()

    async def _end(self, name: str) -> None:
        """Waits for the end of a process that was asked to end; it kills a process that does not end in time, and notes
        it as a crash."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self.until_gone(name)
        except TimeoutError:
            self.crashes.append(f"{name} went on for {END_TIMEOUT_S:g} s after SIGTERM")
            self.kill(name)
        await self.until_gone(name)
