"""The module tells people what was found: a table, and sentences about what to make of it. The figures are a
report's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.dev.bench_proxy.plan import BESIDE, BESIDE_TOKENS, CALM
from scripts.dev.bench_proxy.samples import ADDED, MAX_HELPER_SHARE
from scripts.dev.bench_proxy.targets import DIRECT, OURS
from transfer.command_line.tables import Table

HEADINGS = (
    *("scenario", "target", "CPU ms/req", "CPU µs/token", "ratio", "× floor", "TTFT p50 ms", "TTFT p99 ms"),
    *("transit p50 µs", "transit p99 µs", "RSS MB", "req/s", ""),
)
CAPTION = (
    "ratio: pdproxy's CPU over this one's; × floor: this one's CPU over the floor's, both round by round; no direct: "
    "latency in all; * noisy"
)
NUM_NAMES = 2
"""The number of headings, from the first one, that are over words."""
COMPLAINT_CHARS = 60


def make_table(report: dict[str, Any]) -> Table:
    table = Table(
        *HEADINGS,
        title=f"medians of {num_rounds(report)} rounds; latency of direct, and what each proxy adds to it",
        caption=CAPTION,
        names=NUM_NAMES,
        words=(*range(NUM_NAMES), len(HEADINGS) - 1),
    )
    before = None
    for row in report["rows"]:
        if before is not None and before != row["scenario"]:
            table.add_section()
        table.add_row(row["scenario"] if before != row["scenario"] else "", *cells(report, row))
        before = row["scenario"]
    return table


def cells(report: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Returns one row's cells, under all of `HEADINGS` but the first."""
    has_bare = any(row[f"added_{name}"] is not None for name in ADDED)
    prefix = "added_" if has_bare else ""
    cpu = row["target"] != DIRECT
    return [
        row["target"] + ("*" if row["is_noisy"] else ""),
        f"{row['cpu_ms_per_req']:.3f}" if cpu else "",
        number(row["cpu_us_per_token"], 2) if cpu else "",
        number(cpu_ratio(report, row["scenario"], row["target"]), 2),
        number(row.get("over_floor") if cpu else None, 2),
        *(number(row[prefix + name], 2) for name in ADDED[:2]),
        *(number(row[prefix + name], 0) for name in ADDED[2:]),
        f"{row['rss_mb']:.0f}" if cpu else "",
        f"{row['req_per_s']:.0f}",
        _remark(row),
    ]


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _remark(row: dict[str, Any]) -> str:
    if row["is_disqualified"]:
        return "disqualified: decodes without their handoff"
    return f"{row['errors']} errors: {row['complaint'][:COMPLAINT_CHARS]}" if row["errors"] else ""


def cpu_ratio(report: dict[str, Any], scenario: str, peer: str) -> float | None:
    """Returns our CPU over that peer's, per request; None where it is not known."""
    row = find(report, scenario, OURS)
    ratio: float | None = None if row is None else row["ratios"].get(peer, {}).get("cpu_ms_per_req")
    return ratio


def find(report: dict[str, Any], scenario: str, target: str) -> dict[str, Any] | None:
    rows = (row for row in report["rows"] if (row["scenario"], row["target"]) == (scenario, target))
    return next(rows, None)


def num_rounds(report: dict[str, Any]) -> int:
    """Returns the number of rounds of those scenarios that had most."""
    rounds: int = max((row["rounds"] for row in report["rows"]), default=report["rounds"])
    return rounds


def make_lines(report: dict[str, Any]) -> list[str]:
    """Returns the lines about what is not in the table."""
    machine = report["machine"]
    rows = report["rows"]
    lines = [
        f"machine: {machine['cores']} cores of {machine['cpu']}, kernel {machine['kernel']}; the proxy alone on core "
        f"{machine['proxy_core']}, engines and clients on core {machine['helper_core']}; pdproxy is {way(machine)}"
    ]
    for name, key in (("engines", "engine_share"), ("clients", "clients_share")):
        if rows:
            busiest = max(rows, key=lambda row: row[key])
            lines.append(
                f"{name}: at most {busiest[key]:.0%} of their core ({busiest['scenario']}, {busiest['target']})"
            )
    return [*lines, *notes(report)]


def way(machine: dict[str, Any]) -> str:
    """Returns how pdproxy was run. Old reports do not tell it: then it was as it stands."""
    return "compiled" if machine.get("compiled") else "interpreted"


def notes(report: dict[str, Any]) -> list[str]:
    """Returns what the scenarios tell that are about something else than the table's columns."""
    return [*_along(report), *_delays(report)]


def _along(report: dict[str, Any]) -> Iterator[str]:
    for row in report["rows"]:
        if along := row["rss_mb_along"]:
            last = len(along) - 1
            steps = {round(last * share) for share in (0.1, 0.5)} - {0, last}
            said = [
                f"{along[0]:.1f} MB at the start",
                *(f"{along[at]:.1f} after {at / last:.0%}" for at in sorted(steps)),
            ]
            yield f"{row['scenario']}: {row['target']}'s memory is {', '.join(said)}, {along[-1]:.1f} at the end"


def _delays(report: dict[str, Any]) -> Iterator[str]:
    for row in report["rows"]:
        calm = find(report, CALM.name, row["target"])
        if row["scenario"] == BESIDE.name and calm is not None:
            before, after = calm["transit_p99_us"], row["transit_p99_us"]
            yield (
                f"{row['beside']} prompts of {BESIDE_TOKENS:,} tokens beside the streams, {row['target']}: token "
                f"transit p99 {after / 1e3:.2f} ms instead of {before / 1e3:.2f}"
            )


def goal_lines(report: dict[str, Any]) -> list[str]:
    """Returns what is aimed at, and what this run says of that, a line for each goal."""
    return [
        f"{'reached' if one['holds'] else 'MISSED '} {one['what']}: {one['found']}, aim: {one['aim']}"
        + ("  (noisy)" if one["is_noisy"] else "")
        for one in report["goals"]
    ]


def warnings(report: dict[str, Any]) -> list[str]:
    """Returns what stands against the figures, a line for each thing."""
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
