"""The module puts the proxy's own parts together as `assemble` does, under simulated time: for a proxy that is alone,
and for one that leads others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from math import inf

from pdproxy.assemble import (
    MakeClient,
    Runner,
    instance_maker,
    make_admission,
    make_orchestrator,
    make_retries,
    make_role_changes,
    make_router,
)
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.probe import Probe
from pdproxy.fleet.role_changes import RoleChange
from pdproxy.fleet.role_controller import RoleFollower
from pdproxy.kv_signals.board import KvBoard
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.simulate.adapter import make_adapter
from pdproxy.simulate.engines import Engine
from pdproxy.simulate.messages import FACTS, encode
from pdproxy.telemetry.observer import Observers
from pdproxy.tokens.prompt_sizer import ByteSizer

LOOK_S = 1.0
"""The seconds between two looks at the memory of decoders."""
FULL_SHARE = 0.5
"""The share of a KV cache in use up to which nobody looks."""


class SimulatedProxy:
    """SimulatedProxy admits requests to the engines that are `known`, looks at them, and serves requests. It has to be
    made within the loop whose time it goes by.

    It reaches engines by `client_of` their settings. `board` is where engines tell of its KV. `seed` is for what the
    routing policies leave to chance. It grants nothing before `claims_until`.
    """

    def __init__(
        self,
        settings: Settings,
        client_of: MakeClient,
        known: Mapping[str, InstanceSettings],
        board: KvBoard,
        seed: int,
        *,
        claims_until: float = -inf,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.board = board
        router = make_router(settings, random.Random(f"{seed} routing"))
        admission = make_admission(settings, router, clock, claims_until=claims_until)
        make = instance_maker(
            settings,
            admission,
            board.fail_epoch,
            client_of,
            make_adapter=make_adapter,
            clock=clock,
        )
        instances = [make(one, False) for one in known.values()]
        self.pool = Pool(admission, instances)
        self.reaper = Reaper(
            admission, call_timeout_s=settings.probe_timeout_s, look=lambda instance: self.probe.look(instance)
        )
        self.orchestrator = make_orchestrator(
            settings,
            admission=admission,
            pool=self.pool,
            board=board,
            router=router,
            sizer=ByteSizer(),
            reaper=self.reaper,
            retries=make_retries(settings, clock),
            observer=Observers(),
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
        self.moves: list[tuple[float, str]] = []
        """The changes of role so far: when each ended, and the instance's name and role."""
        self.followers: list[Runner] = []
        """The functions that have roles follow the load, where that is wanted. Each runs until cancelled."""
        if settings.role_controller:
            membership = Membership(
                self.pool, make_instance=lambda one: make(one, True), check=settings.check_instances
            )
            roles = make_role_changes(settings, self.pool, membership)
            roles.on_end = lambda change: self.moves.append((clock(), _told(change)))
            self.followers = [membership.run, roles.run, RoleFollower(self.pool, roles, clock).run]

    async def look_at_memory(self, engines: Mapping[str, Engine]) -> None:
        """Looks at the decoders as the probe does, but only at those with KV caches so full that it makes a
        difference: where nobody may fall, looks at the others would take time and find nothing."""
        while True:
            await asyncio.sleep(LOOK_S)
            for instance in self.pool.of_role("decode"):
                if instance.resident_share > FULL_SHARE and instance.residency.capacity:
                    instance.heard(instance.adapter.read_facts({FACTS: encode(engines[instance.name].tell())}))

    def make_ready(self, engines: Mapping[str, Engine]) -> None:
        """Makes all instances ready as if they had been asked, and a canary had gone through each."""
        for instance in self.pool.instances:
            _make_ready(instance, engines[instance.name])

    def left(self) -> dict[str, int]:
        """Returns what is not over yet, by what it is."""
        return {
            "pages held": self.ledger()["held"],
            "signals expected": self.board.statistics().num_open,
            "legs": sum(instance.num_legs for instance in self.pool.instances),
            "tokens queued": sum(instance.queued_tokens for instance in self.pool.instances),
            "tokens resident": sum(instance.residency.tokens for instance in self.pool.instances),
            "requests": self.orchestrator.num_requests,
        }

    def ledger(self) -> dict[str, int]:
        """Returns how many pages all decoders together have granted, got back and still hold."""
        all_of_them = [pages for one in self.pool.of_role("decode") if (pages := one.pages) is not None]
        return {
            "granted": sum(one.granted_total for one in all_of_them),
            "returned": sum(one.returned_total for one in all_of_them),
            "held": sum(one.held for one in all_of_them),
        }


def settings_of(engine: Engine) -> InstanceSettings:
    """Returns the settings of the instance that an engine is."""
    return InstanceSettings(name=engine.name, role=engine.role, url=f"http://{engine.name}")


def _make_ready(instance: Instance, engine: Engine) -> None:
    instance.heard(instance.adapter.read_facts({FACTS: encode(engine.tell())}))
    instance.proven()


def _told(change: RoleChange) -> str:
    return f"{change.instance.name} → {change.instance.role}"
