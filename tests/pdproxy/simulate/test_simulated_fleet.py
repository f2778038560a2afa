"""One request, or a few, through the whole simulated fleet: every second of them is accounted for."""

from __future__ import annotations

import pytest

from pdproxy.simulate.faults import read_faults
from pdproxy.simulate.simulation import Result, simulate
from tests.fakes.simulated import ROUND, at, make_plan


def mean(result: Result, name: str) -> float:
    histogram = {**result.figures.latencies, **result.figures.phases}[name]
    assert histogram.mean_s is not None
    return histogram.mean_s


def test_every_second_of_a_request_is_accounted_for() -> None:
    result = simulate(make_plan())
    assert result.figures.outcomes == {"done": 1}
    assert result.figures.paths == {"disaggregated": 1}
    expected = {"slot_wait": 0.0, "prefill": 1.5, "kv_wait": 1.25, "first_byte": 0.0, "decode": 1.0}
    assert {name: mean(result, name) for name in expected} == pytest.approx(expected)
    assert mean(result, "ttft") == pytest.approx(2.75)
    assert mean(result, "e2e") == pytest.approx(3.75)
    assert mean(result, "tpot") == pytest.approx(0.1)
    assert result.ledger == {"granted": 1, "returned": 1, "held": 0}
    assert result.use["most_pages"] == 1


def test_what_servers_need_for_themselves_comes_first() -> None:
    from msgspec.structs import replace

    result = simulate(make_plan(speed=replace(ROUND, overhead_s=0.125)))
    assert mean(result, "ttft") == pytest.approx(2.875)


def test_prompts_are_read_one_after_the_other_and_their_kv_takes_the_link_in_turn() -> None:
    result = simulate(make_plan(num_requests=2, traffic=at((0.0, 100, 11), (0.0, 300, 11))))
    # The first is there at 1.5 + 1.25, the second, of 3.5 s, at 5 + 0.25 + 3.
    assert result.figures.latencies["ttft"].max_s == pytest.approx(8.25)
    assert mean(result, "ttft") == pytest.approx((2.75 + 8.25) / 2)


def test_pages_are_waited_for() -> None:
    """A buffer of ten pages: the second prompt of six waits until the first one's have been taken."""
    result = simulate(make_plan(num_requests=2, prefillers=2, traffic=at((0.0, 600, 11), (0.0, 600, 11))))
    assert result.figures.phases["slot_wait"].max_s == pytest.approx(6.5 + 0.25 + 6.0)
    assert result.use["most_pages"] == 6
    assert result.ledger == {"granted": 12, "returned": 12, "held": 0}


def test_without_admission_the_decoder_defends_itself() -> None:
    plan = make_plan(
        num_requests=2, prefillers=2, traffic=at((0.0, 600, 11), (0.0, 600, 11)), settings={"admission": False}
    )
    result = simulate(plan)
    assert result.figures.outcomes == {"done": 2}
    assert result.figures.phases["slot_wait"].max_s == 0.0
    assert result.use["most_pages"] == 6  # never twelve


def test_a_full_batch_is_waited_for_with_the_kv_in_the_buffer() -> None:
    from msgspec.structs import replace

    plan = make_plan(
        num_requests=2, prefillers=2, traffic=at((0.0, 100, 101), (0.0, 100, 101)), speed=replace(ROUND, max_batch=1)
    )
    result = simulate(plan)
    # The second one's KV is there a second after the first one's, which has ten seconds to write.
    assert result.figures.phases["first_byte"].max_s == pytest.approx(9.0)
    assert result.use["most_pages"] == 2


def test_one_token_is_the_prefillers() -> None:
    result = simulate(make_plan(traffic=at((0.0, 100, 1), (9.0, 100, 1)), num_requests=2))
    assert result.figures.paths == {"prefill_only": 2}
    assert mean(result, "e2e") == pytest.approx(1.5)
    assert result.ledger["granted"] == 0


