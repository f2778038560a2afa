"""The measured times: one entry per round and target. Rates, ratios and medians are worked out from them, nowhere
else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.dev.bench_transfer.plan import GB, Case


@dataclass(frozen=True, slots=True)
class Timed:
    """`Timed` tells when something began and ended (`time.monotonic()`, the same clock for all processes of a machine),
    and the CPU seconds that its process used meanwhile, all threads."""

    started: float
    ended: float
    cpu_s: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class Sample:
    """A `Sample` is one transfer by one target. It has the CPU seconds of the sending processes together and of the
    receiving one."""

    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float = 0.0


@dataclass(slots=True)
class Measured:
    """`Measured` is one case, in rounds: entry i of each list was taken in round i, one right after the other."""

    case: Case
    ours: list[Sample] = field(default_factory=list)
    nixl: list[Sample] = field(default_factory=list)
    copy: list[Sample] = field(default_factory=list)

    def gb_s(self, samples: Sequence[Sample]) -> list[float]:
        """Returns GB/s by round."""
        return [self.case.total_bytes / GB / sample.seconds for sample in samples]

    def ratios(self, to: Sequence[Sample]) -> list[float]:
        """Returns our GB/s over that target's, by round: a disturbance of a round disturbs both."""
        return [theirs.seconds / ours.seconds for ours, theirs in zip(self.ours, to, strict=True)]

    def cpu_s_per_gb(self, seconds: Sequence[float]) -> float:
        return statistics.median(seconds) * GB / self.case.total_bytes


def p99(values: Sequence[float]) -> float:
    """Returns the smallest value that no more than 1 % of all exceed."""
    return sorted(values)[-(-99 * len(values) // 100) - 1]
