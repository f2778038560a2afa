"""Routing policies on plain snapshots: who is picked, how often, and who keeps what when the fleet changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.config.values import DecodePolicy, RoutingPolicy
from pdproxy.errors import ConfigError
from pdproxy.fleet.routing.affinity import BYTES_PER_TOKEN, PrefixAffinity, home, rendezvous
from pdproxy.fleet.routing.candidate import NO_HINTS, RoutingHints, Snapshot
from pdproxy.fleet.routing.candidates import CandidateSet, Policy
from pdproxy.fleet.routing.policies import POLICIES, PolicyOptions, make_policy
from pdproxy.fleet.routing.rotation import MAX_REMEMBERED, Ramp, Rotation

CHUNK = 4


def fleet(num: int, **facts: object) -> list[Snapshot]:
    return [Snapshot(name=f"d{number}", **facts) for number in range(num)]  # type: ignore[arg-type]


def policy(name: str, **options: object) -> Policy:
    rng = random.Random(7)
    return make_policy(name, PolicyOptions(rng=rng, chunk_size=CHUNK, **options))  # type: ignore[arg-type]


def picks(picker: Policy, candidates: Sequence[Snapshot], num: int, hints: RoutingHints = NO_HINTS) -> list[str]:
    lineup = CandidateSet(candidates)
    return [picker.pick(lineup, hints).name for _ in range(num)]


def pick(picker: Policy, candidates: Sequence[Snapshot], hints: RoutingHints) -> Snapshot:
    return picker.pick(CandidateSet(candidates), hints)


def busy(candidates: Iterable[Snapshot], name: str, **facts: object) -> list[Snapshot]:
    return [replace(c, **facts) if c.name == name else c for c in candidates]  # type: ignore[arg-type]


def session(number: int) -> RoutingHints:
    return RoutingHints(session=f"user-{number}")


def prompt(number: int, *more: int) -> RoutingHints:
    return RoutingHints(prompt=[number] * (2 * CHUNK) + list(more))


KEYED = {"session_affinity": session, "prefix_affinity": prompt}
ALL = list(dict.fromkeys(get_args(DecodePolicy) + get_args(RoutingPolicy)))
BY_LOAD = ["round_robin", "least_slots", "least_resident", "least_queued_tokens", "power_of_two"]


# ── by name ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_policy_of_the_configuration_is_there():
    assert sorted(POLICIES) == sorted(ALL)


def test_an_unknown_policy_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match="no routing policy 'fastest'; there are round_robin, least_slots"):
        policy("fastest")


@pytest.mark.parametrize("fallback", KEYED)
def test_an_affinity_cannot_fall_back_to_an_affinity(fallback):
    with pytest.raises(ConfigError, match="the fallback of an affinity policy cannot be"):
        policy("session_affinity", fallback=fallback)


@pytest.mark.parametrize("name", ALL)
def test_one_candidate_is_the_pick(name):
    (only,) = fleet(1)
    for hints in (NO_HINTS, session(1), prompt(1)):
        assert pick(policy(name), [only], hints) is only


@given(
    st.sampled_from(ALL),
    st.lists(
        st.builds(
            Snapshot,
            name=st.uuids().map(str),
            held=st.integers(0, 64),
            capacity=st.sampled_from([0, 64]),
            queued_tokens=st.integers(0, 10**6),
            num_legs=st.integers(0, 50),
            resident_share=st.floats(0.0, 2.0),
            weight=st.floats(0.0, 1.0),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda candidate: candidate.name,
    ),
    st.builds(
        RoutingHints,
        session=st.none() | st.text(max_size=5),
        prompt=st.none() | st.lists(st.integers()) | st.text() | st.binary(),
    ),
)
def test_the_pick_is_one_of_the_candidates_whatever_they_are(name, candidates, hints):
    picker = policy(name)
    for _ in range(3):
        assert pick(picker, candidates, hints) in candidates


# ── by turns and by load ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["round_robin", "least_slots", "least_queued_tokens"])
def test_equals_take_turns(name):
    picked = picks(policy(name), fleet(3), 9)
    assert [sorted(picked[start : start + 3]) for start in (0, 3, 6)] == [["d0", "d1", "d2"]] * 3


def test_two_roles_that_take_turns_do_not_always_meet_in_the_same_pairs():
    """One request after the other, so that nothing but turns decides."""
    options = PolicyOptions(rng=random.Random(1))
    prefill, decode = make_policy("least_queued_tokens", options), make_policy("least_slots", options)
    pairs = Counter(zip(picks(prefill, fleet(2), 40), picks(decode, fleet(2), 40), strict=True))
    assert len(pairs) == 4


def test_round_robin_does_not_look_at_load():
    candidates = busy(fleet(2, capacity=64), "d0", held=64, queued_tokens=9000, num_legs=30)
    assert Counter(picks(policy("round_robin"), candidates, 10)) == {"d0": 5, "d1": 5}


def test_turns_stay_fair_between_requests_that_may_go_to_different_instances():
    """Two models in one fleet, asked for by turns: a mere counter would give each only every other instance."""
    picker, candidates = policy("round_robin"), fleet(4)
    some, others = candidates[:2], candidates[2:]
    picked = [pick(picker, among, NO_HINTS).name for _ in range(4) for among in (some, others)]
    assert Counter(picked) == {"d0": 2, "d1": 2, "d2": 2, "d3": 2}


def test_an_instance_that_comes_back_does_not_get_what_it_missed():
    picker, candidates = policy("round_robin"), fleet(3)
    picks(picker, candidates[:2], 10)
    assert Counter(picks(picker, candidates, 9)) == {"d0": 3, "d1": 3, "d2": 3}


def test_turns_forget_those_whose_pick_is_the_longest_ago():
    turns = Rotation(random.Random())
    names = ["here all along", *(f"pod-{number}" for number in range(1, MAX_REMEMBERED)), "here all along", "one more"]
    for name in names:
        turns.took(name, ())
    assert len(turns._picked) == MAX_REMEMBERED
    assert {"here all along", "one more", "pod-2"} <= turns._picked.keys()
    assert "pod-1" not in turns._picked


def test_least_slots_counts_what_is_held_of_all_there_is():
    candidates = [
        Snapshot(name="full", held=64, capacity=64),
        Snapshot(name="half full", held=40, capacity=64),
        Snapshot(name="larger", held=60, capacity=128, num_legs=40),
    ]
    assert picks(policy("least_slots"), candidates, 2) == ["larger", "larger"]


def test_least_resident_counts_the_fuller_of_two_memories():
    pages = Snapshot(name="pages", held=32, capacity=64, resident_share=0.1)
    cache = Snapshot(name="cache", held=1, capacity=64, resident_share=0.6)
    assert picks(policy("least_resident"), [pages, cache], 1) == ["pages"]
    unguarded = [Snapshot(name="full", resident_share=0.7), Snapshot(name="empty", resident_share=0.2, num_legs=9)]
    assert picks(policy("least_resident"), unguarded, 2) == ["empty", "empty"]


def test_least_slots_of_prefillers_counts_legs():
    candidates = [Snapshot(name="p0", num_legs=2), Snapshot(name="p1", num_legs=1)]
    assert picks(policy("least_slots"), candidates, 2) == ["p1", "p1"]


def test_least_queued_tokens_sees_that_one_long_prompt_is_more_than_three_short_ones():
    candidates = [Snapshot(name="p0", num_legs=1, queued_tokens=30_000), Snapshot(name="p1", num_legs=3)]
    candidates = busy(candidates, "p1", queued_tokens=900)
    assert picks(policy("least_queued_tokens"), candidates, 2) == ["p1", "p1"]


def test_power_of_two_never_picks_the_most_loaded_and_spreads_the_rest():
    candidates = busy(fleet(4, capacity=64), "d2", held=64)
    counts = Counter(picks(policy("power_of_two"), candidates, 600))
    assert set(counts) == {"d0", "d1", "d3"}
    assert min(counts.values()) > 150


def test_power_of_two_follows_the_rng_it_was_given():
    candidates = fleet(5)
    first, second = (picks(policy("power_of_two"), candidates, 20) for _ in range(2))
    other = picks(make_policy("power_of_two", PolicyOptions(rng=random.Random(8))), candidates, 20)
    assert first == second != other


# ── slow start ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", BY_LOAD)
def test_a_weight_is_a_part_of_a_full_share(name, weight):
    """Also where the one held back has nothing to do, so that its load alone would draw everything to it."""
    others = fleet(3, held=32, capacity=64, queued_tokens=5000)
    candidates = [*others, Snapshot(name="new", capacity=64, weight=weight)]
    counts = Counter(picks(policy(name), candidates, 4000))
    full_share = 4000 / (3 + weight)
    assert counts["new"] == pytest.approx(weight * full_share, rel=0.3 if name == "power_of_two" else 0.01)
    assert all(counts[other.name] == pytest.approx(full_share, rel=0.2) for other in others)


@pytest.mark.parametrize("name", KEYED)
def test_a_weight_is_a_part_of_the_keys(name):
    candidates = busy(fleet(4), "d1", weight=0.25)
    counts = Counter(pick(policy(name), candidates, KEYED[name](number)).name for number in range(3000))
    assert counts["d1"] == pytest.approx(0.25 * 3000 / 3.25, rel=0.2)


@pytest.mark.parametrize("name", ALL)
def test_a_fleet_that_starts_as_a_whole_is_not_held_back(name):
    candidates = fleet(3, weight=0.1)
    picker = policy(name)
    counts = Counter(pick(picker, candidates, KEYED.get(name, session)(number)).name for number in range(900))
    assert min(counts.values()) > 220


@pytest.mark.parametrize("name", ALL)
def test_a_weight_of_nothing_gets_nothing_while_there_are_others(name):
    candidates = busy(fleet(3), "d0", weight=0.0)
    picker = policy(name)
    assert "d0" not in {pick(picker, candidates, KEYED.get(name, session)(number)).name for number in range(200)}


def test_no_burst_onto_the_one_that_is_spared():
    """While it is busy it saves up at most two picks; afterwards it does not get everything at once."""
    picker = policy("least_slots")
    spared = Snapshot(name="new", held=64, capacity=64, weight=0.1)
    picks(picker, [*fleet(3, capacity=64), spared], 1000)
    after = picks(picker, [*fleet(3, held=32, capacity=64), replace(spared, held=0)], 20)
    assert after.count("new") <= 3


def test_a_ramp_forgets_the_names_that_are_gone():
    ramp = Ramp()
    for number in range(MAX_REMEMBERED + 100):
        ramp.resting({f"pod-{number}": 0.5}, 1)
    assert len(ramp._credit) <= MAX_REMEMBERED + 1


# ── affinity ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", KEYED)
def test_a_key_stays_where_it_is_in_whatever_order_the_fleet_is_told(name):
    candidates = fleet(5)
    for number in range(50):
        hints = KEYED[name](number)
        home = pick(policy(name), candidates, hints)
        assert pick(policy(name), candidates[::-1], hints) == home


def test_homes_are_the_same_in_every_release_and_process():
    """A fixed table: several proxies must agree, and a new version must not move everybody."""
    homes = [pick(policy("session_affinity"), fleet(5), session(number)).name for number in range(8)]
    assert homes == ["d0", "d3", "d4", "d0", "d3", "d2", "d0", "d0"]


@pytest.mark.parametrize("name", KEYED)
def test_when_an_instance_goes_only_its_keys_move_and_when_it_comes_back_they_return(name):
    num, num_keys = 10, 2000
    candidates, picker = fleet(num), policy(name)
    before = [pick(picker, candidates, KEYED[name](number)).name for number in range(num_keys)]
    remaining = [c for c in candidates if c.name != "d3"]
    after = [pick(picker, remaining, KEYED[name](number)).name for number in range(num_keys)]
    moved = [was for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) == {"d3"}
    assert len(moved) == pytest.approx(num_keys / num, rel=0.25)
    assert [pick(picker, candidates, KEYED[name](number)).name for number in range(num_keys)] == before
    orphans = Counter(now for was, now in zip(before, after, strict=True) if was != now)
    assert len(orphans) == num - 1, "its keys are spread over all others"


@given(st.integers(0, 10**6), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_a_rising_weight_only_brings_keys(key, weight, more):
    low, high = sorted((weight, more))
    before = rendezvous(b"%d" % key, busy(fleet(5), "d2", weight=low))
    after = rendezvous(b"%d" % key, busy(fleet(5), "d2", weight=high))
    assert after.name in (before.name, "d2")


def test_homes_are_looked_up_again_when_everybody_has_risen():
    class Rising:
        name, weight = "d1", 0.5

    risen = Rising()
    lineup = CandidateSet([*fleet(1), risen], is_lasting=True)
    home(b"key", lineup)
    assert not lineup.homes, "it moves while a weight does"
    risen.weight = 1.0
    assert home(b"key", lineup) is lineup.homes[b"key"]


@pytest.mark.parametrize("hints", [NO_HINTS, RoutingHints(session=""), prompt(1)], ids=["none", "empty", "a prompt"])
def test_without_a_session_the_fallback_decides(hints):
    candidates = busy(fleet(3, capacity=8, held=8), "d1", held=0)
    assert picks(policy("session_affinity"), candidates, 3, hints) == ["d1"] * 3
    turns = policy("session_affinity", fallback="round_robin")
    assert sorted(picks(turns, candidates, 3, hints)) == ["d0", "d1", "d2"]


def test_a_session_may_be_any_text():
    candidates = fleet(3)
    for text in ("\ud800", "x" * 10_000, "é"):
        assert pick(policy("session_affinity"), candidates, RoutingHints(session=text)) in candidates


class TestPrefix:
    """What makes prompts alike, and what happens when too many are."""

    def key(self, start: Sequence[int] | str | bytes | None) -> bytes | None:
        picker = policy("prefix_affinity")
        assert isinstance(picker, PrefixAffinity)
        return picker.key(start)

    def test_only_the_first_chunks_count(self):
        start = list(range(2 * CHUNK))
        assert self.key(start) == self.key([*start, 99]) == self.key([*start, *start])
        assert self.key(start) != self.key([*start[:-1], 99])

    def test_a_shorter_prompt_goes_by_its_whole_chunks(self):
        start = list(range(CHUNK))
        assert self.key(start) == self.key([*start, 1]) == self.key([*start, 2])
        assert self.key(start) != self.key([*start, *start])

    @pytest.mark.parametrize("start", [None, [], [1] * (CHUNK - 1), "ab", b"", "x" * (CHUNK * BYTES_PER_TOKEN - 1)])
    def test_less_than_a_chunk_shares_nothing(self, start):
        assert self.key(start) is None

    def test_text_is_cut_by_bytes(self):
        two_chunks = "é" * CHUNK * BYTES_PER_TOKEN
        raw = two_chunks.encode()
        assert self.key(two_chunks) == self.key(two_chunks + "more") == self.key(raw) == self.key(memoryview(raw))
        assert self.key("a" + two_chunks) != self.key(two_chunks)

    def test_ids_may_be_any_integers_in_any_sequence(self):
        assert self.key((-1, 2**70, 3, 4)) == self.key([-1, 2**70, 3, 4])

    def test_the_number_of_chunks_can_be_chosen(self):
        wide = policy("prefix_affinity", prefix_chunks=4)
        assert isinstance(wide, PrefixAffinity)
        start = list(range(2 * CHUNK))
        assert wide.key(start * 2) == wide.key([*start, *start, 7])
        assert wide.key(start * 2) != wide.key([*start, *start[::-1]])

    def test_without_a_chunk_the_fallback_decides(self):
        candidates = busy(fleet(3, capacity=8, held=8), "d2", held=0)
        assert picks(policy("prefix_affinity"), candidates, 2, RoutingHints(prompt=[1])) == ["d2", "d2"]

    def test_an_instance_above_its_part_of_the_load_is_passed_over_for_the_next(self):
        candidates = fleet(4, num_legs=10)
        picker, hints = policy("prefix_affinity", load_factor=1.5), prompt(1)
        home = pick(picker, candidates, hints).name
        # 1.5 × (30 + own + 1) / 4: own 18 is below 18.4, rounded up to 19; own 19 is not below 18.75, rounded up.
        assert pick(picker, busy(candidates, home, num_legs=18), hints).name == home
        second = pick(picker, busy(candidates, home, num_legs=19), hints).name
        assert second != home
        assert second == pick(picker, [c for c in candidates if c.name != home], hints).name

    def test_a_hot_prefix_loads_nobody_with_more_than_the_bound(self):
        candidates, picker = fleet(5), policy("prefix_affinity", load_factor=1.25)
        for num in range(1, 201):
            name = pick(picker, candidates, prompt(1)).name
            candidates = [replace(c, num_legs=c.num_legs + (c.name == name)) for c in candidates]
            assert max(c.num_legs for c in candidates) <= 1.25 * num / 5 + 1
        assert sum(c.num_legs for c in candidates) == 200

    def test_the_bound_of_one_that_starts_slowly_is_smaller(self):
        candidates, picker = fleet(4, num_legs=8), policy("prefix_affinity", load_factor=1.0)
        home = pick(picker, candidates, prompt(1)).name
        assert pick(picker, busy(candidates, home, weight=0.5, num_legs=7), prompt(1)).name != home

    @pytest.mark.parametrize("options", [{"load_factor": 0.9}, {"prefix_chunks": 0}])
    def test_senseless_options_are_refused(self, options):
        with pytest.raises(ValueError, match="below 1"):
            policy("prefix_affinity", **options)
