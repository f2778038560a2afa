"""The sweep: it finds where the target breaks, in few steps, and says nothing for a generator that was late."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
from msgspec import structs

from pdproxy.loadtest.arrivals import Pace
from pdproxy.loadtest.errors import LoadTestError
from pdproxy.loadtest.record import Run
from pdproxy.loadtest.slo import Slo
from pdproxy.loadtest.sweep import Search, Step, sweep
from pdproxy.loadtest.workload import Closed, Open, Workload
from tests.fakes.measured_runs import health, record, run_of

SLO = Slo.parse("ttft:p99<0.5")
WORKLOAD = Workload(seed=1, pace=Open(pace=Pace(rate=2.0)), duration_s=10.0)


def looked_at(search: Search, is_met: Callable[[float], bool]) -> list[float]:
    rates = []
    while (rate := search.next_rate()) is not None:
        rates.append(rate)
        search.found(rate, is_met=is_met(rate))
    return rates


@pytest.mark.parametrize("knee", [2.0, 2.1, 7.9, 8.0, 11.3, 100.0, 1000.0])
def test_it_finds_the_highest_rate(knee: float) -> None:
    search = Search(2.0, precision=0.02, most_runs=40)
    rates = looked_at(search, lambda rate: rate <= knee)
    assert search.best is not None
    assert search.best <= knee <= search.best * 1.02
    assert len(rates) == len(set(rates)) < 20


def test_it_doubles_until_the_target_breaks_and_then_halves_the_distance() -> None:
    assert looked_at(Search(2.0, precision=0.1), lambda rate: rate <= 11) == [2, 4, 8, 16, 12, 10, 11]


def test_a_first_rate_that_is_too_high_is_halved() -> None:
    search = Search(16.0, precision=0.1)
    assert looked_at(search, lambda rate: rate <= 3)[:4] == [16, 8, 4, 2]
    assert search.best == 3


def test_where_nothing_meets_the_target_it_gives_up() -> None:
    search = Search(64.0)
    assert looked_at(search, lambda rate: False)[-1] == 1
    assert search.best is None


def test_it_goes_no_further_than_it_may() -> None:
    search = Search(2.0, most=10.0)
    assert looked_at(search, lambda rate: True) == [2, 4, 8, 10]
    assert (search.best, search.broken) == (10, None)
    assert len(looked_at(Search(2.0, precision=1e-9, most_runs=7), lambda rate: rate < 5)) == 7


@pytest.mark.parametrize("fields", [{"first": 0.0}, {"first": 2.0, "most": 1.0}, {"first": 1.0, "precision": 0.0}])
def test_what_cannot_be_searched(fields: dict[str, float]) -> None:
    with pytest.raises(LoadTestError, match="a sweep's first rate is above 0"):
        Search(**fields)


class Service:
    """Answers in time up to `knee` requests per second. The generator is late above `lateness`."""

    def __init__(self, knee: float, *, lateness: float = 1e9, stops_at: float = 1e9) -> None:
        self.asked: list[Workload] = []
        self._knee = knee
        self._lateness = lateness
        self._stops_at = stops_at

    async def __call__(self, workload: Workload) -> Run:
        assert isinstance(workload.pace, Open)
        rate = workload.pace.pace.rate
        self.asked.append(workload)
        return run_of(
            [record(0, ttft_s=0.1 if rate <= self._knee else 1.0)],
            health=health(late_p99_s=1.0 if rate > self._lateness else 0.0),
            is_interrupted=rate >= self._stops_at,
        )

    @property
    def rates(self) -> list[float]:
        return [one.pace.pace.rate for one in self.asked if isinstance(one.pace, Open)]


async def test_each_step_is_told_as_it_ends() -> None:
    service, told = Service(knee=5.0), list[Step]()
    steps = await sweep(Search(2.0, precision=0.3), WORKLOAD, SLO, service, told.append)
    assert told == steps
    assert [(step.rate, step.is_met) for step in steps] == [(2, True), (4, True), (8, False), (6, False), (5, True)]
    assert service.rates == [2, 4, 8, 6, 5]


async def test_every_rate_has_questions_of_its_own_and_the_same_ones_every_time() -> None:
    first, second = Service(knee=5.0), Service(knee=5.0)
    for service in (first, second):
        await sweep(Search(2.0), WORKLOAD, SLO, service, lambda step: None)
    seeds = [workload.seed for workload in first.asked]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [workload.seed for workload in second.asked]


async def test_a_late_generator_cannot_say_that_the_target_was_met() -> None:
    search = Search(2.0, precision=0.3)
    await sweep(search, WORKLOAD, SLO, Service(knee=100.0, lateness=5.0), lambda step: None)
    assert search.best == 5


async def test_a_generator_that_was_late_for_once_measures_the_rate_again() -> None:
    class LateForOnce(Service):
        async def __call__(self, workload: Workload) -> Run:
            run = await super().__call__(workload)
            is_second = len(self.asked) == 2
            return structs.replace(run, health=health(late_p99_s=1.0)) if is_second else run

    search, service = Search(2.0, precision=0.3), LateForOnce(knee=5.0)
    steps = await sweep(search, WORKLOAD, SLO, service, lambda step: None)
    assert service.rates == [2, 4, 4, 8, 6, 5]
    _, first, again, *_ = service.asked
    assert list(first.due_times()) == list(again.due_times())
    for one, other in islice(zip(first.sessions(), again.sessions(), strict=True), 20):
        assert one.asks[0].prompt_tokens == other.asks[0].prompt_tokens
        assert one.asks[0].pieces != other.asks[0].pieces
    assert all(step.run.health.is_trusted for step in steps)
    assert search.best == 5


@pytest.mark.parametrize(("late_s", "num_tries"), [(0.1, 1), (0.6, 3)])
async def test_what_no_lateness_explains_is_not_measured_again(late_s: float, num_tries: int) -> None:
    """A second to the first token where half of one is allowed."""

    class Late(Service):
        async def __call__(self, workload: Workload) -> Run:
            return structs.replace(await super().__call__(workload), health=health(late_p99_s=late_s))

    service = Late(knee=0.0)
    (step,) = await sweep(Search(2.0, most_runs=1), WORKLOAD, SLO, service, lambda step: None)
    assert service.rates == [2.0] * num_tries
    assert (step.is_met, step.is_known) == (False, num_tries == 1)


async def test_a_rate_that_was_met_in_spite_of_the_generators_lateness_counts_as_met() -> None:
    """A tenth of a second to the first token, and a late generator, where half of one is allowed."""

    class Late(Service):
        async def __call__(self, workload: Workload) -> Run:
            return structs.replace(await super().__call__(workload), health=health(late_p99_s=0.2))

    search, service = Search(2.0, precision=0.3), Late(knee=5.0)
    steps = await sweep(search, WORKLOAD, SLO, service, lambda step: None)
    assert [(step.rate, step.is_met, step.is_known) for step in steps] == [
        *((2, True, True), (4, True, True), (8, False, True), (6, False, True), (5, True, True)),
    ]
    assert service.rates == [2, 4, 8, 6, 5], "no rate was measured again"


async def test_a_run_that_was_stopped_is_the_last_and_decides_nothing() -> None:
    search = Search(2.0)
    steps = await sweep(search, WORKLOAD, SLO, Service(knee=100.0, stops_at=8.0), lambda step: None)
    assert [step.rate for step in steps] == [2, 4, 8]
    assert (search.best, search.broken) == (4, None)


async def test_what_cannot_be_swept() -> None:
    service = Service(knee=5.0)
    with pytest.raises(LoadTestError, match="a sweep needs a target"):
        await sweep(Search(2.0), WORKLOAD, Slo(), service, lambda step: None)
    closed = Workload(seed=1, pace=Closed(num_clients=1), num_requests=1)
    with pytest.raises(LoadTestError, match="only open-loop arrivals have a rate"):
        await sweep(Search(2.0), closed, SLO, service, lambda step: None)
