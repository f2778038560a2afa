"""How much of its share an instance gets after it came back: cold caches and unbuilt graphs do not bear all at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStart:
    """A weight that rises in a straight line from `floor` to 1 over `ramp_s` seconds; 0 seconds: no ramp."""

    ramp_s: float
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.ramp_s < 0.0 or not 0.0 < self.floor <= 1.0:
            raise ValueError(f"ramp_s {self.ramp_s} must not be negative, floor {self.floor} above 0 and at most 1")

    def weight(self, recovered_at: float | None, now: float) -> float:
        """Both on the same clock; None: it has been well all along."""
        if recovered_at is None or now >= recovered_at + self.ramp_s:
            return 1.0
        done = max(0.0, (now - recovered_at) / self.ramp_s)
        return self.floor + (1.0 - self.floor) * done
