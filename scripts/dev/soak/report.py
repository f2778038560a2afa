"""The module tells what a soak found: as JSON for machines, as a table for people, and as an exit status."""

from __future__ import annotations

from typing import Any

from scripts.dev.soak.counters import Counters
from scripts.dev.soak.run import Findings, ReplicaFindings
from scripts.dev.soak.verdict import Verdict
from transfer.command_line.tables import Table

MUST_BE_ZERO = (
    "wrong_answers",
    "hung",
    "held_at_end",
    "leaked_pages",
    "reservations_waited",
    "unserved_at_end",
    "crashes",
    "disagreements",
    "left_behind",
    "alarms",
)
LIMITS = {"fd_growth": 8, "thread_growth": 4, "task_growth": 4, "too_slow_percent": 5}
"""The most of what need not be zero. Idle moments differ a little, because a probe is under way or is not; what leaks,
leaks with every request or fault. Where more requests have run out of their time at slow engines, the soak says little
of those that it was for."""


def make_report(findings: Findings, *, is_complete: bool) -> dict[str, Any]:
    """Returns the report. Null stands for what was not looked at because the soak did not get so far."""
    counters, before, after = findings.counters, findings.before, findings.after
    report: dict[str, Any] = {
        "seed": findings.options.seed,
        "is_complete": is_complete,
        "duration_s": findings.options.duration_s,
        "prefillers": findings.options.num_prefillers,
        "decoders": findings.options.num_decoders,
        "clients": findings.options.num_clients,
        "requests": counters.num_requests,
        "completed": counters.verdicts[Verdict.COMPLETED],
        "typed_errors": counters.verdicts[Verdict.TYPED_ERROR],
        "left": counters.verdicts[Verdict.LEFT],
        "proxy_killed": counters.verdicts[Verdict.PROXY_KILLED],
        "wrong_answers": counters.verdicts[Verdict.WRONG],
        "hung": counters.verdicts[Verdict.HUNG],
        "held_at_end": None if findings.leaks is None else findings.leaks.num_held,
        "leaked_pages": None if findings.leaks is None else findings.leaks.num_leaked,
        "reservations_waited_after_kill": None if findings.witness is None else findings.witness.num_after_kill,
        "reservations_waited": None if findings.witness is None else findings.witness.num_waited,
        "unserved_at_end": findings.num_unserved,
        "crashes": len(findings.crashes),
        "most_lag_s": round(findings.most_lag_s, 2),
    }
    for name, attribute in (
        ("fd_growth", "num_fds"),
        ("thread_growth", "num_threads"),
        ("task_growth", "num_tasks"),
        ("rss_growth_mb", "rss_mb"),
    ):
        is_known = before is not None and after is not None
        report[name] = round(getattr(after, attribute) - getattr(before, attribute), 1) if is_known else None
    return report | _of_replicas(findings.replicas, findings.counters) | _details(findings)


def _of_replicas(found: ReplicaFindings | None, counters: Counters) -> dict[str, Any]:
    """Returns what there is to tell of replicas: nothing where there is one proxy."""
    if found is None:
        return {}
    faults = found.faults
    return {
        "proxies": found.num_replicas,
        "store": found.store,
        "disagreements": None if found.disagreements is None else len(found.disagreements),
        "left_behind": None if found.left_behind is None else len(found.left_behind),
        "alarms": len(found.alarms),
        "too_slow_percent": round(100 * counters.num_too_slow / max(1, counters.num_requests), 1),
        "terms_begun": 0 if faults is None else sum(" leads, in term " in what for _, what in faults.told),
        "faults_of_replicas": {} if faults is None else dict(sorted(faults.done.items())),
        "replica_reports": [*(found.disagreements or []), *(found.left_behind or []), *found.alarms],
        "time_line": [] if faults is None else [{"at_s": at_s, "what": what} for at_s, what in faults.told],
    }


def is_clean(report: dict[str, Any]) -> bool:
    """Tells whether the soak ran to its end, and found nothing."""
    return bool(report["is_complete"]) and not any(_is_bad(name, value) for name, value in report.items())


def _is_bad(name: str, value: Any) -> bool:
    limit = 0 if name in MUST_BE_ZERO else LIMITS.get(name)
    return limit is not None and value is not None and value > limit


def make_table(report: dict[str, Any]) -> Table:
    table = Table("", "", title=f"soak, seed {report['seed']}", words=(0, 1))
    for name, value in report.items():
        if isinstance(value, dict):
            value = "\n".join(f"{what}: {count}" for what, count in value.items())
        if not isinstance(value, list) and value != "":
            style = "red" if _is_bad(name, value) else None
            table.add_row(name, "not known" if value is None else str(value), style=style)
    return table


def problems(report: dict[str, Any]) -> list[str]:
    """Returns the problems in words, one a line."""
    found: list[str] = [*report["failures"], *report["crash_reports"], *report.get("replica_reports", ())]
    if any(report[name] for name in ("held_at_end", "leaked_pages", "unserved_at_end")):
        found += report["still_held"]
    found += [
        f"attempts that had to wait at {name} for pages that admission had promised: {count}"
        for name, count in report["waited_at"].items()
    ]
    return found


def _details(findings: Findings) -> dict[str, Any]:
    counters, leaks, faults = findings.counters, findings.leaks, findings.faults
    return {
        "paths": dict(sorted(counters.paths.items())),
        "errors": dict(counters.errors.most_common()),
        "lost_connections": dict(counters.lost.most_common()),
        "slowest_s": dict(sorted(counters.slowest_s.items())),
        "slowest_return_s": None if faults is None else round(faults.slowest_return_s, 1),
        "overslept": findings.num_overslept,
        "faults": {} if faults is None else dict(sorted(faults.done.items())),
        "waited_at": {} if findings.witness is None else findings.witness.by_decoder,
        "signals": dict(sorted(findings.signals.items())),
        "failures": counters.failures,
        "crash_reports": findings.crashes,
        "still_held": [] if leaks is None else leaks.where,
        "vitals_before": [] if findings.before is None else [findings.before.facts()],
        "vitals_after": [] if findings.after is None else [findings.after.facts()],
        "samples": [{"at_s": at_s, **vitals.facts()} for at_s, vitals in findings.samples],
    }
