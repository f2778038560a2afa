"""The module shows what was found out, as tables for people, and the same as Markdown for documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pdproxy.simulate.figures import Figures
from pdproxy.simulate.fit import Compared
from pdproxy.simulate.simulation import Result
from pdproxy.simulate.studies import Pair
from transfer.command_line.tables import Table

Rows = tuple[list[str], list[list[str]]]
"""The head and the body of a table."""

_LATENCIES = (("TTFT", "ttft", 50.0), ("TTFT", "ttft", 95.0), ("TTFT", "ttft", 99.0), ("TPOT", "tpot", 95.0))


def seconds(value: float | None) -> str:
    """Returns seconds as text for a cell."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "never"
    return f"{value * 1000:.3g} ms" if value < 1.0 else f"{value:.3g} s"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.1f} %"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def latency_rows(result: Result) -> Rows:
    """Returns the table of one run: latencies and phases, by percentile."""
    figures = result.figures
    rows = []
    for name, histogram in (*figures.latencies.items(), *figures.phases.items()):
        cells = [seconds(histogram.percentile(percent)) for percent in (50.0, 95.0, 99.0)]
        label = name.upper() if name in figures.latencies else name.replace("_", " ")
        rows.append([label, seconds(histogram.mean_s), *cells, seconds(histogram.max_s if histogram.count else None)])
    return ["", "mean", "p50", "p95", "p99", "max"], rows


def fleet_rows(result: Result) -> Rows:
    """Returns the table of one run's fleet: what was asked of it, how busy it was, and what became of the requests."""
    figures, use = result.figures, result.use
    rows = [
        ["requests/s", number(result.offered_per_s)],
        ["answers/s", number(result.done_per_s)],
        ["prefillers", share(use["prefillers_busy"]["mean"])],
        ["decoders", share(use["decoders_busy"]["mean"])],
        ["mean batch", f"{number(use['mean_batch'])} of {result.plan.speed.max_batch}"],
        ["token gap p99", _range(use["token_gap_p99_s"])],
        ["gave way", str(use["given_way"])],
        ["most pages", f"{use['most_pages']} of {use['pd_buffer_pages']}"],
        ["failed", share(figures.num_failed / figures.count if figures.count else None)],
    ]
    if fronts := result.fronts:
        rows.append(["messages per request", number(fronts["messages_per_request"])])
        rows.append(["transfers without room", str(fronts["without_room"])])
        rows.append(["leaders", str(fronts["leaders"])])
        if fronts["leader_core_share"] is not None:
            rows.append(["the leader's core", share(fronts["leader_core_share"])])
    plain = figures.as_plain()
    for one in plain.get("slo", []):
        rows.append([one["objective"], "met" if one["is_met"] else "missed"])
    if "good_share" in plain:
        rows.append(["good", share(plain["good_share"])])
    return ["", "value"], rows


def _range(spread: Mapping[str, float | None]) -> str:
    """Returns the least and the most of what decoders have."""
    return f"{seconds(spread['least'])} to {seconds(spread['most'])}"


def policy_rows(found: Sequence[tuple[Pair, Result]]) -> Rows:
    return ["policy (prefill/decode)", *_HEADS], [[str(pair), *_cells(result)] for pair, result in found]


def rate_rows(results: Sequence[Result]) -> Rows:
    return ["requests/s", *_HEADS], [[number(result.plan.traffic.rate), *_cells(result)] for result in results]


def size_rows(results: Sequence[Result]) -> Rows:
    rows = [[result.plan.name, *_cells(result)] for result in results]
    return ["fleet", *_HEADS], rows


def role_rows(found: Sequence[tuple[str, Result]]) -> Rows:
    """Returns the table of splits: TTFT (p95) of each half, or of all, against the best split that stays as it is."""
    num_halves = len(found[0][1].halves) or 1
    ttfts = [[_ttft(figures) for figures in (result.halves or (result.figures,))] for _, result in found]
    best = [min(each[half] for each in ttfts[:-1]) for half in range(num_halves)]
    rows = []
    for (name, result), each in zip(found, ttfts, strict=True):
        cells = [cell for half in range(num_halves) for cell in (seconds(each[half]), f"{each[half] / best[half]:.2f}")]
        rows.append([name, *cells, str(len(result.moves)), share(result.figures.num_failed / result.figures.count)])
    parts = ("first half", "second half") if num_halves > 1 else ("",)
    heads = [head for part in parts for head in (f"TTFT p95 {part}".strip(), "× best")]
    return ["split", *heads, "moves", "failed"], rows


def _ttft(figures: Figures) -> float:
    """Returns the TTFT (p95) in seconds; a request that failed took for ever."""
    value = figures.latencies["ttft"].percentile(95.0, figures.num_failed)
    return math.inf if value is None else value


def compared_rows(compared: Sequence[Compared]) -> Rows:
    rows = [[one.what, number(one.measured), number(one.predicted), _error(one.error)] for one in compared]
    return ["", "measured", "predicted", "error"], rows


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:+.1f} %"


_HEADS = [
    *(f"{name} p{percent:g}" for name, _, percent in _LATENCIES),
    "E2E p99",
    "answers/s",
    "prefillers",
    "decoders",
]
_HEADS += ["retries", "failed", "good"]


def _cells(result: Result) -> list[str]:
    figures, use = result.figures, result.use
    latencies = [*_LATENCIES, ("E2E", "e2e", 99.0)]
    plain = figures.as_plain()
    return [
        *(seconds(figures.latencies[metric].percentile(percent)) for _, metric, percent in latencies),
        number(result.done_per_s),
        share(use["prefillers_busy"]["mean"]),
        share(use["decoders_busy"]["mean"]),
        str(figures.num_retries),
        share(figures.num_failed / figures.count if figures.count else None),
        share(plain.get("good_share")),
    ]


def make_table(title: str, rows: Rows) -> Table:
    head, body = rows
    table = Table(*head, title=title)
    for row in body:
        table.add_row(*row)
    return table


def markdown(rows: Rows) -> str:
    """Returns the table as Markdown for a document."""
    head, body = rows
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
