"""The module counts the times between an answer's pieces in buckets. However long an answer is, what is kept of it
stays small, and the gaps of many answers can be added up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

GROWTH = 1.02
"""The factor between the ends of one bucket and the next: a gap is known to one percent."""
FLOOR_S = 1e-6
"""The end of the first bucket, in seconds; that bucket holds whatever is shorter."""

_LOG_GROWTH = math.log(GROWTH)
_NUMBERS = tuple(range(math.ceil(math.log(1e6 / FLOOR_S) / _LOG_GROWTH)))
"""The bucket numbers, up to some days. They are in memory once, instead of once for each answer that has a gap in
them."""


class Gaps(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gaps counts the gaps of one or more answers, in seconds.

    Mutable state: it grows with `add`.
    """

    count: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0
    buckets: dict[int, int] = msgspec.field(default_factory=dict)
    """Counts the gaps in each bucket; empty buckets are left out."""

    def add(self, gap_s: float) -> None:
        self.count += 1
        self.sum_s += gap_s
        self.max_s = max(self.max_s, gap_s)
        bucket = bucket_of(gap_s)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    @property
    def mean_s(self) -> float | None:
        return self.sum_s / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """Returns the smallest gap in seconds which at least `percent` of a hundred gaps do not exceed, to one percent;
        None where there are no gaps."""
        wanted = max(1, math.ceil(round(self.count * percent / 100, 9)))
        num_seen = 0
        for bucket in sorted(self.buckets):
            num_seen += self.buckets[bucket]
            if num_seen >= wanted:
                return min(middle_of(bucket), self.max_s)
        return None


def merged(parts: Iterable[Gaps]) -> Gaps:
    """Returns all parts added up as one."""
    whole = Gaps()
    for part in parts:
        whole.count += part.count
        whole.sum_s += part.sum_s
        whole.max_s = max(whole.max_s, part.max_s)
        _add_all(whole.buckets, part.buckets)
    return whole


def bucket_of(gap_s: float) -> int:
    if gap_s <= FLOOR_S:
        return 0
    return _NUMBERS[min(math.floor(math.log(gap_s / FLOOR_S) / _LOG_GROWTH), len(_NUMBERS) - 1)]


def middle_of(bucket: int) -> float:
    """Returns the seconds that stand for all gaps of a bucket."""
    return FLOOR_S * math.pow(GROWTH, bucket + 0.5)


def _add_all(whole: dict[int, int], part: Mapping[int, int]) -> None:
    for bucket, count in part.items():
        whole[bucket] = whole.get(bucket, 0) + count
