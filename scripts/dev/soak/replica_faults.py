"""The module does faults to a fleet of replicas: to their processes, to their store, and to the ways between them.

Three things go wrong by themselves, each one fault at a time: processes of replicas, the store, and connections.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import StrEnum

from scripts.dev.soak.partition import Partition, Rule, Trouble
from scripts.dev.soak.replica_cluster import ReplicaCluster, signal_to
from scripts.dev.soak.replica_plan import STORE, TERM_S

MIN_S, MAX_S = 0.5, 2 * TERM_S
"""The seconds that a fault lasts at least and at most."""
MAX_PAUSE_S = TERM_S
STORE_PAUSE_S = 12 * TERM_S
"""The most seconds until the store has its next fault: without a store there is no leader that anything could be done
to."""
LOOK_INTERVAL_S = 0.3
MISSED_S = 8.0
"""The seconds of a front's silence from which on its parent may end it."""


class ReplicaFault(StrEnum):
    FRONT_KILLED = "front killed"
    FRONT_FROZEN = "front frozen"
    PARENT_KILLED = "parent killed"
    """The fronts are left to end by themselves."""
    PARENT_FROZEN = "parent frozen"
    REPLICA_KILLED = "replica killed"
    """The parent and all its fronts are killed, as where a machine is lost."""
    REPLICA_FROZEN = "replica frozen"


class StoreFault(StrEnum):
    FROZEN = "store frozen"
    RESTARTED = "store restarted"
    EMPTIED = "store restarted empty"


class WayFault(StrEnum):
    STORE = "way to the store"
    """The way between one replica and the store."""
    LEADER = "way to the leader"
    """The way between the fronts of one replica and the leader."""
    ALL_TO_LEADER = "all ways to the leader"
    """The ways between the leader and all others; the store is with the others."""


TROUBLES = list(Trouble)


