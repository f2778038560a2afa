"""Pages are free when there is proof of it: the ledger is never below what the engine holds, and comes down soon after
that was heard again.

What an engine holds is known here, of each kind, since it is a scripted one; a `Witness` looks after every turn of the
event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdproxy.admission import orphans
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
    monkeypatch.setattr(orphans, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(orphans, "MAX_PAUSE_S", 0.02)
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

    async def at_decoder(self, **body: Any) -> Call:
        """A request whose KV lies where it waits to be taken: the decoder has its leg and has not begun."""
        decoder = self.house.decoder
        decoder.hang_at.add("decode")
        call = self.house.call(prompt=PROMPT, **body)
        await decoder.reached("decode")
        assert self.owner.held == sum(self.engine.pages.values()) == PAGES
        return call

    async def leave(self, call: Call) -> None:
        call.leave()
        await call.done()
        self.house.decoder.let_go("decode")


Kind = Callable[[], tuple[list[ScriptedEngine], list[ScriptedEngine]]]


def builtin() -> tuple[list[ScriptedEngine], list[ScriptedEngine]]:
    return [FakeEngine("prefill")], [FakeEngine("decode")]


def nixl() -> tuple[list[ScriptedEngine], list[ScriptedEngine]]:
    return [FakeNixl("prefill", lease_s=60.0)], [FakeNixl("decode", lease_s=60.0)]


def lmcache() -> tuple[list[ScriptedEngine], list[ScriptedEngine]]:
    return [FakeLMCache("prefill")], [FakeLMCache("decode")]


KINDS: list[Kind] = [builtin, nixl, lmcache]


@asynccontextmanager
async def witnessed(kind: Kind, tmp_path: Path, **options: Any) -> AsyncIterator[Witness]:
    if kind is lmcache:
        options["model"] = tmp_path
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    prefillers, decoders = kind()
    options = {"retries": 0, "admin_key": "operator", "probe_successes": 1, "probe_timeout_s": 0.05} | options
    async with proxy_in_front_of(prefillers, decoders, **options) as house:
        owner = next(one for one in house.proxy.pool.instances if one.is_owner)
        engine = house.prefiller if owner.role == "prefill" else house.decoder
        witness = Witness(house, owner, engine, house.client_of(engine))
        watching = asyncio.create_task(witness.watch())
        try:
            yield witness
            await house.is_ready()  # a canary may be on its way
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
async def test_a_refused_connection_frees_nothing_until_it_is_heard_again(kind: Kind, tmp_path: Path) -> None:
    """A Kubernetes Service without ready endpoints for a moment."""
    async with witnessed(kind, tmp_path) as witness:
        call = await witness.at_decoder(stream=True)
        with witness.client.refusing():
            await is_down(witness.owner)
            await witness.leave(call)
            await asyncio.sleep(0.1)
            assert witness.owner.held == PAGES
            assert witness.house.proxy.reaper.statistics()["void"] == 0
        await is_back(witness.owner)
        await witness.free_soon()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_frozen_machine_keeps_its_pages_and_drops_them_when_it_goes_on(kind: Kind, tmp_path: Path) -> None:
    """Nothing is reset: its legs say nothing, and it is taken for down."""
    async with witnessed(kind, tmp_path) as witness:
        call = await witness.at_decoder(stream=True)
        with witness.engine.frozen():
            await witness.leave(call)
            await is_down(witness.owner)
            await asyncio.sleep(0.1)
            assert witness.owner.held == PAGES
        await is_back(witness.owner)
        await witness.free_soon()


# ── it is drained, then stopped ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_is_drained_gives_back_what_was_left_there_before_it_is_stopped(
    kind: Kind, tmp_path: Path
) -> None:
    async with witnessed(kind, tmp_path) as witness:
        call = await witness.at_decoder(stream=True)
        witness.owner.drain()
        await witness.leave(call)
        await witness.free_soon()
        assert witness.owner.is_idle


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_is_drained_and_stopped_frees_its_pages_as_another_process(kind: Kind, tmp_path: Path) -> None:
    """While nobody is there nothing is known; who comes next proves that it has gone."""
    async with witnessed(kind, tmp_path) as witness:
        call = await witness.at_decoder(stream=True)
        witness.owner.drain()
        with witness.client.refusing():
            await is_down(witness.owner)
            await witness.leave(call)
            await asyncio.sleep(0.05)
            assert witness.owner.held == PAGES
            witness.engine.restart()
        await is_back(witness.owner)
        await witness.free_soon()


# ── another process ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
async def test_another_process_at_the_same_place_frees_all_at_once(kind: Kind, tmp_path: Path) -> None:
    """Its attempts as well, which are still under way as far as anybody here knows."""
    async with witnessed(kind, tmp_path) as witness:
        call = await witness.at_decoder(stream=True)
        witness.engine.restart()
        assert witness.owner.held == PAGES
        before = witness.owner.epoch
        witness.owner.suspected.set()
        await until(lambda: witness.owner.epoch != before)
        assert witness.owner.held <= 1, "its canary's at most"
        witness.house.decoder.let_go("decode")
        await call.done()


# ── others' pages ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_pages_that_no_lease_explains_are_granted_to_nobody_while_two_looks_find_them(tmp_path: Path) -> None:
    """Another proxy's, or those of this one before it was started again."""
    async with witnessed(builtin, tmp_path) as witness:
        owner, engine, admission = witness.owner, witness.engine, witness.house.admission
        num_foreign = engine.num_pages - PAGES
        witness.is_watching = False  # what others hold is no page of ours
        engine.running["of another proxy"] = num_foreign
        await witness.house.proxy.probe.look(owner)
        assert not owner.has_foreign_pages, "it may have been between the proof and the moment of letting go"
        await witness.house.proxy.probe.look(owner)
        assert owner.pages is not None
        assert (owner.pages.foreign, owner.pages.occupied) == (num_foreign, num_foreign)
        first = await witness.at_decoder(stream=True)
        second = witness.house.call(prompt=PROMPT)
        await until(lambda: admission.num_waiting == 1)
        engine.running.clear()
        owner.suspected.set()
        await until(lambda: admission.num_waiting == 0)
        witness.house.decoder.let_go("decode")
        for call in (first, second):
            assert (await call.answer()).status == 200


async def test_a_proxy_that_was_started_again_grants_only_what_is_really_free() -> None:
    """The first look at a process counts at once: nothing of its pages can be of a request here."""
    decoder = FakeEngine("decode", num_pages=8)
    decoder.running["before"] = 6
    async with proxy_in_front_of(decoders=[decoder], wait=False, canary=False) as house:
        await house.is_ready()
        owner = house.proxy.pool.of_role("decode")[0]
        assert owner.pages is not None
        assert owner.pages.foreign == 6
        call = house.call(prompt=PROMPT)
        await until(lambda: house.admission.num_waiting == 1)
        decoder.running.clear()
        owner.suspected.set()
        assert (await call.answer()).status == 200
