"""The circuit breaker of one instance's leg leaves that leg alone after too many faults, then tries it with few
requests.

A 4xx answer of an engine is the client's affair, and a 429 or 503 is backpressure. Neither is a fault nor a proof of
health, so nobody tells the breaker of them. Everything that changes a breaker is in this file.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pdproxy.errors import IllegalTransition


class BreakerState(StrEnum):
    CLOSED = "closed"
    """Every request passes."""
    OPEN = "open"
    """No request passes until the cool-off is over."""
    HALF_OPEN = "half_open"
    """A few requests pass, and the first outcome decides."""


CLOSED: Final = BreakerState.CLOSED
OPEN: Final = BreakerState.OPEN
HALF_OPEN: Final = BreakerState.HALF_OPEN

BREAKER_STEPS: Final[Mapping[BreakerState, frozenset[BreakerState]]] = {
    CLOSED: frozenset({OPEN}),
    # It closes at once when a new process has taken the place of the one that failed.
    OPEN: frozenset({HALF_OPEN, CLOSED}),
    HALF_OPEN: frozenset({OPEN, CLOSED}),
}

NUM_BUCKETS: Final = 10
"""Number of pieces of the window; outcomes leave the window one piece at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """BreakerLimits says when a breaker opens, for how long it stays open, and what closes it again."""

    consecutive_faults: int = 5
    fault_share: float = 0.5
    """The share of faults, 0 to 1, that opens the breaker. It is taken among the outcomes of the last `window_s`
    seconds, if there are at least `min_outcomes` of them."""
    min_outcomes: int = 20
    window_s: float = 30.0
    cool_off_s: float = 5.0
    max_probes: int = 1
    """Number of requests that may pass per cool-off while the breaker is half open. A request whose outcome is never
    told uses up its place for that long."""

    def __post_init__(self) -> None:
        counts = (self.consecutive_faults, self.min_outcomes, self.max_probes)
        if min(counts) < 1 or not 0.0 < self.fault_share <= 1.0 or self.window_s <= 0.0 or self.cool_off_s <= 0.0:
            raise ValueError(f"counts of at least 1, times above 0 and a share of 0 to 1 are needed: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerStatistics:
    """BreakerStatistics holds the numbers of one breaker at one moment."""

    instance: str
    leg: str
    state: BreakerState
    consecutive_faults: int
    num_faults: int
    """Number of faults within the window; `num_outcomes` counts over the same window."""
    num_outcomes: int
    num_opened: int
    """Number of times the breaker has opened since it was made."""
    cool_off_left_s: float
    """Seconds until the cool-off is over; 0 unless the breaker is open."""


class Breaker:
    """Breaker guards the leg `leg` of the instance `instance`. `allows` asks; `started`, `succeeded` and `failed` act.

    `started` returns the breaker's *era*, and the caller hands it back with the outcome. A leg that was started before
    the breaker changed its state says nothing about the present state, so its outcome does not count. The outcome of a
    leg that was sent although the breaker was open does not count either.
    """

    def __init__(
        self, instance: str, leg: str, limits: BreakerLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.instance = instance
        self.leg = leg
        self.on_change: Callable[[], object] = lambda: None
        """Called when the breaker may let other requests pass than before, though no time has passed; must not
        raise."""
        self._limits = limits
        self._clock = clock
        # State: where it is, since when, and the number of the change that brought it there; what was heard in this
        # era; the probes let through since `_probes_at`.
        self.state = CLOSED
        self._era = 0
        self._opened_at = 0.0
        self._num_opened = 0
        self._consecutive_faults = 0
        self._outcomes = _Outcomes(limits.window_s / NUM_BUCKETS)
        self._num_probes = 0
        self._probes_at = 0.0

    @property
    def era(self) -> int:
        """The number of the breaker's last change, for `blamed`."""
        return self._era

    def allows(self) -> bool:
        """Tells whether a request may pass now. Changes nothing."""
        if self.state is CLOSED:
            return True
        now = self._clock()
        if self.state is OPEN:
            return self._has_cooled_off(self._opened_at, now)
        return self._num_probes < self._limits.max_probes or self._has_cooled_off(self._probes_at, now)

    @property
    def max_trials(self) -> int:
        """Number of requests that may pass once the breaker has cooled off."""
        return self._limits.max_probes

    @property
    def trials_left(self) -> int:
        """Number of requests that may pass now; it has a meaning only while the breaker is not closed and `allows` is
        true."""
        is_fresh = self.state is OPEN or self._has_cooled_off(self._probes_at, self._clock())
        return self._limits.max_probes - (0 if is_fresh else self._num_probes)

    @property
    def allows_at(self) -> float:
        """Time on the breaker's clock, in seconds, when the breaker lets a request pass again by itself; has a meaning
        only while the breaker is not closed."""
        return (self._opened_at if self.state is OPEN else self._probes_at) + self._limits.cool_off_s

    def started(self) -> int:
        """Notes that a request is sent. Returns the era, which the caller hands back with the outcome."""
        if self.state is not CLOSED:
            self._probe()
        return self._era

    def _probe(self) -> None:
        now = self._clock()
        if self.state is OPEN and self._has_cooled_off(self._opened_at, now):
            self._step(HALF_OPEN)
            self._num_probes, self._probes_at = 0, now
        if self.state is HALF_OPEN:
            if self._has_cooled_off(self._probes_at, now):
                self._num_probes, self._probes_at = 0, now
            self._num_probes += 1
            self.on_change()

    def succeeded(self, era: int, times: int = 1) -> None:
        """Notes that a leg that was started in `era`, or several of them, did what it should."""
        if era != self._era or self.state is OPEN:
            return  # no vote
        if self.state is HALF_OPEN:
            self.reset()
        else:
            self._consecutive_faults = 0
            self._outcomes.count(0, self._clock(), times)

    def failed(self, era: int) -> None:
        """Notes that the leg that was started in `era` met a fault: no connection, a broken one, a 5xx other than 503,
        a timeout, or an answer that is corrupt. A 4xx, 429 or 503 is no fault."""
        if era != self._era or self.state is OPEN:
            return  # no vote
        if self.state is HALF_OPEN:
            self._open()
            return
        self._consecutive_faults += 1
        self._outcomes.count(1, self._clock())
        if self._has_too_many_faults():
            self._open()

    def blamed(self, era: int) -> None:
        """Notes a fault that showed at a peer before a leg was sent here: it counts as the fault of a leg. `era` is the
        breaker's when the request was bound to the instance."""
        if era == self._era:
            self.failed(self.started())

    def not_tried(self, era: int) -> None:
        """Notes that the leg that was started in `era` never left this machine: it was no probe."""
        if era == self._era and self.state is HALF_OPEN and self._num_probes:
            self._num_probes -= 1
            self.on_change()

    def reset(self) -> None:
        """Forgets every outcome and closes the breaker: a probe succeeded, or the instance is a new process."""
        self._forget()
        if self.state is CLOSED:
            self._era += 1
        else:
            self._step(CLOSED)
            self.on_change()

    def told(self) -> tuple[int, BreakerState, float, int, float]:
        """Returns what `mirror` takes: the era, the state, the seconds since the breaker opened, the probes that were
        let through, and the seconds since the first of them."""
        now = self._clock()
        return self._era, self.state, now - self._opened_at, self._num_probes, now - self._probes_at

    def mirror(self, era: int, state: BreakerState, opened_s: float, num_probes: int, probes_s: float) -> None:
        """Makes this breaker say what another one does, which has `told` so. It must not hear of outcomes itself."""
        now = self._clock()
        self._era, self.state, self._num_probes = era, state, num_probes
        self._opened_at, self._probes_at = now - opened_s, now - probes_s
        self.on_change()

    def statistics(self) -> BreakerStatistics:
        now = self._clock()
        num_faults, num_outcomes = self._outcomes.within(self._limits.window_s, now)
        left_s = self._opened_at + self._limits.cool_off_s - now
        return BreakerStatistics(
            instance=self.instance,
            leg=self.leg,
            state=self.state,
            consecutive_faults=self._consecutive_faults,
            num_faults=num_faults,
            num_outcomes=num_outcomes,
            num_opened=self._num_opened,
            cool_off_left_s=max(0.0, left_s) if self.state is OPEN else 0.0,
        )

    def _has_cooled_off(self, since: float, now: float) -> bool:
        return now >= since + self._limits.cool_off_s

    def _has_too_many_faults(self) -> bool:
        limits = self._limits
        if self._consecutive_faults >= limits.consecutive_faults:
            return True
        num_faults, num_outcomes = self._outcomes.within(limits.window_s, self._clock())
        return num_outcomes >= limits.min_outcomes and num_faults >= limits.fault_share * num_outcomes

    def _open(self) -> None:
        self._step(OPEN)
        self._opened_at = self._clock()
        self._num_opened += 1
        self._forget()
        self.on_change()

    def _forget(self) -> None:
        self._consecutive_faults = 0
        self._outcomes = _Outcomes(self._limits.window_s / NUM_BUCKETS)

    def _step(self, state: BreakerState) -> None:
        """Moves to `state` and begins a new era. Raises `IllegalTransition`, and changes nothing, where the table has
        no such step."""
        if state not in BREAKER_STEPS[self.state]:
            raise IllegalTransition(f"{self!r} cannot become {state}")
        self.state = state
        self._era += 1

    def __repr__(self) -> str:
        statistics = self.statistics()
        heard = f"{statistics.num_faults} faults in {statistics.num_outcomes} outcomes"
        told = {
            CLOSED: f"{heard}, {statistics.consecutive_faults} in a row",
            OPEN: f"for {statistics.cool_off_left_s:g} s more",
            HALF_OPEN: f"{self._num_probes} of {self._limits.max_probes} probes sent",
        }
        return f"<Breaker {self.instance}/{self.leg}: {self.state}, {told[self.state]}>"


class _Outcomes:
    """Counts the outcomes of the last seconds, in pieces of `bucket_s` seconds.

    Mutable state: [number of the piece, faults, outcomes], oldest first; when the last piece ends.
    """

    __slots__ = ("_bucket_s", "_buckets", "_ends_at", "_last")

    def __init__(self, bucket_s: float) -> None:
        self._bucket_s = bucket_s
        self._buckets: deque[list[int]] = deque(maxlen=NUM_BUCKETS + 1)
        self._last = [0, 0, 0]
        self._ends_at = -math.inf

    def count(self, num_faults: int, now: float, num_outcomes: int = 1) -> None:
        """Adds outcomes, of which `num_faults` were faults."""
        if now >= self._ends_at:
            number = int(now // self._bucket_s)
            self._ends_at = (number + 1) * self._bucket_s
            self._last = [number, 0, 0]
            self._buckets.append(self._last)
        self._last[1] += num_faults
        self._last[2] += num_outcomes

    def within(self, window_s: float, now: float) -> tuple[int, int]:
        """Returns the numbers of faults and of outcomes within the last `window_s` seconds, exact to one piece."""
        oldest = int((now - window_s) // self._bucket_s)
        recent = [bucket for bucket in self._buckets if bucket[0] > oldest]
        return sum(bucket[1] for bucket in recent), sum(bucket[2] for bucket in recent)
