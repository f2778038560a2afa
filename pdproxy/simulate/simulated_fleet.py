"""The module runs a whole fleet under simulated time: the proxy's own parts, put together as `assemble` does, in front
of engines that compute nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio

from pdproxy.assemble import instance_maker, make_admission, make_orchestrator, make_retries, make_router
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.engines.factory import TAKE_IDS
from pdproxy.errors import IntegrityError
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.probe import Probe
from pdproxy.fleet.token_counts import TokenCounts
from pdproxy.fronts.hub import Hub
from pdproxy.kv_signals.board import KvBoard
from pdproxy.openai.request import GenerationRequest
from pdproxy.orchestrator.context import Client
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.simulate.adapter import LEASE_S, SimulatedAdapter, make_adapter
from pdproxy.simulate.engines import Decoder, Engine, Prefiller
from pdproxy.simulate.errors import SimulationError
from pdproxy.simulate.messages import FACTS, encode
from pdproxy.simulate.simulated_fronts import Fronts, SimulatedFront
from pdproxy.simulate.speed import Speed
from pdproxy.telemetry.record import Observers, RequestRecord
from pdproxy.tokens.prompt_sizer import ByteSizer
from transfer import wire

SETTLE_S = 600.0
"""The seconds, at the end, for what was left behind to be settled; they are longer than an engine's lease."""

Served = Coroutine[Any, Any, None]
SETTLED_S = 0.1
"""The seconds between two looks at what fronts have still to say."""


