"""The findings of a soak: as JSON for machines, in lines for people, and as an exit status."""

from __future__ import annotations

from typing import Any

from scripts.dev.soak_transfer.plan import STALL_LIMIT_S
from scripts.dev.soak_transfer.run import Findings

GROWTH_LIMITS = {"fds": 8, "threads": 4, "tasks": 4, "rss_mb": 48.0}
"""The most growth from one idle moment to another. Pools of memory differ a little. A leak grows with every attempt or
kill."""
EMPTY_TABLES = ("attempts", "waiters", "moved", "pushes")
MIN_QUEUED_SHARE = 0.95
"""The least share of the looks during the storm that find an attempt waiting: then more is asked for than there is."""
MIN_LOOKS = 20
"""The least number of looks for that share. Fewer say nothing: in a storm of seconds one look meets the moment after a
kill."""


def make_report(findings: Findings, *, is_complete: bool) -> dict[str, Any]:
    """Returns the report. Null stands for what was not looked at, or not often enough, because the soak did not get so
    far."""
    options, last, samples = findings.options, findings.last, findings.samples
    said = last or (samples[-1] if samples else {})
    counts = said.get("counts", {})
    report: dict[str, Any] = {
        "seed": options.seed,
        "is_complete": is_complete,
        "duration_s": options.duration_s,
        "prefillers": options.num_prefillers,
        "processes": options.num_processes,
        "pages": options.num_pages,
        "at_once": options.num_prefillers * options.num_at_once,
        "granted": said.get("granted"),
        "read_right": counts.get("right", 0),
        "read_wrong": counts.get("wrong", 0),
        "lost": {name: count for name, count in counts.items() if name.startswith("lost")},
        "page_writes_saved": said.get("writes_saved"),
        "kills": findings.num_kills,
        "freezes": findings.num_freezes,
        "overslept": findings.num_overslept,
        "wrong_tags": said.get("wrong_tags"),
        "overtaken": said.get("overtaken"),
        "longest_wait_grants": said.get("longest_wait"),
        "bound_grants": said.get("longest_queue"),
        "longest_wait_s": said.get("longest_wait_s"),
        "longest_stall_s": said.get("stalled_s"),
        "stall_limit_s": STALL_LIMIT_S,
        "queued_share": _mean([float(look["queued"] > 0) for look in samples]) if len(samples) >= MIN_LOOKS else None,
        "mean_use": _mean([sample["held"] / options.num_pages for sample in samples]),
        "starved": sum(findings.counts[f"{fate}: no room in time"] for fate in ("complete", "abort", "cancel")),
        "all_pages_free": findings.is_settled,
        "outcomes": dict(sorted(findings.counts.items())),
    }
    report["before"], report["after"] = findings.before, findings.after
    report["problems"] = problems(report)
    return report


def problems(report: dict[str, Any]) -> list[str]:
    """Returns the problems in words, one a line. There are none where nothing was found."""
    found: list[str] = []
    if not report["is_complete"]:
        found.append("it did not run to its end")
    if report["read_wrong"]:
        found.append(f"{report['read_wrong']} attempts were read with wrong bytes")
    if report["wrong_tags"]:
        found.append(f"{report['wrong_tags']} attempts had another one's bytes in their pages, and were not read")
    if not report["read_right"]:
        found.append("nothing was read at all")
    if report["overtaken"]:
        found.append(f"{report['overtaken']} grants went past somebody who had come before")
    if report["starved"]:
        found.append(f"{report['starved']} attempts that had time enough were never granted")
    if (report["longest_stall_s"] or 0.0) > STALL_LIMIT_S:
        found.append(f"nothing was granted for {report['longest_stall_s']} s although somebody waited")
    if report["queued_share"] is not None and report["queued_share"] < MIN_QUEUED_SHARE:
        found.append(f"somebody waited in {report['queued_share']:.0%} of all looks only: this was no soak")
    if report["all_pages_free"] is False:
        found.append("pages were held when everything was over")
    return found + _growth(report["before"], report["after"])


def _growth(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    found = []
    for name, then in before.items():
        now = after.get(name)
        if now is None:
            continue
        for what, limit in GROWTH_LIMITS.items():
            if now[what] - then[what] > limit:
                found.append(f"{name}: {what} grew from {then[what]} to {now[what]}")
        for table in EMPTY_TABLES:
            if now["tables"].get(table):
                found.append(f"{name}: {now['tables'][table]} {table} are left")
    return found


def make_lines(report: dict[str, Any]) -> list[str]:
    """Returns every figure, `name: value`."""
    return [f"{name}: {value}" for name, value in report.items() if name != "problems"]


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None
