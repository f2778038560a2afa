"""The module counts durations in buckets whose ends grow by a factor: those between an answer's pieces, and those of a
simulation. However many there are, what is kept of them stays small, and several counts can be added up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

GROWTH = 1.02
"""The usual factor between the ends of one bucket and the next: a duration is known to one percent."""
FINE_GROWTH = 1.01
"""The factor with which a duration is known to half a percent."""
FLOOR_S = 1e-6
"""The end of the first bucket, in seconds; that bucket holds whatever is shorter."""

_NUMBERS = tuple(range(math.ceil(math.log(1e6 / FLOOR_S) / math.log(FINE_GROWTH))))
"""The bucket numbers, up to some days. They are in memory once, instead of once for each answer that has a gap in
them."""
_LAST = len(_NUMBERS) - 1


class LogHistogram(msgspec.Struct, kw_only=True, omit_defaults=True):
    """LogHistogram counts durations, in seconds.

    Mutable state: it grows with `add` and `add_all`.
    """

    count: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0
    buckets: dict[int, int] = msgspec.field(default_factory=dict)
    """Counts the durations in each bucket; empty buckets are left out."""
    growth: float = GROWTH

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        self.max_s = max(self.max_s, seconds)
        bucket = 0 if seconds <= FLOOR_S else int(math.log(seconds / FLOOR_S) / math.log(self.growth))
        bucket = _NUMBERS[min(bucket, _LAST)]
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def add_all(self, many: Sequence[float]) -> None:
        """Adds one or more durations. Many are counted faster at once than one by one."""
        self.count += len(many)
        self.sum_s += sum(many)
        self.max_s = max(self.max_s, *many)
        log, log_growth = math.log, math.log(self.growth)
        numbers = [int(log(each / FLOOR_S) / log_growth) if each > FLOOR_S else 0 for each in many]
        _add_counts(self.buckets, Counter(numbers))

    @property
    def mean_s(self) -> float | None:
        return self.sum_s / self.count if self.count else None

    def percentile(self, percent: float, num_infinite: int = 0) -> float | None:
        """Returns the smallest duration in seconds which at least `percent` of a hundred do not exceed, as exact as the
        buckets are; `num_infinite` more took for ever. Returns None where there is nothing."""
        total = self.count + num_infinite
        if not total:
            return None
        wanted = max(1, math.ceil(round(total * percent / 100, 9)))
        num_seen = 0
        for bucket in sorted(self.buckets):
            num_seen += self.buckets[bucket]
            if num_seen >= wanted:
                return min(FLOOR_S * math.pow(self.growth, bucket + 0.5), self.max_s)
        return math.inf


def merged(parts: Iterable[LogHistogram]) -> LogHistogram:
    """Returns all parts added up as one. They have the usual growth."""
    whole = LogHistogram()
    for part in parts:
        whole.count += part.count
        whole.sum_s += part.sum_s
        whole.max_s = max(whole.max_s, part.max_s)
        _add_counts(whole.buckets, part.buckets)
    return whole


def _add_counts(whole: dict[int, int], part: Mapping[int, int]) -> None:
    for bucket, count in part.items():
        whole[bucket] = whole.get(bucket, 0) + count
