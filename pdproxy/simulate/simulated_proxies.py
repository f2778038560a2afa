"""Several proxies under simulated time: fronts that serve, and whoever leads them. Each of them may stand still or end,
and so may what lies between them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine, Mapping
from typing import Any

import anyio

from pdproxy.aio.coarse_timer import alarms_of
from pdproxy.config.settings import Settings
from pdproxy.kv_signals.board import KvBoard
from pdproxy.openai.request import GenerationRequest
from pdproxy.simulate.adapter import LEASE_S, SimulatedAdapter
from pdproxy.simulate.client import SimulatedClient
from pdproxy.simulate.engines import Engine
from pdproxy.simulate.process import Distant, Process
from pdproxy.simulate.simulated_fronts import SimulatedFront, lose
from pdproxy.simulate.simulated_leader import PARTS, SimulatedLeader, Store
from pdproxy.simulate.simulated_link import Network, Weather
from pdproxy.simulate.simulated_proxy import settings_of
from pdproxy.telemetry.record import RequestRecord
from transfer import wire

LOOK_S = 0.1
"""The seconds between two looks at what is not settled yet."""


class Switch:
    """Switch brings the signals of decoders to the proxy that expects them, as their addresses would.

    Mutable state: the proxies' boards, and the processes that they are in.
    """

    def __init__(self) -> None:
        self.boards: dict[KvBoard, Process] = {}

    def deliver(self, signal: wire.Signal) -> None:
        """Brings a signal to whoever expects it. It is lost where nobody does."""
        for board, process in self.boards.items():
            if board.knows(signal):
                process.call(board.deliver, signal)
                return


class Alarms:
    """Alarms keeps the loop's coarse timer going from outside of all processes, because they share it: one that stands
    still must not keep it from the others. Implements `coarse_timer.Alarm`."""

    due_at = float("inf")

    def ring(self) -> None:
        """Does nothing: it is never due."""


class Proxies:
    """Proxies is `num_proxies` fronts in front of `engines`, and one leader at a time.

    `can_be_lost` says that processes may stand still or end: then leaders hold a key at a store, fronts give signs of
    life, and each process asks the engines by itself. Mutable state: the fronts, who leads, and those that led before;
    the requests that were served.
    """

    def __init__(
        self,
        settings: Settings,
        engines: Mapping[str, Engine],
        switch: Switch,
        seed: int,
        *,
        num_proxies: int,
        weather: Weather,
        can_be_lost: bool,
    ) -> None:
        self._settings = settings
        self._switch = switch
        self._seed = seed
        self._num = num_proxies
        self._clients: Mapping[str, Any] = engines
        if can_be_lost:
            self._clients = {name: Distant(engine) for name, engine in engines.items()}
        self._known = {name: settings_of(engine) for name, engine in engines.items()}
        self._adapter = SimulatedAdapter(lease_s=settings.engine_lease_s or LEASE_S)
        self._store = Store(settings.term_s / PARTS) if can_be_lost else None
        self._dice = random.Random(f"{seed} elections")
        self._terms = itertools.count(1)
        self._is_probed = False
        self._electing: asyncio.Task[None] | None = None
        self._former: list[SimulatedLeader] = []
        self.leader = self._make_leader()
        self.leader.proxy.make_ready(engines)
        if self._store is not None:
            self._store.holder = self.leader
        self._networks = [Network(weather, random.Random(f"{seed} network {n}")) for n in range(num_proxies)]
        self.fronts = [self._make_front(number) for number in range(num_proxies)]
        for front in self.fronts:
            front.know(self.leader)

    def _make_leader(self, claims_until: float = float("-inf")) -> SimulatedLeader:
        leader = SimulatedLeader(
            self._settings,
            self._clients,
            self._known,
            self._seed,
            term=next(self._terms),
            claims_until=claims_until,
            store=self._store,
        )
        self._switch.boards[leader.board] = leader.process
        return leader

    def _make_front(self, number: int) -> SimulatedFront:
        front = SimulatedFront(
            self._settings,
            name=f"front-{number}",
            num_fronts=self._num,
            clients=self._clients,
            known=self._known,
            adapter=self._adapter,
            network=self._networks[number],
            ttl_s=None if self._store is None else self._store.ttl_s,
            seed=self._seed,
        )
        self._switch.boards[front.board] = front.process
        return front

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, *, is_probed: bool) -> None:
        """Begins what goes on behind requests."""
        self._is_probed = is_probed
        self.leader.begin(is_probed=is_probed)
        for front in self.fronts:
            front.begin()
        if self._store is not None:
            alarms_of(asyncio.get_running_loop()).set(Alarms())
            self._electing = asyncio.get_running_loop().create_task(self._elect(self._store))

    async def _elect(self, store: Store) -> None:
        """Has another lead whenever the key has not been renewed in time."""
        loop = asyncio.get_running_loop()
        await anyio.sleep(store.ttl_s / PARTS)
        while True:
            now = loop.time()
            if store.until > now:
                await anyio.sleep(store.until - now)
                continue
            self._former.append(self.leader)
            self.leader = store.holder = self._make_leader(claims_until=now + (PARTS - 1) * store.ttl_s)
            self.leader.begin(is_probed=self._is_probed)
            store.renew(self.leader, now)
            for front in self.fronts:  # each hears of it when its replica has next asked the store
                in_s = self._dice.uniform(0.0, store.ttl_s / PARTS)
                loop.call_later(in_s, front.follow, self.leader, context=front.process.context)

    def serve(
        self, index: int, request: GenerationRequest, client: SimulatedClient, record: RequestRecord
    ) -> Coroutine[Any, Any, None]:
        """Returns the service of a request by one of the proxies that live, each in its turn."""
        front = self.fronts[index % self._num]
        if self._store is None:
            return front.orchestrator.serve(request, client, record)
        if not front.is_alive:
            living = [one for one in self.fronts if one.is_alive]
            if not living:
                lose(record)
                return _nothing()
            front = living[index % len(living)]
        return front.serve(request, client, record)

    def mend(self) -> None:
        """Lets everybody go on, so that what is left can be settled."""
        for network in self._networks:
            network.mend()
        for process in self._switch.boards.values():
            process.thaw()

    async def settled(self) -> None:
        """Waits until nothing is left that fronts, or whoever leads, hold."""
        while True:
            is_settled = all(front.is_settled for front in self.fronts) and not self.leader.num_attempts
            if is_settled and not any(self.leader.proxy.reaper.orphans) and not self.leader.proxy.ledger()["held"]:
                return
            await anyio.sleep(LOOK_S)

    def end(self) -> None:
        """Ends all processes."""
        if self._electing is not None:
            self._electing.cancel()
        for leader in (*self._former, self.leader):
            leader.kill()
        for front in self.fronts:
            front.kill()

    # ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def whom(self) -> dict[str, Any]:
        """Returns to whom anything can happen, by name."""
        fronts = {f"front-{number}": _FrontTarget(self, number) for number in range(self._num)}
        return {**fronts, "leader": _LeaderTarget(self)}

    def restart(self, number: int) -> None:
        """Has a new front take the place of one that was killed."""
        if not self.fronts[number].is_alive:
            self._switch.boards.pop(self.fronts[number].board)
            front = self.fronts[number] = self._make_front(number)
            front.begin()
            front.process.call(front.follow, self.leader)

    def thaw_leaders(self) -> None:
        """Has leaders go on that stand still, also one that has been replaced."""
        for leader in (*self._former, self.leader):
            leader.process.thaw()

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when pages or expectations do not add up."""
        self.leader.proxy.pool.check_integrity()
        for board in self._switch.boards:
            board.check_integrity()

    def left(self) -> dict[str, int]:
        """Returns what is not over yet, by what it is."""
        left = {**self.leader.proxy.left(), "attempts of fronts": self.leader.num_attempts}
        for front in self.fronts:
            if front.is_alive:
                for what, num in front.left().items():
                    left[f"{what} at fronts"] = left.get(f"{what} at fronts", 0) + num
        return left

    @property
    def num_messages(self) -> int:
        """Returns how many messages there were, in both directions."""
        return sum(network.num_messages for network in self._networks)

    @property
    def num_batches(self) -> int:
        """Returns how many batches of messages there were, in both directions."""
        return sum(network.num_frames for network in self._networks)

    @property
    def num_leaders(self) -> int:
        """Returns how many have led."""
        return 1 + len(self._former)


class _FrontTarget:
    """_FrontTarget is one front, for faults: whichever has this number at that time."""

    def __init__(self, proxies: Proxies, number: int) -> None:
        self._proxies = proxies
        self._number = number

    @property
    def _front(self) -> SimulatedFront:
        return self._proxies.fronts[self._number]

    def kill(self) -> None:
        self._front.kill()

    def start(self) -> None:
        self._proxies.restart(self._number)

    def freeze(self) -> None:
        self._front.process.freeze()

    def thaw(self) -> None:
        self._front.process.thaw()

    def cut(self) -> None:
        self._front.network.cut()

    def mend(self) -> None:
        self._front.network.mend()


class _LeaderTarget:
    """_LeaderTarget is whoever leads, for faults. Once it has been replaced, it stays away."""

    def __init__(self, proxies: Proxies) -> None:
        self._proxies = proxies

    def kill(self) -> None:
        self._proxies.leader.kill()

    def freeze(self) -> None:
        self._proxies.leader.process.freeze()

    def thaw(self) -> None:
        self._proxies.thaw_leaders()


async def _nothing() -> None:
    """Does nothing: there is nobody who serves."""