def test_a_prompt_that_never_fits_is_read_by_the_decoder_which_writes_nothing_meanwhile() -> None:
    result = simulate(make_plan(num_requests=2, traffic=at((0.0, 100, 201), (5.0, 2000, 11))))
    assert result.figures.paths == {"disaggregated": 1, "local": 1}
    # Alone, the first one ends at 22.75; for 20.5 s the decoder reads.
    assert result.figures.latencies["e2e"].max_s == pytest.approx(22.75 + 20.5)


def test_an_answer_longer_than_any_silence_shows_signs_of_life() -> None:
    result = simulate(make_plan(traffic=at((0.0, 100, 2001), (1.0, 100, 11)), num_requests=2))
    assert result.figures.outcomes == {"done": 2}
    assert result.figures.latencies["e2e"].max_s == pytest.approx(202.75)


def test_a_client_without_patience_leaves_and_leaves_nothing_behind() -> None:
    result = simulate(make_plan(num_requests=20, patience_s=4.0, traffic=at(*((0.1 * i, 100, 11) for i in range(20)))))
    outcomes = result.figures.outcomes
    assert outcomes["client_gone"] + outcomes["done"] == 20
    assert outcomes["done"] >= 1
    assert result.ledger["held"] == 0
    assert result.figures.latencies["ttft"].max_s <= 4.0
    assert result.figures.num_failed == 0


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def faulty(faults: str, **more: object) -> Result:
    plan: dict[str, object] = {"num_requests": 30, "traffic": at(*((2.0 * i, 100, 101) for i in range(30)))}
    return simulate(make_plan(faults=tuple(read_faults(faults)), **(plan | more)))  # type: ignore[arg-type]


def test_another_decoder_goes_on_where_one_has_died() -> None:
    result = faulty("20.1 kill decode-0; 40 start decode-0", decoders=2, prefillers=3)
    assert result.figures.outcomes == {"done": 30}
    assert result.figures.num_retries > 0
    assert result.ledger["held"] == 0


def test_a_fleet_that_comes_back_serves_again() -> None:
    result = faulty("10.1 kill decode-0; 20 start decode-0", prefillers=3)
    outcomes = result.figures.outcomes
    assert outcomes["failed"] > 0  # there was nobody else
    assert outcomes["done"] > outcomes["failed"]
    assert result.ledger["held"] == 0


def test_prompts_of_a_dead_prefiller_are_read_by_another() -> None:
    result = faulty("20.1 kill prefill-0; 30 start prefill-0", prefillers=3, decoders=2)
    assert result.figures.outcomes == {"done": 30}
    assert result.ledger["held"] == 0


def test_kv_under_way_from_a_dead_prefiller_is_given_up() -> None:
    """One of them dies while the first prompt's KV is on the link from it."""
    results = [faulty(f"2 kill {whom}; 5 start {whom}", prefillers=2) for whom in ("prefill-0", "prefill-1")]
    for result in results:
        assert result.figures.outcomes == {"done": 30}
        assert result.ledger["held"] == 0
    assert sum(result.figures.num_retries for result in results) >= 1


@pytest.mark.parametrize("whom", ["prefill-0", "decode-0"])
def test_what_stood_still_goes_on(whom: str) -> None:
    result = faulty(f"5 freeze {whom} for 8", prefillers=3, decoders=2)
    assert result.figures.outcomes == {"done": 30}
    assert result.figures.latencies["e2e"].max_s > 12.75 + 2.5
    assert result.ledger["held"] == 0


def test_one_that_never_goes_on_is_left_behind() -> None:
    result = faulty("5 freeze decode-0", prefillers=3, decoders=2)
    outcomes = result.figures.outcomes
    assert outcomes["done"] >= 20
    assert result.ledger["held"] == 0


def test_a_straggler_is_slow() -> None:
    usual, slowed = faulty("", prefillers=3), faulty("0 slow decode-0 by 1.5", prefillers=3)
    assert mean(slowed, "decode") == pytest.approx(1.5 * mean(usual, "decode"), rel=0.01)


def test_some_are_slow_by_chance_and_always_the_same_ones() -> None:
    plan = make_plan(prefillers=10, decoders=10, stragglers="0.2x4", num_requests=20)
    one, other = simulate(plan), simulate(plan)
    assert len(one.stragglers) == 4
    assert one.stragglers == other.stragglers
