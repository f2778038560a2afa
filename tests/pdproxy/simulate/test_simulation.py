"""The whole of it: laws that every house of queues obeys, nothing left behind, and twice the same."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from pdproxy.aio.deadline import Deadline
from pdproxy.kv_signals.board import Expectation
from pdproxy.loadtest.lengths import Fixed, Independent
from pdproxy.openai.request import GenerationRequest
from pdproxy.orchestrator.attempt import Attempt
from pdproxy.orchestrator.context import RequestContext
from pdproxy.simulate.engines import Answer, Transfer
from pdproxy.simulate.faults import read_faults
from pdproxy.simulate.legs import StreamLeg
from pdproxy.simulate.prompts import Prompt
from pdproxy.simulate.simulation import Result, simulate
from pdproxy.simulate.speed import Speed
from pdproxy.simulate.traffic import Traffic
from pdproxy.telemetry.attempt_record import AttemptRecord
from tests.fakes.simulated import ROUND, Exponential, make_plan

ROOMY = replace(
    ROUND, pd_buffer_pages=1_000_000, max_batch=1_000_000, chunk_size=256, link_bytes_per_s=1e15, kv_cache_bytes=0
)
"""Nobody waits for pages, for the link, for the batch or for room in it."""


def mean(result: Result, name: str) -> float:
    histogram = {**result.figures.latencies, **result.figures.phases}[name]
    assert histogram.mean_s is not None
    return histogram.mean_s


# ── laws ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_littles_law() -> None:
    """As many are under way, on average, as come in the time that one of them takes."""
    traffic = Traffic(
        sizes=Independent(Exponential(2000), Exponential(100)), rate=20.0, process="gamma", burstiness=3.0
    )
    result = simulate(make_plan(prefillers=4, decoders=3, num_requests=3000, traffic=traffic, speed=Speed()))
    assert result.figures.outcomes == {"done": 3000}
    per_s = 3000 / result.simulated_s
    assert result.in_flight.mean(result.simulated_s) == pytest.approx(per_s * mean(result, "e2e"), rel=1e-6)
    assert result.in_flight.now == 0


def test_a_prefiller_with_memoryless_service_is_an_m_m_1() -> None:
    """Arrivals 6/s, service 10/s: 1/(10 − 6) s on average from the prefill leg to its reply."""
    speed = replace(ROOMY, prefill_s=0.0, prefill_token_s=1e-5, transfer_s=0.0)
    traffic = Traffic(sizes=Independent(Exponential(10_000), Fixed(2)), rate=6.0)
    result = simulate(make_plan(num_requests=5_000, traffic=traffic, speed=speed, seed=2))
    assert mean(result, "prefill") == pytest.approx(1 / (10 - 6), rel=0.12)
    assert result.use["prefillers_busy"]["mean"] == pytest.approx(0.6, rel=0.03)


def test_a_prefiller_with_constant_service_waits_half_as_long() -> None:
    """M/D/1: x + ρx/(2(1 − ρ))."""
    speed = replace(ROOMY, prefill_s=0.1, prefill_token_s=0.0, transfer_s=0.0)
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(2)), rate=7.0)
    result = simulate(make_plan(num_requests=4_000, traffic=traffic, speed=speed))
    assert mean(result, "prefill") == pytest.approx(0.1 + 0.7 * 0.1 / (2 * 0.3), rel=0.1)


def test_a_decoder_whose_steps_grow_with_the_batch_is_shared_by_all() -> None:
    """M/G/1 with processor sharing: x/(1 − ρ), for answers of any lengths."""
    speed = replace(ROOMY, prefill_s=0.0, prefill_token_s=0.0, transfer_s=0.0, step_s=0.0, step_sequence_s=0.001)
    traffic = Traffic(sizes=Independent(Fixed(10), Exponential(101)), rate=5.0)
    result = simulate(make_plan(num_requests=4_000, traffic=traffic, speed=speed))
    load = 5.0 * 0.001 * 100
    assert mean(result, "decode") == pytest.approx(0.1 / (1 - load), rel=0.1)
    assert result.use["decoders_busy"]["mean"] == pytest.approx(load, rel=0.05)


def test_steps_that_cost_the_same_for_any_batch_keep_nobody_waiting() -> None:
    """M/G/∞."""
    speed = replace(ROOMY, prefill_s=0.0, prefill_token_s=0.0, transfer_s=0.0, step_s=0.02)
    traffic = Traffic(sizes=Independent(Fixed(10), Fixed(51)), rate=30.0)
    result = simulate(make_plan(num_requests=3000, traffic=traffic, speed=speed))
    assert mean(result, "decode") == pytest.approx(1.0)
    assert result.use["mean_batch"] == pytest.approx(30.0, rel=0.1)


def test_more_than_the_fleet_can_do_is_not_done() -> None:
    """Throughput stops at the prefiller's 10/s."""
    speed = replace(ROOMY, prefill_s=0.1, prefill_token_s=0.0)
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(2)), rate=20.0)
    result = simulate(make_plan(num_requests=1000, traffic=traffic, speed=speed, num_warmup=100))
    assert result.offered_per_s == pytest.approx(20.0, rel=0.1)
    assert result.done_per_s == pytest.approx(10.0, rel=0.02)
    assert result.figures.outcomes == {"done": 900}


