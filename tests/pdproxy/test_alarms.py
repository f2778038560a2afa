"""All limits on one timer: who rings when, on a clock that is turned by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdproxy.alarms import SLOTS_PER_S, Alarms


class Handle:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """As much of an event loop as alarms need."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handles: list[Handle] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Handle:
        assert when >= self.now
        self.handles.append(Handle(when, callback))
        return self.handles[-1]

    @property
    def live(self) -> list[Handle]:
        return [handle for handle in self.handles if not handle.is_cancelled]

    def turn_to(self, when: float) -> None:
        while due := [handle for handle in self.live if handle.when <= when]:
            handle = min(due, key=lambda one: one.when)
            self.handles.remove(handle)
            self.now = max(self.now, handle.when)
            handle.callback()
        self.now = when


def make() -> tuple[Clock, Alarms, list[str]]:
    clock: Any = Clock()
    return clock, Alarms(clock), []


def test_each_rings_once_and_never_too_soon_nor_a_slot_too_late() -> None:
    clock, alarms, rung = make()
    for due_at in (1.0, 1.01, 2.5, 60.0):
        alarms.set(due_at, lambda due_at=due_at: rung.append(f"{due_at}+{clock.now - due_at:.4f}"))
    assert len(clock.live) == 1
    clock.turn_to(100.0)
    assert [each.split("+")[0] for each in rung] == ["1.0", "1.01", "2.5", "60.0"]
    assert all(0 <= float(each.split("+")[1]) <= 1 / SLOTS_PER_S for each in rung)
    assert clock.live == []


def test_one_that_is_taken_back_does_not_ring_and_the_others_do() -> None:
    clock, alarms, rung = make()
    rings = {name: (lambda name=name: rung.append(name)) for name in "abc"}
    slots = {name: alarms.set(5.0, ring) for name, ring in rings.items()}
    alarms.take_back(slots["b"], rings["b"])
    alarms.take_back(slots["b"], rings["b"])
    clock.turn_to(6.0)
    assert rung == ["a", "c"]
    alarms.take_back(slots["a"], rings["a"])


def test_an_earlier_one_that_comes_later_rings_first() -> None:
    clock, alarms, rung = make()
    alarms.set(60.0, lambda: rung.append("late"))
    alarms.set(2.0, lambda: rung.append("early"))
    clock.turn_to(3.0)
    assert rung == ["early"]
    clock.turn_to(61.0)
    assert rung == ["early", "late"]


def test_who_sets_another_while_it_rings_delays_nobody() -> None:
    clock, alarms, rung = make()
    alarms.set(2.0, lambda: alarms.set(50.0, lambda: rung.append("again")) and None)
    alarms.set(3.0, lambda: rung.append("third"))
    clock.turn_to(3.1)
    assert rung == ["third"]
    clock.turn_to(51.0)
    assert rung == ["third", "again"]


def test_the_timer_stops_where_nobody_is_left() -> None:
    clock, alarms, _ = make()

    def ring() -> None:
        raise AssertionError

    alarms.take_back(alarms.set(2.0, ring), ring)
    clock.turn_to(10.0)
    assert clock.live == []
