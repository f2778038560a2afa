"""Traffic tells what the page shows of the requests that one process serves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import Any

from pdproxy.dashboard.first_tokens import waits_s
from pdproxy.orchestrator.orchestrator import Orchestrator
from pdproxy.telemetry.metrics import Metrics
from pdproxy.telemetry.observer import Recent
from pdproxy.telemetry.record import RequestRecord

NUM_SLOWEST = 12
MAX_MODEL_CHARACTERS = 64
"""Number of characters that are shown of a model's name as a client wrote it."""


class Traffic:
    """Traffic looks at a process's requests. All it tells can be added to what other processes tell."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        metrics: Metrics,
        recent: Recent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._orchestrator = orchestrator
        self._metrics = metrics
        self._recent = recent
        self._clock = clock

    def counted(self) -> dict[str, Any]:
        """Returns the requests that ended by outcome, and that failed by error code, the seconds that they spent in
        each phase, and the tokens that clients were given."""
        recent, records = self._recent, self._orchestrator.records()
        return {
            "ended": dict(recent.totals),
            "failures": dict(recent.failures),
            "phase_s": self._metrics.phase_totals_s(),
            "tokens": recent.num_output_tokens + sum(record.num_output_tokens for record in records),
        }

    def present(self) -> dict[str, Any]:
        """Returns the number of requests under way, and of those in each step; the waits for first tokens in the last
        minute, in seconds; and the requests that take longest, with their times in seconds until now."""
        now, records = self._clock(), self._orchestrator.records()
        slowest = nsmallest(NUM_SLOWEST, records, key=lambda one: one.started)
        return {
            "in_flight": len(records),
            "now": dict(Counter(_step(record)[0] for record in records)),
            "waits_s": waits_s(self._recent, records, now),
            "slow": [_row(record, now) for record in slowest],
        }


def slowest(rows: Sequence[dict[str, Any]], now: float) -> list[dict[str, Any]]:
    """Returns what the page shows of the slowest requests of all processes, with times that begin with the proxy's.
    `now` is how many seconds have passed since then."""
    shown = sorted(rows, key=lambda row: -float(row["age_s"]))[:NUM_SLOWEST]
    return [_dated(row, now) for row in shown]


def _dated(row: dict[str, Any], now: float) -> dict[str, Any]:
    told = {name: value for name, value in row.items() if name not in ("age_s", "step_s")}
    return told | {"started": round(now - row["age_s"], 2), "since": round(now - row["step_s"], 2)}


def _row(record: RequestRecord, now: float) -> dict[str, Any]:
    """Returns what is told of one request under way."""
    step, since = _step(record)
    told: dict[str, Any] = {
        "id": record.request_id,
        "age_s": now - record.started,
        "step": step,
        "step_s": now - since,
        "attempts": record.num_attempts,
    }
    if record.model is not None:
        told["model"] = record.model[:MAX_MODEL_CHARACTERS]
    if (attempt := record.attempt) is not None:
        known = {
            "prefiller": attempt.prefiller,
            "decoder": attempt.decoder,
            "tokens": attempt.num_prompt_tokens,
            "pages": attempt.num_pages,
        }
        told |= {name: value for name, value in known.items() if value is not None}
    return told


def _step(record: RequestRecord) -> tuple[str, float]:
    """Returns the step that the request is in, and since when, on the record's clock."""
    if record.attempt is None:
        return "tokenize", record.started
    step, since = record.attempt.step
    return step or "retry", since
