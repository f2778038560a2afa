"""Snapshotter takes one look at everything the page shows. It costs something only when somebody asks for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import Any

from pdproxy import __version__
from pdproxy.dashboard.cards import cards
from pdproxy.dashboard.first_tokens import first_token_facts
from pdproxy.dashboard.minute import Counts, LastMinute
from pdproxy.fleet.pool import Pool
from pdproxy.ids import fresh_id
from pdproxy.orchestrator.orchestrator import Orchestrator
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.telemetry.metrics import Metrics
from pdproxy.telemetry.record import Recent, RequestRecord

NUM_SLOWEST = 12
MAX_MODEL_CHARACTERS = 64
"""Number of characters that are shown of a model's name as a client wrote it."""


class Snapshotter:
    """Snapshotter takes pictures of a proxy. Times in them are in seconds since it was made; `now` is how many have
    passed.

    `can_change`: the admin API has a key, so that the page's buttons can do something. Mutable state: the last minute.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        orchestrator: Orchestrator,
        reaper: Reaper,
        metrics: Metrics,
        recent: Recent,
        can_change: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._orchestrator = orchestrator
        self._reaper = reaper
        self._metrics = metrics
        self._recent = recent
        self._can_change = can_change
        self._clock = clock
        self._made_at = clock()
        self._life = fresh_id()
        self._minute = LastMinute()

    @property
    def now(self) -> float:
        return round(self._clock() - self._made_at, 3)

    @property
    def is_over(self) -> bool:
        """Tells whether there will be nothing more to see."""
        return self._orchestrator.is_draining and self._orchestrator.num_requests == 0

    def take(self) -> dict[str, Any]:
        """Returns ``proxy``, ``fleet`` (one card per instance, by key), ``flow`` and ``slow``: plain JSON, without any
        null but those in the lists of the history."""
        records = self._orchestrator.records()
        return {
            "proxy": self._proxy(),
            "fleet": cards(self._pool),
            "flow": self._flow(records),
            "slow": [self._row(record) for record in nsmallest(NUM_SLOWEST, records, key=lambda one: one.started)],
        }

    def _proxy(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "life": self._life,
            "ready": self._pool.is_ready,
            "draining": self._orchestrator.is_draining,
            "can_change": self._can_change,
        }

    def _flow(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        now, recent = self._clock(), self._recent
        counts = Counts(
            at=now - self._made_at,
            ended=dict(recent.totals),
            failures=dict(recent.failures),
            phase_s=self._metrics.phase_totals_s(),
            tokens=self._num_tokens(records),
        )
        self._minute.note(counts)
        return {
            "in_flight": len(records),
            "now": dict(Counter(_step(record)[0] for record in records)),
            "unsettled": self._reaper.statistics()["open"],
            "first_token_s": first_token_facts(recent, records, now),
            **self._minute.facts(),
        }

    def _num_tokens(self, records: Sequence[RequestRecord]) -> int:
        """Returns the number of tokens that clients were given so far."""
        return self._recent.num_output_tokens + sum(record.num_output_tokens for record in records)

    def _row(self, record: RequestRecord) -> dict[str, Any]:
        """Returns what the page shows of one request under way."""
        step, since = _step(record)
        told: dict[str, Any] = {
            "id": record.request_id,
            "started": self._seconds(record.started),
            "step": step,
            "since": self._seconds(since),
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

    def _seconds(self, moment: float) -> float:
        return round(moment - self._made_at, 2)


def _step(record: RequestRecord) -> tuple[str, float]:
    """Returns the step that the request is in, and since when, on the record's clock."""
    if record.attempt is None:
        return "tokenize", record.started
    step, since = record.attempt.step
    return step or "retry", since
