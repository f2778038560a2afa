"""Observers are told what became of legs and requests: metrics, the log, spans, and Recent, which is for the status
page."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from pdproxy.telemetry.record import Outcome, RequestRecord

MAX_RECENT: Final = 50
"""The most requests that are shown of those which have ended."""
MAX_FIRST_TOKENS: Final = 2048
"""The most first tokens that are kept of streams that have ended."""

# Looking up a member in its enum costs more than the comparison.
_FAILED: Final = Outcome.FAILED


class LegObserver(Protocol):
    """LegObserver is told what became of each leg; it must not raise and must not wait."""

    __slots__ = ()

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        """Notes the end of a leg. `outcome` is ``ok``, ``refused`` (4xx), ``busy`` (429, 503), ``failed``,
        ``timed_out``, ``not_tried`` (the proxy could open no connection), ``no_handoff`` (a prefiller kept no KV),
        ``no_kv`` (the KV reached no decoder, which is in doubt itself or at fault), ``stale_term`` (the engine has
        heard of a later leader) or ``closed`` (by the proxy)."""


class RequestObserver(Protocol):
    """RequestObserver is told what became of each request; it must not raise and must not wait."""

    __slots__ = ()

    def request_finished(self, record: RequestRecord) -> None: ...


class Observer(LegObserver, RequestObserver, Protocol):
    """Observer is told of both."""

    __slots__ = ()


class Observers(Observer):
    """Observers passes on what happened: legs to some, requests to others."""

    __slots__ = ("_of_legs", "_of_requests")

    def __init__(self, of_legs: Sequence[LegObserver] = (), of_requests: Sequence[RequestObserver] = ()) -> None:
        self._of_legs = [one.leg_finished for one in of_legs]
        self._of_requests = [one.request_finished for one in of_requests]

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        for tell in self._of_legs:
            tell(leg, instance, outcome)

    def request_finished(self, record: RequestRecord) -> None:
        for tell in self._of_requests:
            tell(record)


class Recent(RequestObserver):
    """Recent keeps the last requests, totals by outcome, and the tokens of all answers, for the status page.

    Mutable state: the records, newest last; the totals; how many failed, by error code; the first tokens of the last
    streams.
    """

    def __init__(self, limit: int = MAX_RECENT) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=limit)
        self.totals: dict[str, int] = {}
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.failures: dict[str, int] = {}
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_FIRST_TOKENS)
        """The first tokens of the last streams that have ended: when each came, on the records' clock, and after how
        many seconds."""

    def request_finished(self, record: RequestRecord) -> None:
        if record.is_counted:
            self._records.append(record)
            self.totals[record.outcome] = self.totals.get(record.outcome, 0) + 1
            if record.has_answer:
                self.num_prompt_tokens += record.num_prompt_tokens or 0
                self.num_output_tokens += record.num_output_tokens
            if record.outcome is _FAILED:
                reason = record.error or "unknown"
                self.failures[reason] = self.failures.get(reason, 0) + 1
            if record.stream and (first_s := record.first_token_s) is not None:
                self.first_tokens.append((record.started + first_s, first_s))

    def facts(self) -> list[dict[str, Any]]:
        """Returns the facts of the last requests, newest first."""
        return [record.facts() for record in reversed(self._records)]
