"""Two requests that share a prefix, in every interleaving; and twenty of them, a thousand times.

LMCache leaked a page for each request that shared a prefix, and then, with that reference dropped, freed pages which a
second request still had to read. Both come from one order of events among thousands; so all of them are played here,
with a memory in which a wrong byte would be seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.fakes.shared_prefix import Request, SharedPrefix

Path = tuple[tuple[str, str], ...]


@dataclass
class Interleavings:
    """All orders of the steps of two requests.

    Orders that lead to the same signature have the same futures, so each state is played once and the orders are
    counted by adding up. Mutable state: `_num_orders` (signature → orders from there to the end), and what was seen.
    """

    num_pages: int
    num_ranks: tuple[int, int]
    num_orders: int = 0
    steps_seen: set[str] = field(default_factory=set)
    num_shared: int = 0
    _num_orders: dict[object, int] = field(default_factory=dict)

    @property
    def num_states(self) -> int:
        return len(self._num_orders)

    def play(self, path: Path) -> SharedPrefix:
        world = SharedPrefix(self.num_pages)
        for name, num_ranks in zip("ab", self.num_ranks, strict=True):
            world.add(Request(name, (b"system", name.encode()), num_ranks))
        for name, step in path:
            world.act(name, step)
        return world

    def explore(self, path: Path = ()) -> int:
        """Orders from here to the end."""
        world = self.play(path)
        signature = world.signature()
        if signature in self._num_orders:
            return self._num_orders[signature]
        try:
            world.check()
            following = [(name, step) for name in world.requests for step in world.steps(name)]
            if not following:
                world.check_nothing_left()
        except AssertionError as error:
            raise AssertionError(f"{error} after {path}") from error
        self.num_shared += sum(bool(r.present) for r in world.table._attempts.values())
        self.steps_seen |= {step.split()[0] for _, step in following}
        self._num_orders[signature] = sum(self.explore((*path, step)) for step in following) or 1
        return self._num_orders[signature]


@pytest.mark.parametrize(
    ("num_pages", "num_ranks", "least_orders", "least_states"),
    [
        (4, (1, 1), 190_000, 1_200),
        (3, (1, 1), 14_900, 550),
        (2, (1, 1), 12_600, 480),
        (3, (1, 2), 850_000, 5_500),
    ],
)
def test_every_interleaving_of_two_requests_with_one_prefix(
    num_pages: int, num_ranks: tuple[int, int], least_orders: int, least_states: int
) -> None:
    """Room for both without sharing, for both with it, for one at a time; and a request that two ranks write."""
    everything = Interleavings(num_pages, num_ranks)
    num_orders = everything.explore()
    print(f"{num_orders} interleavings through {everything.num_states} states, {everything.num_shared} of them sharing")
    assert num_orders >= least_orders
    assert everything.num_states >= least_states
    assert everything.steps_seen == {"join", "write", "done", "end", "die", "take", "consume", "cancel", "expire"}
    assert everything.num_shared > 0


NUM_ROUNDS = 1000
NUM_REQUESTS = 20
SEED = 20_26
LIKELY = {"cancel": 0.03, "expire": 0.01, "die": 0.02}
"""How often what ends a request early happens when it could; everything else happens when it is its turn."""


def new_round(world: SharedPrefix, number: int, luck: random.Random) -> list[str]:
    """Twenty requests that begin alike; the system prompt changes every few rounds."""
    system = tuple(b"system %d, chunk %d" % (number // 7, chunk) for chunk in range(2))
    world.requests.clear()
    for request in range(NUM_REQUESTS):
        name = f"{number}.{request}"
        world.add(Request(name, (*system, name.encode()), num_ranks=luck.choice((1, 1, 1, 2))))
    return list(world.requests)


def play_round(world: SharedPrefix, names: list[str], luck: random.Random) -> None:
    """Steps in random order until nothing is left to be done."""
    while names:
        at = luck.randrange(len(names))
        steps = world.steps(names[at])
        if steps:
            step = luck.choice(steps)
            if luck.random() < LIKELY.get(step.split()[0], 1.0):
                world.act(names[at], step)
        else:
            known = world.table.get(names[at])
            assert known is None
            names.pop(at)


def test_twenty_requests_with_one_system_prompt_a_thousand_times() -> None:
    """Nothing is left after any round of a pool of 12 pages; every landing write and every read looks at the memory."""
    print(f"seed {SEED}")
    luck = random.Random(SEED)
    world = SharedPrefix(12)
    for number in range(NUM_ROUNDS):
        play_round(world, new_round(world, number, luck), luck)
        world.check_nothing_left()
    print(f"{world.num_read} of {NUM_ROUNDS * NUM_REQUESTS} were read, {world.table.statistics()}")
    assert world.num_read > NUM_ROUNDS * NUM_REQUESTS / 2
    assert world.table.statistics()["writes_saved"] > NUM_ROUNDS * NUM_REQUESTS
