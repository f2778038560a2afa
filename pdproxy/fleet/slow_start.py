"""SlowStart gives an instance less than its share after it came back, because its caches are cold and its graphs
unbuilt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStart:
    """SlowStart is a weight that rises in a straight line from `floor` to 1 over `ramp_s` seconds; 0 seconds: no
    ramp."""

    ramp_s: float
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.ramp_s < 0.0 or not 0.0 < self.floor <= 1.0:
            raise ValueError(f"ramp_s {self.ramp_s} must not be negative, floor {self.floor} above 0 and at most 1")

    def weight(self, recovered_at: float | None, now: float) -> float:
        """Returns the weight, `floor` to 1. Both times are on the same clock; None says that it has been well all
        along."""
        if recovered_at is None or now >= recovered_at + self.ramp_s:
            return 1.0
        done = max(0.0, (now - recovered_at) / self.ramp_s)
        return self.floor + (1.0 - self.floor) * done
