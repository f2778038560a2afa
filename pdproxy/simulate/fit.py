"""The module finds the numbers of `speed.py` from one load test of real engines, and tells how near a prediction with
them comes to another.

It fits what can be told apart in the run: prompts that nobody disturbed say what reading costs, answers among more or
fewer others say what a step costs. So a run at a low rate is enough for the first, and one at several for the second.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from pathlib import Path
from statistics import median

import msgspec

from pdproxy.loadtest.latency import distribution_of
from pdproxy.loadtest.record import Record, Run, RunFileError, read_run
from pdproxy.loadtest.traces import TraceRow
from pdproxy.simulate.errors import SimulationError
from pdproxy.simulate.plan import Plan
from pdproxy.simulate.simulation import Result, simulate
from pdproxy.simulate.speed import Speed
from pdproxy.simulate.traffic import sizes_of, span_of

MIN_RECORDS = 8
MAX_POINTS = 400
"""The most points of a fit, because it looks at every pair of them."""
CHUNK_SIZES: tuple[int, ...] = tuple(2**exponent for exponent in range(4, 12))
FASTEST_LINK = 1e12
"""The bandwidth, in bytes per second, that a fit finds where more bytes took no longer. It finds no higher one."""

Interval = tuple[float, float]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Returns the runs in these files. Raises `SimulationError`."""
    runs = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except OSError as error:
            raise SimulationError(f"{path} cannot be read: {error.strerror}") from None
        except RunFileError as error:
            raise SimulationError(str(error)) from None
    return runs


