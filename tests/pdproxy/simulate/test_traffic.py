"""What is asked, and when."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from pdproxy.loadtest.fault_schedule import Fault, FaultError, check_names
from pdproxy.loadtest.lengths import Fixed, Independent, Uniform
from pdproxy.loadtest.traces import SAMPLES, TraceRow, read_trace
from pdproxy.simulate.errors import SimulationError
from pdproxy.simulate.faults import read_faults
from pdproxy.simulate.plan import decode_capacity, prefill_capacity, rate_for
from pdproxy.simulate.speed import Speed, changed, read_speed
from pdproxy.simulate.traffic import Traffic, sizes_of

SIZES = Independent(Uniform(10, 30), Fixed(5))


@pytest.mark.parametrize("process", ["poisson", "gamma", "constant"])
def test_questions_come_at_their_rate_and_twice_the_same(process: str) -> None:
    traffic = Traffic(sizes=SIZES, rate=50.0, process=process, burstiness=2.0)  # type: ignore[arg-type]
    asked = list(traffic.questions(5000, seed=3))
    assert asked == list(traffic.questions(5000, seed=3))
    assert process == "constant" or asked != list(traffic.questions(5000, seed=4))
    assert asked[-1].due_s == pytest.approx(100.0, rel=0.1)
    assert all(one.due_s <= other.due_s for one, other in pairwise(asked))
    assert {one.num_answer_tokens for one in asked} == {5}
    assert traffic.means == pytest.approx((20.0, 5.0), rel=0.02)


def test_lengths_do_not_depend_on_when_they_come() -> None:
    """So two rates are asked the same."""
    slow, fast = (Traffic(sizes=SIZES, rate=rate) for rate in (1.0, 9.0))
    told = [[one.num_prompt_tokens for one in traffic.questions(100, seed=1)] for traffic in (slow, fast)]
    assert told[0] == told[1]


def test_prompts_of_a_group_share_their_beginning() -> None:
    traffic = Traffic(sizes=SIZES, num_groups=3, shared_share=0.5)
    asked = list(traffic.questions(300, seed=1))
    assert {one.group for one in asked} == {0, 1, 2}
    assert all(one.num_shared == one.num_prompt_tokens // 2 for one in asked)


def test_a_trace_is_replayed_at_the_rate_that_is_wanted_over_and_over() -> None:
    rows = [TraceRow(0.0, 10, 1), TraceRow(1.0, 20, 2), TraceRow(4.0, 30, 3)]
    traffic = Traffic(sizes=sizes_of(rows), rows=rows, rate=0.25)
    asked = list(traffic.questions(5, seed=1))
    assert [one.due_s for one in asked] == pytest.approx([0.0, 2.0, 8.0, 12.0, 14.0])
    assert [one.num_prompt_tokens for one in asked] == [10, 20, 30, 10, 20]


def test_the_samples_that_come_along_can_be_replayed() -> None:
    for path in SAMPLES.values():
        if path.exists():
            rows = read_trace(path, limit=50)
            asked = list(Traffic(sizes=sizes_of(rows), rows=rows, rate=100.0).questions(80, seed=1))
            assert asked[-1].due_s == pytest.approx(0.8, rel=0.2)


# ── what there is to do ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_load_is_a_share_of_what_the_busier_side_can_do() -> None:
    speed = Speed(
        prefill_s=0.1, prefill_token_s=0.001, prefill_batch_tokens=1, step_s=0.0, step_sequence_s=0.01, max_batch=8
    )
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(11)))
    assert prefill_capacity(speed, traffic) == pytest.approx(5.0)
    assert decode_capacity(speed, traffic) == pytest.approx(10.0)
    assert rate_for(0.5, 4, 1, speed, traffic) == pytest.approx(5.0)
    assert rate_for(0.5, 1, 4, speed, traffic) == pytest.approx(2.5)


# ── speeds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_speed_comes_from_a_file_and_from_assignments(tmp_path: Path) -> None:
    toml, as_json = tmp_path / "speed.toml", tmp_path / "speed.json"
    toml.write_text("max_batch = 7\nprefill_s = 0.5\n")
    as_json.write_text('{"speed": {"max_batch": 7, "prefill_s": 0.5}}')
    assert read_speed(toml) == read_speed(as_json) == Speed(max_batch=7, prefill_s=0.5)
    assert changed(read_speed(toml), "max_batch=9, step_s = 0.25") == Speed(max_batch=9, prefill_s=0.5, step_s=0.25)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("bandwidth = 3", "bandwidth"),
        ("max_batch = 0", "max_batch must be above 0"),
        ("max_batch = ", "speed"),
        ("step_s = 0.0\nstep_sequence_s = 0.0", "a step takes some time"),
    ],
)
def test_a_speed_that_is_none_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "speed.toml"
    path.write_text(text)
    with pytest.raises(SimulationError, match=complaint):
        read_speed(path)
    with pytest.raises(SimulationError, match="cannot be read"):
        read_speed(tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["max_batch", "batch=3", "max_batch=many", "prefill_s=-1"])
def test_an_assignment_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SimulationError, match="speed"):
        changed(Speed(), text)


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_faults_are_read_in_the_order_of_their_times() -> None:
    assert read_faults("60 start decode-0;30 kill decode-0; 40.5s freeze prefill-0 for 5s; 1 slow decode-1 by 2.5") == [
        Fault(1.0, "slow", "decode-1", 2.5),
        Fault(30.0, "kill", "decode-0"),
        Fault(40.5, "freeze", "prefill-0"),
        Fault(45.5, "thaw", "prefill-0"),
        Fault(60.0, "start", "decode-0"),
    ]
    assert read_faults(" ; ") == []


@pytest.mark.parametrize(
    "text", ["kill decode-0", "3 burn decode-0", "3 slow decode-0", "3 kill decode-0 by 2", "3 start decode-0 for 3"]
)
def test_faults_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(FaultError, match="is no fault; one is SECONDS"):
        read_faults(text)


def test_whom_there_is_not_cannot_be_killed() -> None:
    with pytest.raises(FaultError, match="there is no decode-9; there are decode-0"):
        check_names(read_faults("3 kill decode-9"), {"decode-0": None})


def test_a_load_that_turns_has_other_lengths_in_its_second_half() -> None:
    traffic = Traffic(sizes=Independent(Fixed(4000), Fixed(100)), then=Independent(Fixed(200), Fixed(1000)), rate=5.0)
    asked = [(one.num_prompt_tokens, one.num_answer_tokens) for one in traffic.questions(11, seed=1)]
    assert asked == [(4000, 100)] * 5 + [(200, 1000)] * 6
