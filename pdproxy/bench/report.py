"""What was found, as plain values for a JSON file, as a table for people, and as sentences about what to make of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from pdproxy.bench.run import Measured
from pdproxy.bench.samples import ADDED, FIGURES, MAX_HELPER_SHARE, added_of, is_disturbed, median_of, ratio_of
from pdproxy.bench.targets import DIRECT, OURS


@dataclass(slots=True)
class Findings:
    """Of one run; grows while it runs, so that an interrupted one has something to tell."""

    date: str
    """ISO 8601, when the run began."""
    machine: dict[str, Any]
    rounds: int
    has_ids: bool
    missing: list[str]
    """Peers that were asked for and could not be started."""
    measured: list[Measured] = field(default_factory=list)


def make_report(findings: Findings, *, is_complete: bool) -> dict[str, Any]:
    """``rows``: one per scenario and target, medians over the rounds, in their order."""
    return {
        "date": findings.date,
        "is_complete": is_complete,
        "machine": findings.machine,
        "rounds": findings.rounds,
        "engines_tell_ids": findings.has_ids,
        "missing": findings.missing,
        "rows": [row for measured in findings.measured for row in _rows(measured)],
        "failures": [
            {"scenario": measured.scenario.name, "target": target, "why": why}
            for measured in findings.measured
            for target, why in measured.failures.items()
        ],
    }


def _rows(measured: Measured) -> Iterator[dict[str, Any]]:
    """Of a scenario that was interrupted before there was any better round, of the disturbed ones."""
    rounds = [each for each in measured.rounds or measured.disturbed if set(measured.targets) <= set(each)]
    if rounds:
        for target in measured.targets:
            yield _row(measured, rounds, target)


def _row(measured: Measured, rounds: Sequence[Any], target: str) -> dict[str, Any]:
    samples = [each[target] for each in rounds]
    others = [other for other in measured.targets if other not in (target, DIRECT)]
    has_bare = DIRECT in measured.targets and target != DIRECT
    return {
        "target": target,
        "scenario": measured.scenario.name,
        **{figure: median_of(rounds, target, figure) for figure in FIGURES},
        **{f"added_{name}": added_of(rounds, target, DIRECT, name) if has_bare else None for name in ADDED},
        "ratios": {
            other: {figure: ratio_of(rounds, target, other, figure) for figure in FIGURES}
            for other in (others if target == OURS else [])
        },
        "req_per_s": median_of(rounds, target, "req_per_s"),
        "proxy_share": median_of(rounds, target, "proxy_share"),
        "engine_share": median_of(rounds, target, "engine_share"),
        "clients_share": median_of(rounds, target, "clients_share"),
        "elsewhere_cores": max(sample.elsewhere_cores for sample in samples),
        "errors": sum(sample.num_errors for sample in samples),
        "complaint": next((sample.complaint for sample in samples if sample.complaint), ""),
        "is_disqualified": any(sample.num_unproven for sample in samples),
        "is_noisy": measured.is_noisy or is_disturbed(samples),
        "rounds": len(rounds),
        "rounds_thrown_away": len(measured.disturbed),
        "by_round": [asdict(sample) for sample in samples],
    }


# ── for people ──────────────────────────────────────────────────────────────────────────────────────────────────────


def make_table(report: dict[str, Any]) -> Table:
    rows = report["rows"]
    table = Table(
        title=f"medians of {report['rounds']} rounds; latency of direct, and what each proxy adds to it",
        caption="ratio: pdproxy's CPU over this one's, round by round; no direct: latency in all; * noisy",
    )
    names = ("CPU ms/req", "CPU µs/token", "ratio", "TTFT p50 ms", "p99", "transit p50 µs", "p99", "RSS MB", "req/s")
    for name in ("scenario", "target"):
        table.add_column(name, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    before = None
    for row in rows:
        if before is not None and before != row["scenario"]:
            table.add_section()
        table.add_row(row["scenario"] if before != row["scenario"] else "", *_cells(report, row))
        before = row["scenario"]
    return table


def _cells(report: dict[str, Any], row: dict[str, Any]) -> list[str]:
    has_bare = any(row[f"added_{name}"] is not None for name in ADDED)
    prefix = "added_" if has_bare else ""
    cpu = row["target"] != DIRECT
    return [
        row["target"] + ("*" if row["is_noisy"] else ""),
        f"{row['cpu_ms_per_req']:.3f}" if cpu else "",
        _number(row["cpu_us_per_token"], 2) if cpu else "",
        _number(cpu_ratio(report, row["scenario"], row["target"]), 2),
        *(_number(row[prefix + name], 2) for name in ADDED[:2]),
        *(_number(row[prefix + name], 0) for name in ADDED[2:]),
        f"{row['rss_mb']:.0f}" if cpu else "",
        f"{row['req_per_s']:.0f}",
        _remark(row),
    ]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _remark(row: dict[str, Any]) -> str:
    if row["is_disqualified"]:
        return "disqualified: decodes without their handoff"
    return f"{row['errors']} errors: {row['complaint']}" if row["errors"] else ""


def cpu_ratio(report: dict[str, Any], scenario: str, peer: str) -> float | None:
    """Ours over that peer's, per request."""
    for row in report["rows"]:
        if row["scenario"] == scenario and row["target"] == OURS:
            ratio: float | None = row["ratios"].get(peer, {}).get("cpu_ms_per_req")
            return ratio
    return None


def make_lines(report: dict[str, Any]) -> list[str]:
    """What is not in the table."""
    machine = report["machine"]
    rows = report["rows"]
    lines = [
        f"machine: {machine['cores']} cores of {machine['cpu']}, kernel {machine['kernel']}; the proxy alone on core "
        f"{machine['proxy_core']}, engines and clients on core {machine['helper_core']}"
    ]
    for name, key in (("engines", "engine_share"), ("clients", "clients_share")):
        if rows:
            busiest = max(rows, key=lambda row: row[key])
            lines.append(
                f"{name}: at most {busiest[key]:.0%} of their core ({busiest['scenario']}, {busiest['target']})"
            )
    return lines


def warnings(report: dict[str, Any]) -> list[str]:
    """What stands against the figures."""
    rows = report["rows"]
    found = [f"skipped {why}" for why in report["missing"]]
    found += [f"{one['scenario']}: without {one['target']}: {one['why']}" for one in report["failures"]]
    noisy = sorted({row["scenario"] for row in rows if row["is_noisy"]})
    if noisy:
        found.append(f"other processes were busy: the figures of {', '.join(noisy)} are not to be quoted")
    for row in rows:
        if row["engine_share"] + row["clients_share"] > MAX_HELPER_SHARE and row["target"] != DIRECT:
            found.append(f"{row['scenario']}, {row['target']}: engines and clients had no room left on their core")
    if report["machine"]["cores"] < 2:
        found.append("there is one core only, which the proxy shares with what it is measured with")
    return found
