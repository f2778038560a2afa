"""The module says how a decoder writes: all sequences of the batch together, a token each per step.

A step takes longer the more sequences there are, so every end moves whenever a sequence joins or leaves. To work out
all ends anew would cost as much as there are sequences. So progress is counted in steps, which are the same for all,
and each sequence knows at which step it ends: a heap of those costs O(log n). Steps are taken as flowing, not one by
one: a sequence that joins within a step does not wait for its end.
"""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush

from pdproxy.simulate.calls import ENGINES
from pdproxy.simulate.speed import Speed

_NEARLY = 1e-6
"""The part of a step by which sums of floating-point numbers may be off."""


class Sequence:
    """Sequence is one answer being written, with `num_tokens` of it still to come.

    Mutable state: the steps at which it begins and ends; whether it is in a batch.
    """

    __slots__ = ("begins", "ends", "is_in", "num_tokens")

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.begins = self.ends = 0.0
        self.is_in = False

    def finished(self) -> None:
        """Is called when the last token is written; a subclass that waits for that overrides it. It must not raise."""


class Batch:
    """Batch is the sequences that a decoder writes together.

    Mutable state: how many there are, and when each ends (in steps); steps made until `_since`; the timer of the next
    end; how often it was held; how slow it is; the sums that its use is measured by.
    """

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
        """Adds a sequence, which is written from now on; `sequence.finished` is called at its last token. A sequence of
        no tokens ends at once."""
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
        """Removes a sequence before its end. It is idempotent."""
        if not sequence.is_in:
            return
        self._settle()
        sequence.is_in = False
        self.size -= 1
        self._set_timer()

    def num_written(self, sequence: Sequence) -> int:
        """Returns how many whole tokens were written since the sequence joined."""
        self._settle()
        return min(sequence.num_tokens, int(self._steps - sequence.begins + _NEARLY))

    def hold(self) -> None:
        """Stops the steps until as many calls of `go`: the decoder is frozen, or reads a prompt."""
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
        """Removes all sequences because the process has gone; no hold remains for the next process's batch."""
        self._settle()
        for _, _, sequence in self._ends:
            sequence.is_in = False
        self._ends.clear()
        self.size = self._num_holds = 0
        self._set_timer()

    @property
    def busy_s(self) -> float:
        """Returns the seconds, until now, in which there was any sequence."""
        self._settle()
        return self._busy_s

    @property
    def sequence_s(self) -> float:
        """Returns sequences times seconds, until now."""
        self._settle()
        return self._sequence_s

    def _settle(self) -> None:
        """Counts the steps made since the last look."""
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
            left_s = left * self._step_s if left > 0.0 else 0.0
            self._timer = self._loop.call_later(left_s, self._look, context=ENGINES)

    def _look(self) -> None:
        """Ends the sequences whose last token is written, and sets the next timer."""
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
