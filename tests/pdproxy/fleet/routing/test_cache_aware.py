"""Who is picked by what is known of the caches, and who where nothing is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from pdproxy.fleet.routing.candidate import RoutingHints, Snapshot
from pdproxy.fleet.routing.candidates import CandidateSet, Policy
from pdproxy.fleet.routing.policies import PolicyOptions, make_policy
from pdproxy.kv_events.index import PromptBlocks

PROMPT = RoutingHints(blocks=PromptBlocks(range(1000)), prompt=list(range(1000)))


def policy(*, is_decode: bool = False) -> Policy:
    fallback = "least_resident" if is_decode else "least_slots"
    options = PolicyOptions(rng=random.Random(7), fallback=fallback, chunk_size=4, is_decode=is_decode)
    return make_policy("cache_aware", options)


def picks(picker: Policy, members: Sequence[Snapshot], num: int = 12, hints: RoutingHints = PROMPT) -> Counter[str]:
    lineup = CandidateSet(members)
    return Counter(picker.pick(lineup, hints).name for _ in range(num))


def test_the_prefiller_with_the_fewest_tokens_to_compute() -> None:
    members = [
        Snapshot(name="idle", num_cached=0),
        Snapshot(name="has most", num_cached=960, queued_tokens=100),
        Snapshot(name="not known"),
    ]
    assert picks(policy(), members) == {"has most": 12}
    assert picks(policy(), [*members[:1], Snapshot(name="busy", num_cached=960, queued_tokens=961)]) == {"idle": 12}


def test_a_prefiller_that_comes_back_has_less_of_a_share() -> None:
    members = [Snapshot(name="there", num_cached=0), Snapshot(name="rising", num_cached=400, weight=0.5)]
    assert picks(policy(), members) == {"there": 12}
    assert picks(policy(), [members[0], Snapshot(name="rising", num_cached=600, weight=0.5)]) == {"rising": 12}
    assert picks(policy(), [members[0], Snapshot(name="new", num_cached=900, weight=0.0)]) == {"there": 12}


def test_the_decoder_that_has_most_among_equally_loaded_ones() -> None:
    members = [
        Snapshot(name="empty", num_cached=0, resident_share=0.2),
        Snapshot(name="alike", num_cached=480, resident_share=0.24),
        Snapshot(name="fuller", num_cached=960, resident_share=0.3),
    ]
    assert picks(policy(is_decode=True), members) == {"alike": 12}


@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize("known", [None, 0])
def test_where_nobody_has_anything_prompts_that_begin_alike_go_together(is_decode: bool, known: int | None) -> None:
    members = [Snapshot(name=f"i{number}", num_cached=known) for number in range(4)]
    picker = policy(is_decode=is_decode)
    assert len(picks(picker, members)) == 1
    assert picks(picker, members) == picks(picker, members, hints=RoutingHints(prompt=[*range(1000), 7]))
    assert picker.key([1] * 8) is not None
    assert picker.home(CandidateSet(members), PROMPT) is None
    assert len(picks(picker, members, hints=RoutingHints())) == 4, "without a prompt they take turns"


@pytest.mark.parametrize("is_decode", [False, True])
def test_those_that_have_as_much_share(is_decode: bool) -> None:
    """The load of those that have it is bounded by the other policy."""
    members = [Snapshot(name=f"i{number}", num_cached=480, num_legs=9 * (number == 0)) for number in range(3)]
    members.append(Snapshot(name="nothing", num_cached=0))
    found = picks(policy(is_decode=is_decode), members)
    assert found.keys() <= {"i1", "i2"}
    assert picks(policy(), members[:1]) == {"i0": 12}
