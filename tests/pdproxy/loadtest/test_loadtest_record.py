"""What a run leaves behind, and that a file of it is read as it was written."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pdproxy.loadtest.log_histogram import LogHistogram, merged
from pdproxy.loadtest.record import (
    FORMAT,
    Event,
    GeneratorHealth,
    Head,
    Moment,
    Record,
    Run,
    RunFileError,
    read_run,
    write_run,
)

HEAD = Head(
    format=FORMAT, target="http://x", model="m", seed=3, started_at=1.5, wall_s=10.0, warmup_s=2.0,
    is_interrupted=False, settings={"rate": 4.0, "arrivals": "poisson", "is_scale_measured": True},
)  # fmt: skip
HEALTH = GeneratorHealth(
    cpu_share=0.2, late_p50_s=0, late_p99_s=0.001, late_max_s=0.002, lag_p50_s=0, lag_p99_s=0.001, lag_max_s=0.01,
    limit_s=0.005,
)  # fmt: skip
RECORD = Record(
    index=0, due_s=1.0, sent_s=1.001, done_s=3.0, first_byte_s=1.4, first_token_s=1.5, last_token_s=2.9,
    prompt_tokens_asked=10, answer_tokens_asked=8, answer_tokens=8, num_chunks=8, status=200,
    gaps=LogHistogram(count=1, sum_s=0.2, max_s=0.2, buckets={600: 1}), phases={"slot_wait": 0.1, "prefill": 0.25},
)  # fmt: skip
LATER = Record(
    index=1, due_s=2.5, sent_s=2.5, done_s=2.6, prompt_tokens_asked=1, answer_tokens_asked=1, error="refused"
)  # fmt: skip


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = Run(
        head=HEAD,
        health=HEALTH,
        records=[RECORD, LATER],
        moments=[Moment(at_s=0.25, num_open=3, in_flight=2, held={"decode-0": 7}, states={"decode-0": "ready"})],
        events=[Event(at_s=4.0, what="kill", whom="decode-0")],
    )
    write_run(run, tmp_path / "run.jsonl")
    assert read_run(tmp_path / "run.jsonl") == run
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: lines[1:], "0 lines of type run"),
        (lambda lines: [*lines, lines[1]], "2 of type generator"),
        (lambda lines: [*lines, b"{}\n"], "line 5"),
        (lambda lines: [*lines[:-1], lines[-1][:20]], "line 4"),
        (lambda lines: [lines[0].replace(b'"format":1', b'"format":9'), *lines[1:]], "format 9"),
        (lambda lines: [], "0 lines"),
    ],
    ids=["no head", "two of one", "no type", "cut", "of the future", "empty"],
)
def test_what_is_no_file_of_ours(tmp_path: Path, change: object, complaint: str) -> None:
    path = tmp_path / "run.jsonl"
    write_run(Run(head=HEAD, health=HEALTH, records=[RECORD, LATER]), path)
    assert callable(change)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(RunFileError, match=complaint):
        read_run(path)


def test_latencies_count_from_when_it_was_due() -> None:
    assert RECORD.lateness_s == pytest.approx(0.001)
    assert RECORD.ttft_s == pytest.approx(0.5)
    assert RECORD.e2e_s == pytest.approx(2.0)
    assert RECORD.tpot_s == pytest.approx(1.4 / 7)
    assert RECORD.is_ok
    assert LATER.ttft_s is LATER.tpot_s is None
    assert not LATER.is_ok


def test_the_warm_up_does_not_count() -> None:
    warm = Record(index=2, due_s=0, sent_s=0, done_s=1, prompt_tokens_asked=1, answer_tokens_asked=1, is_warmup=True)
    run = Run(head=HEAD, health=HEALTH, records=[warm, RECORD])
    assert run.measured == [RECORD]
    assert run.measured_s == 8.0


@pytest.mark.parametrize(("late", "lag"), [(0.001, 0.2), (0.2, 0.001)])
def test_a_generator_that_was_late_is_not_trusted(late: float, lag: float) -> None:
    assert HEALTH.is_trusted
    facts = {name: getattr(HEALTH, name) for name in HEALTH.__struct_fields__}
    assert not GeneratorHealth(**facts | {"late_p99_s": late, "lag_p99_s": lag}).is_trusted


# ── gaps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_percentiles_of_gaps_are_known_to_one_percent() -> None:
    dice = random.Random(1)
    values = sorted(dice.lognormvariate(-4, 1) for _ in range(5000))
    gaps = LogHistogram()
    for value in values:
        gaps.add(value)
    for percent in (1, 50, 95, 99, 100):
        assert gaps.percentile(percent) == pytest.approx(values[percent * 50 - 1], rel=0.011)
    assert gaps.mean_s == pytest.approx(sum(values) / 5000)
    assert gaps.max_s == values[-1]
    assert len(gaps.buckets) < 500


def test_gaps_of_many_answers_together() -> None:
    one, other = LogHistogram(), LogHistogram()
    for value in (0.01, 0.01, 0.5):
        one.add(value)
    other.add(0.0)
    both = merged([one, other, LogHistogram()])
    assert both.count == 4
    assert both.max_s == 0.5
    assert both.percentile(1) == pytest.approx(1e-6, rel=0.02)
    assert both.percentile(75) == pytest.approx(0.01, rel=0.011)
    assert one.count == 3


def test_no_gaps() -> None:
    assert LogHistogram().percentile(50) is None
    assert LogHistogram().mean_s is None
