"""The figures of a run: percentiles that were really measured, rates, phases, and what counts for what."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.loadtest.latency import distribution, distribution_of, percentile
from pdproxy.loadtest.log_histogram import LogHistogram
from pdproxy.loadtest.record import Event
from pdproxy.loadtest.slo import Slo
from pdproxy.loadtest.summary import asked_s, offered_rps, summarize
from tests.fakes.measured_runs import failed, health, left, plain, record, run_of

NO_SLO = Slo()


@pytest.mark.parametrize(
    ("count", "percent", "expected"),
    [(100, 50, 50), (100, 99, 99), (1000, 99.9, 999), (10, 99, 10), (3, 50, 2), (1, 99, 1), (200, 95, 190)],
)
def test_a_percentile_is_a_value_that_was_measured(count: int, percent: float, expected: int) -> None:
    assert percentile([float(value) for value in range(1, count + 1)], percent) == expected


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 50) is None
    assert distribution([]).p50 is None
    assert distribution([]).count == 0


def test_a_distribution() -> None:
    found = distribution(float(value) for value in reversed(range(1, 1001)))
    assert (found.p50, found.p90, found.p95, found.p99, found.p999, found.max) == (500, 900, 950, 990, 999, 1000)
    assert (found.count, found.mean) == (1000, 500.5)


def test_latencies_count_from_when_a_request_was_due() -> None:
    late = record(0, due_s=1.0, sent_s=1.5, ttft_s=0.6)
    found = summarize(run_of([late]), NO_SLO).latencies
    assert found["ttft"].p50 == pytest.approx(0.6)
    assert found["e2e"].p50 == pytest.approx(0.68)
    assert found["tpot"].p50 == pytest.approx(0.02)


def test_gaps_of_all_answers_are_one_distribution() -> None:
    slow = LogHistogram()
    slow.add(0.5)
    found = distribution_of([record(0), record(1, gaps=slow)], "itl")
    assert found.count == 5
    assert found.p50 == pytest.approx(0.02, rel=0.02)
    assert found.max == 0.5
    assert found.mean == pytest.approx(0.116)


def test_what_has_no_first_token_has_no_time_to_it() -> None:
    found = summarize(run_of([record(0), plain(1, done_s=2.0), left(2), failed(3)]), NO_SLO)
    assert found.latencies["ttft"].count == 1
    assert found.latencies["e2e"].count == 2
    assert (found.num_requests, found.num_ok, found.num_failed, found.num_aborted) == (4, 2, 1, 1)


def test_one_that_left_later_had_its_first_token() -> None:
    gone = record(1, aborted="mid_stream")
    found = summarize(run_of([record(0), gone]), NO_SLO)
    assert (found.latencies["ttft"].count, found.latencies["e2e"].count, found.latencies["tpot"].count) == (2, 1, 1)


def test_what_the_generator_cut_off_is_nobodys_failure() -> None:
    found = summarize(run_of([record(0), failed(1, "interrupted")]), Slo.parse("e2e:p99<1,errors<1%"))
    assert (found.num_failed, found.num_interrupted, found.errors) == (0, 1, {})
    assert found.is_slo_met
    assert found.good_share == 1


def test_warm_up_does_not_count() -> None:
    slow = record(0, due_s=0.5, ttft_s=9.0, is_warmup=True)
    run = run_of([slow, record(1, due_s=2.0), record(2, due_s=3.0)], warmup_s=2.0, wall_s=6.0)
    found = summarize(run, NO_SLO)
    assert found.num_requests == 2
    assert found.latencies["ttft"].max == pytest.approx(0.1)
    assert found.measured_s == 4.0
    assert found.throughput_rps == pytest.approx(0.5)


def test_rates() -> None:
    records = [record(index, due_s=index / 4) for index in range(41)]
    found = summarize(run_of(records, wall_s=20.5), NO_SLO)
    assert found.offered_rps == pytest.approx(4.0)
    assert found.throughput_rps == pytest.approx(2.0)
    assert found.answer_tps == pytest.approx(10.0)
    assert found.prompt_tps == pytest.approx(20.0)
    assert offered_rps(run_of([])) is None


@pytest.mark.parametrize(
    ("dues", "head", "seconds"),
    [
        ([0.0, 1.0, 2.0], {"wall_s": 9.0}, 3.0),
        ([5.0, 5.01], {"wall_s": 9.0}, 5.01),
        ([5.0, 5.01], {"wall_s": 9.0, "warmup_s": 4.0}, 1.01),
        ([0.0, 5.0], {"wall_s": 6.0}, 6.0),
        ([0.0], {"wall_s": 2.0}, 2.0),
        ([0.1, 0.2], {"wall_s": 12.0, "settings": {"duration_s": 10.0}}, 10.0),
        ([3.1, 3.2], {"wall_s": 12.0, "warmup_s": 3.0, "settings": {"duration_s": 10.0}}, 7.0),
        ([0.1, 0.2], {"wall_s": 4.0, "settings": {"duration_s": 10.0}}, 4.0),
        ([0.0, 1.0], {"wall_s": 9.0, "settings": {"duration_s": 10.0, "num_requests": 2}}, 2.0),
        ([0.0, 1.0], {"wall_s": 9.0, "settings": {"duration_s": 10.0, "arrivals": "trace"}}, 2.0),
    ],
)
def test_what_was_asked_is_divided_by_the_time_in_which_it_was_due(
    dues: list[float], head: dict[str, Any], seconds: float
) -> None:
    run = run_of([record(index, due_s=due_s) for index, due_s in enumerate(dues)], **head)
    assert asked_s(run) == pytest.approx(seconds)
    assert offered_rps(run) == pytest.approx(len(dues) / seconds)


def test_goodput_is_what_was_good_of_what_was_answered() -> None:
    records = [record(index, due_s=index / 4, ttft_s=0.9 if index % 4 == 0 else 0.1) for index in range(40)]
    found = summarize(run_of(records, wall_s=15.0), Slo.parse("ttft:p50<0.5"))
    assert (found.num_good, found.good_share) == (30, 0.75)
    assert (found.goodput_rps, found.throughput_rps) == (pytest.approx(2.0), pytest.approx(40 / 15))
    assert found.is_slo_met


def test_goodput_is_not_above_throughput_where_two_requests_came_at_once() -> None:
    found = summarize(run_of([record(0, due_s=0.0), record(1, due_s=0.05)]), Slo.parse("ttft:p99<1"))
    assert found.goodput_rps == found.throughput_rps
    assert found.offered_rps is not None
    assert found.throughput_rps <= found.offered_rps < 40


def test_errors_by_code_the_most_frequent_first() -> None:
    records = [failed(0, "timeout"), failed(1), failed(2), record(3)]
    assert list(summarize(run_of(records), NO_SLO).errors.items()) == [("http_503", 2), ("timeout", 1)]


def test_phases_are_in_the_order_in_which_a_request_goes_through_them() -> None:
    phases = {"slot_wait": 0.02, "prefill": 0.05, "decode": 0.1, "strange": 0.5}
    records = [record(0, phases=phases), record(1, phases={"tokenize": 0.01, **phases}), record(2)]
    found = summarize(run_of(records), NO_SLO)
    assert list(found.phases) == ["tokenize", "slot_wait", "prefill", "decode", "strange"]
    assert (found.phases["tokenize"].count, found.phases["prefill"].count) == (1, 2)
    assert found.phases["prefill"].p50 == 0.05


def test_any_servers_time_is_split_as_seen_from_outside() -> None:
    found = summarize(run_of([record(0, due_s=1.0, sent_s=1.03)]), NO_SLO).outer_phases
    assert [found[name].p50 for name in found] == pytest.approx([0.03, 0.07, 0.08])


def test_stretches_go_from_one_event_to_the_next() -> None:
    records = [record(index) for index in range(10)]
    records[5] = failed(5)
    events = [Event(at_s=4.5, what="kill", whom="decode-0"), Event(at_s=7.5, what="start", whom="decode-0")]
    found = summarize(run_of(records, events=events, wall_s=11.0), NO_SLO).stretches
    assert [(one.after, one.num_requests, one.num_failed) for one in found] == [
        ("", 5, 0),
        ("kill decode-0", 3, 1),
        ("start decode-0", 2, 0),
    ]
    assert found[1].ttft.count == 2
    assert (found[0].begin_s, found[-1].end_s) == (0.0, 11.0)


def test_a_run_in_which_nothing_happened_has_no_stretches() -> None:
    assert summarize(run_of([record(0)]), NO_SLO).stretches == []


def test_the_share_of_prompts_that_was_cached_is_of_those_who_tell() -> None:
    records = [record(0, cached_tokens=5), record(1, cached_tokens=0), record(2)]
    assert summarize(run_of(records), NO_SLO).cached_share == 0.25
    assert summarize(run_of(records[2:]), NO_SLO).cached_share is None


def test_figures_of_a_late_generator_are_not_to_be_trusted() -> None:
    assert summarize(run_of([record(0)]), NO_SLO).is_trusted
    assert not summarize(run_of([record(0)], health=health(late_p99_s=0.02)), NO_SLO).is_trusted


def test_a_run_of_nothing_has_figures() -> None:
    found = summarize(run_of([]), Slo.parse("ttft:p99<1"))
    assert (found.num_requests, found.offered_rps, found.throughput_rps, found.goodput_rps) == (0, None, 0, None)
    assert found.is_slo_met is False
