"""The ranking of candidates against its rule, applied by looking at everybody; on schedules of any kind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdproxy.fleet.routing.candidate import Snapshot
from pdproxy.fleet.routing.load_index import LoadIndex
from pdproxy.fleet.routing.policies import no_load, queued_tokens
from pdproxy.fleet.routing.rotation import Rotation


class Living:
    """A candidate whose load changes. Implements `base.Candidate`."""

    held = capacity = num_legs = 0
    weight = 1.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.queued_tokens = 0
        self.touched: list[dict[Any, None]] = []

    def watch(self, touched: dict[Any, None]) -> None:
        self.touched.append(touched)

    def unwatch(self, touched: dict[Any, None]) -> None:
        self.touched = [other for other in self.touched if other is not touched]

    def load(self, num_tokens: int) -> None:
        self.queued_tokens = num_tokens
        for touched in self.touched:
            touched[self] = None

    def __repr__(self) -> str:
        return f"{self.name}: {self.queued_tokens}"


class ByLooking:
    """Whose turn it may be, and what a pick changes: the rule, as plainly as it can be written."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}

    def may_be_picked(self, candidates: Sequence[Living]) -> list[Living]:
        least = min(candidate.queued_tokens for candidate in candidates)
        equals = [candidate for candidate in candidates if candidate.queued_tokens == least]
        earliest = min(self.rounds.get(candidate.name, 0) for candidate in equals)
        return [candidate for candidate in equals if self.rounds.get(candidate.name, 0) == earliest]

    def picked(self, one: Living, candidates: Sequence[Living]) -> None:
        equals = [candidate for candidate in candidates if candidate.queued_tokens == one.queued_tokens]
        rounds = sorted(self.rounds.get(candidate.name, 0) for candidate in equals)
        later = [other for other in rounds if other > rounds[0]]
        self.rounds[one.name] = 1 + (later[0] if later and later[-1] > rounds[0] + 1 else rounds[0])


class AnySchedule(RuleBasedStateMachine):
    """Two rankings, one of everybody and one of some, which share their turns, as those of two models do."""

    @initialize(num=st.integers(2, 7), num_some=st.integers(1, 3), seed=st.integers(0, 5))
    def begin(self, num: int, num_some: int, seed: int) -> None:
        turns = Rotation(random.Random(seed))
        self.everybody = [Living(f"d{number}") for number in range(num)]
        self.groups = [self.everybody, self.everybody[:num_some]]
        self.rankings = [LoadIndex(group, queued_tokens, turns) for group in self.groups]
        for ranking in self.rankings:
            ranking.watch()
        self.model = ByLooking()
        self.resting: list[frozenset[str]] = [frozenset(), frozenset()]

    @rule(which=st.integers(0, 1), more=st.sampled_from([0, 0, 1, 2]))
    def take(self, which: int, more: int) -> None:
        candidates = [one for one in self.groups[which] if one.name not in self.resting[which]]
        picked = self.rankings[which].take()
        assert picked in self.model.may_be_picked(candidates)
        self.model.picked(picked, candidates)
        picked.load(picked.queued_tokens + more)  # whoever is picked gets something to do, and is looked at again

    @rule(number=st.integers(0, 6), num_tokens=st.integers(0, 4))
    def load(self, number: int, num_tokens: int) -> None:
        self.everybody[number % len(self.everybody)].load(num_tokens)

    @rule(which=st.integers(0, 1), numbers=st.sets(st.integers(0, 6)))
    def rest(self, which: int, numbers: set[int]) -> None:
        names = frozenset(f"d{number}" for number in numbers if number < len(self.groups[which]))
        if len(names) < len(self.groups[which]):
            self.resting[which] = names
            self.rankings[which].rest(names)

    @invariant()
    def it_does_not_grow(self) -> None:
        for ranking, group in zip(getattr(self, "rankings", ()), getattr(self, "groups", ()), strict=True):
            assert len(ranking._loads) == len(ranking._tiers) <= 2 * len(group) + 16
            assert sum(len(waiting) for tier in ranking._tiers.values() for waiting in tier.values()) <= len(group)


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_loads_that_nobody_has_any_more_are_forgotten() -> None:
    """One stays idle, so that no other load ever comes up."""
    idle, busy = Living("idle"), Living("busy")
    ranking = LoadIndex([idle, busy], queued_tokens, Rotation(random.Random(1)))
    ranking.watch()
    for num_tokens in range(1, 200):
        busy.load(num_tokens)
        assert ranking.take() is idle
    assert len(ranking._tiers) == len(ranking._loads) < 25


@pytest.mark.parametrize("num", [10, 1000])
def test_a_pick_looks_at_those_only_who_have_changed(num: int) -> None:
    looked: list[str] = []

    def load(candidate: Living) -> int:
        looked.append(candidate.name)
        return candidate.queued_tokens

    everybody = [Living(f"d{number}") for number in range(num)]
    ranking = LoadIndex(everybody, load, Rotation(random.Random(1)))  # type: ignore[arg-type]
    ranking.watch()
    first = ranking.take()
    first.load(5)
    everybody[3].load(7)
    looked.clear()
    ranking.take()
    assert sorted(looked) == sorted({first.name, "d3"})


def test_a_turn_had_elsewhere_counts_though_nobody_tells_of_it() -> None:
    """By turns alone nobody's load is of interest; two models may share an instance all the same."""
    for seed in range(10):
        turns = Rotation(random.Random(seed))
        fleet = [Snapshot(name=name) for name in ("d0", "d1", "d2")]
        everybody, some = LoadIndex(fleet, no_load, turns), LoadIndex(fleet[:2], no_load, turns)
        first = some.take()
        assert first not in (everybody.take(), everybody.take())


def test_equals_are_drawn_with_equal_chances() -> None:
    """Whose turn it is, is drawn anew in each round, among however many."""
    counts: Counter[str] = Counter()
    rng = random.Random(1)
    for _ in range(3000):
        ranking = LoadIndex([Snapshot(name=f"d{number}") for number in range(3)], no_load, Rotation(rng))
        counts["".join(ranking.take().name[1] for _ in range(3))] += 1
    assert len(counts) == 6
    assert min(counts.values()) > 400
