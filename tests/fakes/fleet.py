"""Instances without engines, for tests of the fleet: what they would say is said for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pdproxy.admission.budget import PageBudget
from pdproxy.config import InstanceSettings, Role
from pdproxy.engines.base import EngineClient, Facts
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.fleet.instance import Care, Instance
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


def facts(role: Role = "decode", **different: Any) -> Facts:
    """What the adapter makes of a built-in engine's word, which is `different` from a fake engine's."""
    return FakeEngine(role).known_facts(**different)


def make_instance(
    one: InstanceSettings | str = "d0",
    role: Role = "decode",
    *,
    client: EngineClient | None = None,
    care: Care | None = None,
    on_gone: Callable[[str, str], object] = lambda epoch, why: None,
    is_newcomer: bool = False,
    clock: Callable[[], float] | None = None,
) -> Instance:
    one = settings(one, role) if isinstance(one, str) else one
    return Instance(
        one,
        client=client or ClosableClient(FakeEngine(one.role)),
        adapter=BuiltinAdapter(),
        make_admission=PageBudget,
        care=care,
        on_gone=on_gone,
        is_newcomer=is_newcomer,
        clock=clock or Clock(),
    )


def make_ready(instance: Instance, **different: Any) -> Instance:
    """As if it had answered and a canary had gone through it."""
    instance.heard(facts(instance.role, **different))
    instance.proven()
    return instance
