"""The module puts the figures of all runs beside each other, and says in sentences what they mean; page and terminal
both use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from pdproxy.loadtest.agreement import Differing, asks_alike, differences, differing
from pdproxy.loadtest.latency import told_of
from pdproxy.loadtest.report.sides import Shown, Side
from pdproxy.loadtest.report.words import NOTHING, counted, late_words, milliseconds, rate, share
from pdproxy.loadtest.slo import Slo

HEADINGS = (
    *("", "requests", "whole", "failed", "left", "asked/s", "answered/s", "good/s", "answer tokens/s"),
    *("TTFT p50", "TTFT p99", "TTFT p99.9", "TPOT p50", "TPOT p95"),
    *("ITL p99", "ITL p99.9", "E2E p50", "E2E p99", "E2E p99.9"),
)
CAPTION = "latencies in milliseconds, counted from when a request was due; warm-up does not count"


def rows(shown: Sequence[Shown]) -> list[list[str]]:
    """Returns a row of cells for each run, as `HEADINGS` names them."""
    return [_row(one) for one in shown]


def columns(shown: Sequence[Shown]) -> list[int]:
    """Returns the places of the `HEADINGS` that are worth showing: percentiles for which no run has values enough are
    left out."""
    found = rows(shown)
    return [
        place
        for place, name in enumerate(HEADINGS)
        if not name.endswith("p99.9") or any(row[place] != NOTHING for row in found)
    ]


def _row(one: Shown) -> list[str]:
    found = one.summary
    latency = found.latencies
    return [
        one.label + ("" if found.is_trusted else " *"),
        f"{found.num_requests:,}",
        f"{found.num_ok:,}",
        f"{found.num_failed:,}",
        f"{found.num_aborted:,}",
        rate(found.offered_rps),
        rate(found.throughput_rps),
        rate(found.goodput_rps),
        rate(found.answer_tps),
        milliseconds(latency["ttft"].p50),
        milliseconds(latency["ttft"].p99),
        milliseconds(told_of(latency["ttft"], "p999")),
        milliseconds(latency["tpot"].p50),
        milliseconds(latency["tpot"].p95),
        milliseconds(latency["itl"].p99),
        milliseconds(told_of(latency["itl"], "p999")),
        milliseconds(latency["e2e"].p50),
        milliseconds(latency["e2e"].p99),
        milliseconds(told_of(latency["e2e"], "p999")),
    ]


def verdicts(shown: Sequence[Shown], slo: Slo) -> Iterator[str]:
    """Yields one sentence per side: whether its runs met the service's target. A last one says so where the sides
    cannot be compared by it."""
    if not slo.objectives:
        return
    sides = [
        sorted((one for one in shown if one.index == index), key=lambda one: one.rate or 0.0)
        for index in sorted({one.index for one in shown})
    ]
    for runs in sides:
        yield f"{runs[0].side}: {_verdict(runs, slo)}"
    unsure = [runs[0].side for runs in sides if _unjudged(runs)]
    if len(sides) > 1 and unsure:
        yield f"None of these is shown to be better than another: not all of {' and '.join(unsure)} is judged"


def _verdict(runs: Sequence[Shown], slo: Slo) -> str:
    if len(runs) > 1:
        return _verdict_of_rates(runs, slo)
    found = runs[0].summary
    good = f"{share(found.good_share)} of the requests were good"
    if found.is_slo_met:
        return f"met {slo}; {good}"
    failing = [one for one in found.slo if not one.is_met and one.is_judged == found.is_slo_judged]
    values = "; ".join(f"{one.objective}: {_told(one.metric, one.value)}" for one in failing)
    if not found.is_slo_judged:
        return f"not judged: {late_words(found.generator)}; {values}"
    return f"missed {values}; {good}"


def _verdict_of_rates(runs: Sequence[Shown], slo: Slo) -> str:
    """Returns the verdict on several runs in the order of their rates."""
    met = [one for one in runs if one.summary.is_slo_met]
    unjudged = _unjudged(runs)
    if not met and not unjudged:
        return f"no rate met {slo}"
    why = "; ".join(f"{rate(one.rate)} is not judged: {late_words(one.summary.generator)}" for one in unjudged)
    if not met:
        return f"no rate is known to have met {slo}; {why}"
    best = met[-1]
    below = [rate(one.rate) for one in runs[: runs.index(best)] if one.summary.is_slo_met is False]
    but = f"; but {' and '.join(below)} did not" if below else ""
    up_to = f"{'at least up' if unjudged else 'up'} to {rate(best.rate)} requests/s"
    good = f"good there: {rate(best.summary.goodput_rps)}/s"
    return f"{up_to} met {slo}; {good}{but}{f'; {why}' if why else ''}"


def _unjudged(runs: Sequence[Shown]) -> list[Shown]:
    """Returns those of a side's runs, in the order of their rates, without which it is not known what the side can do.
    They are not judged, and lie above the highest rate that met the target and below the next that missed it."""
    met = [index for index, one in enumerate(runs) if one.summary.is_slo_met]
    above = runs[met[-1] + 1 :] if met else runs
    missed = next((index for index, one in enumerate(above) if one.summary.is_slo_met is False), len(above))
    return [one for one in above[:missed] if not one.summary.is_slo_judged]


def _told(metric: str, value: float | None) -> str:
    if value is None:
        return "too many failed, or nothing was measured"
    return share(value) if metric == "errors" else f"it was {milliseconds(value)} ms"


def notes(shown: Sequence[Shown], sides: Sequence[Side]) -> Iterator[str]:
    """Yields the sentences about what is not in the table."""
    for side in sides:
        errors: Counter[str] = Counter()
        for one in shown:
            errors.update(one.summary.errors if one.side == side.label else {})
        if errors:
            yield f"{side.label}: failed: {counted(dict(errors.most_common()))}"
        alone = sum(one.summary.paths.get("local", 0) for one in shown if one.side == side.label)
        if alone:
            yield f"{side.label}: {alone:,} answers are of one engine alone: their prefill is in the handover's time"
    yield from _answers(sides)
    yield from _differences(sides)
    for one in shown:
        if one.summary.num_at_once:
            of = f"{one.summary.num_at_once:,} of {one.summary.num_ok:,} answers"
            yield f"{one.label}: {of} came whole at once, so that their TPOT is 0 and tells nothing of the engine"
    for one in shown:
        if one.summary.cached_share:
            yield f"{one.label}: {share(one.summary.cached_share)} of the prompts' tokens were in the engine's cache"


def _answers(sides: Sequence[Side]) -> Iterator[str]:
    """Yields sentences that tell whether requests that asked the same got the same answer."""
    for side in sides:
        found = [differing(run.records) for run in side.runs]
        if any(found):
            yield f"{side.label}: answers to the same question: {_differ(found)}"
    for one, other in combinations(sides, 2):
        found = [differing([*a.records, *b.records]) for a in one.runs for b in other.runs if asks_alike(a, b)]
        if any(found):
            yield f"answers of {one.label} and of {other.label} to the same question: {_differ(found)}"


def _differences(sides: Sequence[Side]) -> Iterator[str]:
    """Yields a warning for two sides that were not asked the same: one cannot compare them without a thought."""
    for one, other in combinations(sides, 2):
        names = dict.fromkeys(name for a in one.runs for b in other.runs for name in differences(a, b))
        if names:
            yield f"{one.label} and {other.label} were not asked alike: {', '.join(names)} differ; see the settings"


def _differ(found: Sequence[Differing]) -> str:
    return f"{sum(one.num_differing for one in found)} of {sum(one.num_compared for one in found):,} differ"


def warnings(shown: Sequence[Shown]) -> Iterator[str]:
    """Yields what stands against the figures."""
    for one in shown:
        health = one.summary.generator
        if not one.summary.is_trusted:
            late, lag = milliseconds(health.late_p99_s), milliseconds(health.lag_p99_s)
            yield (
                f"* {one.label}: not to be quoted. The generator was late: p99 of its sends {late} ms and of its reads "
                f"{lag} ms, and {milliseconds(health.limit_s)} ms are allowed"
            )
        if one.summary.is_interrupted:
            yield f"{one.label}: stopped before its end; {one.summary.num_interrupted} requests were cut off"
