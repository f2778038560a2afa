"""The bounds of a run's figures: whatever a run was like, none of them says what cannot be."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from msgspec import structs

from pdproxy.loadtest.latency import Distribution
from pdproxy.loadtest.live import WINDOW_S, Live
from pdproxy.loadtest.log_histogram import LogHistogram
from pdproxy.loadtest.record import GeneratorHealth, Record, Run
from pdproxy.loadtest.report import overview
from pdproxy.loadtest.report.page import page
from pdproxy.loadtest.report.sides import Side, shown_of
from pdproxy.loadtest.slo import Slo, all_met
from pdproxy.loadtest.summary import Summary, summarize
from tests.fakes.measured_runs import failed, left, plain, record, run_of

SLOS = ("", "ttft:p99<0.5", "ttft:p50<0.2,tpot:p95<50ms,errors<10%", "itl:p99<0.1,e2e:p90<2")


def random_run(seed: int) -> Run:
    dice = random.Random(seed)
    wide = 10 ** dice.uniform(-3, 2)
    dues = sorted(dice.uniform(0, wide) for _ in range(dice.choice((0, 1, 2, 3, 10, 60))))
    duration_s = dice.choice((None, wide, wide * 3))
    warmup_s = dice.choice((0.0, wide / 4))
    records = [_random_record(dice, index, due_s, is_warmup=due_s < warmup_s) for index, due_s in enumerate(dues)]
    ended_s = max((one.done_s for one in records), default=0.0)
    told: dict[str, Any] = {"warmup_s": warmup_s, "duration_s": duration_s, "rate": dice.choice((None, 2.0))}
    told |= {"num_requests": dice.choice((None, len(dues))), "arrivals": dice.choice(("poisson", "closed", "trace"))}
    return run_of(
        records,
        health=_random_health(dice),
        wall_s=ended_s + dice.choice((0.0, 0.01)),
        warmup_s=warmup_s,
        is_interrupted=any(one.error == "interrupted" for one in records),
        settings=told,
    )


def _random_record(dice: random.Random, index: int, due_s: float, *, is_warmup: bool) -> Record:
    kind = dice.choice((record, record, record, plain, failed, left))
    ttft_s, tpot_s = dice.lognormvariate(-2, 1.5), dice.lognormvariate(-4, 1.5)
    sent_s = due_s + dice.choice((0.0, 0.01))
    done_s = sent_s + ttft_s + 4 * tpot_s
    fields: dict[str, Any] = {"due_s": due_s, "sent_s": sent_s, "is_warmup": is_warmup, "done_s": done_s}
    if kind is record:
        fields |= {"ttft_s": sent_s - due_s + ttft_s, "tpot_s": tpot_s, "aborted": dice.choice(("", "", "mid_stream"))}
        fields |= {"cached_tokens": dice.choice((None, 0, 10, 12)), "phases": {"prefill": ttft_s, "decode": tpot_s * 4}}
    if kind is failed:
        fields["error"] = dice.choice(("http_503", "timeout", "interrupted"))
    return kind(index, **fields)


def _random_health(dice: random.Random) -> GeneratorHealth:
    late, lag = (sorted(dice.choice((0.001, 0.02, 0.4)) for _ in range(3)) for _ in range(2))
    return GeneratorHealth(
        cpu_share=0.5,
        late_p50_s=late[0],
        late_p99_s=late[1],
        late_max_s=late[2],
        lag_p50_s=lag[0],
        lag_p99_s=lag[1],
        lag_max_s=lag[2],
        limit_s=0.005,
    )


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(SLOS))
def test_no_figure_is_out_of_bounds_whatever_the_run_was_like(seed: int, target: str) -> None:
    note(f"seed {seed}")
    run, slo = random_run(seed), Slo.parse(target)
    found = summarize(run, slo)
    check_counts(found)
    check_rates(found)
    check_judgement(found, run, slo)
    times = [*found.latencies.values(), *found.phases.values(), *found.outer_phases.values(), found.transfer]
    for each in times:
        check_order(each)
    for share in (found.good_share, found.cached_share):
        assert share is None or 0 <= share <= 1


def check_counts(found: Summary) -> None:
    assert 0 <= found.num_good <= found.num_ok <= found.num_requests
    assert 0 <= found.num_at_once <= found.latencies["tpot"].count
    ended = (found.num_ok, found.num_failed, found.num_aborted, found.num_interrupted)
    assert sum(ended) == found.num_requests
    assert sum(found.errors.values()) == found.num_failed
    assert max(found.latencies["e2e"].count, found.latencies["tpot"].count) <= found.num_ok
    for name in ("paths", "prefillers", "decoders"):
        assert sum(getattr(found, name).values()) <= found.num_ok


def check_rates(found: Summary) -> None:
    """Good answers are no more than answers, and these no more than what was asked; each rate times its seconds is the
    count."""
    if found.offered_rps is None or found.asked_s is None:
        assert found.num_requests == 0 or found.measured_s == 0
        return
    assert found.asked_s <= found.measured_s
    assert (found.goodput_rps or 0) <= found.throughput_rps <= found.offered_rps * (1 + 1e-12)
    assert found.offered_rps * found.asked_s == pytest.approx(found.num_requests)
    assert found.throughput_rps * found.measured_s == pytest.approx(found.num_ok)
    if found.goodput_rps is not None:
        assert found.goodput_rps * found.measured_s == pytest.approx(found.num_good)


def check_judgement(found: Summary, run: Run, slo: Slo) -> None:
    """A generator that was late makes no verdict turn into its opposite, and one that was in time judges all."""
    as_if_in_time = all_met(slo.judge(run.measured))
    assert found.is_slo_met in (as_if_in_time, None)
    assert found.is_slo_judged == (found.is_slo_met is not None or not slo.objectives)
    if run.health.is_trusted:
        assert found.is_slo_met is as_if_in_time
    for one in found.slo:
        assert one.is_judged or not one.is_met


def check_order(found: Distribution) -> None:
    there = [getattr(found, name) for name in ("p50", "p90", "p95", "p99", "p999", "max")]
    assert all(value is None for value in there) if found.count == 0 else None not in there
    assert all(low <= high for low, high in pairwise(value for value in there if value is not None))
    assert found.mean is None or found.mean <= there[-1] * (1 + 1e-12)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=3), st.sampled_from(SLOS))
def test_any_runs_have_a_page_and_a_verdict(seeds: list[int], target: str) -> None:
    note(f"seeds {seeds}")
    slo = Slo.parse(target)
    sides = [Side(f"side {index}", (random_run(seed),)) for index, seed in enumerate(seeds)]
    said = list(overview.verdicts(shown_of(sides, slo), slo))
    assert len(said) in ((len(sides), len(sides) + 1) if slo.objectives else (0,))
    assert all(words in page(sides, slo).replace("&lt;", "<") for words in said)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_live_rates_are_those_of_the_last_seconds(seed: int) -> None:
    note(f"seed {seed}")
    dice = random.Random(seed)
    now_s, ended = 0.0, list[Record]()
    live, under_way, sent = Live(lambda: now_s), list[Record](), list[float]()
    for index in range(dice.randrange(1, 60)):
        now_s += dice.choice((0.0, 0.01, 1.0, 4.0))
        if under_way and dice.random() < 0.5:
            ended.append(structs.replace(under_way.pop(), done_s=now_s))
            live.ended(ended[-1])
        else:
            sent.append(now_s)
            under_way.append(dice.choice((record, failed, left))(index, due_s=now_s))
            live.sent(now_s)
        found, window_s = live.progress(), max(1e-9, min(WINDOW_S, now_s))
        assert found.num_open == found.num_sent - found.num_ended == len(under_way)
        assert found.num_failed + found.num_aborted <= found.num_ended <= found.num_sent
        assert found.sent_per_s * window_s == pytest.approx(sum(at_s >= now_s - WINDOW_S for at_s in sent))
        assert found.ended_per_s * window_s == pytest.approx(sum(one.done_s >= now_s - WINDOW_S for one in ended))
        assert (found.ttft_p50_s or 0.0) <= (found.ttft_p95_s or 0.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-9, 1e5), min_size=1, max_size=40), st.integers(0, 10))
def test_percentiles_of_a_histogram_rise_to_the_maximum(durations: list[float], num_infinite: int) -> None:
    histogram = LogHistogram()
    histogram.add_all(durations)
    found = [histogram.percentile(percent, num_infinite) for percent in (1.0, 50.0, 90.0, 99.0, 99.9)]
    values = [value for value in found if value is not None]
    assert len(values) == len(found)
    assert all(low <= high for low, high in pairwise(values))
    assert num_infinite or values[-1] <= max(durations)
    one_by_one = LogHistogram()
    for duration in durations:
        one_by_one.add(duration)
    assert one_by_one.buckets == histogram.buckets
