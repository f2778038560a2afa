"""What the generator says of itself: when it sent, how late it was, how it goes."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest

from pdproxy.loadtest.clock import TIMER_S, Clock
from pdproxy.loadtest.generator_health import PULSE_S, Meter, calm_collector
from pdproxy.loadtest.live import FIRST_GUESS_S, WINDOW_S, Live
from pdproxy.loadtest.record import Record


class Hands:
    """A clock's, moved by a test."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_nothing_is_late_for_want_of_a_better_timer() -> None:
    """What is due within a timer's exactness is due now; never earlier than that, and never after it was to be."""
    clock = Clock()
    for step in range(1, 20):
        wanted = step * 0.0037
        due_s = await clock.sleep_until(wanted)
        assert wanted - TIMER_S <= due_s <= wanted
        assert due_s <= clock.now_s()


async def test_what_is_overdue_is_due_when_it_was() -> None:
    hands = Hands()
    clock = Clock(hands)
    hands.now_s += 5
    assert await clock.sleep_until(2.0) == 2.0


async def test_others_get_their_turn() -> None:
    """A generator that is behind does not keep its answers from being read."""
    turns: list[str] = []

    async def other() -> None:
        turns.append("other")

    clock = Clock()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(other())
        await clock.sleep_until(-1.0)
        turns.append("sleeper")
    assert turns == ["other", "sleeper"]


async def test_a_loop_that_stands_still_is_noticed() -> None:
    clock = Clock()
    meter = Meter(clock)
    pulse = asyncio.ensure_future(meter.pulse())
    await asyncio.sleep(0)
    stand_still(0.06)
    await asyncio.sleep(PULSE_S * 2)
    pulse.cancel()
    meter.sent(0.0)
    meter.sent(0.02)
    health = meter.health(1.0, 0.005)
    assert health.lag_max_s == pytest.approx(0.05, abs=0.02)
    assert (health.late_p50_s, health.late_p99_s, health.late_max_s) == (0.0, 0.02, 0.02)
    assert not health.is_trusted


def stand_still(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_its_share_of_a_core() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.start()
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert meter.health(0.1).cpu_share == pytest.approx(0.5, abs=0.1)
    assert meter.health(0.0).cpu_share == 0
    assert meter.health(1.0).is_trusted  # nothing was sent, nothing was late


def test_the_collector_is_as_it_was_afterwards() -> None:
    before = gc.get_threshold()
    with calm_collector():
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before


def ended(index: int, done_s: float, **facts: object) -> Record:
    times = {"due_s": done_s - 0.4, "sent_s": done_s - 0.4, "done_s": done_s}
    known: dict[str, Any] = {**times, **facts}
    return Record(index=index, prompt_tokens_asked=1, answer_tokens_asked=10, **known)


def test_rates_are_of_the_last_seconds() -> None:
    hands = Hands()
    clock = Clock(hands)
    live = Live(clock.now_s, num_expected=40)
    for index in range(20):
        hands.now_s = 100 + index * 0.5
        live.sent(clock.now_s())
        if index % 5:
            live.ended(ended(index, clock.now_s(), answer_tokens=10, first_token_s=clock.now_s() - 0.2))
    progress = live.progress()
    assert progress.at_s == 9.5
    assert (progress.num_sent, progress.num_ended, progress.num_open, progress.num_expected) == (20, 16, 4, 40)
    assert progress.sent_per_s == pytest.approx(11 / WINDOW_S)
    assert progress.ended_per_s == pytest.approx(9 / WINDOW_S)
    assert progress.tokens_per_s == pytest.approx(progress.ended_per_s * 10)
    assert progress.ttft_p50_s == pytest.approx(0.2)
    assert progress.e2e_p50_s == pytest.approx(0.4)
    hands.now_s += 2 * WINDOW_S
    later = live.progress()
    assert (later.sent_per_s, later.ended_per_s, later.ttft_p50_s) == (0, 0, None)


def test_failures_and_departures_are_counted() -> None:
    live = Live(Clock(Hands()).now_s)
    live.ended(ended(0, 1.0, error="broken"))
    live.ended(ended(1, 1.0, aborted="prefill"))
    assert (live.progress().num_failed, live.progress().num_aborted) == (1, 1)


def test_how_long_answers_take_to_begin() -> None:
    live = Live(Clock(Hands()).now_s)
    assert live.typical_first_byte_s == FIRST_GUESS_S
    for index in range(200):
        live.ended(ended(index, 10.0, first_byte_s=9.9))
    assert live.typical_first_byte_s == pytest.approx(0.3, abs=0.01)
