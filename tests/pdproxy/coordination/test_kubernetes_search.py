"""Elections by a Lease, whatever happens: to replicas, to their clocks, to what they say to the server, and to it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from pdproxy.coordination.kubernetes_store import TERM, KubernetesStore
from tests.fakes.kubernetes_api import KubernetesApi, Request
from tests.pdproxy.coordination.test_election import Replica, World, try_anything

LEADER = "pdproxy-leader-f"
SKEWS_S = {"a": 0.0, "b": -60.0, "c": 60.0}


class Wire(httpx2.AsyncBaseTransport):
    """What one replica sends takes its time, and so does the answer, whatever becomes of the replica meanwhile: what
    nobody waits for any more is carried out all the same. Mutable state: how late; whether nothing gets through."""

    def __init__(self, world: LeaseWorld, replica: Replica) -> None:
        self._world = world
        self._replica = replica
        self.is_down = False
        self.late_before_s = 0.0
        self.late_after_s = 0.0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.is_down:
            raise httpx2.ConnectError("it is down")
        content = await request.aread()
        asked = Request(request.url.path, {}, {}, request.method, content)
        answered: asyncio.Future[httpx2.Response] = self._replica.loop.create_future()

        def carry_out() -> None:
            code, body = self._world.one(asked)
            said = httpx2.Response(code, json=body)
            self._world.after(self.late_after_s, lambda: self._replica.loop.call_soon(settle, said))

        def settle(said: httpx2.Response) -> None:
            if not answered.done():
                answered.set_result(said)

        self._world.after(self.late_before_s, carry_out)
        return await answered


class WiredStore:
    """The store with its wire's faults, as `MemoryStore` has them."""

    def __init__(self, store: KubernetesStore, wire: Wire) -> None:
        self.__dict__.update(_store=store, _wire=wire)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire if name in vars(self._wire) else self._store, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wire, name, value)


class LeaseWorld(World):
    """Replicas whose clocks differ by up to two minutes, and a server. Mutable state: what is under way; the terms in
    the order in which they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.api = KubernetesApi(clock=lambda: 1_800_000_000 + self.now)
        self.terms: list[int] = []
        self._under_way: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()

    def open_store(self, replica: Replica) -> Any:
        wire = Wire(self, replica)
        store = KubernetesStore(
            "kubernetes://llm",
            "f",
            timeout_s=0.9,
            connect=lambda: httpx2.AsyncClient(transport=wire, base_url="http://server"),
            clock=lambda: self.now,
            unix_clock=lambda: 1_800_000_000 + self.now + SKEWS_S[replica.election.member.id],
        )
        return WiredStore(store, wire)

    def forget(self) -> None:
        """Deletes the leader's Lease."""
        if any(name == LEADER for _, name in self.api._objects["leases"]):
            self.api.remove("leases", LEADER)

    def one(self, request: Request) -> tuple[int, dict[str, Any]]:
        code, body = self.api.one(request)
        if code == 200 and request.method == "PUT" and LEADER in request.path:
            assert json.loads(request.content)["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]
            term = int(body["metadata"]["annotations"][TERM])
            if self.terms[-1:] != [term]:
                assert term > max(self.terms, default=0), "terms only grow"
                self.terms.append(term)
        return code, body

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        if seconds < math.inf:
            heapq.heappush(self._under_way, (self.now + seconds, next(self._number), act))

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.05)
            self._pass_on()
            for replica in self.replicas:
                replica.catch_up()
                self._pass_on()
                replica.catch_up()

    def _pass_on(self) -> None:
        while self._under_way and self._under_way[0][0] <= self.now:
            heapq.heappop(self._under_way)[2]()


@pytest.fixture
def world() -> Iterator[LeaseWorld]:
    found = LeaseWorld()
    yield found
    for replica in found.replicas:
        assert replica.run.done() is replica.run.cancelled(), replica.run
        replica.loop.finish()


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("round_number", range(4))
def test_never_do_two_lead_under_one_term_nor_at_once_unless_the_lease_was_deleted(
    world: LeaseWorld, forgets: bool, round_number: int
) -> None:
    try_anything(world, forgets=forgets)
    assert len(world.terms) > 1, "no leader was followed by another"


def test_a_leader_that_dies_is_followed_within_five_thirds_of_its_time(world: LeaseWorld) -> None:
    a, b = world.replica("a"), world.replica("b")
    world.advance(3.0)
    assert world.leading() == [a]
    a.is_stopped = True
    world.advance(3.0 * 5 / 3)
    assert world.leading() == [b]
    assert b.terms("elected") > a.terms("elected")