@dataclass(frozen=True, slots=True)
class Line:
    """Line is `at_zero` + `slope` × x."""

    at_zero: float
    slope: float


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Returns a line through the middle of the points (Theil and Sen's): a few that are far off do not move it. Neither
    number is negative; where all x are the same, everything is owed to x. Raises `SimulationError` where no x is above
    0."""
    if points and not any(x > 0 for x, _ in points):
        raise SimulationError("none of the records moved anything: there is no line through them")
    points = _spread(points)
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(points, 2) if x1 != x0]
    if not slopes:
        return Line(0.0, median(y / x for x, y in points if x > 0))
    slope = max(0.0, median(slopes))
    at_zero = median(y - slope * x for x, y in points)
    if at_zero < 0.0:
        return Line(0.0, max(0.0, median(y / x for x, y in points if x > 0)))
    return Line(at_zero, slope)


def fit(runs: Sequence[Run], base: Speed) -> Speed:
    """Returns `base` with what the runs tell. The runs have to go through a proxy of ours, or the time would not be
    split by phases.

    Raises `SimulationError` where they tell too little.
    """
    records = [[one for one in run.measured if _is_telling(one)] for run in runs]
    alone = [one for run in records for one in _alone_at(run, _prefill_interval, lambda one: one.prefiller)]
    if len(alone) < MIN_RECORDS:
        raise SimulationError(
            f"{len(alone)} prompts were read without others beside them, and {MIN_RECORDS} are needed: measure a run "
            "at a lower rate, through the proxy, with streamed answers"
        )
    prefill = fit_line([(_prompt_tokens(one), one.phases["prefill"]) for one in alone])
    steps = fit_line([point for run in records for point in _steps(run)])
    token_bytes = median((one.num_kv_bytes or 0) / _prompt_tokens(one) for one in alone)
    transfer = fit_line([(float(one.num_kv_bytes or 0), one.phases.get("kv_wait", 0.0)) for one in alone])
    return msgspec.structs.replace(
        base,
        prefill_s=_told(prefill.at_zero),
        prefill_token_s=_told(prefill.slope),
        transfer_s=_told(transfer.at_zero),
        kv_token_bytes=round(token_bytes),
        link_bytes_per_s=_told(min(FASTEST_LINK, 1 / transfer.slope)) if transfer.slope > 0.0 else FASTEST_LINK,
        step_s=_told(steps.at_zero),
        step_sequence_s=_told(steps.slope),
        overhead_s=_told(max(0.0, median(map(_overhead, alone)))),
        chunk_size=_chunk_size(alone) or base.chunk_size,
        pd_buffer_pages=_pages(runs) or base.pd_buffer_pages,
    )


def _is_telling(record: Record) -> bool:
    has_times = record.first_token_s is not None and record.last_token_s is not None
    return record.is_ok and has_times and record.path == "disaggregated" and "prefill" in record.phases


def _prompt_tokens(record: Record) -> int:
    return record.prompt_tokens or record.prompt_tokens_asked


def _prefill_interval(record: Record) -> Interval:
    began = record.sent_s + record.phases.get("tokenize", 0.0) + record.phases.get("slot_wait", 0.0)
    return began, began + record.phases["prefill"]


def _alone_at(
    records: Sequence[Record], interval: Callable[[Record], Interval], place: Callable[[Record], str]
) -> Iterable[Record]:
    """Yields the records whose interval no other's at the same place touches."""
    by_place: dict[str, list[tuple[Interval, Record]]] = {}
    for record in records:
        by_place.setdefault(place(record), []).append((interval(record), record))
    for others in by_place.values():
        others.sort(key=lambda one: one[0])
        ended_at = -1.0
        for index, ((begins, ends), record) in enumerate(others):
            is_last = index + 1 == len(others)
            if begins >= ended_at and (is_last or others[index + 1][0][0] >= ends):
                yield record
            ended_at = max(ended_at, ends)


def _steps(records: Sequence[Record]) -> Iterable[tuple[float, float]]:
    """Yields for each answer how many were written beside it on average, itself included, and the seconds of a
    token."""
    by_decoder: dict[str, list[Record]] = {}
    for record in records:
        by_decoder.setdefault(record.decoder, []).append(record)
    for together in by_decoder.values():
        mean_size = _mean_sizes([(one.first_token_s or 0.0, one.last_token_s or 0.0) for one in together])
        for record, size in zip(together, mean_size, strict=True):
            if record.tpot_s is not None and record.tpot_s > 0.0:
                yield size, record.tpot_s


def _mean_sizes(intervals: Sequence[Interval]) -> list[float]:
    """Returns for each interval how many there were on average while it lasted."""
    changes = sorted([(begin, 1) for begin, _ in intervals] + [(end, -1) for _, end in intervals])
    times = [at for at, _ in changes]
    sizes = list(accumulate(by for _, by in changes))
    areas = [0.0]
    for index in range(1, len(times)):
        areas.append(areas[-1] + sizes[index - 1] * (times[index] - times[index - 1]))

    def area(until: float) -> float:
        index = bisect_right(times, until) - 1
        return areas[index] + sizes[index] * (until - times[index])

    return [(area(end) - area(begin)) / (end - begin) if end > begin else 1.0 for begin, end in intervals]


def _overhead(record: Record) -> float:
    """Returns the seconds up to the first token, less what is accounted for."""
    accounted = sum(record.phases.get(name, 0.0) for name in ("slot_wait", "prefill", "kv_wait"))
    return (record.first_token_s or 0.0) - record.sent_s - accounted


def _chunk_size(records: Sequence[Record]) -> int | None:
    """Returns the page size with which most prompts take the pages they took, or None where no record tells."""
    told = [(_prompt_tokens(one), one.num_pages) for one in records if one.num_pages]
    if not told:
        return None
    num_right = {size: sum(-(-tokens // size) == pages for tokens, pages in told) for size in CHUNK_SIZES}
    return max(num_right, key=num_right.__getitem__)


def _pages(runs: Sequence[Run]) -> int | None:
    told: list[int] = [pages for run in runs for moment in run.moments for pages in moment.capacity.values()]
    return max(told) if told else None


def _spread(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Returns at most `MAX_POINTS` of the points, over the whole range of x, so that they can be looked at in pairs.
    Raises `SimulationError` where there are none."""
    if not points:
        raise SimulationError("there is nothing to fit: no answer of two tokens or more was written")
    step = max(1, -(-len(points) // MAX_POINTS))
    return sorted(points)[::step]


def _told(value: float) -> float:
    return float(f"{value:.5g}")


# ── how near it comes ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Compared:
    """Compared is one figure, as measured and as predicted."""

    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float | None:
        """Returns the error as a share of what was measured; None where that was 0, of which nothing is a share."""
        return (self.predicted - self.measured) / self.measured if self.measured else None


def predict(run: Run, plan: Plan) -> tuple[Result, list[Compared]]:
    """Simulates the plan's fleet with a run's own requests, at their own times. Returns the result, and its figures
    beside the measured ones. Raises `SimulationError` where the run has fewer than two requests."""
    rows = [
        TraceRow(one.due_s - run.records[0].due_s, _prompt_tokens(one), one.answer_tokens or one.answer_tokens_asked)
        for one in run.records
    ]
    if len(rows) < 2:
        raise SimulationError("there are no two requests in the run")
    traffic = replace(plan.traffic, rows=rows, sizes=sizes_of(rows), rate=len(rows) / span_of(rows), clients=0)
    warmup = sum(one.is_warmup for one in run.records)
    result = simulate(replace(plan, traffic=traffic, num_requests=len(rows), num_warmup=warmup))
    return result, list(_compared(run, result))


def _compared(run: Run, result: Result) -> Iterable[Compared]:
    latencies = result.figures.latencies
    for metric, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E")):
        seen = distribution_of(run.measured, metric)
        for word, percent, value in (("median", 50.0, seen.p50), ("p95", 95.0, seen.p95)):
            predicted = latencies[metric].percentile(percent)
            if value is not None and predicted is not None:
                yield Compared(f"{name} {word} (s)", value, predicted)
    due = [one.due_s for one in run.measured]
    if due and (span_s := max(due) - min(due)) > 0.0 and result.done_per_s is not None:
        num = sum(one.done_s <= max(due) for one in run.records if one.is_ok and one.done_s >= min(due))
        yield Compared("throughput (answers/s)", num / span_s, result.done_per_s)
