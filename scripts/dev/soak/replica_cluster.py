"""The module keeps the processes of a fleet with several replicas by name, and the relays between them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

import httpx

from pdproxy.launch.errors import LaunchError
from pdproxy.launch.ports import HOST, is_free
from pdproxy.launch.supervisor import PROBE_INTERVAL_S, Supervisor
from scripts.dev.soak.outages import Outages
from scripts.dev.soak.partition import Partition
from scripts.dev.soak.replica_plan import STORE, FleetPlan, ReplicaPlan, replica_program, store_program
from scripts.dev.soak.soak_cluster import END_TIMEOUT_S, START_TIMEOUT_S, SoakCluster

FRONT = b"pdproxy.fronts"
LOOK_TIMEOUT_S = 3.0
LOOK_INTERVAL_S = 0.5


class ReplicaCluster(SoakCluster):
    """ReplicaCluster is the engines, the store and the replicas under test. `relaying` has to be entered first.

    Mutable state, besides that of `SoakCluster`: by a replica's name, the `lost` times in which its clients may lose
    connections, and the `unwell` ones in which something of it was killed or frozen; the relays.
    """

    def __init__(self, supervisor: Supervisor, plan: FleetPlan) -> None:
        super().__init__(supervisor, plan.engines)
        self.fleet = plan
        self.lost = {one.name: Outages() for one in plan.replicas}
        self.unwell = {one.name: Outages() for one in plan.replicas}
        self.links: dict[str, Partition] = {}
        """The relays by which fronts of other replicas reach a replica that leads."""
        self.stores: dict[str, Partition] = {}
        """The relays by which a replica reaches the store."""
        self.num_killed: dict[str, int] = dict.fromkeys(self.lost, 0)
        # One for all looks: to make a client takes long, and the relays run in the same event loop.
        self._http = httpx.AsyncClient(trust_env=False, timeout=LOOK_TIMEOUT_S)
        self._looking = asyncio.Lock()
        self._looked_at = -inf
        self._page: dict[str, Any] | None = None

    @asynccontextmanager
    async def relaying(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._http)
            for one in self.fleet.replicas:
                link = Partition(one.advertised_port, one.link_port)
                self.links[one.name] = await stack.enter_async_context(link)
                store = Partition(one.store_port, self.fleet.store_ports[0])
                self.stores[one.name] = await stack.enter_async_context(store)
            yield

    # ── starts and ends ─────────────────────────────────────────────────────────────────────────────────────────────

    async def start_fleet(self) -> None:
        """Starts the store and all replicas, and returns when each would serve a request. Raises `LaunchError`."""
        await self.start_store()
        for one in self.fleet.replicas:
            self.fleet.temporary(one).mkdir(parents=True)
            self.spawn(replica_program(self.fleet, one))
        await self._supervisor.until_ready(START_TIMEOUT_S)

    async def start_store(self, *, forget: bool = False) -> None:
        """Starts the store when the process before has gone, and returns when it takes connections. `forget`: it begins
        with no data. Raises `LaunchError`."""
        if STORE in self._running:
            await self.until_gone(STORE)
        if forget:
            await asyncio.to_thread(shutil.rmtree, self.fleet.store_dir)
        self.fleet.store_dir.mkdir(parents=True, exist_ok=True)
        self.spawn(store_program(self.fleet))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await _listens(self.fleet.store_ports[0]):
            if time.monotonic() > deadline:
                raise LaunchError(f"the store was not there within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def end_fleet(self) -> list[str]:
        """Ends all replicas in order, and then the store. Returns what they have left behind, in words."""
        for one in self.fleet.replicas:
            self.terminate(one.name)
        for one in self.fleet.replicas:
            await self._end(one.name)
        self.kill(STORE)
        await self.until_gone(STORE)
        return await asyncio.to_thread(self._left_behind)

    def _left_behind(self) -> list[str]:
        left = [f"port {port} is taken" for port in self.fleet.ports if not is_free(port)]
        left += [f"{self.links[name].num_passages} connections to {name}" for name in self.links if self._is_used(name)]
        for one in self.fleet.replicas:
            folder = self.fleet.temporary(one)
            paths = sorted(str(path.relative_to(folder)) for path in folder.iterdir())
            # With a whole replica that is killed nobody is left who could remove its folder.
            if len(paths) > self.num_killed[one.name]:
                left.append(f"{one.name} leaves {paths}, and was killed as a whole {self.num_killed[one.name]} times")
            left += [
                f"the process {pid} of {one.name}: {words}" for pid, words in _processes_with(self._mark(one.name))
            ]
        return left

    def _is_used(self, name: str) -> bool:
        return bool(self.links[name].num_passages or self.stores[name].num_passages)

    async def _end(self, name: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await self.until_gone(name)
                return
        self.crashes.append(f"{name} went on for {END_TIMEOUT_S:g} s after SIGTERM: its log says where it is")
        signal_to(self.pid(name), signal.SIGUSR1)  # for its tasks, and then for its threads
        await asyncio.sleep(1)
        signal_to(self.pid(name), signal.SIGABRT)
        await super()._end(name)

    # ── processes of a replica ──────────────────────────────────────────────────────────────────────────────────────

    def fronts(self, name: str) -> list[int]:
        """Returns the pids of the fronts that this replica has now."""
        return [pid for pid in _children(self.pid(name)) if FRONT in _command(pid)]

    def tree(self, name: str) -> list[int]:
        """Returns the pids of the replica and of all its fronts; those whose parent has died, too."""
        return [pid for pid, _ in _processes_with(self._mark(name))]

    def _mark(self, name: str) -> bytes:
        return f"TMPDIR={self.fleet.temporary(self.fleet.replica(name))}".encode()

    async def restart_replica(self, name: str) -> None:
        """Starts a new replica when the process before has gone, as its supervisor would."""
        await self.until_gone(name)
        self.spawn(replica_program(self.fleet, self.fleet.replica(name)))

    async def until_well(self, name: str, was: int | None = None) -> float:
        """Waits until the replica has all its fronts, whose pids are not `was`, and would serve a request. Returns the
        seconds that took. Raises `LaunchError`."""
        replica, began = self.fleet.replica(name), time.monotonic()
        while (took := time.monotonic() - began) < START_TIMEOUT_S:
            fronts = self.fronts(name)
            if len(fronts) == replica.num_workers and was not in fronts and await self._is_ready(replica):
                return took
            await asyncio.sleep(PROBE_INTERVAL_S)
        raise LaunchError(f"{name} was not well within {START_TIMEOUT_S:g} s")

    async def _is_ready(self, replica: ReplicaPlan) -> bool:
        with suppress(httpx.HTTPError):
            return (await self._http.get(f"{replica.url}/ready")).status_code == 200
        return False

    # ── who leads ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def status_of(self, replica: ReplicaPlan) -> dict[str, Any] | None:
        """Returns the leader's page as this replica shows it; None where it has none to show."""
        with suppress(httpx.HTTPError, ValueError):
            status: dict[str, Any] = (await self._http.get(f"{replica.url}/status")).json()
            if status.get("replica", {}).get("leads"):
                return status
        return None

    async def proxy_status(self) -> dict[str, Any] | None:
        """Returns the page of the leader with the greatest term, which is not older than `LOOK_INTERVAL_S`; None where
        no replica shows one."""
        async with self._looking:
            if time.monotonic() - self._looked_at > LOOK_INTERVAL_S:
                told = await asyncio.gather(*(self.status_of(one) for one in self.fleet.replicas))
                pages = [page for page in told if page is not None]
                self._page = max(pages, key=lambda page: page["replica"]["term"], default=None)
                self._looked_at = time.monotonic()
            return self._page

    async def leader(self) -> str | None:
        """Returns the name of the replica that leads; None where nobody says so."""
        page = await self.proxy_status()
        return None if page is None else self._named(page["replica"]["name"])

    def _named(self, member: str) -> str | None:
        return next((name for name in self.lost if self.member(name).decode() == member), None)

    def member(self, name: str) -> bytes:
        """Returns the replica's name among the others, which is in the first bytes of each of its fronts' links."""
        return f"{socket.gethostname()}-{self.pid(name)}".encode()

    async def disagreements(self) -> list[str]:
        """Returns in words where replicas do not agree who leads, or the leader lacks fronts."""
        pages = [await self.status_of(one) for one in self.fleet.replicas]
        told = [None if page is None else (page["replica"]["name"], page["replica"]["term"]) for page in pages]
        found = [] if len({*told}) == 1 and told[0] is not None else [f"the replicas show as their leader: {told}"]
        expected = {pid for name in self.lost for pid in self.fronts(name)}
        for page in pages[:1]:
            fronts = [] if page is None else page["replica"]["fronts"]
            linked = {one["pid"] for one in fronts if one["connected"]}
            if linked != expected or len(fronts) != len(expected):
                found.append(f"the leader has the fronts {fronts}, and those that run are {sorted(expected)}")
        return found

    # ── as of `SoakCluster` ─────────────────────────────────────────────────────────────────────────────────────────

    async def heal(self) -> None:
        """Thaws everything, mends all connections, and starts what has gone again. Raises `LaunchError`."""
        self.note_crashes()
        for relay in (*self.links.values(), *self.stores.values()):
            for rule in list(relay.rules):
                await relay.end(rule)
        if self.is_gone(STORE) or STORE in self._doomed:
            await self.start_store()
        self.thaw(STORE)
        for name in self.lost:
            if self.is_gone(name) or name in self._doomed:
                await self.restart_replica(name)
            for pid in self.tree(name):
                signal_to(pid, signal.SIGCONT)
        for engine in self.plan.engines:
            self.thaw(engine.name)
        gone = [e.name for e in self.plan.engines if e.name in self._doomed or self.is_gone(e.name)]
        await asyncio.gather(*(self.restart(name) for name in gone))
        for engine in self.plan.engines:
            await self.until_healthy(engine.name, START_TIMEOUT_S)
        for name in self.lost:
            await self.until_well(name)
            self.lost[name].end()
            self.unwell[name].end()


async def _listens(port: int) -> bool:
    """Tells whether a process takes connections at the port, without a socket that would be in its way."""
    with suppress(OSError):
        _, writer = await asyncio.open_connection(HOST, port)
        writer.close()
        return True
    return False


def signal_to(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process, unless it has gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _processes_with(variable: bytes) -> list[tuple[int, str]]:
    """Returns the processes that have this variable: their pids and commands."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                pid = int(folder.name)
                found.append((pid, _command(pid).replace(bytes(1), b" ").decode(errors="replace")[:200]))
    return found
