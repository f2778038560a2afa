"""A speed fitted to a run is the speed that the run was made with."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdproxy.loadtest.record import FORMAT, GeneratorHealth, Head, Moment, Record, Run, write_run
from pdproxy.simulate.errors import SimulationError
from pdproxy.simulate.fit import Line, _mean_sizes, fit, fit_line, predict, read_runs
from pdproxy.simulate.speed import Speed
from tests.fakes.simulated import make_plan

REAL = Speed(
    prefill_s=0.02,
    prefill_token_s=0.0001,
    transfer_s=0.005,
    kv_token_bytes=1000,
    link_bytes_per_s=1e8,
    step_s=0.01,
    step_sequence_s=0.002,
    overhead_s=0.003,
    chunk_size=256,
    pd_buffer_pages=64,
)
HEALTH = GeneratorHealth(
    cpu_share=0.1,
    late_p50_s=0.0,
    late_p99_s=0.0,
    late_max_s=0.0,
    lag_p50_s=0.0,
    lag_p99_s=0.0,
    lag_max_s=0.0,
    limit_s=0.01,
)


def make_run(records: list[Record]) -> Run:
    head = Head(
        format=FORMAT,
        target="http://a",
        model="m",
        seed=1,
        started_at=0.0,
        wall_s=100.0,
        warmup_s=0.0,
        is_interrupted=False,
        settings={},
    )
    moments = [Moment(at_s=0.0, num_open=0, capacity={"decode-0": 64})]
    return Run(head=head, health=HEALTH, records=records, moments=moments)


def record(index: int, due_s: float, prompt: int, answer: int, size: int, **more: object) -> Record:
    """As `REAL` would answer it, alone at the prefiller, with so many beside it at the decoder."""
    num_bytes = prompt * REAL.kv_token_bytes
    phases = {
        "tokenize": 0.0,
        "slot_wait": 0.0,
        "prefill": REAL.prefill_takes(prompt),
        "kv_wait": REAL.transfer_s + num_bytes / REAL.link_bytes_per_s,
    }
    first = due_s + sum(phases.values()) + REAL.overhead_s
    last = first + (answer - 1) * REAL.step_takes(size)
    told: dict[str, object] = {
        "index": index,
        "due_s": due_s,
        "sent_s": due_s,
        "done_s": last,
        "first_token_s": first,
        "last_token_s": last,
        "prompt_tokens_asked": prompt,
        "answer_tokens_asked": answer,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "status": 200,
        "phases": phases,
        "path": "disaggregated",
        "prefiller": "prefill-0",
        "decoder": "decode-0",
        "num_pages": -(-prompt // REAL.chunk_size),
        "num_kv_bytes": num_bytes,
    }
    return Record(**(told | more))  # type: ignore[arg-type]


def real_run(num: int = 60) -> Run:
    """By turns one answer alone, and several that begin and end together."""
    dice, records = random.Random(2), list[Record]()
    for turn in range(num):
        size = 1 + turn % 4
        prompt, answer = dice.randint(50, 3000), dice.randint(20, 60)
        records += [
            record(4 * turn + one, 10.0 * turn, prompt, answer, size, prefiller=f"prefill-{one}") for one in range(size)
        ]
    return make_run(records)


def test_a_line_goes_through_the_middle_of_the_points() -> None:
    points = [(float(x), 3.0 + 2.0 * x) for x in range(50)]
    assert fit_line(points) == Line(pytest.approx(3.0), pytest.approx(2.0))  # type: ignore[arg-type]
    points[10] = (10.0, 1e6)
    assert fit_line(points).slope == pytest.approx(2.0, rel=0.01)


def test_a_line_is_never_negative() -> None:
    assert fit_line([(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)]) == Line(4.0, 0.0)
    assert fit_line([(1.0, 1.0), (2.0, 3.0), (3.0, 5.0)]).at_zero == 0.0


def test_no_line_goes_through_records_that_moved_nothing() -> None:
    with pytest.raises(SimulationError, match="moved anything"):
        fit_line([(0.0, 1.0), (0.0, 2.0)])


def test_where_all_are_of_one_length_everything_is_owed_to_that() -> None:
    assert fit_line([(10.0, 5.0), (10.0, 5.0)]) == Line(0.0, 0.5)


def test_sizes_are_means_over_time() -> None:
    assert _mean_sizes([(0.0, 4.0), (2.0, 4.0), (8.0, 9.0)]) == pytest.approx([1.5, 2.0, 1.0])


def test_a_run_tells_the_speed_it_was_made_with() -> None:
    found = fit([real_run()], Speed())
    for name in REAL.__struct_fields__:
        if name not in ("max_batch", "prefill_batch_tokens", "prefix_cache_tokens"):  # which nothing tells
            assert getattr(found, name) == pytest.approx(getattr(REAL, name), rel=0.02), name


def test_prompts_that_stand_in_line_do_not_count() -> None:
    """Each of them waits for the ones before it; those that are alone say how long it really takes."""
    run = real_run()
    begin = 10.0 * 60
    for index in range(40):
        one = record(1000 + index, begin, 500, 5, 1)
        waited = {**one.phases, "prefill": one.phases["prefill"] * (index + 1)}
        run.records.append(record(1000 + index, begin, 500, 5, 1, phases=waited, decoder=f"d{index}"))
    found = fit([run], Speed())
    assert found.prefill_token_s == pytest.approx(REAL.prefill_token_s, rel=0.05)


def test_failures_and_other_ways_tell_nothing() -> None:
    run = real_run()
    run.records += [
        record(900, 5.0, 100, 10, 1, error="broken"),
        record(901, 15.0, 100, 10, 1, path="local", phases={"decode": 9.0}),
    ]
    assert fit([run], Speed()) == fit([real_run()], Speed())


def test_too_little_is_said_to_be_too_little() -> None:
    with pytest.raises(SimulationError, match="lower rate"):
        fit([make_run([record(0, 0.0, 100, 10, 1)])], Speed())


def test_a_run_is_predicted_as_it_was() -> None:
    """Requests far from each other, at known seconds."""
    run = make_run([record(index, 20.0 * index, 100 + 50 * index, 50, 1) for index in range(20)])
    result, compared = predict(run, make_plan(speed=REAL))
    assert result.figures.outcomes == {"done": 20}
    told = {one.what: one for one in compared}
    assert told["TTFT median (s)"].error == pytest.approx(0.0, abs=0.03)
    assert told["E2E p95 (s)"].error == pytest.approx(0.0, abs=0.03)
    assert told["throughput (answers/s)"].error == pytest.approx(0.0, abs=0.06)
    _, compared = predict(run, make_plan(speed=replace(REAL, prefill_s=0.22)))
    assert {one.what: one for one in compared}["TTFT median (s)"].error > 1.0


def test_runs_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_run(real_run(), path)
    assert fit(read_runs([path]), Speed()) == fit([real_run()], Speed())
    with pytest.raises(SimulationError, match="cannot be read"):
        read_runs([tmp_path / "none.jsonl"])
    path.write_text("{}")
    with pytest.raises(SimulationError, match=r"run\.jsonl"):
        read_runs([path])
