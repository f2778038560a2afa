"""The processes under test, by name, whichever process has that name just now."""

from __future__ import annotations

import asyncio
import time

import httpx

from pdproxy.launch.crew import Crew
from pdproxy.launch.supervisor import PROBE_INTERVAL_S, Supervisor
from pdproxy.soak.plan import PROXY, Plan, engine_program, proxy_program

START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 20.0
"""For an engine to end after SIGTERM."""
RETURN_TIMEOUT_S = 30.0
"""For a proxy to take back an engine that answers; after that another may be afflicted all the same."""


class House(Crew):
    """Mutable state: `crashes`, those who ended unasked, or would not end when asked."""

    def __init__(self, supervisor: Supervisor, plan: Plan) -> None:
        super().__init__(supervisor)
        self.plan = plan
        self.crashes: list[str] = []

    async def start_engines(self) -> None:
        """All of them, until they answer. Raises `LaunchError`."""
        self.spawn(*(engine_program(self.plan, engine) for engine in self.plan.engines))
        await self._supervisor.until_ready(START_TIMEOUT_S)

    async def start_proxy(self) -> None:
        """Until a request would be served. Raises `LaunchError`."""
        self.spawn(proxy_program(self.plan))
        await self._supervisor.until_ready(START_TIMEOUT_S)

    @property
    def proxy_pid(self) -> int:
        return self.pid(PROXY)

    async def restart(self, name: str) -> None:
        """When the old process is gone, a new one on the same ports, until it answers. Raises `LaunchError`."""
        await self._end(name)
        self.spawn(engine_program(self.plan, self.plan.engine(name)))
        await self.until_healthy(name, START_TIMEOUT_S)

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
        """Everything thawed, and running again. Raises `LaunchError`."""
        self.note_crashes()
        for engine in self.plan.engines:
            self.thaw(engine.name)
        gone = [e.name for e in self.plan.engines if e.name in self._doomed or self.is_gone(e.name)]
        await asyncio.gather(*(self.restart(name) for name in gone))
        for engine in self.plan.engines:
            await self.until_healthy(engine.name, START_TIMEOUT_S)

    def note_crashes(self) -> None:
        """Who has ended though nobody wanted it; each once."""
        for name, words in self.crashed.items():
            self._doomed.add(name)
            self.crashes.append(words)

    async def _end(self, name: str) -> None:
        """It was asked to; what does not listen is killed."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self.until_gone(name)
        except TimeoutError:
            self.crashes.append(f"{name} went on for {END_TIMEOUT_S:g} s after SIGTERM")
            self.kill(name)
        await self.until_gone(name)
