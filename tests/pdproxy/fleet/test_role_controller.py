"""Roles that follow the load: which moves are made, and that they come to an end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from pdproxy.config.values import Role
from pdproxy.fleet import role_controller
from pdproxy.fleet.role_controller import BUSY, HURRY_S, REVERSE_S, WINDOW_S, Load, Move, RoleController


@dataclass
class World:
    """A fleet without engines: work for so many prefillers and decoders is spread evenly over those there are."""

    num_prefillers: int = 4
    num_decoders: int = 4
    prefill_work: float = 0.0
    decode_work: float = 0.0
    noise: float = 0.0
    seed: int = 0
    now: float = 0.0
    moves: list[tuple[float, Move]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.controller = RoleController()

    def _loads(self, role: Role, num: int, work: float) -> list[Load]:
        noisy = (work / num + self.dice.uniform(-self.noise, self.noise) for _ in range(num))
        return [Load(f"{role}-{i}", min(1.0, max(0.0, use))) for i, use in enumerate(noisy)]

    def run(self, seconds: float, *, acts: bool = True) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            prefillers = self._loads("prefill", self.num_prefillers, self.prefill_work)
            decoders = self._loads("decode", self.num_decoders, self.decode_work)
            move = self.controller.decide(self.now, prefillers, decoders)
            if move is None:
                continue
            self.moves.append((self.now, move))
            if acts:
                by = 1 if move.role == "prefill" else -1
                self.num_prefillers, self.num_decoders = self.num_prefillers + by, self.num_decoders - by
                assert min(self.num_prefillers, self.num_decoders) >= 1

    @property
    def num_reversed(self) -> int:
        roles = [move.role for _, move in self.moves]
        return sum(one != other for one, other in pairwise(roles))


def test_the_busier_role_gets_the_least_loaded_of_the_others() -> None:
    controller = RoleController()
    decoders = [Load("a", 0.2), Load("b", 0.1), Load("c", 0.3)]
    for now in range(int(HURRY_S)):
        assert controller.decide(float(now), [Load("p", 1.0)], decoders) is None, "it is not known for long enough"
    move = controller.decide(HURRY_S, [Load("p", 1.0)], decoders)
    assert move is not None
    assert (move.name, move.role) == ("b", "prefill")
    assert move.why == (
        "1 prefill instances are 100% in use and 3 others 20%; after the move the busier role would be 50%"
    )


def test_idle_fleets_and_busy_ones_are_left_alone() -> None:
    for prefill_work, decode_work in ((0.0, 0.0), (4 * BUSY - 0.1, 0.0), (4.0, 4.0), (3.0, 2.9)):
        world = World(prefill_work=prefill_work, decode_work=decode_work)
        world.run(600)
        assert not world.moves, (prefill_work, decode_work)


def test_no_role_is_emptied() -> None:
    world = World(num_prefillers=2, num_decoders=3, prefill_work=10.0)
    world.run(600)
    assert (world.num_prefillers, world.num_decoders) == (4, 1)
    assert World(num_prefillers=1, num_decoders=1, prefill_work=10.0).controller.decide(100.0, [], []) is None


def test_who_cannot_change_is_left_alone() -> None:
    controller = RoleController()
    decoders = [Load("a", 0.0, can_move=False), Load("b", 0.1)]
    found = [controller.decide(float(now), [Load("p", 1.0)], decoders) for now in range(20)]
    assert {move.name for move in found if move} == {"b"}
    controller = RoleController()
    decoders = [Load("a", 0.0, can_move=False), Load("b", 0.1, can_move=False)]
    assert not any(controller.decide(float(now), [Load("p", 1.0)], decoders) for now in range(60))


def test_a_load_that_turns_is_followed_and_not_more() -> None:
    world = World(prefill_work=4.2, decode_work=0.3)
    world.run(1800)
    first = (world.num_prefillers, world.num_decoders)
    assert first[0] >= 6
    world.prefill_work, world.decode_work = 0.4, 2.7
    world.run(1800)
    assert world.num_decoders >= 4
    assert world.num_reversed == 1
    assert len(world.moves) <= 8


def test_a_move_that_came_to_nothing_is_not_tried_again_at_once() -> None:
    world = World(prefill_work=4.0)
    world.run(WINDOW_S + 2, acts=False)
    assert len(world.moves) > 0
    world.moves.clear()
    world.controller.hold(world.now)
    world.run(REVERSE_S - 1)
    assert not world.moves
    world.run(10)
    assert world.moves


@pytest.mark.parametrize("seed", range(40))
def test_a_load_that_stays_the_same_has_no_role_go_back_and_forth(seed: int) -> None:
    dice = random.Random(seed)
    num = dice.randint(2, 12)
    num_prefillers = dice.randint(1, num - 1)
    world = World(
        num_prefillers,
        num - num_prefillers,
        prefill_work=dice.uniform(0.0, num),
        decode_work=dice.uniform(0.0, num),
        noise=0.3,
        seed=seed,
    )
    world.run(3600)
    assert world.num_reversed <= 1, (seed, world.moves)
    assert len(world.moves) <= num, (seed, world.moves)


@pytest.mark.parametrize("period_s", [30, 60, 120, 300])
def test_a_load_that_swings_is_not_run_after(period_s: int) -> None:
    """Each move back has to wait twice as long as the one before."""
    world = World(num_prefillers=2, num_decoders=2)
    for _ in range(3600 // period_s):
        world.prefill_work, world.decode_work = (
            (3.0, 0.2) if world.prefill_work < world.decode_work or not world.now else (0.2, 3.0)
        )
        world.run(period_s)
    assert world.num_reversed <= 5, world.moves


def test_without_the_patience_it_would_be_run_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(role_controller, "REVERSE_S", 0.0)
    world = World(num_prefillers=2, num_decoders=2)
    for number in range(12):
        world.prefill_work, world.decode_work = (3.0, 0.2) if number % 2 else (0.2, 3.0)
        world.run(300)
    assert world.num_reversed > 5
