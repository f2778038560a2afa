"""How fast an instance is, by what it did lately: prompts that overlap, fail and stand still; estimates that age."""

from __future__ import annotations

import pytest

from pdproxy.fleet.pace import FRESH_S, HALF_LIFE_S, Pace


class Reader:
    """An instance with prompts to read, on a clock of its own."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.now = 1000.0
        self.queued = 0

    def change(self, num: int, num_read: int = 0) -> None:
        self.queued += num
        self.pace.queue_changed(self.queued, num_read, self.now)

    def read(self, num: int, seconds: float) -> None:
        self.change(num)
        self.now += seconds
        self.change(-num, num)

    @property
    def speed(self) -> float | None:
        return self.pace.tokens_per_s(self.now)


def test_nothing_is_known_before_the_first_prompt_was_read() -> None:
    reader = Reader()
    assert (reader.speed, reader.pace.handoff_s(reader.now)) == (None, None)
    reader.change(500)
    reader.now += 1.0
    assert reader.speed is None
    reader.change(-500)  # it was not read
    assert reader.speed is None


def test_only_time_with_something_to_read_counts() -> None:
    reader = Reader()
    for _ in range(3):
        reader.read(1000, 0.5)
        reader.now += 20.0
    assert reader.speed == pytest.approx(2000.0)


def test_prompts_that_are_read_together_count_together() -> None:
    reader = Reader()
    for _ in range(4):
        reader.change(1000)
    reader.now += 1.0
    for _ in range(4):
        reader.change(-1000, 1000)
    assert reader.speed == pytest.approx(4000.0)


def test_what_is_new_counts_more() -> None:
    reader = Reader()
    reader.read(10_000, 1.0)
    for _ in range(10):
        reader.read(1000, HALF_LIFE_S / 5)
    assert reader.speed is not None
    assert 333.0 < reader.speed < 500.0, "of all tokens and all time it would be 645 a second"


def test_who_stands_still_gets_slower_and_is_then_unknown_and_then_as_fast_as_it_is() -> None:
    reader = Reader()
    reader.read(1000, 0.1)
    reader.change(1000)
    reader.now += 10.0
    slow = reader.speed
    assert slow is not None
    assert slow < 200.0
    reader.now += FRESH_S
    assert reader.speed is None
    reader.change(-1000, 1000)  # it goes on
    assert reader.speed is None, "how long it stood still is no speed"
    reader.read(1000, 0.1)
    assert reader.speed == pytest.approx(10_000.0)


def test_an_old_estimate_does_not_count_beside_a_new_one() -> None:
    reader = Reader()
    reader.read(100, 10.0)
    reader.now += FRESH_S + 1.0
    assert reader.speed is None
    reader.read(1000, 0.1)
    assert reader.speed == pytest.approx(10_000.0)


def test_handoffs_have_a_running_mean_that_ages() -> None:
    pace = Pace()
    pace.handed_over(1, 0.05, 0.0)
    assert pace.handoff_s(1.0) == pytest.approx(0.05)
    for _ in range(20):
        pace.handed_over(2, 0.4, 1.0)
    assert pace.handoff_s(1.0) == pytest.approx(0.2, rel=0.05)
    assert pace.handoff_s(1.0 + FRESH_S + 1.0) is None


def test_memory_comes_back_as_fast_as_answers_end() -> None:
    pace = Pace()
    assert pace.freed_per_s(0.0) == 0.0
    for number in range(10):  # two answers of 100 tokens at a time, and each ends after 2 s
        pace.residents_changed(100, float(number), 100 if number else 0)
        pace.residents_changed(200, float(number))
    assert pace.freed_per_s(9.0) == pytest.approx(100.0)
    pace.residents_changed(400, 10.0)
    assert pace.freed_per_s(10.0) == pytest.approx(200.0, rel=0.2), "twice as many end in the same time"
    pace.residents_changed(0, 10.0, 400)
    assert pace.freed_per_s(10.0) == 0.0, "nobody is there"


def test_where_no_answer_ends_any_more_memory_comes_back_ever_more_slowly() -> None:
    pace = Pace()
    pace.residents_changed(200, 0.0)
    pace.residents_changed(100, 1.0, 100)
    assert pace.freed_per_s(1.0) == pytest.approx(50.0)
    rates = [pace.freed_per_s(1.0 + 10.0 * number) for number in range(10)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1.0


def test_another_process_begins_anew() -> None:
    reader = Reader()
    reader.read(1000, 0.1)
    reader.pace.handed_over(1, 0.1, reader.now)
    reader.pace.residents_changed(100, 0.0)
    reader.pace.residents_changed(50, 1.0, 50)
    reader.pace.forget()
    assert (reader.speed, reader.pace.handoff_s(reader.now), reader.pace.freed_per_s(reader.now)) == (None, None, 0.0)
