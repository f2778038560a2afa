"""Pages are free when there is proof of it: the ledger is never below what the engine may hold, and comes down soon after
the engine was heard again.

What an engine holds is known here, of each kind, since it is a scripted one; a `Witness` looks after every turn of the
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdproxy.admission import kernel
from pdproxy.fleet.instance import Health, Instance
from tests.fakes.calls import Call
from tests.fakes.fake_engine import FakeClient, FakeEngine, ScriptedEngine
from tests.fakes.fake_lmcache import CONFIG, FakeLMCache
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

PROMPT = [1] * 40
PAGES = 3
SOON_S = 2.0
"""Much less than any engine's lease."""


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be done is tried again soon, and LMCache's reads and writes take no time."""
    monkeypatch.setattr(kernel, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(kernel, "MAX_PAUSE_S", 0.02)
    monkeypatch.setattr("pdproxy.engines.lmcache.WRITING_S", 0.01)
    monkeypatch.setattr("pdproxy.engines.lmcache.READING_S", 0.01)


@dataclass
class Witness:
    """Looks at what the owner of the pages holds and at what is held for it."""

    house: Harness
    owner: Instance
    engine: Any
    client: FakeClient
    is_watching: bool = True
    seen: list[str] = field(default_factory=list)

    async def watch(self) -> None:
        while self.is_watching:
            num_pages = sum(self.engine.pages.values())
            if self.owner.held < num_pages:
                self.seen.append(f"{self.owner.held} held of {num_pages} in use")
            await asyncio.sleep(0)

    async def free_soon(self) -> None:
        """All that was held is free, by proof and long before the lease ends."""
        async with asyncio.timeout(SOON_S):
            await until(lambda: self.owner.held == 0)
        assert sum(self.engine.pages.values()) == 0

    async def left(self, **body: Any) -> Call:
        """A request that its client leaves while its KV lies there, not taken."""
        stopping = self.house.decoder if self.engine is not self.house.decoder else self.engine
        stopping.hang_at.add("decode")
        call = self.house.call(prompt=PROMPT, **body)
        await stopping.reached("decode")
        assert self.owner.held == sum(self.engine.pages.values()) == PAGES
        return call


Kind = Callable[[], tuple[list[ScriptedEngine], list[ScriptedEngine]]]


def builtin() -> tuple[list[ScriptedEngine], list[ScriptedEngine]]:
    return [FakeEngine("prefill")], [FakeEngine("decode")]


def nixl() -> tuple[list[ScriptedEngine], list[ScriptedEngine]]:
    return [FakeNixl("prefill", lease_s=60.0)], [FakeNixl("decode", lease_s=60.0)]


def lmcache() -> tuple[list[ScriptedEngine], list[ScriptedEngine]]:
    return [FakeLMCache("prefill")], [FakeLMCache("decode")]


KINDS: list[Kind] = [builtin, nixl, lmcache]


@asynccontextmanager
async def witnessed(kind: Kind, tmp_path: Any, **options: Any) -> AsyncIterator[Witness]:
    if kind is lmcache:
        options["model_path"] = tmp_path
        (tmp_path / "config.json").write_text(str(CONFIG).replace("'", '"'))
    prefillers, decoders = kind()
    options = {"retries": 0, "admin_key": "operator", "probe_successes": 1, "probe_timeout_s": 0.05} | options
    async with proxy_in_front_of(prefillers, decoders, **options) as house:
        owner = next(one for one in house.proxy.pool.instances if one.is_owner)
        engine = house.prefiller if owner.role == "prefill" else house.decoder
        witness = Witness(house, owner, engine, house.client_of(engine))
        watching = asyncio.create_task(witness.watch())
        try:
            yield witness
        finally:
            witness.is_watching = False
            await watching
        assert witness.seen == []


async def is_down(instance: Instance) -> None:
    instance.suspected.set()
    await until(lambda: instance.health is Health.DOWN)


async def is_back(instance: Instance) -> None:
    instance.suspected.set()
    await until(lambda: instance.health is not Health.DOWN)


# ── it cannot be reached, and lives on ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refused_connection_frees_nothing_until_it_is_heard_again(kind: Kind, tmp_path: Any) -> None:
    """A Kubernetes Service without ready endpoints for a moment."""
    async with witnessed(kind, tmp_path) as witness:
        house = witness.house
        call = await witness.left(stream=True)
        decoder = house.proxy.pool.of_role("decode")[0]
        with witness.client.refusing(), house.client_of(house.decoder).refusing() if kind is nixl else _nothing():
            call.leave()
            await call.done()
            house.decoder.let_go("decode")
            await is_down(witness.owner)
            if kind is nixl:
                await is_down(decoder)
            await asyncio.sleep(0.1)
            assert witness.owner.held == PAGES
        await is_back(witness.owner)
        await is_back(decoder)
        await witness.free_soon()


class _nothing:  # noqa: N801 (reads as what it is)
    def __enter__(self) -> None: ...

    def __exit__(self, *about: object) -> None: ...