def test_a_closed_loop_has_so_many_under_way() -> None:
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(11)), clients=5)
    result = simulate(make_plan(prefillers=5, decoders=1, num_requests=200, traffic=traffic, speed=ROOMY))
    assert result.in_flight.most == 5
    assert result.figures.outcomes == {"done": 200}
    assert result.figures.count == 200


# ── what counts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nobody_is_busy_for_longer_than_there_is_time() -> None:
    """A prefiller takes 1.5 s for each prompt, and ten prompts come a second: it is busy from the first to the last of
    them, and the work that is left then is done later."""
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(11)), rate=10.0, process="constant")
    result = simulate(make_plan(num_requests=100, traffic=traffic, speed=ROOMY))
    assert result.use["prefillers_busy"]["mean"] == pytest.approx(1.0)
    assert 0.0 < result.use["decoders_busy"]["mean"] < 1.0


def test_the_answers_of_one_client_are_as_many_as_its_questions_before_the_last() -> None:
    traffic = Traffic(sizes=Independent(Fixed(100), Fixed(11)), clients=1)
    result = simulate(make_plan(num_requests=3, traffic=traffic, speed=ROOMY))
    assert result.done_per_s == pytest.approx(1 / mean(result, "e2e"))
    assert result.done_per_s == result.offered_per_s


def test_what_comes_before_does_not_count() -> None:
    result = simulate(make_plan(num_requests=50, num_warmup=20, speed=ROOMY))
    assert result.figures.count == result.figures.latencies["e2e"].count == 30
    assert result.offered_per_s == pytest.approx(1.0)
    assert result.ledger["granted"] == 50


def test_the_json_says_what_is_asked_for() -> None:
    plain = json.loads(json.dumps(simulate(make_plan(num_requests=50)).as_plain()))
    assert plain["requests"] == 50
    assert plain["wall_s"] > 0.0
    assert plain["outcomes"] == {"done": 50}
    assert plain["plan"]["prefillers"] == 1
    assert plain["ledger"]["held"] == 0


# ── conservation and determinism ────────────────────────────────────────────────────────────────────────────────────

STORM = (
    "3 kill decode-0; 9 start decode-0; 4 freeze prefill-1 for 6; 5 slow decode-1 by 4 for 10; 7 kill prefill-0; "
    "12 start prefill-0; 15 freeze decode-2 for 8; 20 kill decode-1; 22 kill decode-2; 26 start decode-1"
)


def storm(seed: int, policy: str = "power_of_two") -> Result:
    traffic = Traffic(sizes=Independent(Exponential(900), Exponential(60)), rate=40.0, num_groups=5)
    return simulate(
        make_plan(
            prefillers=3,
            decoders=3,
            num_requests=1200,
            seed=seed,
            traffic=traffic,
            speed=replace(Speed(), pd_buffer_pages=40, max_batch=16),
            settings={"prefill_policy": policy, "decode_policy": policy, "slot_timeout_s": 5.0},
            patience_s=3.0,
            faults=tuple(read_faults(STORM)),
        )
    )


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_behind_whatever_happens(seed: int) -> None:
    """`simulate` itself raises `IntegrityError` where pages, signals, legs or tokens do not add up in the end."""
    result = storm(seed)
    assert result.figures.count == 1200
    assert result.ledger["held"] == 0
    assert result.ledger["granted"] == result.ledger["returned"] > 1000
    assert result.use["most_pages"] <= 40
    assert result.figures.num_retries > 0


def plain(result: Result) -> dict[str, Any]:
    return {name: value for name, value in result.as_plain().items() if name != "wall_s"}


def test_the_same_seed_is_the_same_run() -> None:
    assert plain(storm(7)) == plain(storm(7))
    assert plain(storm(7)) != plain(storm(8))


def test_so_it_is_in_another_process() -> None:
    """Whose hashes and addresses are others."""
    code = (
        "import json; from tests.pdproxy.simulate.test_simulation import plain, storm; "
        "print(json.dumps(plain(storm(7, 'least_slots')), sort_keys=True))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(told) == 1
    assert json.loads(told.pop()) == json.loads(json.dumps(plain(storm(7, "least_slots"))))


def test_requests_that_are_answered_leave_no_cycles_behind() -> None:
    """Which would pile up, for cycles are hardly ever looked for while it runs."""
    gc.collect()
    there_before = Counter(type(one).__name__ for one in gc.get_objects())
    gc.disable()
    try:
        result = simulate(make_plan(num_requests=200, speed=ROOMY))
        left = Counter(type(one).__name__ for one in gc.get_objects()) - there_before
    finally:
        gc.enable()
    assert result.figures.outcomes == {"done": 200}
    kinds = (
        Answer,
        Attempt,
        Expectation,
        AttemptRecord,
        GenerationRequest,
        Deadline,
        Prompt,
        StreamLeg,
        Transfer,
        RequestContext,
    )
    assert {kind.__name__: left[kind.__name__] for kind in kinds} == dict.fromkeys([one.__name__ for one in kinds], 0)
