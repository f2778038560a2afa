"""The circuit breaker on a clock that only the test moves."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdproxy.errors import IllegalTransition
from pdproxy.fleet.breaker import BREAKER_STEPS, Breaker, BreakerLimits, BreakerState

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, **limits: float) -> Breaker:
    chosen = {"consecutive_faults": 3, "min_outcomes": 10, "window_s": 30.0, "cool_off_s": 5.0, **limits}
    return Breaker("p0", "prefill", BreakerLimits(**chosen), clock)  # type: ignore[arg-type]


def fail(breaker: Breaker, num: int = 1) -> None:
    for _ in range(num):
        breaker.failed(breaker.started())


def succeed(breaker: Breaker, num: int = 1) -> None:
    for _ in range(num):
        breaker.succeeded(breaker.started())


def opened(clock: Clock, **limits: float) -> Breaker:
    breaker = make(clock, **limits)
    fail(breaker, 3)
    assert breaker.state is OPEN
    return breaker


# ── opening ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_faults_in_a_row_open_it(clock):
    breaker = make(clock)
    fail(breaker, 2)
    assert breaker.allows()
    fail(breaker)
    assert not breaker.allows()


def test_a_success_between_breaks_the_row(clock):
    breaker = make(clock)
    for _ in range(3):
        fail(breaker, 2)
        succeed(breaker)
    assert breaker.state is CLOSED


def test_a_share_of_faults_opens_it_once_there_are_enough_outcomes(clock):
    breaker = make(clock, fault_share=0.5)
    for _ in range(4):
        fail(breaker)
        succeed(breaker)
    succeed(breaker)
    assert breaker.state is CLOSED, "4 of 9"
    fail(breaker)
    assert breaker.state is OPEN, "5 of 10"


def test_faults_leave_the_window(clock):
    breaker = make(clock, fault_share=0.5)
    for _ in range(4):
        fail(breaker)
        succeed(breaker)
    clock.now += 31.0
    succeed(breaker)
    fail(breaker)
    stats = breaker.statistics()
    assert (stats.state, stats.num_faults, stats.num_outcomes) == (CLOSED, 1, 2)


def test_what_is_never_told_never_counts(clock):
    """A 4xx, a 429, a 503, a client that left: the leg was started, and there is no verdict."""
    breaker = make(clock)
    for _ in range(100):
        breaker.started()
    assert (breaker.state, breaker.statistics().num_outcomes) == (CLOSED, 0)


def test_faults_with_nothing_but_4xx_between_are_still_in_a_row(clock):
    breaker = make(clock)
    for _ in range(3):
        fail(breaker)
        breaker.started()
    assert breaker.state is OPEN


# ── cooling off and probing ─────────────────────────────────────────────────────────────────────────────────────────


def test_after_the_cool_off_a_limited_number_of_probes_may_pass(clock):
    breaker = opened(clock, max_probes=2)
    clock.now += 4.9
    assert not breaker.allows()
    clock.now += 0.1
    assert breaker.allows()
    assert breaker.state is OPEN, "asking changes nothing"
    breaker.started()
    assert (breaker.state, breaker.allows()) == (HALF_OPEN, True)
    breaker.started()
    assert not breaker.allows()


def test_a_probe_that_succeeds_closes_it_and_nothing_is_held_against_it(clock):
    breaker = opened(clock)
    clock.now += 5.0
    succeed(breaker)
    assert (breaker.state, breaker.statistics().num_outcomes) == (CLOSED, 0)
    fail(breaker, 2)
    assert breaker.allows()


def test_a_probe_that_fails_opens_it_for_another_cool_off(clock):
    breaker = opened(clock)
    clock.now += 5.0
    fail(breaker)
    assert breaker.state is OPEN
    clock.now += 4.9
    assert not breaker.allows()
    clock.now += 0.1
    assert breaker.allows()
    assert breaker.statistics().num_opened == 2


def test_a_probe_nobody_hears_of_again_costs_one_cool_off_and_no_more(clock):
    breaker = opened(clock)
    clock.now += 5.0
    breaker.started()
    assert not breaker.allows()
    clock.now += 5.0
    assert breaker.allows()
    breaker.started()
    assert not breaker.allows()


# ── late news ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("verdict", ["succeeded", "failed"])
def test_a_leg_from_before_it_opened_has_no_vote_while_it_is_half_open(clock, verdict):
    breaker = make(clock)
    slow = breaker.started()
    fail(breaker, 3)
    getattr(breaker, verdict)(slow)
    assert breaker.state is OPEN
    clock.now += 5.0
    breaker.started()
    getattr(breaker, verdict)(slow)
    assert breaker.state is HALF_OPEN


def test_a_leg_sent_though_it_was_open_has_no_vote(clock):
    breaker = opened(clock)
    clock.now += 1.0
    forced = breaker.started()
    breaker.succeeded(forced)
    for _ in range(3):
        breaker.failed(forced)
    assert (breaker.state, breaker.allows(), breaker.statistics().num_outcomes) == (OPEN, False, 0)
    clock.now += 4.0
    breaker.started()
    breaker.failed(forced)
    assert breaker.state is HALF_OPEN


@pytest.mark.parametrize("state", [CLOSED, OPEN, HALF_OPEN])
def test_a_new_process_starts_with_a_clean_slate(clock, state):
    breaker = make(clock)
    old = breaker.started()
    fail(breaker, 2 if state is CLOSED else 3)
    if state is HALF_OPEN:
        clock.now += 5.0
        old = breaker.started()
    assert breaker.state is state
    breaker.reset()
    breaker.failed(old)
    stats = breaker.statistics()
    assert (stats.state, stats.consecutive_faults, stats.num_outcomes) == (CLOSED, 0, 0)


def test_who_may_pass_is_told_anew_at_every_change_but_those_of_the_clock(clock):
    breaker = make(clock)
    told: list[bool] = []
    breaker.on_change = lambda: told.append(breaker.allows())
    succeed(breaker)
    fail(breaker, 2)
    breaker.reset()
    assert told == []
    fail(breaker, 3)
    assert told == [False]
    clock.now += 5.0
    assert told == [False]
    probe = breaker.started()
    assert told[-1] is False, "one is trying"
    breaker.succeeded(probe)
    assert told[-1] is True


# ── the table, looking, limits ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", BreakerState)
@pytest.mark.parametrize("target", BreakerState)
def test_a_step_that_is_not_in_the_table_raises_and_changes_nothing(clock, state, target):
    breaker = make(clock)
    breaker.state = state
    if target in BREAKER_STEPS[state]:
        breaker._step(target)
        assert breaker.state is target
        return
    era = breaker._era
    with pytest.raises(IllegalTransition, match=rf"p0/prefill: {state}, .* cannot become {target}"):
        breaker._step(target)
    assert (breaker.state, breaker._era) == (state, era)


def test_repr_is_a_status_line(clock):
    breaker = make(clock)
    succeed(breaker)
    fail(breaker, 2)
    assert repr(breaker) == "<Breaker p0/prefill: closed, 2 faults in 3 outcomes, 2 in a row>"
    fail(breaker)
    clock.now += 2.0
    assert repr(breaker) == "<Breaker p0/prefill: open, for 3 s more>"
    clock.now += 3.0
    breaker.started()
    assert repr(breaker) == "<Breaker p0/prefill: half_open, 1 of 1 probes sent>"


@pytest.mark.parametrize(
    "limits",
    [{"consecutive_faults": 0}, {"fault_share": 0.0}, {"fault_share": 1.1}, {"window_s": 0.0}, {"max_probes": 0}],
)
def test_senseless_limits_are_refused(limits):
    with pytest.raises(ValueError, match="are needed"):
        BreakerLimits(**limits)


# ── any schedule ────────────────────────────────────────────────────────────────────────────────────────────────────


class AnySchedule(RuleBasedStateMachine):
    """Whatever happens in whatever order: it lets through what it must, and never stays shut for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = make(self.clock, max_probes=2)
        self.under_way: list[int] = []

    @rule(is_polite=st.booleans())
    def start(self, is_polite: bool) -> None:
        if self.breaker.allows() or not is_polite:
            self.under_way.append(self.breaker.started())

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), verdict=st.sampled_from(["succeeded", "failed", "nothing"]))
    def end(self, data: st.DataObject, verdict: str) -> None:
        era = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        before, num_opened = self.breaker.state, self.breaker.statistics().num_opened
        if verdict != "nothing":
            getattr(self.breaker, verdict)(era)
        after = self.breaker.state
        if after is not before:
            assert (before, after, verdict) in {
                (CLOSED, OPEN, "failed"),
                (HALF_OPEN, OPEN, "failed"),
                (HALF_OPEN, CLOSED, "succeeded"),
            }
        assert self.breaker.statistics().num_opened - num_opened == (after is OPEN and before is not OPEN)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def restart(self) -> None:
        self.breaker.reset()

    @invariant()
    def closed_lets_everything_pass(self) -> None:
        assert self.breaker.state is not CLOSED or self.breaker.allows()

    @invariant()
    def a_cool_off_later_it_may_be_tried(self) -> None:
        self.clock.now += 5.0
        assert self.breaker.allows()
        self.clock.now -= 5.0


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
