"""How a decoder writes: all sequences of the batch together, a token each per step.

A step takes longer the more there are, so everybody's end moves whenever somebody joins or leaves. To work all of them
out anew would cost as much as there are; so progress is counted in steps, which are the same for all, and each knows at
which step it ends: a heap of those costs O(log n). Steps are taken as flowing, not one by one: a sequence that joins
within a step does not wait for its end.
"""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush

from pdproxy.simulate.speed import Speed

_NEARLY = 1e-6
"""Of a step: what sums of floating-point numbers may be off by."""


class Sequence:
    """One answer being written, `num_tokens` of it still to come. Mutable state: the steps at which it begins and ends;
    whether it is in a batch."""

    __slots__ = ("begins", "ends", "is_in", "num_tokens")

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.begins = self.ends = 0.0
        self.is_in = False

    def finished(self) -> None:
        """Its last token is written. Whoever waits for that overrides this. Must not raise."""


class Batch:
    """Mutable state: how many there are, and when each ends (in steps); steps made until `_since`; the timer of the
    next end; how often it was held; how slow it is; the sums that its use is measured by."""

    def __init__(self, speed: Speed, *, slowness: float = 1.0) -> None:
        self._speed = speed
        self._slowness = slowness
        self._loop = asyncio.get_running_loop()
        self.size = 0
        self._ends: list[tuple[float, int, Sequence]] = []
        self._num_joined = 0
        self._steps = 0.0
        self._since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._num_holds = 0
        self._busy_s = 0.0
        self._sequence_s = 0.0

    def join(self, sequence: Sequence) -> None:
        """From now on it is written; `sequence.finished` is called at its last token. One of none ends at once."""
        self._settle()
        sequence.is_in = True
        sequence.begins = self._steps
        sequence.ends = self._steps + sequence.num_tokens
        self.size += 1
        self._num_joined += 1
        heappush(self._ends, (sequence.ends, self._num_joined, sequence))
        if self._timer is None or self._ends[0][2] is sequence:
            self._set_timer()  # else the one that is set is early, and finds out

    def leave(self, sequence: Sequence) -> None:
        """Before its end. Idempotent."""
        if not sequence.is_in:
            return
        self._settle()
        sequence.is_in = False
        self.size -= 1
        self._set_timer()

    def num_written(self, sequence: Sequence) -> int:
        """Whole tokens since it joined."""
        self._settle()
        return min(sequence.num_tokens, int(self._steps - sequence.begins + _NEARLY))

    def hold(self) -> None:
        """No steps are made until as many `go`: it is frozen, or reads a prompt."""
        self._settle()
        self._num_holds += 1
        self._set_timer()

    def go(self) -> None:
        self._settle()
        self._num_holds -= 1
        self._set_timer()

    @property
    def slowness(self) -> float:
        return self._slowness

    @slowness.setter
    def slowness(self, slowness: float) -> None:
        self._settle()
        self._slowness = slowness
        self._set_timer()

    def clear(self) -> None:
        """The process has gone: nobody is written any more, and nothing holds the next one's batch."""
        self._settle()
        for _, _, sequence in self._ends:
            sequence.is_in = False
        self._ends.clear()
        self.size = self._num_holds = 0
        self._set_timer()

    @property
    def busy_s(self) -> float:
        """Seconds, until now, with anybody in it."""
        self._settle()
        return self._busy_s

    @property
    def sequence_s(self) -> float:
        """Sequences times seconds, until now."""
        self._settle()
        return self._sequence_s

    def _settle(self) -> None:
        """Count the steps made since the last look."""
        now = self._loop.time()
        passed_s = now - self._since
        self._since = now
        if passed_s <= 0.0 or not self.size:
            return
        self._busy_s += passed_s
        self._sequence_s += passed_s * self.size
        if not self._num_holds:
            self._steps += passed_s / self._step_s

    @property
    def _step_s(self) -> float:
        return self._speed.step_takes(self.size) * self._slowness

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = self._ends
        while ends and not ends[0][2].is_in:
            heappop(ends)
        if not ends:
            self._steps = 0.0  # small numbers are exact ones
        elif not self._num_holds:
            left = ends[0][0] - self._steps
            self._timer = self._loop.call_later(left * self._step_s if left > 0.0 else 0.0, self._look)

    def _look(self) -> None:
        """Somebody may have ended."""
        self._timer = None
        self._settle()
        ended: list[Sequence] = []
        ends = self._ends
        while ends and (not ends[0][2].is_in or ends[0][0] <= self._steps + _NEARLY):
            sequence = heappop(ends)[2]
            if sequence.is_in:
                sequence.is_in = False
                self.size -= 1
                ended.append(sequence)
        self._set_timer()
        for sequence in ended:
            sequence.finished()

    def __repr__(self) -> str:
        state = f", held {self._num_holds}" if self._num_holds else ""
        return f"<Batch of {self.size}{state}>"
