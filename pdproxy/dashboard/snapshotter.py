"""Snapshotter takes one look at everything the page shows. It costs something only when somebody asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pdproxy import __version__
from pdproxy.dashboard.cards import cards
from pdproxy.dashboard.first_tokens import first_token_facts
from pdproxy.dashboard.minute import Counts, LastMinute
from pdproxy.dashboard.traffic import Traffic, slowest
from pdproxy.fleet.pool import Pool
from pdproxy.ids import fresh_id
from pdproxy.orchestrator.orchestrator import Orchestrator
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.telemetry.figures import Elsewhere

PART = "traffic"
"""The name of the page's part of the figures of other processes."""


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
        traffic: Traffic,
        elsewhere: Elsewhere,
        can_change: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._orchestrator = orchestrator
        self._reaper = reaper
        self._traffic = traffic
        self._elsewhere = elsewhere
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
        present = self._elsewhere.present(PART, self._traffic.present())
        return {
            "proxy": self._proxy(),
            "fleet": cards(self._pool),
            "flow": self._flow(present),
            "slow": slowest(present["slow"], self._clock() - self._made_at),
        }

    def _proxy(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "life": self._life,
            "ready": self._pool.is_ready,
            "draining": self._orchestrator.is_draining,
            "can_change": self._can_change,
        }

    def _flow(self, present: Mapping[str, Any]) -> dict[str, Any]:
        counted = self._elsewhere.counted(PART, self._traffic.counted())
        self._minute.note(Counts(at=self._clock() - self._made_at, **counted))
        return {
            "in_flight": present["in_flight"],
            "now": present["now"],
            "unsettled": self._reaper.statistics()["open"],
            "first_token_s": first_token_facts(present["waits_s"]),
            **self._minute.facts(),
        }