class ReplicaFaults:
    """ReplicaFaults makes replicas, their store and their connections fail, again and again.

    Mutable state: `done`, how many of each fault; `told`, what was done when, in seconds since the start.
    """

    def __init__(self, cluster: ReplicaCluster, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self.told: list[tuple[float, str]] = []
        self._cluster = cluster
        self._seed = seed
        self._began = time.monotonic()

    async def run(self) -> None:
        """Runs until it is cancelled; then `ReplicaCluster.heal` is due."""
        self._began = time.monotonic()
        works: list[tuple[str, float, Callable[[random.Random], Awaitable[None]]]] = [
            ("replicas", MAX_PAUSE_S, self._hurt_replica),
            ("store", STORE_PAUSE_S, self._hurt_store),
            ("ways", MAX_PAUSE_S, self._hurt_way),
        ]
        async with asyncio.TaskGroup() as tasks:
            for name, pause_s, work in works:
                tasks.create_task(self._again(work, pause_s, random.Random(f"{self._seed} {name}")))

    async def watch_leader(self) -> None:
        """Notes who leads, until it is cancelled."""
        last = None
        while True:
            page = await self._cluster.proxy_status()
            now = None if page is None else (page["replica"]["term"], page["replica"]["name"])
            if now != last and now is not None:
                self.note(f"{await self._cluster.leader()} leads, in term {now[0]}")
                last = now
            await asyncio.sleep(1.0)

    def note(self, what: str) -> None:
        self.told.append((round(time.monotonic() - self._began, 1), what))

    async def _again(
        self, work: Callable[[random.Random], Awaitable[None]], pause_s: float, dice: random.Random
    ) -> None:
        while True:
            await asyncio.sleep(dice.uniform(0, pause_s))
            await work(dice)

    def _begin(self, fault: str, at: str = "") -> None:
        self.done[fault] += 1
        self.note(f"{fault}: {at}" if at else fault)

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _target(self, dice: random.Random, *, can_be_leader: bool = True) -> tuple[str, str]:
        """Returns a replica, which is the leader every other time, and what it is."""
        is_leader, other = dice.random() < 0.5, dice.random()
        leader = await self._until_led()
        others = [name for name in self._cluster.lost if name != leader]
        if leader is not None and is_leader and can_be_leader:
            return leader, "the leader's"
        return others[int(other * len(others))], "a follower's"

    async def _until_led(self) -> str | None:
        """Returns the name of the replica that leads, as soon as one does; None where none does for long."""
        deadline = time.monotonic() + 2 * TERM_S
        # HTTP offers nothing to wait on, so it is asked again.
        while (leader := await self._cluster.leader()) is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_INTERVAL_S)
        return leader

    async def _hurt_replica(self, dice: random.Random) -> None:
        fault, seconds = dice.choice(list(ReplicaFault)), dice.uniform(MIN_S, MAX_S)
        name, whose = await self._target(dice)
        cluster, unwell = self._cluster, self._cluster.unwell[name]
        self._begin(f"{fault}, {whose}", f"{name}, {seconds:.1f} s")
        unwell.begin()
        match fault:
            case ReplicaFault.FRONT_KILLED:
                await self._kill_front(name, dice)
            case ReplicaFault.FRONT_FROZEN:
                await self._freeze_front(name, seconds, dice)
            case ReplicaFault.PARENT_FROZEN:
                await self._freeze([cluster.pid(name)], seconds)
            case ReplicaFault.REPLICA_FROZEN:
                await self._freeze(cluster.tree(name), seconds)
            case ReplicaFault.PARENT_KILLED | ReplicaFault.REPLICA_KILLED:
                await self._kill_replica(name, is_whole=fault is ReplicaFault.REPLICA_KILLED)
        await cluster.until_well(name)
        unwell.end()
        self.note(f"{name} is well again")

    async def _kill_front(self, name: str, dice: random.Random) -> None:
        fronts, lost = self._cluster.fronts(name), self._cluster.lost[name]
        if fronts:
            lost.begin()
            pid = dice.choice(fronts)
            signal_to(pid, signal.SIGKILL)
            await self._cluster.until_well(name, pid)
            lost.end()

    async def _freeze_front(self, name: str, seconds: float, dice: random.Random) -> None:
        fronts, lost = self._cluster.fronts(name), self._cluster.lost[name]
        if fronts:
            if seconds > MISSED_S:
                lost.begin()
            await self._freeze([dice.choice(fronts)], seconds)
            await self._cluster.until_well(name)
            lost.end()

    async def _freeze(self, pids: list[int], seconds: float) -> None:
        for pid in pids:
            signal_to(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            for pid in pids:
                signal_to(pid, signal.SIGCONT)

    async def _kill_replica(self, name: str, *, is_whole: bool) -> None:
        cluster, lost = self._cluster, self._cluster.lost[name]
        lost.begin()
        pids = cluster.tree(name) if is_whole else []
        cluster.num_killed[name] += is_whole
        cluster.kill(name)
        for pid in pids:
            signal_to(pid, signal.SIGKILL)
        await cluster.restart_replica(name)
        await cluster.until_well(name)
        lost.end()

    # ── the store ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _hurt_store(self, dice: random.Random) -> None:
        fault, seconds = dice.choice(list(StoreFault)), dice.uniform(MIN_S, MAX_S)
        self._begin(fault, f"{seconds:.1f} s")
        cluster = self._cluster
        if fault is StoreFault.FROZEN:
            cluster.freeze(STORE)
            await asyncio.sleep(seconds)
            cluster.thaw(STORE)
        else:
            cluster.kill(STORE)
            await asyncio.sleep(seconds / 2)
            await cluster.start_store(forget=fault is StoreFault.EMPTIED)
        self.note("the store is well again")

    # ── connections ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _hurt_way(self, dice: random.Random) -> None:
        fault, trouble, seconds = dice.choice(list(WayFault)), dice.choice(TROUBLES), dice.uniform(MIN_S, MAX_S)
        cluster = self._cluster
        if fault is WayFault.STORE:
            name, whose = await self._target(dice)
            broken = [(cluster.stores[name], Rule(trouble, b""))]
        else:
            name, whose = await self._target(dice, can_be_leader=False)
            if (leader := await cluster.leader()) is None:
                return
            word = b"" if fault is WayFault.ALL_TO_LEADER else cluster.member(name)
            broken = [(cluster.links[leader], Rule(trouble, word))]
            if fault is WayFault.ALL_TO_LEADER:
                name = leader
                broken.append((cluster.stores[leader], Rule(trouble, b"")))
        self._begin(f"{fault}, {whose}, {trouble}", f"{name}, {seconds:.1f} s")
        await self._break(broken, seconds)
        self.note(f"{fault} of {name} is mended")

    async def _break(self, broken: list[tuple[Partition, Rule]], seconds: float) -> None:
        for relay, rule in broken:
            await relay.begin(rule)
        try:
            await asyncio.sleep(seconds)
        finally:
            for relay, rule in broken:
                await relay.end(rule)
