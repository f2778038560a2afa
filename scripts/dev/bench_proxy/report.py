"""The module makes a report of what was found, as plain values for a JSON file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.dev.bench_proxy.goals import check_goals
from scripts.dev.bench_proxy.plan import FULL, LONG
from scripts.dev.bench_proxy.run import Measured
from scripts.dev.bench_proxy.samples import ADDED, FIGURES, Round, added_of, is_disturbed, median_of, ratio_of
from scripts.dev.bench_proxy.targets import DIRECT, FLOOR, OURS


@dataclass(slots=True)
class Findings:
    """Findings are those of one run; they grow while it runs, so that an interrupted one has something to tell."""

    date: str
    """The time at which the run began, in ISO 8601."""
    machine: dict[str, Any]
    rounds: int
    has_ids: bool
    missing: list[str]
    """Holds the peers that were asked for and could not be started."""
    measured: list[Measured] = field(default_factory=list)
    has_interpreted: bool = False
    """True where pdproxy is measured a second time, not compiled."""
    earlier: Path | None = None
    """Holds another checkout of pdproxy, which is measured, too."""
    python: str | None = None
    """Holds the command of another Python, by which pdproxy is measured, too."""
    num_workers: int = 1
    """The processes with which pdproxy is measured a second time, where they are several."""


def make_report(findings: Findings, *, is_complete: bool) -> dict[str, Any]:
    """Returns the report; ``rows`` has one per scenario and target, with medians over the rounds, in their order."""
    rows = [row | {"date": findings.date} for measured in findings.measured for row in _rows(measured)]
    return {
        "date": findings.date,
        "is_complete": is_complete,
        "machine": findings.machine,
        "rounds": findings.rounds,
        "engines_tell_ids": findings.has_ids,
        "missing": findings.missing,
        "rows": rows,
        "failures": [
            {"scenario": measured.scenario.name, "target": target, "why": why}
            for measured in findings.measured
            for target, why in measured.failures.items()
        ],
        "goals": check_goals(rows),
    }


def merge(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one report of all: a scenario that several have is the last one's. Raises `ValueError` for different
    machines."""
    *_, last = reports
    if any(_made_on(one) != _made_on(last) for one in reports):
        raise ValueError(
            "these reports are of different machines, or of pdproxy compiled and not: they do not belong side by side"
        )
    by_scenario = {name: one for one in reports for name in _scenarios(one)}
    merged = {
        key: [each for name, one in by_scenario.items() for each in one[key] if each["scenario"] == name]
        for key in ("rows", "failures")
    }
    merged["rows"].sort(key=_place)
    missing = sorted({why for one in reports for why in one["missing"]})
    return last | merged | {"missing": missing, "goals": check_goals(merged["rows"])}


def _made_on(report: dict[str, Any]) -> tuple[Any, ...]:
    machine = report["machine"]
    return machine["cpu"], machine["cores"], bool(machine.get("compiled"))


def _scenarios(report: dict[str, Any]) -> set[str]:
    return {each["scenario"] for key in ("rows", "failures") for each in report[key]}


def _place(row: dict[str, Any]) -> int:
    """Returns the scenario's place in the plan's order; unknown ones come last."""
    names = [scenario.name for scenario in (*FULL, *LONG)]
    return names.index(row["scenario"]) if row["scenario"] in names else len(names)


def _rows(measured: Measured) -> Iterator[dict[str, Any]]:
    """Yields the rows of a scenario. If it was interrupted before there was any better round, they are of the disturbed
    ones."""
    rounds = [each for each in measured.rounds or measured.disturbed if set(measured.targets) <= set(each)]
    if rounds:
        for target in measured.targets:
            yield _row(measured, rounds, target)


def _row(measured: Measured, rounds: Sequence[Round], target: str) -> dict[str, Any]:
    samples = [each[target] for each in rounds]
    has_bare = DIRECT in measured.targets and target != DIRECT
    return {
        "target": target,
        "scenario": measured.scenario.name,
        **{figure: median_of(rounds, target, figure) for figure in FIGURES},
        **{f"added_{name}": added_of(rounds, target, DIRECT, name) if has_bare else None for name in ADDED},
        "ratios": {
            peer: {figure: ratio_of(rounds, target, peer, figure) for figure in FIGURES}
            for peer in (_comparable(measured, rounds) if target == OURS else [])
        },
        "over_floor": ratio_of(rounds, target, FLOOR, "cpu_ms_per_req") if FLOOR in measured.targets else None,
        "req_per_s": median_of(rounds, target, "req_per_s"),
        "rss_mb_along": list(samples[-1].rss_mb_along),
        "proxy_share": median_of(rounds, target, "proxy_share"),
        "engine_share": median_of(rounds, target, "engine_share"),
        "clients_share": median_of(rounds, target, "clients_share"),
        "elsewhere_cores": max(sample.elsewhere_cores for sample in samples),
        "beside": sum(sample.num_beside for sample in samples),
        "errors": sum(sample.num_errors for sample in samples),
        "complaint": next((sample.complaint for sample in samples if sample.complaint), ""),
        "is_disqualified": any(sample.num_unproven for sample in samples),
        "is_noisy": measured.is_noisy or is_disturbed(samples),
        "rounds": len(rounds),
        "rounds_thrown_away": len(measured.disturbed),
        "by_round": [asdict(sample) for sample in samples],
    }


def _comparable(measured: Measured, rounds: Sequence[Round]) -> list[str]:
    """Returns the peers that answered every request, and as they should: refusing is cheap. It returns none where we
    did not."""
    sound = [
        target
        for target in measured.targets
        if not any(each[target].num_errors or each[target].num_unproven for each in rounds)
    ]
    return [target for target in sound if target not in (OURS, DIRECT, FLOOR)] if OURS in sound else []
