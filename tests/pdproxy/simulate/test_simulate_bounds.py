"""The bounds of a simulation's figures: whatever was simulated, none of them says what cannot be."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pdproxy.loadtest.lengths import Independent
from pdproxy.loadtest.slo import Slo
from pdproxy.simulate import tables
from pdproxy.simulate.faults import read_faults
from pdproxy.simulate.plan import Plan
from pdproxy.simulate.simulation import Result, simulate
from pdproxy.simulate.traffic import Traffic
from tests.fakes.simulated import ROUND, Exponential, make_plan


def random_plan(seed: int) -> Plan:
    """Returns a small fleet under too little, enough or far too much traffic; now and then a decoder dies."""
    dice = random.Random(seed)
    num_requests = dice.choice((1, 2, 5, 30, 60))
    traffic = Traffic(
        sizes=Independent(Exponential(dice.choice((10, 100))), Exponential(dice.choice((1, 20)))),
        rate=10 ** dice.uniform(-1, 2),
        process=dice.choice(("poisson", "constant", "gamma")),
        clients=dice.choice((0, 0, 1, 4)),
        think_s=dice.choice((0.0, 0.5)),
        num_groups=dice.choice((0, 3)),
    )
    return make_plan(
        prefillers=dice.choice((1, 3)),
        decoders=dice.choice((1, 2)),
        num_requests=num_requests,
        num_warmup=dice.choice((0, num_requests // 2)),
        seed=seed,
        traffic=traffic,
        speed=replace(ROUND, step_sequence_s=0.01, prefill_batch_tokens=dice.choice((1, 500))),
        slo=Slo.parse("ttft:p95<3,errors<5%"),
        faults=tuple(read_faults(dice.choice(("", "", "1 kill decode-0; 3 start decode-0")))),
        patience_s=dice.choice((None, None, 5.0)),
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_no_figure_is_out_of_bounds_whatever_was_simulated(seed: int) -> None:
    note(f"seed {seed}")
    plan = random_plan(seed)
    result = simulate(plan)
    plain = result.as_plain()
    check_shares(plain)
    check_counts(result, plain)
    check_rates(result)
    for found in (*(plain[f"{name}_s"] for name in ("ttft", "tpot", "e2e")), *plain["phases_s"].values()):
        check_order(found)
    row = tables.rate_rows([result])[1][0]
    assert all(float(cell[:-2]) <= 100 for cell in row if cell.endswith(" %"))


def check_shares(plain: dict[str, Any]) -> None:
    use = plain["use"]
    for side in ("prefillers_busy", "decoders_busy"):
        shares = [use[side][name] for name in ("least", "mean", "most")]
        assert shares == [None] * 3 or 0 <= shares[0] <= shares[1] <= shares[2] <= 1
    assert 0 <= use["cached_share"] <= 1
    assert plain["good_share"] is None or 0 <= plain["good_share"] <= 1
    assert 0 <= use["mean_batch"] <= ROUND.max_batch


def check_counts(result: Result, plain: dict[str, Any]) -> None:
    figures = result.figures
    num_done = figures.outcomes["done"]
    assert sum(plain["outcomes"].values()) == figures.count == result.plan.num_requests - result.plan.num_warmup
    assert 0 <= figures.num_good <= num_done
    assert figures.num_failed + num_done + figures.outcomes["client_gone"] == figures.count
    assert plain["e2e_s"]["count"] == plain["ttft_s"]["count"] == sum(plain["paths"].values()) == num_done
    assert plain["tpot_s"]["count"] <= num_done


def check_rates(result: Result) -> None:
    """Each rate times its seconds is a count, and there are no more answers than requests until the last one."""
    assert result.in_flight.mean(result.simulated_s) <= result.in_flight.most
    if result.offered_per_s is None or result.done_per_s is None:
        return
    span_s = (result.figures.count - 1) / result.offered_per_s
    num_done = result.done_per_s * span_s
    assert num_done == pytest.approx(round(num_done), abs=1e-6)
    assert num_done < result.plan.num_requests


def check_order(found: dict[str, Any]) -> None:
    there = [found[name] for name in ("p50", "p90", "p95", "p99", "max") if found[name] is not None]
    assert len(there) == (5 if found["count"] else 1)
    assert all(low <= high for low, high in pairwise(there))
    assert found["mean"] is None or found["mean"] <= there[-1] * (1 + 1e-5)
