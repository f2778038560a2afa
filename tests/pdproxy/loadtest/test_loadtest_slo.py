"""Targets: how they are written, whom they judge, and that refusing does not make a service fast."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from pdproxy.loadtest.log_histogram import LogHistogram
from pdproxy.loadtest.record import Record
from pdproxy.loadtest.slo import Objective, Slo, SloError, all_met
from tests.fakes.measured_runs import failed, health, left, plain, record


def test_what_can_be_written() -> None:
    assert Slo.parse("ttft:p99<0.5, tpot:p95<50ms;e2e:p99.9<10s errors<1%").objectives == (
        Objective("ttft", 99.0, 0.5),
        Objective("tpot", 95.0, 0.05),
        Objective("e2e", 99.9, 10.0),
        Objective("errors", 0.0, 0.01),
    )
    assert Slo.parse("ttft : p99 < 500ms, errors < 1%") == Slo.parse("ttft:p99<0.5,errors<0.01")
    assert Slo.parse("errors<0.25").objectives == (Objective("errors", 0.0, 0.25),)
    assert Slo.parse(" ").objectives == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        *((text, "is no objective; one is LATENCY:pNN<SECONDS") for text in ("ttft<0.5", "ttft:99<0.5", "ttft:p99>1")),
        ("tpot:p9<1, fast:p99<1", "'fast:p99<1': there is no latency 'fast'; there are ttft, tpot, itl, e2e"),
        ("ttft:p0<1", "'ttft:p0<1': 0 of a hundred is no percentile"),
        ("ttft:p100<1", "'ttft:p100<1': 100 of a hundred is no percentile"),
        ("e2e:p50<0ms", "'e2e:p50<0ms': nothing is below 0"),
        ("errors<0%", "'errors<0%': nothing is below 0"),
    ],
)
def test_what_cannot(text: str, complaint: str) -> None:
    with pytest.raises(SloError, match=complaint):
        Slo.parse(text)


def test_in_words() -> None:
    assert str(Slo.parse("ttft:p99<500ms,errors<1%")) == "TTFT p99 < 0.5 s, errors < 0.01"


def judged(text: str, records: list[Record]) -> list[tuple[float | None, bool]]:
    return [(one.value, one.is_met) for one in Slo.parse(text).judge(records)]


@pytest.mark.parametrize(
    ("objective", "late_s", "verdict"),
    [
        ("ttft:p99<0.5", 0.398, True),
        ("ttft:p99<0.5", 0.4, None),
        ("ttft:p99<0.05", 0.04, False),
        ("ttft:p99<0.05", 0.06, None),
        ("tpot:p99<30ms", 9.0, True),
        ("itl:p99<22ms", 9.0, True),
        ("itl:p99<20.5ms", 9.0, None),
        ("errors<1%", 9.0, True),
    ],
)
def test_what_the_generators_lateness_could_explain_is_not_judged(
    objective: str, late_s: float, verdict: bool | None
) -> None:
    """A tenth of a second to the first token and 20 ms for each of four more; what was read was late by 1 to 2 ms."""
    slo = Slo.parse(objective)
    assert all_met(slo.judge([record(0)], health(late_p99_s=late_s))) is verdict


def test_a_first_piece_that_was_read_late_is_shared_by_all_tokens_behind_it() -> None:
    late = structs.replace(health(late_p99_s=1.0), lag_p99_s=0.036, lag_max_s=0.08)
    for limit, verdict in (("30ms", True), ("28ms", None), ("1ms", None)):
        assert all_met(Slo.parse(f"tpot:p99<{limit}").judge([record(0)], late)) is verdict
    assert all_met(Slo.parse("tpot:p99<1ms").judge([record(0, tpot_s=0.022)], late)) is False


def test_a_percentile_is_held_against_its_limit() -> None:
    records = [record(index, ttft_s=0.1 * (index + 1)) for index in range(10)]
    (value, is_met), (_, is_lower_met) = judged("ttft:p90<0.95,ttft:p50<0.4", records)
    assert value == pytest.approx(0.9)
    assert is_met
    assert not is_lower_met


def test_at_the_limit_is_not_below_it() -> None:
    assert judged("e2e:p50<2", [plain(0, due_s=0.0, done_s=2.0)]) == [(2.0, False)]


@pytest.mark.parametrize("metric", ["ttft", "tpot", "itl", "e2e"])
def test_failures_took_for_ever(metric: str) -> None:
    """Two of a hundred are too many for p99, and one is not."""
    records: list[Record] = [record(index) for index in range(98)]
    assert judged(f"{metric}:p99<1", [*records, record(98), failed(99)])[0][1]
    assert judged(f"{metric}:p99<1", [*records, failed(98), failed(99)]) == [(None, False)]


def test_a_failure_after_the_first_token_is_a_failure_as_well() -> None:
    cut = record(1, error="cut")
    assert Slo.parse("ttft:p90<1").objectives[0].value([record(0), cut]) == math.inf


def test_failures_that_were_not_streamed_say_nothing_of_streams() -> None:
    records = [record(0), plain(1, error="timeout", done_s=2.0)]
    assert judged("ttft:p99<1", records)[0][1]
    assert not judged("e2e:p99<9", records)[0][1]


def test_nothing_measured_meets_nothing() -> None:
    assert judged("ttft:p99<1", [plain(0, done_s=1.0)]) == [(None, False)]
    assert judged("errors<1%", []) == [(None, False)]


def test_a_share_of_errors() -> None:
    records = [failed(0), *(record(index) for index in range(1, 8)), failed(8, "interrupted")]
    assert judged("errors<20%,errors<10%", records) == [(0.125, True), (0.125, False)]


def test_which_answers_are_good() -> None:
    slo = Slo.parse("ttft:p50<0.5,tpot:p50<0.1,e2e:p99<9,errors<50%")
    assert slo.is_met_by(record(0)) is True
    assert slo.is_met_by(record(0, ttft_s=0.6)) is False
    assert slo.is_met_by(record(0, tpot_s=0.2)) is False
    assert slo.is_met_by(failed(0)) is False
    assert slo.is_met_by(plain(0, done_s=8.0)) is True
    assert slo.is_met_by(plain(0, done_s=10.0)) is False
    assert slo.is_met_by(left(0)) is None
    assert slo.is_met_by(failed(0, "interrupted")) is None


def test_of_its_own_gaps_so_many_have_to_be_short() -> None:
    gaps = LogHistogram()
    for gap_s in (0.01, 0.01, 0.01, 0.5):
        gaps.add(gap_s)
    one = record(0, gaps=gaps)
    assert Slo.parse("itl:p75<0.1").is_met_by(one)
    assert not Slo.parse("itl:p99<0.1").is_met_by(one)


def test_without_a_target_every_whole_answer_is_good() -> None:
    assert Slo().is_met_by(record(0, ttft_s=100.0)) is True
    assert Slo().is_met_by(failed(0)) is False
