"""What one request did, written once while it runs; metrics, log line, headers and status page all read it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from pdproxy.flight import Flight


class Outcome(StrEnum):
    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"
    """Answered with a 4xx, by us or by an engine."""
    FAILED = "failed"
    CLIENT_GONE = "client_gone"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Step:
    """A stretch of a request's time: a phase of one attempt, or (`flight` None) what came before the first."""

    name: str
    started: float
    """On the monotonic clock."""
    seconds: float
    flight: Flight | None


class RequestRecord:
    """One client request over all its attempts. `flight` is the latest attempt.

    A canary's record is not counted: it tells of the fleet, not of its users.
    """

    def __init__(self, request_id: str, endpoint: str, *, is_counted: bool = True) -> None:
        self.request_id = request_id
        self.endpoint = endpoint
        self.is_counted = is_counted
        self.started_at = time.time()
        self.started = time.monotonic()
        # State: filled in as it becomes known.
        self.model: str | None = None
        self.stream = False
        self.reason = ""
        self.num_attempts = 0
        self.outcome = Outcome.RUNNING
        self.status: int | None = None
        self.error: str | None = None
        self._received: float | None = None
        self._ended: float | None = None
        self._flights: list[tuple[float, Flight]] = []

    def received(self) -> None:
        """The whole body is there, and understood."""
        self._received = time.monotonic()

    @property
    def flight(self) -> Flight | None:
        return self._flights[-1][1] if self._flights else None

    @flight.setter
    def flight(self, flight: Flight) -> None:
        """The next attempt begins."""
        self._flights.append((time.monotonic(), flight))

    def end(self, outcome: Outcome) -> None:
        """The first end counts."""
        if self._ended is None:
            self.outcome = outcome
            self._ended = time.monotonic()

    @property
    def path(self) -> str:
        return "none" if self.flight is None else self.flight.path.value

    @property
    def total_s(self) -> float:
        return (time.monotonic() if self._ended is None else self._ended) - self.started

    def steps(self) -> Iterator[Step]:
        """Where the time went, over all attempts, in order. Up to now where the request is not over."""
        yield Step("receive", self.started, self._receive_s, None)
        for began, flight in self._flights:
            phases = flight.phase_seconds()
            if flight.tokenize_s is not None:  # it came before the attempt did
                yield Step("tokenize", began - flight.tokenize_s, phases.pop("tokenize"), None)
            for name, seconds in phases.items():
                yield Step(name, began, seconds, flight)
                began += seconds

    def facts(self) -> dict[str, Any]:
        """Everything known, flat; what is not known is left out."""
        known: dict[str, Any] = {
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "model": self.model,
            "stream": self.stream,
            "outcome": self.outcome.value,
            "status": self.status,
            "error": self.error,
            "reason": self.reason or None,
            "attempts": self.num_attempts,
            "started_at": round(self.started_at, 3),
            "total_s": self.total_s,
            "receive_s": self._receive_s,
            "earlier_s": self._earlier_s,
        }
        known |= {} if self.flight is None else self.flight.facts()
        return {name: value for name, value in known.items() if value is not None}

    @property
    def _receive_s(self) -> float:
        """For reading and understanding the body."""
        return self.total_s if self._received is None else self._received - self.started

    @property
    def _earlier_s(self) -> float | None:
        """For attempts before the latest; None where there were none."""
        return self._flights[-1][0] - self._flights[0][0] if len(self._flights) > 1 else None


class Observer(Protocol):
    """Is told what happened; must not raise and must not wait."""

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        """`outcome` is ``ok``, ``refused`` (4xx), ``busy`` (429, 503), ``failed`` or ``closed`` (by us)."""

    def request_finished(self, record: RequestRecord) -> None: ...


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        for observer in self._observers:
            observer.leg_finished(leg, instance, outcome)

    def request_finished(self, record: RequestRecord) -> None:
        for observer in self._observers:
            observer.request_finished(record)


class Recent:
    """The last requests, and totals by outcome, for the status page. Implements `Observer`.

    Mutable state: the records, newest last; the totals.
    """

    def __init__(self, limit: int = 50) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=limit)
        self.totals: dict[str, int] = {}

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        """Legs are the metrics' business."""

    def request_finished(self, record: RequestRecord) -> None:
        if record.is_counted:
            self._records.append(record)
            self.totals[record.outcome] = self.totals.get(record.outcome, 0) + 1

    def facts(self) -> list[dict[str, Any]]:
        """Newest first."""
        return [record.facts() for record in reversed(self._records)]
