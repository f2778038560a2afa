"""The module says how a decoder writes: all sequences of the batch together, a token each per step.

A step takes longer the more sequences there are, so every end moves whenever a sequence joins or leaves. To work out
all ends anew would cost as much as there are sequences. So progress is counted in steps, which are the same for all,
and each sequence knows at which step it ends: a heap of those costs O(log n). Steps are taken as flowing, not one by
one: a sequence that joins within a step does not wait for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from pdproxy.simulate.calls import ENGINES
from pdproxy.simulate.gaps import Gaps
from pdproxy.simulate.speed import Speed

_NEARLY = 1e-6
"""The part of a step by which sums of floating-point numbers may be off."""


class Sequence:
    """Sequence is one answer being written, with `num_tokens` of it still to come, after `num_before` of its prompt and
    of what is written.

    Mutable state: these two, where it leaves a batch to join one again; the steps at which it begins and ends; whether
    it is in a batch, and as which of those that ever joined.
    """

    __slots__ = ("begins", "ends", "is_in", "num_before", "num_tokens", "number")

    def __init__(self, num_tokens: int, num_before: int = 0) -> None:
        self.num_tokens = num_tokens
        self.num_before = num_before
        self.begins = self.ends = 0.0
        self.is_in = False
        self.number = 0

    def finished(self) -> None:
        """Is called when the last token is written; a subclass that waits for that overrides it. It must not raise."""


def _is_there(entry: tuple[float, int, Sequence]) -> bool:
    """Tells whether a sequence is still in the batch, as it was when it joined: it may have left and joined again."""
    _, number, sequence = entry
    return sequence.is_in and sequence.number == number


class Batch:
    """Batch is the sequences that a decoder writes together. `on_full` is called when they have more than `max_tokens`
    together and one of them has to leave; it must not raise.

    Mutable state: how many there are, and when each ends (in steps); the tokens that they would have if no step had
    been made; steps made until `_since`; the timer of what comes next, and at which step that is; how often it was
    held, and since when; how slow it is; the sums that its use is measured by.
    """

    def __init__(
        self,
        speed: Speed,
        *,
        slowness: float = 1.0,
        max_tokens: float = inf,
        on_full: Callable[[], object] | None = None,
    ) -> None:
        self._speed = speed
        self._max_tokens = max_tokens
        self._on_full = on_full
        self.gaps = Gaps()
        self._slowness = slowness
        self._loop = asyncio.get_running_loop()
        self.size = 0
        self._ends: list[tuple[float, int, Sequence]] = []
        self._num_joined = 0
        self._base = 0.0
        self._steps = 0.0
        self._since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf
        self._num_holds = 0
        self._held_s = 0.0
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
        self._base += sequence.num_before - self._steps
        self._num_joined = sequence.number = self._num_joined + 1
        heappush(self._ends, (sequence.ends, sequence.number, sequence))
        if self._timer is None or self._next_step() < self._due:
            self._set_timer()  # else the one that is set is early, and finds out

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence before its end. It is idempotent."""
        if not sequence.is_in:
            return
        self._settle()
        self._take_out(sequence)
        self._set_timer()

    def _take_out(self, sequence: Sequence) -> None:
        sequence.is_in = False
        self.size -= 1
        self._base -= sequence.num_before - sequence.begins

    @property
    def num_tokens(self) -> float:
        """Returns how many tokens all sequences have together: their prompts, and what is written."""
        self._settle()
        return self._base + self.size * self._steps

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
        self._base = self._held_s = 0.0
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
        if self._num_holds:
            self._held_s += passed_s
            return
        step_s = self._step_s
        if self._held_s:  # the first token after a pause comes that much later
            self.gaps.add(self._held_s + step_s, self.size)
            self._held_s = 0.0
        num_steps = passed_s / step_s
        self.gaps.add(step_s, num_steps * self.size)
        self._steps += num_steps

    @property
    def _step_s(self) -> float:
        """Returns the seconds of a step, as of the last look: what is written until the next makes little
        difference."""
        return self._speed.step_takes(self.size, self._base + self.size * self._steps) * self._slowness

    def _next_step(self) -> float:
        """Returns at which step the next sequence ends, or there is no room for another token."""
        ends_at = self._ends[0][0]
        if self._max_tokens == inf or self.size < 2:
            return ends_at
        return min(ends_at, max(self._steps, (self._max_tokens - self._base) / self.size))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = self._ends
        while ends and not _is_there(ends[0]):
            heappop(ends)
        self._due = inf
        if not ends:
            self._steps = self._base = 0.0  # small numbers are exact ones
        elif not self._num_holds:
            self._due = self._next_step()
            left = self._due - self._steps
            left_s = left * self._step_s if left > 0.0 else 0.0
            self._timer = self._loop.call_later(left_s, self._look, context=ENGINES)

    def _look(self) -> None:
        """Ends the sequences whose last token is written, and sets the next timer."""
        self._timer = None
        self._settle()
        ended: list[Sequence] = []
        ends = self._ends
        while ends and (ends[0][0] <= self._steps + _NEARLY or not _is_there(ends[0])):
            if _is_there(entry := heappop(ends)):
                self._take_out(entry[2])
                ended.append(entry[2])
        self._set_timer()
        for sequence in ended:
            sequence.finished()
        while self._on_full is not None and self.size > 1 and self.num_tokens >= self._max_tokens - _NEARLY:
            self._on_full()

    def __repr__(self) -> str:
        state = f", held {self._num_holds}" if self._num_holds else ""
        return f"<Batch of {self.size}{state}>"
