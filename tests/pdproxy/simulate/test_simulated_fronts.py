"""Several fronts and a leader under simulated time."""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import random
from typing import Any

import pytest

from pdproxy.fronts.hub import Session
from pdproxy.loadtest.fault_schedule import FaultError
from pdproxy.simulate import loop as virtual
from pdproxy.simulate.engines import Decoder
from pdproxy.simulate.errors import SimulationError
from pdproxy.simulate.faults import read_faults
from pdproxy.simulate.messages import Told
from pdproxy.simulate.process import Process
from pdproxy.simulate.simulated_link import Line, Network, Weather
from pdproxy.simulate.simulated_proxies import Proxies
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


@pytest.mark.parametrize(
    "faults",
    ["20 freeze front-1 for 2", "20 freeze front-1 for 30", "20 freeze leader for 2", "20 cut front-1 for 2"],
)
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


@pytest.mark.parametrize("faults", ["1 slow front-1 by 2", "1 cut leader", "1 kill leader for 3", "1 freeze front-7"])
def test_what_cannot_happen_to_a_front_is_said(faults: str) -> None:
    with pytest.raises((SimulationError, FaultError), match=r"front-1|leader|front-7"):
        busy(faults=tuple(read_faults(faults)))


@pytest.mark.parametrize("faults", ["20 kill leader", "20 freeze leader for 15", "20 kill leader; 36 kill leader"])
def test_another_leads_and_grants_no_more_than_fits(faults: str) -> None:
    result = busy(faults=tuple(read_faults(faults)))
    # What had no KV yet when the lease was over is cut; nothing else fails.
    assert sum(result.figures.outcomes.values()) == 120
    assert result.figures.num_failed == result.figures.errors["no_ready_instance"] < 10
    assert result.fronts["leaders"] == 2 + faults.count(";")
    assert result.figures.phases["slot_wait"].max_s > 4.0  # who comes while nobody leads waits for the next one
    assert result.num_without_room == 0
    assert result.ledger["held"] == 0


def test_a_leader_that_awaits_no_claims_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Proxies._make_leader
    monkeypatch.setattr(Proxies, "_make_leader", lambda self, claims_until=-math.inf: make(self))
    monkeypatch.setattr(Session, "claim", lambda self, message: None)
    results = [busy(faults=tuple(read_faults(f"{at} kill leader"))) for at in (20, 25, 30)]
    assert any(result.num_without_room for result in results)


def test_a_front_that_stood_still_over_a_change_of_leader_sends_nothing_that_was_granted_before() -> None:
    result = busy(faults=tuple(read_faults("20 freeze front-1 for 30; 20.5 kill leader")))
    assert sum(result.figures.outcomes.values()) == 120
    assert result.num_without_room == 0


def test_a_front_takes_the_place_of_one_that_was_killed() -> None:
    result = busy(faults=tuple(read_faults("; ".join(f"20 kill front-{number} for 5" for number in range(3)))))
    outcomes = result.figures.outcomes
    assert 0 < result.figures.errors["front_died"] == outcomes[Outcome.FAILED] < 60
    assert outcomes[Outcome.DONE] == 120 - outcomes[Outcome.FAILED]
    assert result.num_without_room == 0


def test_a_client_of_a_front_that_stands_still_may_leave() -> None:
    result = busy(faults=tuple(read_faults("20 freeze front-1 for 30")), patience_s=20.0)
    assert set(result.figures.outcomes) <= {Outcome.DONE, Outcome.CLIENT_GONE}
    assert sum(result.figures.outcomes.values()) == 120


def test_the_leaders_share_of_a_core_is_told_where_its_messages_have_a_cost() -> None:
    free, costly = busy(), busy(message_cpu_s=1e-3)
    assert free.fronts["leader_core_share"] is None
    per_s = costly.fronts["messages_per_request"] * 120 / costly.simulated_s
    assert costly.fronts["leader_core_share"] >= per_s * 1e-3 > 0.0


# ── processes and links ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_that_stands_still_runs_nothing_and_goes_on() -> None:
    async def main() -> tuple[list[float], list[float]]:
        loop = asyncio.get_running_loop()
        frozen, other = Process(), Process()
        ticks: dict[Process, list[float]] = {frozen: [], other: []}

        async def tick(process: Process) -> None:
            while len(ticks[process]) < 6:
                await asyncio.sleep(1.0)
                ticks[process].append(loop.time())

        tasks = [process.begin(tick(process)) for process in ticks]
        loop.call_at(2.5, frozen.freeze)
        loop.call_at(2.6, frozen.freeze)
        loop.call_at(5.25, frozen.thaw)
        await asyncio.wait(tasks)
        return ticks[frozen], ticks[other]

    stood, ran = virtual.run(main())
    assert stood == pytest.approx([1.0, 2.0, 5.25, 6.25, 7.25, 8.25])
    assert ran == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_what_is_said_over_a_bad_link_comes_once_and_in_order() -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")

    async def main() -> tuple[list[int], list[float]]:
        loop, dice = asyncio.get_running_loop(), random.Random(seed)
        network = Network(Weather(delay_s=0.1, jitter_s=0.5, loss=0.3, retransmit_s=0.2), dice)
        line = Line(network, contextvars.copy_context())
        heard: list[int] = []
        times: list[float] = []

        def hear(number: int) -> None:
            heard.append(number)
            times.append(loop.time())

        line.handlers = {int: hear}
        for at in (10.0, 30.0):
            loop.call_at(at, network.cut)
            loop.call_at(at + 5.0, network.mend)
        for number in range(1000):
            (line.send if dice.random() < 0.5 else line.send_soon)(number)
            await asyncio.sleep(dice.uniform(0.0, 0.1))
        await asyncio.sleep(20.0)
        return heard, times

    heard, times = virtual.run(main())
    assert heard == list(range(1000))
    assert not [at for at in times if 10.0 < at < 15.0 or 30.0 < at < 35.0]
