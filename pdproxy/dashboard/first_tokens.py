"""The first tokens of the last minute: how long clients waited for them, in percentiles of single requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pdproxy.dashboard.minute import WINDOW_S
from pdproxy.telemetry.observer import Recent
from pdproxy.telemetry.record import RequestRecord

LEAST = 20
"""The fewest first tokens of which percentiles are told: below that, the 95th is the slowest one."""


def waits_s(recent: Recent, under_way: Iterable[RequestRecord], now: float) -> list[float]:
    """Returns the waits for the first tokens of the last minute before `now`, which is on the records' clock; in
    seconds."""
    since = now - WINDOW_S
    waits = [wait_s for came, wait_s in recent.first_tokens if came >= since]
    return waits + [wait_s for record in under_way if (wait_s := _wait_s(record, since)) is not None]


def first_token_facts(waits: Sequence[float]) -> dict[str, Any]:
    """Returns ``num``, ``least`` (how many it takes for percentiles) and, where there are so many, ``p50`` and ``p95``
    in seconds."""
    facts: dict[str, Any] = {"num": len(waits), "least": LEAST}
    if len(waits) >= LEAST:
        ordered = sorted(waits)
        facts |= {"p50": _quantile(ordered, 0.5), "p95": _quantile(ordered, 0.95)}
    return facts


def _wait_s(record: RequestRecord, since: float) -> float | None:
    """Returns how many seconds the client of a stream under way waited for its first token; None where that was not
    after `since`, or has not come."""
    attempt = record.attempt
    if not record.stream or not record.is_counted or attempt is None:
        return None
    if record.num_attempts > 1:  # the first token may be that of an earlier attempt
        first_s = record.first_token_s
        return None if first_s is None or record.started + first_s < since else first_s
    step, came = attempt.step
    return came - record.started if step == "decode" and came >= since else None


def _quantile(ordered: Sequence[float], share: float) -> float:
    return round(ordered[math.ceil(share * len(ordered)) - 1], 4)
