"""The module keeps all the time limits of an event loop on one timer.

A timer of the loop's own costs about as much as reading a socket. A request sets several limits, and hardly any of them
ever goes off. So limits that are a second away or more are looked at together: to set one is an entry in a dict, and to
move one is an assignment. About once a second the timer looks at all of them and finds those that are due before the
next such look. Eight times a second it looks at those which were found. A limit that is due sooner than in a second
gets a timer of its own, for it must also be exact.
"""

from __future__ import annotations

import asyncio
import math
from typing import ClassVar, Final, Protocol
from weakref import WeakKeyDictionary

LOOK_S = 0.125
MIN_S: Final = 1.0
"""The shortest delay, in seconds, of an alarm: no alarm is set for a nearer time, or moved to one. From one second on,
an eighth of a second does not matter. An alarm that is due before the next look at all alarms is among those found at
this look.
"""

LATE_S: Final = 0.05
"""The seconds by which a look is late where the loop has stood still."""
LATE_TURNS: Final = 5
"""The turns of the loop before a late look. In the first of them what came meanwhile is read, and in the next ones
those who wait for it go on: they move their alarms, or take them back. (libuv looks at its timers before it reads.)
"""


class Alarm(Protocol):
    """An `Alarm` can become due. It is hashed by identity."""

    __slots__ = ()

    @property
    def due_at(self) -> float:
        """The time at which the alarm is due, in seconds on the loop's clock. It may move."""

    def ring(self) -> None:
        """Tells the alarm that it is due. It is no longer set then. It must not raise."""


class CoarseTimer:
    """A `CoarseTimer` rings the alarms of one event loop.

    Mutable state: the alarms that are set; those which were found to be due soon; the time of the next look at all of
    them; the loop's timer, while any alarm is set, and when it is due.
    """

    __slots__ = ("_everybody_at", "_look_at", "_set", "_soon", "_timer", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._set: dict[Alarm, None] = {}
        self._soon: list[Alarm] = []
        self._everybody_at = -math.inf
        self._look_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, alarm: Alarm) -> None:
        """Sets `alarm`: it rings when it is due, or up to `LOOK_S` later. Idempotent."""
        self._set[alarm] = None
        if self._timer is None:
            self._look_later(self.loop.time())

    def take_back(self, alarm: Alarm) -> None:
        """Takes `alarm` back: it does not ring any more. Idempotent."""
        self._set.pop(alarm, None)

    def _look_later(self, now: float) -> None:
        self._look_at = now + LOOK_S
        self._timer = self.loop.call_later(LOOK_S, self._is_time)

    def _is_time(self) -> None:
        if self.loop.time() - self._look_at > LATE_S:
            self._wait_for_turns(LATE_TURNS)
        else:
            self._look()

    def _wait_for_turns(self, num_turns: int) -> None:
        if num_turns:
            self.loop.call_soon(self._wait_for_turns, num_turns - 1)
        else:
            self._look()

    def _look(self) -> None:
        now = self.loop.time()
        if now >= self._everybody_at:
            self._everybody_at = before = now + MIN_S - LOOK_S
            self._soon = [alarm for alarm in self._set if alarm.due_at <= before]
        for alarm in [alarm for alarm in self._soon if alarm.due_at <= now]:
            if alarm in self._set:  # another one may have taken it back
                del self._set[alarm]
                alarm.ring()
        if self._set:
            self._look_later(now)
        else:
            self._timer = None
            self._soon.clear()


class _Latest:
    """`_Latest` remembers the `CoarseTimer` that was asked for last, because a process usually has one loop. Mutable
    state: that timer.
    """

    alarms: ClassVar[CoarseTimer | None] = None


_all: WeakKeyDictionary[asyncio.AbstractEventLoop, CoarseTimer] = WeakKeyDictionary()


def alarms_of(loop: asyncio.AbstractEventLoop) -> CoarseTimer:
    """Returns the `CoarseTimer` of `loop`; makes it at the first call."""
    alarms = _Latest.alarms
    if alarms is None or alarms.loop is not loop:
        alarms = _all.get(loop) or _all.setdefault(loop, CoarseTimer(loop))
        _Latest.alarms = alarms
    return alarms
