"""How often instances are looked at that are not ready.

What always holds: an instance that answers again is looked at within two seconds of its first answer while a request
wants one like it, among a thousand; otherwise within four intervals. Whatever is asked, looks at instances that are not
ready have a limit together.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

import anyio
import pytest

from pdproxy.assemble import assemble
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.errors import ModelNotFound, NotReady
from pdproxy.fleet import probe
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.probe import HURRIED_PER_S, UNREADY_PER_S, Probe
from pdproxy.fleet.wanted import KEPT_S, MAX_MODELS, Wanted
from pdproxy.simulate.loop import VirtualLoop
from tests.fakes.calls import until
from tests.fakes.fake_engine import FakeClient, FakeEngine
from tests.fakes.fleet import Clock, Held, make_admission, make_instance, settings
from tests.fakes.proxy_harness import proxy_in_front_of

LONGEST_S = 20.0
"""Four intervals of those that a proxy has."""
NUM = 300
"""Enough of them to be rare, where a thousand would take longer."""
LONG_S = 70.0
"""After which it is as rare as that."""


class CountedClient(FakeClient):
    """Nobody listens there, until a test says so. Notes when it was looked at."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.is_up = False
        self.looks: list[float] = []

    async def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        if path == "/health":
            self.looks.append(asyncio.get_running_loop().time())
        return await super().get(path, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Nothing is held."""


class Fleet:
    """So many instances, half of each role, that nobody has heard of; a probe watches them."""

    def __init__(self, num: int, *, prove: probe.Prove | None = None) -> None:
        clock = asyncio.get_running_loop().time
        self.clients = [CountedClient(FakeEngine("prefill" if i < num // 2 else "decode")) for i in range(num)]
        for i, client in enumerate(self.clients):
            client.engine.epoch = f"{i}"
        admission = make_admission(clock)
        self.instances = [
            make_instance(settings(f"i{i}", client.engine.role), client=client, admission=admission, clock=clock)
            for i, client in enumerate(self.clients)
        ]
        self.pool = Pool(admission, self.instances)
        self.probe = Probe(self.pool, interval_s=5.0, timeout_s=5.0, prove=prove)

    def looks(self, since: float) -> list[float]:
        return sorted(at for client in self.clients for at in client.looks if at >= since)

    def longest_gap_s(self, since: float) -> float:
        """Returns the longest time, from `since` to now, in which some instance was not looked at."""
        now = asyncio.get_running_loop().time()
        among = [[since, *(at for at in client.looks if at > since), now] for client in self.clients]
        return max(later - at for looks in among for at, later in pairwise(looks))

    def refuse(self, model: str | None = "tiny") -> None:
        """Has a request find nobody."""
        with pytest.raises(NotReady):
            self.pool.open_places(model)


Story = Callable[[Fleet], Coroutine[Any, Any, None]]


def simulate(story: Story, num: int, *, prove: probe.Prove | None = None, seed: int = 1) -> None:
    """Runs a story on a clock that jumps."""
    print(f"seed {seed}")
    random.seed(seed)

    async def run() -> None:
        fleet = Fleet(num, prove=prove)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.probe.run)
            await story(fleet)
            tasks.cancel_scope.cancel()
        assert not fleet.probe._watched
        assert not fleet.probe._unready
        assert not fleet.probe._resting

    loop = VirtualLoop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "EAGER_S", 0.5)


# ── nobody asks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_thousand_unreachable_instances_are_looked_at_seldom_and_one_by_one() -> None:
    async def story(fleet: Fleet) -> None:
        await asyncio.sleep(30)
        assert len(fleet.looks(now() - 10)) < 10 * HURRIED_PER_S
        started = now()
        await asyncio.sleep(60)
        looks = fleet.looks(started)
        assert len(looks) < 60 * 2 * UNREADY_PER_S
        started = now()
        await asyncio.sleep(60)
        looks = fleet.looks(started)
        assert len(looks) < 60 * 1.15 * UNREADY_PER_S
        assert fleet.longest_gap_s(started) <= LONGEST_S
        ticks = [int(at / 0.1) for at in looks]
        assert max(ticks.count(tick) for tick in set(ticks)) < 50, "they do not come together"

    simulate(story, 1000)


def test_no_more_looks_than_allowed_in_the_first_seconds_of_a_thousand() -> None:
    async def story(fleet: Fleet) -> None:
        await asyncio.sleep(10)
        assert len(fleet.looks(0.0)) < 1000 + 10 * 1.15 * HURRIED_PER_S

    simulate(story, 1000)


def test_a_few_unreachable_instances_are_looked_at_every_half_second_for_ever() -> None:
    async def story(fleet: Fleet) -> None:
        await asyncio.sleep(200)
        assert fleet.longest_gap_s(1.0) <= 0.5

    simulate(story, 24)


def test_an_instance_that_was_lost_just_now_is_looked_at_often_among_a_thousand_that_were_long_ago() -> None:
    async def story(fleet: Fleet) -> None:
        one = fleet.clients[0]
        one.is_up = True
        await asyncio.sleep(LONG_S)
        assert fleet.instances[0].is_ready
        one.is_up = False
        fleet.instances[0].suspect("a connection broke", is_lost=True)
        started = now()
        await asyncio.sleep(15)
        looks = [at for at in one.looks if at > started]
        assert max(later - at for at, later in pairwise([started, *looks])) <= 1.25

    simulate(story, 1000)


@pytest.mark.parametrize("seed", range(1))
def test_two_that_need_each_other_are_ready_when_both_were_looked_at(seed: int) -> None:
    async def prove(prefiller: Instance, decoder: Instance) -> None:
        await asyncio.sleep(0.1)

    async def story(fleet: Fleet) -> None:
        await asyncio.sleep(LONG_S)
        dice = random.Random(seed)
        for i in (dice.randrange(500), 500 + dice.randrange(500)):
            await asyncio.sleep(dice.uniform(0, 30))
            fleet.clients[i].is_up = True
        await asyncio.sleep(LONGEST_S + 2.0)
        assert fleet.pool.is_ready

    simulate(story, 1000, prove=prove, seed=seed)


# ── somebody asks ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_while_a_request_asks_each_of_a_thousand_is_looked_at_within_two_seconds() -> None:
    async def story(fleet: Fleet) -> None:
        await asyncio.sleep(LONG_S)
        started = now()
        fleet.refuse()
        await asyncio.sleep(KEPT_S)
        assert fleet.longest_gap_s(started) <= 2.0
        started = now()
        await asyncio.sleep(20)
        assert len(fleet.looks(started)) < 20 * 1.3 * UNREADY_PER_S, "nobody asks any more"

    simulate(story, 1000)


def test_a_stream_of_requests_costs_a_limited_number_of_looks() -> None:
    async def story(fleet: Fleet) -> None:
        await asyncio.sleep(LONG_S)
        started = now()
        for i in range(50):
            fleet.refuse(None if i % 2 else "tiny")
            await asyncio.sleep(0.1)
        assert len(fleet.looks(started)) < 5 * 1.2 * (HURRIED_PER_S + UNREADY_PER_S)

    simulate(story, 2000)


def test_a_request_that_waits_in_line_asks_for_as_long_as_it_waits() -> None:
    async def story(fleet: Fleet) -> None:
        for i in (0, NUM // 2):
            fleet.clients[i].is_up = True
        await asyncio.sleep(LONG_S)
        full = Held(fleet.instances[NUM // 2], 64)
        waiting = Held(fleet.instances[NUM // 2], 1)
        assert full.is_there
        assert not waiting.is_there
        fleet.pool.wanted.note(None)
        await asyncio.sleep(1.5 * KEPT_S)
        started = now()
        await asyncio.sleep(5)
        others = [client for client in fleet.clients if not client.is_up]
        assert all(len([at for at in client.looks if at > started]) >= 3 for client in others)
        full.release()
        await waiting.wait()
        waiting.release()
        await asyncio.sleep(1)
        started = now()
        await asyncio.sleep(20)
        assert len(fleet.looks(started)) < 20 * 1.5 * UNREADY_PER_S

    simulate(story, NUM)


def test_instances_that_are_lost_while_a_request_waits_are_asked_for() -> None:
    async def story(fleet: Fleet) -> None:
        for client in fleet.clients:
            client.is_up = True
        await asyncio.sleep(20)
        held = [Held(one, 64) for one in fleet.instances[NUM // 2 :]]
        waiting = Held(fleet.instances[-1], 1)
        fleet.pool.wanted.note(None)
        await asyncio.sleep(2 * KEPT_S)
        for client in fleet.clients[1:-1]:
            client.is_up = False
        await asyncio.sleep(LONG_S)
        started = now()
        await asyncio.sleep(5)
        lost = [client for client in fleet.clients if not client.is_up]
        assert all(len([at for at in client.looks if at > started]) >= 3 for client in lost)
        for one in held:
            one.release()
        (await waiting.wait()).release()

    simulate(story, NUM)


async def test_a_request_notes_its_model_when_it_begins_to_wait() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=1)]) as house:
        house.decoder.hang_at.add("decode")
        first = asyncio.ensure_future(house.post())
        await house.decoder.reached("decode")
        assert house.proxy.pool.wanted.models() == []
        second = asyncio.ensure_future(house.post())
        await until(lambda: house.admission.num_waiting == 1)
        assert house.proxy.pool.wanted.models() == ["tiny"]
        house.decoder.let_go("decode")
        assert [(await first).status, (await second).status] == [200, 200]


def test_a_request_that_finds_nobody_with_its_model_asks_for_those_that_have_not_been_heard() -> None:
    async def story(fleet: Fleet) -> None:
        for i in (0, NUM // 2):
            fleet.clients[i].engine.model = "other"
            fleet.clients[i].is_up = True
        await asyncio.sleep(LONG_S)
        with pytest.raises(ModelNotFound):
            fleet.pool.open_places("tiny")
        started = now()
        await asyncio.sleep(5)
        assert len(fleet.looks(started)) > 4 * NUM

    simulate(story, NUM)


def test_instances_of_other_models_are_left_alone() -> None:
    async def story(fleet: Fleet) -> None:
        for i, client in enumerate(fleet.clients):
            client.engine.model = "tiny" if i % 2 else "other"
            client.is_up = True
        await asyncio.sleep(20)
        for client in fleet.clients:
            client.is_up = False
        await asyncio.sleep(LONG_S)
        started = now()
        fleet.refuse("tiny")
        await asyncio.sleep(5)
        others: Sequence[CountedClient] = fleet.clients[::2]
        num = sum(at > started for client in others for at in client.looks)
        assert num < 5 * 1.5 * UNREADY_PER_S

    simulate(story, NUM)


def test_what_is_wanted_is_forgotten_and_has_a_limit() -> None:
    clock = Clock()
    wanted = Wanted(clock)
    for i in range(MAX_MODELS + 5):
        wanted.note(f"m{i}")
    assert len(wanted.models()) == MAX_MODELS
    assert wanted.models()[-1] == f"m{MAX_MODELS + 4}"
    clock.advance(KEPT_S - 1)
    wanted.note("m9")
    clock.advance(2)
    assert wanted.models() == ["m9"]


# ── a real socket ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_process_that_listens_again_is_looked_at_within_two_seconds_when_a_request_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred others are gone; all have been for long."""
    monkeypatch.setattr(probe, "LATELY_S", -60.0)
    monkeypatch.setattr(probe, "UNREADY_PER_S", 0.01)
    looked_at: list[float] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        looked_at.append(now())
        writer.close()

    places = [socket.socket() for _ in range(101)]  # bound, so that they are nobody else's; nobody listens
    try:
        for place in places:
            place.bind(("127.0.0.1", 0))
        instances = tuple(
            InstanceSettings(name=f"i{i}", role="prefill" if i % 2 else "decode", url=f"http://{host}:{port}")
            for i, (host, port) in enumerate(place.getsockname() for place in places)
        )
        proxy = assemble(Settings(instances=instances, port=0, proxy_port=0))
        async with proxy.app.router.lifespan_context(proxy.app):
            await until(lambda: len(proxy.probe._resting) == len(places))
            async with await asyncio.start_server(hear, sock=places[50].dup()):
                await asyncio.sleep(1.0)
                assert not looked_at, "nobody has asked"
                started = now()
                with pytest.raises(NotReady):
                    proxy.pool.open_places("tiny")
                await until(lambda: bool(looked_at))
                assert looked_at[0] - started < 2.0
    finally:
        for place in places:
            place.close()
