"""The module holds what was measured: one sample per target and round. Medians, percentiles and ratios are worked out
here only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from pdproxy.loadtest.latency import percentile
from scripts.dev.bench_proxy.load import Told

TENTHS_PER_US = 10
MAX_ELSEWHERE_CORES = 0.1
"""The most cores that other processes may keep busy. A round in which they keep more busy is thrown away."""
MAX_HELPER_SHARE = 0.95
"""The share of their core that the helpers may use. With more, the benchmark does not measure the proxy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Sample is what one load on one target gave. None means that there was nothing of the kind."""

    cpu_ms_per_req: float
    """The CPU per answer, those to the prompts beside streams included. A refused request does not count as one."""
    cpu_us_per_token: float | None
    """The CPU per token, for streams whose tokens are most of the work; else None."""
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    transit_p50_us: float | None
    transit_p99_us: float | None
    rss_mb: float
    rss_mb_along: tuple[float, ...]
    """Holds the memory at the start and after each part, where the scenario has parts."""
    req_per_s: float
    proxy_share: float
    """The share of a core that the proxy used, while the load lasted."""
    engine_share: float
    clients_share: float
    elsewhere_cores: float
    """Counts the cores that processes of others kept busy meanwhile."""
    num_beside: int
    """Counts the prompts that were answered beside what is timed."""
    num_errors: int
    complaint: str
    num_unproven: int
    """Counts the decode legs, or whole answers, that no handoff stands behind."""

    def __str__(self) -> str:
        errors = f", {self.num_errors} errors: {self.complaint}" if self.num_errors else ""
        return (
            f"{self.cpu_ms_per_req:.3f} ms of CPU per request, {self.elsewhere_cores:.2f} cores busy elsewhere{errors}"
        )


FIGURES = (
    "cpu_ms_per_req",
    "cpu_us_per_token",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "transit_p50_us",
    "transit_p99_us",
    "rss_mb",
)
"""The figures that a row tells, and of which ratios are made."""
ADDED = ("ttft_p50_ms", "ttft_p99_ms", "transit_p50_us", "transit_p99_us")
"""The figures that are also told as the difference to no proxy at all."""

Round = Mapping[str, Sample]
"""The samples of one round, by target."""


def make_sample(
    told: Told,
    *,
    counts_tokens: bool,
    cpu_s: float,
    rss_mb: float,
    rss_mb_along: Sequence[float],
    proxy_share: float,
    engine_share: float,
    clients_share: float,
    elsewhere_cores: float,
    num_unproven: int,
) -> Sample:
    first = sorted(told.first_tokens)
    transits = sorted(told.transits)
    num_answers = told.requests + told.beside - told.errors
    return Sample(
        cpu_ms_per_req=cpu_s * 1e3 / max(1, num_answers),
        cpu_us_per_token=cpu_s * 1e6 / max(1, told.tokens) if counts_tokens and not told.beside else None,
        ttft_p50_ms=_scaled(percentile(first, 50), TENTHS_PER_US * 1000),
        ttft_p99_ms=_scaled(percentile(first, 99), TENTHS_PER_US * 1000),
        transit_p50_us=_scaled(percentile(transits, 50), TENTHS_PER_US),
        transit_p99_us=_scaled(percentile(transits, 99), TENTHS_PER_US),
        rss_mb=rss_mb,
        rss_mb_along=tuple(rss_mb_along),
        req_per_s=max(0, told.requests - told.errors) * 1e9 / max(1, told.wall_ns),
        proxy_share=proxy_share,
        engine_share=engine_share,
        clients_share=clients_share,
        elsewhere_cores=elsewhere_cores,
        num_beside=told.beside,
        num_errors=told.errors,
        complaint=told.complaint,
        num_unproven=num_unproven,
    )


def is_disturbed(samples: Iterable[Sample]) -> bool:
    return any(sample.elsewhere_cores > MAX_ELSEWHERE_CORES for sample in samples)


def median_of(rounds: Sequence[Round], target: str, figure: str) -> float | None:
    values = [value for each in rounds if (value := getattr(each[target], figure)) is not None]
    return statistics.median(values) if values else None


def ratio_of(rounds: Sequence[Round], target: str, other: str, figure: str) -> float | None:
    """Returns the median of the ratios: what disturbs a round disturbs both."""
    pairs = [(getattr(each[target], figure), getattr(each[other], figure)) for each in rounds]
    ratios = [mine / theirs for mine, theirs in pairs if mine is not None and theirs]
    return statistics.median(ratios) if ratios else None


def added_of(rounds: Sequence[Round], target: str, bare: str, figure: str) -> float | None:
    """Returns the median of the differences."""
    pairs = [(getattr(each[target], figure), getattr(each[bare], figure)) for each in rounds]
    added = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
    return statistics.median(added) if added else None


def least_disturbed(rounds: Sequence[Round], count: int) -> list[Round]:
    """Returns `count` of the rounds: those in which others were least busy."""
    return sorted(rounds, key=lambda each: max(sample.elsewhere_cores for sample in each.values()))[:count]


def _scaled(value: float | None, unit: int) -> float | None:
    return None if value is None else value / unit


assert set(FIGURES) <= {field.name for field in fields(Sample)}
