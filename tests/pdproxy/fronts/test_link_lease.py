"""A front's lease ends before the leader takes it for gone, in whichever order things are late, cut and stopped."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from pdproxy.fronts.connection import Connection
from pdproxy.fronts.handshake import Lead, Peer
from pdproxy.fronts.link import Link
from pdproxy.fronts.link_server import LinkServer, Reception

TTL_S = 6.0
BEAT_S = TTL_S / 6
LEAD = Lead(1, "127.0.0.1:1", "secret", TTL_S)


class Nothing(msgspec.Struct, array_like=True, tag=1):
    """Nothing is said but what the link says itself."""


class Wire:
    """One end's transport, whose bytes come late, or not any more once it is cut."""

    def __init__(self, world: World, end: Connection, who: str) -> None:
        self.world, self.end, self.who = world, end, who
        self.other: Wire
        self.is_cut = False
        self.clear_at = 0.0

    def write(self, data: bytes) -> None:
        if not self.is_cut:
            other, self.clear_at = self.other, self.world.after(self.clear_at)
            self.world.at(self.clear_at, other.who, lambda: other.is_cut or other.end.data_received(data))

    def abort(self) -> None:
        self.lose()
        if self.world.rng.random() < 0.7:  # or the other end never hears of it
            self.other.world.at(self.world.after(), self.other.who, self.other.lose)

    close = abort

    def lose(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            self.world.at(self.world.now, self.who, lambda: self.end.connection_lost(None))

    def get_extra_info(self, name: str) -> None:
        return None


class World:
    """A front and a leader, a clock, and what happens when. Each of the two stands still at times."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.wires: list[Wire] = []
        self.still_until = {"front": 0.0, "leader": 0.0, "world": 0.0}
        self.is_apart = False
        self.violations: list[float] = []
        self.counts = {"begun": 0, "closed": 0, "lapsed": 0, "connected": 0}
        self._events: list[tuple[float, int, str, Callable[[], object]]] = []
        self._num = 0
        self.slowness = 0.01
        self.link = Link(
            Nothing, front=Peer("f"), on_begin=self._begin, on_lapse=self._lapse, clock=lambda: self.now + 1000
        )
        self.server = LinkServer(
            Nothing,
            term=1,
            secret="secret",
            ttl_s=TTL_S,
            open_session=lambda peer, send: cast(Any, self),
            may_lead=lambda: True,
            clock=lambda: self.now,
        )

    handlers: dict[type, Any] = {}  # noqa: RUF012

    def _begin(self, term: int) -> None:
        self.counts["begun"] += 1

    def _lapse(self) -> None:
        self.counts["lapsed"] += 1

    def close(self) -> None:
        self.counts["closed"] += 1
        if self.link.is_held:
            self.violations.append(self.now)

    def after(self, earliest: float = 0.0) -> float:
        return max(earliest, self.now + self.rng.expovariate(1 / self.slowness))

    def at(self, when: float, who: str, act: Callable[[], object]) -> None:
        self._num += 1
        heapq.heappush(self._events, (when, self._num, who, act))

    def connect(self) -> None:
        if self.is_apart:
            self.at(self.now + 0.2, "front", self.connect)
            return
        self.counts["connected"] += 1
        near = self.link.connection_to(LEAD, lambda: self.at(self.now + 0.1, "front", self.connect))
        far = Reception(self.server).connection
        self.server._num_strangers += 1
        wires = Wire(self, near, "front"), Wire(self, far, "leader")
        wires[0].other, wires[1].other = reversed(wires)
        self.wires = [*wires]
        for wire in wires:
            self.at(self.after(), wire.who, lambda wire=wire: wire.end.connection_made(wire))

    def _beat(self) -> None:
        self.link.check_lapse()
        self.link.beat()
        self.at(self.now + BEAT_S, "front", self._beat)

    def _tick(self) -> None:
        self.server.tick()
        self.at(self.now + BEAT_S * self.rng.choice([1, 1, 1, 0.3]), "leader", self._tick)

    def _trouble(self) -> None:
        rng = self.rng
        kind = rng.randrange(6)
        if kind == 0:
            self.still_until[rng.choice(["front", "leader"])] = self.now + rng.uniform(0, 3 * TTL_S)
        elif kind == 1:
            self.is_apart = not self.is_apart
        elif kind == 2:
            for wire in self.wires:
                if rng.random() < 0.6:
                    wire.lose()
        elif kind == 3:
            self.slowness = rng.choice([0.001, 0.01, 0.3, 2.0, TTL_S])
        self.at(self.now + rng.uniform(0, TTL_S), "world", self._trouble)

    def run(self, seconds: float) -> None:
        self.link.follow(LEAD)
        self.at(0, "front", self.connect)
        self.at(0, "front", self._beat)
        self.at(0, "leader", self._tick)
        self.at(TTL_S, "world", self._trouble)
        while self._events[0][0] < seconds:
            when, _, who, act = heapq.heappop(self._events)
            if when < self.still_until[who]:
                self.at(self.still_until[who], who, act)
                continue
            self.now = max(self.now, when)
            act()


@pytest.mark.parametrize("seed", range(20))
async def test_the_leader_takes_no_front_for_gone_that_has_its_lease(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed)
    world.run(500 * TTL_S)
    assert not world.violations
    assert min(world.counts.values()) > 3, world.counts
    assert world.counts["connected"] > world.counts["begun"], "some sessions went on with another connection"
