"""Policies against each other, knees and sizes: where the answer is known by other means."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from pdproxy.loadtest.lengths import Fixed, Independent, LogNormal
from pdproxy.loadtest.slo import Slo
from pdproxy.simulate.errors import SimulationError
from pdproxy.simulate.simulation import simulate
from pdproxy.simulate.speed import Speed
from pdproxy.simulate.studies import Pair, compare, compare_roles, find_knee, find_size, read_pairs
from pdproxy.simulate.traffic import Traffic
from tests.fakes.simulated import ROUND, make_plan

PREFILL_BOUND = replace(
    ROUND, prefill_s=0.1, prefill_token_s=0.0, transfer_s=0.0, kv_token_bytes=0, step_s=0.01, pd_buffer_pages=10_000
)
"""Ten prompts a second per prefiller, and a decoder that hardly matters."""


def test_pairs_are_named() -> None:
    assert read_pairs("round_robin, least_queued_tokens/least_slots") == [
        Pair("round_robin", "round_robin"),
        Pair("least_queued_tokens", "least_slots"),
    ]
    assert str(read_pairs("least_queued_tokens/least_slots")[0]) == "least_queued_tokens/least_slots"
    assert Pair("prefix_affinity", "prefix_affinity") in read_pairs("all")


@pytest.mark.parametrize("text", ["", "best", "least_queued_tokens", "round_robin/best"])
def test_pairs_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SimulationError, match="policies"):
        read_pairs(text)


def test_a_policy_that_looks_at_load_beats_one_that_does_not() -> None:
    """Prompts of very different lengths: by turns, a short one often stands behind a long one."""
    sizes = Independent(LogNormal(1000, 1.5, 30_000), Fixed(20))
    traffic = Traffic(sizes=sizes, rate=90.0)
    plan = make_plan(prefillers=16, decoders=8, num_requests=2000, traffic=traffic, speed=Speed(prefill_batch_tokens=1))
    told: list[str] = []
    found = dict(
        compare(plan, read_pairs("round_robin,least_queued_tokens/least_slots"), lambda name, _: told.append(name))
    )
    blind, seeing = found[Pair("round_robin", "round_robin")], found[Pair("least_queued_tokens", "least_slots")]
    assert told == ["round_robin", "least_queued_tokens/least_slots"]
    assert blind.figures.count == seeing.figures.count == 2000
    p95 = [result.figures.latencies["ttft"].percentile(95.0) or 0.0 for result in (blind, seeing)]
    assert p95[1] < 0.8 * p95[0]


def test_a_policy_that_keeps_prefixes_together_reads_less() -> None:
    speed = Speed(prefix_cache_tokens=4000)
    traffic = Traffic(sizes=Independent(Fixed(2000), Fixed(10)), rate=10.0, num_groups=16, shared_share=0.8)
    plan = make_plan(prefillers=8, decoders=4, num_requests=2000, traffic=traffic, speed=speed)
    found = compare(plan, read_pairs("least_queued_tokens/least_slots,prefix_affinity/least_slots"))
    blind, tied = (result.use["cached_share"] for _, result in found)
    assert tied > 2 * blind


def test_the_knee_is_where_the_law_has_it() -> None:
    """M/D/1 with service 0.1 s: the mean wait is 0.1 s at a load of two thirds, where the median nears it."""
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(2)))
    plan = make_plan(num_requests=1500, traffic=traffic, speed=PREFILL_BOUND, slo=Slo.parse("ttft:p50<0.2"))
    knee = find_knee(plan)
    assert knee.rate is not None
    assert 6.0 < knee.rate < 9.0
    rates = [result.plan.traffic.rate for result in knee.results]
    assert rates == sorted(rates)
    for result in knee.results:
        assert bool(result.figures.broken()) == (result.plan.traffic.rate > knee.rate)


def test_without_a_target_one_is_taken_from_the_unloaded_fleet() -> None:
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(2)))
    knee = find_knee(make_plan(num_requests=500, traffic=traffic, speed=PREFILL_BOUND))
    assert [one.metric for one in knee.slo.objectives] == ["ttft", "tpot"]
    assert knee.rate is not None
    assert 2.0 < knee.rate < 8.0
    assert "no --slo was given: 2 times the p95 of the unloaded fleet, at 1 requests/s, 10% of" in knee.target


def test_where_nothing_is_answered_there_is_no_target_to_be_taken() -> None:
    dead = make_plan(num_requests=20, patience_s=1e-6)
    with pytest.raises(SimulationError, match="slo: needed, because the unloaded fleet answered nothing"):
        find_knee(dead)


def test_a_target_that_nobody_meets_has_no_knee() -> None:
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(2)))
    plan = make_plan(num_requests=50, traffic=traffic, speed=PREFILL_BOUND, slo=Slo.parse("ttft:p50<0.05"))
    assert find_knee(plan).rate is None


def test_a_fleet_is_as_large_as_it_must_be() -> None:
    """45 prompts a second, ten per prefiller: five can, four cannot. One decoder is plenty."""
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(6)), rate=45.0, process="constant")
    plan = make_plan(num_requests=2000, traffic=traffic, speed=PREFILL_BOUND, slo=Slo.parse("ttft:p99<0.4"))
    size = find_size(plan)
    assert size.result is not None
    assert (size.result.plan.prefillers, size.result.plan.decoders) == (5, 1)


def test_few_requests_do_not_make_a_fleet_smaller_than_its_work() -> None:
    """Four prefillers read 40 of 45 prompts a second: their line grows, but not in sixty requests."""
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(6)), rate=45.0, process="constant")
    plan = make_plan(num_requests=60, traffic=traffic, speed=PREFILL_BOUND, slo=Slo.parse("ttft:p99<0.4"))
    assert not simulate(dataclasses.replace(plan, prefillers=4)).figures.broken()
    size = find_size(plan)
    assert size.result is not None
    assert size.result.plan.prefillers == 5


def test_prefixes_that_are_shared_may_make_a_fleet_smaller_than_its_prompts() -> None:
    traffic = Traffic(sizes=Independent(Fixed(1000), Fixed(6)), rate=45.0, num_groups=1, shared_share=0.99)
    speed = replace(PREFILL_BOUND, prefill_s=0.0, prefill_token_s=0.0001, prefix_cache_tokens=10**6)
    size = find_size(make_plan(num_requests=1000, traffic=traffic, speed=speed, slo=Slo.parse("ttft:p99<0.5")))
    assert size.result is not None
    assert size.result.plan.prefillers < 5


def test_the_side_that_is_short_grows() -> None:
    """With batches of one token's time per sequence, only more decoders make tokens come faster."""
    speed = replace(PREFILL_BOUND, prefill_s=0.001, step_s=0.0, step_sequence_s=0.01, max_batch=1000)
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(21)), rate=20.0)
    size = find_size(make_plan(num_requests=1500, traffic=traffic, speed=speed, slo=Slo.parse("tpot:p95<30ms")))
    assert size.result is not None
    assert size.result.plan.prefillers == 1
    assert size.result.plan.decoders > 4
    assert not size.result.figures.broken()


