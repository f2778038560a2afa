"""The module says what is asked of a service, and whether a run gave it:
``ttft:p99<0.5,tpot:p95<50ms,e2e:p99<10,errors<1%``.

A request that failed counts as one that took for ever: a service does not get faster by refusing. A request that the
client left on purpose is judged by what it had come to, and one that the generator cut off is not judged.

Where the generator was late, its own lateness is in the latencies. Then an objective is met where the value together
with that lateness is within the limit, and missed where the value is beyond the limit by more than the lateness can
explain. Between the two nothing is known of the service, and the objective is not judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from pdproxy.loadtest.errors import LoadTestError
from pdproxy.loadtest.latency import INTERRUPTED, TITLES, gaps_of, is_failed, percentile, seconds_of, seconds_of_one
from pdproxy.loadtest.record import GeneratorHealth, Record

ERRORS = "errors"
FROM_DUE = ("ttft", "e2e")
"""The latencies that count from when a request was due, so that what was sent late is in them. The others can only be
wrong by how late the generator read."""
_LATENCY = re.compile(r"(\w+):p(\d+(?:\.\d+)?)<(\d+(?:\.\d+)?)(ms|s)?")
_ERRORS = re.compile(r"errors<(\d+(?:\.\d+)?)(%)?")


class SloError(LoadTestError):
    """SloError means that a target cannot be read; the message says what can be read."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Objective asks that one percentile of one latency is below `limit` seconds; for `ERRORS`, that the share of
    errors is below `limit`."""

    metric: str
    percent: float
    limit: float

    def __str__(self) -> str:
        if self.metric == ERRORS:
            return f"errors < {self.limit:.3g}"
        return f"{self.metric.upper()} p{self.percent:g} < {self.limit:g} s"

    def value(self, records: Sequence[Record], delay_s: float = 0.0) -> float | None:
        """Returns the value to compare with the limit; infinite where too many failed; None where there is nothing to
        judge. It is as if each latency had been `delay_s` longer."""
        if self.metric == ERRORS:
            judged = [record for record in records if record.error != INTERRUPTED]
            return sum(map(is_failed, judged)) / len(judged) if judged else None
        asked = [record for record in records if record.is_stream or self.metric == "e2e"]
        if self.metric == "itl":
            gap_s = self._gap(asked)
            return None if gap_s is None else gap_s + delay_s
        seconds = [*seconds_of(asked, self.metric, delay_s), *(math.inf for _ in filter(is_failed, asked))]
        return percentile(sorted(seconds), self.percent)

    def _gap(self, asked: Sequence[Record]) -> float | None:
        """Returns the percentile of all gaps in seconds, or infinity where too many requests failed. One answer has
        many gaps, so failures are weighed against answers."""
        whole = sum(record.is_ok for record in asked)
        failed = sum(map(is_failed, asked))
        if failed > (whole + failed) * (1 - self.percent / 100):
            return math.inf
        return gaps_of(asked).percentile(self.percent)

    def is_met_by(self, record: Record) -> bool:
        """Tells whether one whole answer meets the objective; it does if it has no such latency."""
        if self.metric == ERRORS:
            return True
        if self.metric == "itl":
            seconds = None if record.gaps is None else record.gaps.percentile(self.percent)
        else:
            seconds = seconds_of_one(record, self.metric)
        return seconds is None or seconds < self.limit


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """Judgement is what one objective comes to in one run."""

    objective: str
    metric: str
    percent: float
    limit: float
    value: float | None
    """Holds the value measured; None where more failed than the percentile leaves room for, or nothing was measured."""
    is_met: bool
    is_judged: bool = True
    """False where the generator was too late to tell whether the objective was met; then `is_met` is False as well."""


def all_met(judgements: Sequence[Judgement]) -> bool | None:
    """Tells whether all objectives were met; None where there are none, or where that is not known."""
    if any(one.is_judged and not one.is_met for one in judgements):
        return False
    return True if judgements and all(one.is_met for one in judgements) else None


@dataclass(frozen=True, slots=True)
class Slo:
    """Slo is all objectives of a service together."""

    objectives: tuple[Objective, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the objectives that a text names. Raises `SloError`."""
        joined = re.sub(r"\s*([:<])\s*", r"\1", text)
        return cls(tuple(_objective(part) for part in re.split(r"[,;\s]+", joined) if part))

    def __str__(self) -> str:
        return ", ".join(map(str, self.objectives))

    def judge(self, records: Sequence[Record], health: GeneratorHealth | None = None) -> list[Judgement]:
        """Returns what each objective comes to. `health` is that of the generator that measured the records; None means
        that it was in time."""
        late = None if health is None or health.is_trusted else health
        return [_judgement(objective, records, late) for objective in self.objectives]

    def is_met_by(self, record: Record) -> bool | None:
        """Tells whether a request counts as good; None where it is not to be judged: its client left, or it was cut
        off."""
        if record.aborted or record.error == INTERRUPTED:
            return None
        return record.is_ok and all(objective.is_met_by(record) for objective in self.objectives)


def _objective(part: str) -> Objective:
    if found := _ERRORS.fullmatch(part):
        objective = Objective(ERRORS, 0.0, float(found[1]) / (100 if found[2] else 1))
    elif found := _LATENCY.fullmatch(part):
        objective = Objective(found[1], float(found[2]), float(found[3]) / (1000 if found[4] == "ms" else 1))
        if objective.metric not in TITLES:
            raise SloError(f"{part!r}: there is no latency {objective.metric!r}; there are {', '.join(TITLES)}")
        if not 0 < objective.percent < 100:
            raise SloError(f"{part!r}: {objective.percent:g} of a hundred is no percentile; it is between 0 and 100")
    else:
        raise SloError(
            f"{part!r} is no objective; one is LATENCY:pNN<SECONDS, with one of {', '.join(TITLES)}, as ttft:p99<0.5 "
            "or tpot:p95<50ms, or errors<1%"
        )
    if not objective.limit > 0:
        raise SloError(f"{part!r}: nothing is below {objective.limit:g}")
    return objective


def _judgement(objective: Objective, records: Sequence[Record], late: GeneratorHealth | None) -> Judgement:
    """Returns what an objective comes to in records of a generator which was `late`, or in time."""
    value = objective.value(records)
    delay_s = most_delay_s = 0.0
    if late is not None and objective.metric != ERRORS:
        delay_s, most_delay_s = late.lag_p99_s, late.lag_max_s
        if objective.metric in FROM_DUE:
            delay_s, most_delay_s = delay_s + late.late_p99_s, most_delay_s + late.late_max_s
    at_most, at_least = objective.value(records, delay_s), objective.value(records, -most_delay_s)
    is_met = at_most is not None and at_most < objective.limit
    return Judgement(
        objective=str(objective),
        metric=objective.metric,
        percent=objective.percent,
        limit=objective.limit,
        value=value if value is not None and math.isfinite(value) else None,
        is_met=is_met,
        is_judged=is_met or at_least is None or at_least >= objective.limit,
    )
