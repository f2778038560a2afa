"""The module does faults to engines and to the proxy: they are killed, frozen, restarted, again and again.

All engines of one role are never afflicted at once. The proxy is only ever killed, whatever is done to engines then.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from enum import StrEnum

from pdproxy.config.values import Role
from scripts.dev.soak.outages import Outages
from scripts.dev.soak.plan import FREEZE_LIMIT_S
from scripts.dev.soak.soak_cluster import SoakCluster

WAKING_S = 0.5
"""The seconds within which a woken engine ends itself if it was stopped in the middle of a write for too long."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
MAX_PAUSE_S = 4.0
MAX_DOWN_S = 2.0


class Fault(StrEnum):
    KILLED = "killed"
    """The engine gets kill −9, and is started again."""
    RESTARTED = "restarted"
    """The engine gets SIGTERM, and is started again."""
    HICCUPED = "hiccuped"
    """The engine is stopped for less than a second: no other process may notice."""
    FROZEN = "frozen"
    """The engine is stopped, perhaps for so long that others take it for dead."""


ODDS = {Fault.KILLED: 4, Fault.RESTARTED: 2, Fault.HICCUPED: 3, Fault.FROZEN: 4}


class Faults:
    """Faults makes engines and the proxy fail, again and again.

    Mutable state: `_afflicted`, the engines that have a fault now; `done`, how many of each fault; `slowest_return_s`,
    how many seconds it took, at most, until the proxy gave requests again to an engine that answered.
    """

    def __init__(
        self,
        cluster: SoakCluster,
        seed: int,
        *,
        kill_proxy_every_s: float = 0.0,
        max_pause_s: float = MAX_PAUSE_S,
        unwell: Outages | None = None,
    ) -> None:
        """Makes the faults. `kill_proxy_every_s` is the mean time from the proxy's start to its being killed; 0: it is
        left alone. `max_pause_s` is the most time between two faults of one role's engines. `unwell` is told when any
        engine has a fault."""
        self.done: Counter[str] = Counter()
        self._max_pause_s = max_pause_s
        self._unwell = unwell or Outages()
        self.slowest_return_s = 0.0
        self._cluster = cluster
        self._seed = seed
        self._kill_proxy_every_s = kill_proxy_every_s
        self._afflicted: set[str] = set()

    async def run(self) -> None:
        """Runs until it is cancelled; then `SoakCluster.heal` is due. One engine of each role is always left alone."""
        async with asyncio.TaskGroup() as tasks:
            for role in ROLES:
                for index in range(len(self._cluster.plan.of_role(role)) - 1):
                    tasks.create_task(self._torment(role, random.Random(f"{self._seed} faults {role} {index}")))
            if self._kill_proxy_every_s:
                tasks.create_task(self._kill_proxies(random.Random(f"{self._seed} faults proxy")))

    async def _torment(self, role: Role, dice: random.Random) -> None:
        while True:
            await asyncio.sleep(dice.uniform(0, self._max_pause_s))
            name = dice.choice([n for n in self._cluster.plan.of_role(role) if n not in self._afflicted])
            self._afflicted.add(name)
            self._unwell.begin()
            fault = dice.choices(list(ODDS), list(ODDS.values()))[0]
            self.done[f"{role} {fault}"] += 1
            await self._inflict(fault, name, dice)
            self.slowest_return_s = max(self.slowest_return_s, await self._cluster.until_serving(name))
            self._afflicted.discard(name)
            if not self._afflicted:
                self._unwell.end()

    async def _kill_proxies(self, dice: random.Random) -> None:
        while True:
            await asyncio.sleep(self._kill_proxy_every_s * dice.uniform(0.5, 1.5))
            self.done[f"proxy {Fault.KILLED}"] += 1
            self._cluster.kill_proxy()
            await asyncio.sleep(dice.uniform(0, MAX_DOWN_S))
            await self._cluster.restart_proxy()

    async def _inflict(self, fault: Fault, name: str, dice: random.Random) -> None:
        match fault:
            case Fault.KILLED:
                self._cluster.kill(name)
                await self._revive(name, dice)
            case Fault.RESTARTED:
                self._cluster.terminate(name)
                await self._revive(name, dice)
            case Fault.HICCUPED:
                await self._freeze(name, dice.uniform(0.05, 0.9))
            case Fault.FROZEN:
                await self._freeze(name, dice.uniform(1.0, FREEZE_LIMIT_S))

    async def _revive(self, name: str, dice: random.Random) -> None:
        await asyncio.sleep(dice.uniform(0, MAX_DOWN_S))
        await self._cluster.restart(name)

    async def _freeze(self, name: str, seconds: float) -> None:
        self._cluster.freeze(name)
        await asyncio.sleep(seconds)
        self._cluster.thaw(name)
        await asyncio.sleep(WAKING_S)
        if self._cluster.has_overslept(name):
            await self._cluster.restart(name)
