"""Instances without engines, for tests of the fleet: what they would say is said for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from pdproxy.admission.account import Place
from pdproxy.admission.admission import Admission
from pdproxy.admission.custody import Evidence
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.values import Role
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.engines.http.base import EngineClient
from pdproxy.engines.info import EngineInfo
from pdproxy.fleet.instance import HealthPolicy, Instance
from pdproxy.fleet.routing.candidates import Policy
from pdproxy.fleet.routing.policies import PolicyOptions, make_policy
from pdproxy.fleet.routing.router import Router
from tests.fakes.fake_engine import FakeClient, FakeEngine, FakeLeg


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class ClosableClient(FakeClient):
    """Remembers that it was closed."""

    is_closed = False

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> FakeLeg:
        assert not self.is_closed
        return await super().post(path, body, headers)

    async def aclose(self) -> None:
        self.is_closed = True


def settings(name: str, role: Role = "decode", **more: Any) -> InstanceSettings:
    return InstanceSettings(**({"name": name, "role": role, "url": f"http://{name}:1"} | more))


def facts(role: Role = "decode", **different: Any) -> EngineInfo:
    """What the adapter makes of a built-in engine's word, which is `different` from a fake engine's."""
    return FakeEngine(role).known_facts(**different)


def make_instance(
    one: InstanceSettings | str = "d0",
    role: Role = "decode",
    *,
    client: EngineClient | None = None,
    care: HealthPolicy | None = None,
    on_ended: Callable[[str, str], object] = lambda epoch, why: None,
    admission: Admission | None = None,
    is_newcomer: bool = False,
    clock: Callable[[], float] | None = None,
) -> Instance:
    one = settings(one, role) if isinstance(one, str) else one
    clock = clock or Clock()
    return Instance(
        one,
        client=client or ClosableClient(FakeEngine(one.role)),
        adapter=BuiltinAdapter(),
        admission=admission or make_admission(clock),
        care=care,
        on_ended=on_ended,
        is_newcomer=is_newcomer,
        clock=clock,
    )


def make_admission(clock: Callable[[], float] | None = None, **options: Any) -> Admission:
    """Of its own, where the test does not care who is picked."""
    router = Router(prefill_policy=_by_turns(), decode_policy=_by_turns(), session_header="x-session-id")
    return Admission(Kernel(router, **options), clock=clock or Clock())


def _by_turns() -> Policy:
    return make_policy("round_robin", PolicyOptions(rng=random.Random(0)))


def make_ready(instance: Instance, **different: Any) -> Instance:
    """As if it had answered and a canary had gone through it."""
    instance.heard(facts(instance.role, **different))
    instance.proven()
    return instance


class Held:
    """Pages that somebody holds, or waits for, at one instance: a test's own hand on its account."""

    def __init__(
        self, instance: Instance, pages: int, *, priority: int = 0, age: float = 0.0, deadline: float = inf
    ) -> None:
        self._admission = instance.admission
        self._admission.add(instance)
        peer = next((place for place in self._admission.kernel.places if not place.is_owner), None)
        if peer is None:
            self._admission.add(peer := Place("nobody", is_owner=False))
        self.demand = Demand(
            f"held-{id(self)}",
            None,
            lambda shape: pages,
            age=age,
            deadline=deadline,
            priority=priority,
            pair=(instance, peer),
        )
        self.grant = self._admission.bind_now(self.demand)
        self._unbind()
        self._waiter = self._admission._waiters.get(self.demand)

    @property
    def is_there(self) -> bool:
        return self.grant is not None

    async def wait(self) -> Held:
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            self.grant = waiter.grant or await self._admission.wait(self.demand)
            self._unbind()
        return self

    def _unbind(self) -> None:
        """No attempt is under way: it is about the pages alone."""
        if self.grant is not None:
            for place in (self.grant.owner, self.grant.peer):
                place.unbound(self.demand.attempt)

    def release(self) -> None:
        if self.grant is not None:
            for lease in self.grant.leases:
                self._admission.free(lease, Evidence.NEVER_SENT)