def test_a_size_needs_a_target() -> None:
    with pytest.raises(SimulationError, match="slo"):
        find_size(make_plan())


# ── roles ───────────────────────────────────────────────────────────────────────────────────────────────────────────

SLOW = Speed(prefill_s=0.1, prefill_token_s=0.000_5, step_s=0.08, step_sequence_s=0.001, link_bytes_per_s=2e9)
"""Ten times as slow as the usual engines, so that an hour has few requests."""
TURNING = Traffic(
    sizes=Independent(Fixed(4000), Fixed(100)), then=Independent(Fixed(200), Fixed(1000)), rate=1.0, process="poisson"
)


def test_the_controller_does_in_each_half_as_well_as_the_best_split_for_it() -> None:
    """In an hour in which the load turns from long prompts to long answers; and it does not go back and forth."""
    plan = make_plan(prefillers=2, decoders=2, num_requests=3600, num_warmup=360, traffic=TURNING, speed=SLOW)
    found = compare_roles(plan)
    assert [name for name, _ in found] == ["1p3d", "2p2d", "3p1d", "controller, from 2p2d"]
    ttfts = [[half.latencies["ttft"].percentile(95.0, half.num_failed) for half in one.halves] for _, one in found]
    led = found[-1][1]
    for half in (0, 1):
        best = min(each[half] or 0.0 for each in ttfts[:-1])
        assert (ttfts[-1][half] or 0.0) <= 1.5 * best, (ttfts, led.moves)
    assert led.simulated_s > 3500
    roles = [what.partition(" → ")[2] for _, what in led.moves]
    assert roles == ["prefill"] * roles.count("prefill") + ["decode"] * roles.count("decode"), led.moves
    assert {"prefill", "decode"} == set(roles)
    assert led.figures.outcomes == {"done": 3240}


def test_the_controller_behind_several_proxies_is_not_simulated() -> None:
    with pytest.raises(SimulationError, match="roles"):
        compare_roles(make_plan(traffic=TURNING, proxies=2))
