"""All limits on one timer: who rings when, on a clock that is turned by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdproxy.aio.coarse_timer import LOOK_S, MIN_S, CoarseTimer


class Handle:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback


class Clock:
    """As much of an event loop as alarms need."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handles: list[Handle] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Handle:
        self.handles.append(Handle(self.now + seconds, callback))
        return self.handles[-1]

    def turn_to(self, when: float) -> None:
        while due := [handle for handle in self.handles if handle.when <= when]:
            handle = min(due, key=lambda one: one.when)
            self.handles.remove(handle)
            self.now = handle.when
            handle.callback()
        self.now = when


class Bell:
    def __init__(self, due_at: float, ring: Callable[[], None]) -> None:
        self.due_at = due_at
        self.ring = ring


def make() -> tuple[Clock, CoarseTimer, list[float]]:
    clock: Any = Clock()
    return clock, CoarseTimer(clock), []


def test_each_rings_once_and_never_too_soon_nor_much_too_late() -> None:
    clock, alarms, rung = make()
    times = [1.0, 1.01, 2.5, 60.0]
    for due_at in times:
        alarms.set(Bell(due_at, lambda: rung.append(clock.now)))
    assert len(clock.handles) == 1
    clock.turn_to(100.0)
    assert len(rung) == len(times)
    assert all(0 <= at - due_at <= LOOK_S for at, due_at in zip(rung, times, strict=True))
    assert clock.handles == []


def test_one_that_is_taken_back_does_not_ring_and_the_others_do() -> None:
    clock, alarms, rung = make()
    bells = [Bell(5.0 + i / 1000, lambda: rung.append(clock.now)) for i in range(3)]
    for bell in bells:
        alarms.set(bell)
        alarms.set(bell)
    alarms.take_back(bells[1])
    alarms.take_back(bells[1])
    clock.turn_to(6.0)
    assert len(rung) == 2
    alarms.take_back(bells[0])


def test_one_that_moves_rings_then() -> None:
    clock, alarms, rung = make()
    bell = Bell(2.0, lambda: rung.append(clock.now))
    alarms.set(bell)
    clock.turn_to(1.0)
    bell.due_at = 9.0
    clock.turn_to(8.9)
    assert rung == []
    bell.due_at = 8.0
    clock.turn_to(10.0)
    assert len(rung) == 1


def test_who_takes_another_back_while_it_rings_is_obeyed() -> None:
    clock, alarms, rung = make()
    second = Bell(2.0, lambda: rung.append(2.0))
    alarms.set(Bell(2.0, lambda: alarms.take_back(second)))
    alarms.set(second)
    clock.turn_to(3.0)
    assert rung == []


def test_who_sets_another_while_it_rings_delays_nobody() -> None:
    clock, alarms, rung = make()
    alarms.set(Bell(2.0, lambda: alarms.set(Bell(50.0, lambda: rung.append(50.0)))))
    alarms.set(Bell(3.0, lambda: rung.append(3.0)))
    clock.turn_to(3.2)
    assert rung == [3.0]
    clock.turn_to(51.0)
    assert rung == [3.0, 50.0]


def test_nobody_looks_where_nothing_is_set() -> None:
    clock, alarms, _ = make()
    bell = Bell(2.0, lambda: None)
    alarms.set(bell)
    alarms.take_back(bell)
    clock.turn_to(10.0)
    assert clock.handles == []
    alarms.set(bell)
    assert len(clock.handles) == 1


def test_those_who_are_far_are_looked_at_once_in_a_second() -> None:
    clock, alarms, rung = make()
    looks: list[float] = []

    class Far(Bell):
        @property
        def due_at(self) -> float:  # type: ignore[override]
            looks.append(clock.now)
            return 600.0

        @due_at.setter
        def due_at(self, due_at: float) -> None:
            """It stays where it is."""

    alarms.set(Far(600.0, lambda: rung.append(clock.now)))
    clock.turn_to(300.0)
    assert len(looks) <= 300.0 / (MIN_S - LOOK_S) + 1
    clock.turn_to(601.0)
    assert len(rung) == 1


def test_one_set_between_two_looks_at_everybody_is_not_late() -> None:
    clock, alarms, rung = make()
    alarms.set(Bell(1000.0, lambda: None))
    due = []
    for step in range(1, 200):
        clock.turn_to(step * 0.37)
        due.append(clock.now + MIN_S)
        alarms.set(Bell(due[-1], lambda: rung.append(clock.now)))
    clock.turn_to(200.0)
    assert all(0 <= at - due_at <= LOOK_S for at, due_at in zip(rung, due, strict=True))
