"""Several fronts and a leader under simulated time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.loadtest.fault_schedule import FaultError
from pdproxy.simulate.engines import Decoder
from pdproxy.simulate.errors import SimulationError
from pdproxy.simulate.faults import read_faults
from pdproxy.simulate.messages import Told
from pdproxy.simulate.simulation import Result, simulate
from pdproxy.simulate.traffic import Traffic
from pdproxy.telemetry.record import Outcome
from tests.fakes.simulated import fixed, make_plan


def busy(proxies: int = 3, **more: Any) -> Result:
    """A fleet whose decoders have room for two requests each, which is less than are asked."""
    traffic = Traffic(sizes=fixed(500, 11), process="poisson", rate=2.0)
    return simulate(
        make_plan(
            prefillers=8,
            decoders=2,
            num_requests=120,
            traffic=traffic,
            settings={"slot_timeout_s": 1000.0, "request_timeout_s": 2000.0, "prefill_timeout_s": 1000.0},
            proxies=proxies,
            **more,
        )
    )


@pytest.mark.parametrize("proxies", [2, 3])
def test_behind_several_proxies_every_request_has_an_outcome_and_nothing_is_held(proxies: int) -> None:
    result = busy(proxies)
    assert result.figures.outcomes == {Outcome.DONE: 120}
    assert result.ledger["granted"] == result.ledger["returned"] == 5 * 120
    assert result.use["most_pages"] == 10  # the decoders were full
    assert result.figures.phases["slot_wait"].mean_s > 1.0  # and waited for
    assert result.num_without_room == 0
    assert 5 < result.fronts["messages_per_request"] < 30


def test_a_longer_way_to_the_leader_is_waited_for() -> None:
    waits = []
    for delay_s in (0.0, 0.1, 1.0):
        plan = make_plan(proxies=2, link_delay_s=delay_s, traffic=Traffic(sizes=fixed(), rate=0.1), num_requests=4)
        waits.append(simulate(plan).figures.phases["slot_wait"].mean_s)
    assert waits == pytest.approx([0.0, 0.2, 2.0])


def test_a_leader_that_grants_twice_what_fits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Decoder.tell

    def boast(self: Decoder) -> Told:
        told = tell(self)
        told.num_pages *= 2
        return told

    monkeypatch.setattr(Decoder, "tell", boast)
    assert busy().num_without_room > 0


def test_the_same_seed_is_the_same_run_behind_several_proxies() -> None:
    def plain() -> str:
        return json.dumps({**busy(link_delay_s=0.003).as_plain(), "wall_s": 0.0})

    assert plain() == plain()


def test_one_proxy_has_no_link() -> None:
    near, far = busy(1, link_delay_s=0.0).as_plain(), busy(1, link_delay_s=5.0).as_plain()
    assert near | {"wall_s": 0.0} == far | {"wall_s": 0.0}
    assert "fronts" not in near
    assert "proxies" not in near["plan"]


def test_what_is_lost_on_the_way_comes_later_and_in_order() -> None:
    result = busy(link_loss=0.3)
    assert result.figures.outcomes == {Outcome.DONE: 120}
    assert result.num_without_room == 0
    assert result.figures.phases["slot_wait"].mean_s > busy().figures.phases["slot_wait"].mean_s


@pytest.mark.parametrize("faults", ["20 freeze front-1 for 2", "20 freeze front-1 for 30", "20 freeze leader for 3"])
def test_what_stood_still_between_proxies_goes_on(faults: str) -> None:
    result = busy(faults=tuple(read_faults(faults)))
    assert sum(result.figures.outcomes.values()) == 120
    # Who has come to a front without a leader waits for `term_s`, and is refused.
    assert result.figures.outcomes[Outcome.DONE] >= 90, result.figures.outcomes
    assert result.num_without_room == 0


def test_a_front_that_was_taken_for_gone_hears_of_the_fleet_again() -> None:
    result = busy(faults=tuple(read_faults("10 freeze front-1 for 10; 30 kill decode-0; 31 start decode-0")))
    assert result.figures.outcomes[Outcome.DONE] > 100, (result.figures.outcomes, result.figures.errors)


def test_what_a_front_held_that_has_died_comes_back() -> None:
    result = busy(faults=tuple(read_faults("20 kill front-1")))
    assert sum(result.figures.outcomes.values()) == 120
    assert 0 < result.figures.errors["front_died"] == result.figures.num_failed < 20, result.figures.outcomes
    assert result.ledger["held"] == 0
    assert result.num_without_room == 0


@pytest.mark.parametrize("faults", ["1 slow front-1 by 2", "1 kill leader", "1 freeze front-7"])
def test_what_cannot_happen_to_a_front_is_said(faults: str) -> None:
    with pytest.raises((SimulationError, FaultError), match=r"front-1|leader|front-7"):
        busy(faults=tuple(read_faults(faults)))