class SimulatedFleet:
    """SimulatedFleet is `num_prefillers` and `num_decoders`, all ready, behind the proxy's parts. It has to be made
    within the loop whose time it goes by.

    `seed` is for what the routing policies leave to chance. Behind several `proxies` these parts are those of the
    leader, which serves no requests, and what it and the fronts say takes `link_delay_s` seconds, and longer where it
    is lost on the way, as a share `link_loss` is.
    """

    def __init__(
        self,
        settings: Settings,
        speed: Speed,
        num_prefillers: int,
        num_decoders: int,
        seed: int,
        *,
        proxies: int = 1,
        link_delay_s: float = 0.0,
        link_loss: float = 0.0,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.settings = settings
        self.board = KvBoard(clock=clock)
        lease_s = settings.engine_lease_s or LEASE_S
        names = _names("decode", num_decoders)
        self.decoders = {name: Decoder(name, speed, self.board, lease_s=lease_s) for name in names}
        self.prefillers = {name: Prefiller(name, speed, self.decoders) for name in _names("prefill", num_prefillers)}
        self.engines: dict[str, Engine] = {**self.prefillers, **self.decoders}
        router = make_router(settings, random.Random(f"{seed} routing"))
        admission = make_admission(settings, router, clock)
        make = instance_maker(
            settings,
            admission,
            self.board.fail_epoch,
            lambda one: self.engines[one.name],
            make_adapter=make_adapter,
            clock=clock,
        )
        instances = [make(_settings_of(engine), False) for engine in self.engines.values()]
        self.pool = Pool(admission, instances)
        self.reaper = Reaper(
            admission, call_timeout_s=settings.probe_timeout_s, look=lambda instance: self.probe.look(instance)
        )
        self.retries = make_retries(settings, clock)
        self.orchestrator = make_orchestrator(
            settings,
            admission=admission,
            pool=self.pool,
            board=self.board,
            router=router,
            sizer=ByteSizer(),
            reaper=self.reaper,
            retries=self.retries,
            observer=Observers(()),
            notify=str,
            clock=clock,
        )
        self.probe = Probe(
            self.pool,
            interval_s=settings.probe_interval_s,
            timeout_s=settings.probe_timeout_s,
            prove=self.orchestrator.prove if settings.canary else None,
            canary_timeout_s=settings.canary_timeout_s,
            rng=random.Random(f"{seed} looks"),
        )
        for instance in instances:
            _make_ready(instance, self.engines[instance.name])
        self.fronts: list[SimulatedFront] = []
        if proxies > 1:
            hub = Hub(self.pool, admission, self.reaper, TokenCounts(self.pool, take_ids=TAKE_IDS), term=1)
            self.pool.on_membership = hub.follow
            self.board.pass_on = self._pass_on
            known = {one.name: one.settings for one in instances}
            adapter = SimulatedAdapter(lease_s=lease_s)
            self.fronts = [
                SimulatedFront(
                    settings,
                    hub,
                    number=number,
                    num_fronts=proxies,
                    clients=self.engines,
                    known=known,
                    adapter=adapter,
                    delay_s=link_delay_s,
                    loss=link_loss,
                    seed=seed,
                )
                for number in range(proxies)
            ]

    def serve(self, index: int, request: GenerationRequest, client: Client, record: RequestRecord) -> Served:
        """Returns the service of the request of this index. Fronts take turns. Raises `SimulationError` where none
        lives."""
        if not self.fronts:
            return self.orchestrator.serve(request, client, record)
        alive = [front for front in self.fronts if front.is_alive]
        if not alive:
            raise SimulationError("faults: all fronts were killed, and nobody is there to serve")
        front = alive[index % len(alive)]
        return front.serve(front.orchestrator.serve(request, client, record), record)

    @property
    def whom(self) -> dict[str, Engine | SimulatedFront | Fronts]:
        """Returns to whom anything can happen, by name."""
        fronts = {f"front-{number}": front for number, front in enumerate(self.fronts)}
        return {**self.engines, **fronts, **({"leader": Fronts(self.fronts)} if fronts else {})}

    def _pass_on(self, signal: wire.AnySignal) -> bool:
        """Gives a signal to the front that expects it, and returns whether there is one."""
        for front in self.fronts:
            if front.board.knows(signal):
                front.board.deliver(signal)
                return True
        return False

    @asynccontextmanager
    async def running(self, *, is_probed: bool) -> AsyncIterator[None]:
        """Runs what goes on behind requests, while the block runs. `is_probed` means that the fleet is looked at, as it
        has to be where anybody may fall."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.reaper.run)
            for front in self.fronts:
                tasks.start_soon(front.reaper.run)
            async with anyio.create_task_group() as looking:
                if is_probed:
                    looking.start_soon(self.probe.run)
                yield
                looking.cancel_scope.cancel()
            for engine in self.engines.values():  # nobody could say of the others what became of their pages
                engine.thaw()
                engine.start()
            for front in self.fronts:
                front.thaw()
            with anyio.move_on_after(SETTLE_S):
                while not all(front.is_settled for front in self.fronts):  # noqa: ASYNC110
                    await anyio.sleep(SETTLED_S)
                await self.reaper.idle()
                while any(decoder.pages_in_use for decoder in self.decoders.values()):  # noqa: ASYNC110
                    await anyio.sleep(1.0)  # until leases have run out, which takes no time here
            tasks.cancel_scope.cancel()

    def ledger(self) -> dict[str, int]:
        """Returns how many pages all decoders together have granted, got back and still hold."""
        all_of_them = [pages for one in self.pool.of_role("decode") if (pages := one.pages) is not None]
        return {
            "granted": sum(one.granted_total for one in all_of_them),
            "returned": sum(one.returned_total for one in all_of_them),
            "held": sum(one.held for one in all_of_them),
        }

    def check_idle(self) -> None:
        """Raises `IntegrityError` unless everything that was granted, expected or written is settled."""
        self.pool.check_integrity()
        self.board.check_integrity()
        num_open = self.board.statistics().num_open
        left = {
            "pages held": self.ledger()["held"],
            "signals expected": num_open,
            "pages in use": sum(decoder.pages_in_use for decoder in self.decoders.values()),
            "legs": sum(instance.num_legs for instance in self.pool.instances),
            "tokens queued": sum(instance.queued_tokens for instance in self.pool.instances),
            "requests": self.orchestrator.num_requests,
        }
        for front in self.fronts:
            if front.is_alive:
                front.pool.check_integrity()
                front.board.check_integrity()
            for what, number in front.left().items():
                left[f"{what} of fronts"] = left.get(f"{what} of fronts", 0) + number
        if any(left.values()):
            raise IntegrityError(f"nobody asks any more, and there are left: {left}")


def _names(role: str, num: int) -> list[str]:
    return [f"{role}-{index}" for index in range(num)]


def _settings_of(engine: Engine) -> InstanceSettings:
    return InstanceSettings(name=engine.name, role=engine.role, url=f"http://{engine.name}")


def _make_ready(instance: Instance, engine: Engine) -> None:
    """Makes an instance ready as if it had been asked, and a canary had gone through it."""
    instance.heard(instance.adapter.read_facts({FACTS: encode(engine.tell())}))
    instance.proven()
