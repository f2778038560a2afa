"""What a request's record says of itself, and who is told when it is over."""

from __future__ import annotations

import time

from pdproxy.telemetry.attempt_record import AttemptRecord, Phase
from pdproxy.telemetry.observer import Observers, Recent
from pdproxy.telemetry.record import Outcome, RequestRecord


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        self.told.append((leg, instance, outcome))

    def request_finished(self, record: RequestRecord) -> None:
        self.told.append(record)


class OfLegs:
    """Of one thing only."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        self.told.append(leg)


def test_when_it_began_is_told_the_same_each_time() -> None:
    before = time.time()
    record = RequestRecord("r1", "/v1/completions")
    after = time.time()
    slack_s = 0.005  # between two clocks
    assert before - slack_s <= record.started_at <= after + slack_s
    assert record.started_at == record.started_at
    assert record.facts()["started_at"] == round(record.started_at, 3)


def test_the_first_end_counts() -> None:
    record = RequestRecord("r1", "/v1/completions")
    record.end(Outcome.FAILED)
    total_s = record.total_s
    record.end(Outcome.DONE)
    assert (record.outcome, record.total_s) == (Outcome.FAILED, total_s)


def test_attempts_follow_each_other() -> None:
    record = RequestRecord("r1", "/v1/completions")
    assert (record.attempt, record.attempts, record.path) == (None, (), "none")
    attempts = []
    for end in (Phase.FAILED, Phase.FAILED, Phase.CANCELLED):
        attempt = AttemptRecord("r1", decoder="d0", tokenize_s=None if attempts else 0.5)
        record.attempt = attempt
        attempt.advance(end)
        attempts.append(attempt)
    assert record.attempts == tuple(attempts)
    assert record.attempt is attempts[-1]
    assert record.path == "disaggregated"
    assert record.facts()["attempt"] == attempts[-1].id
    assert record.facts()["earlier_s"] == attempts[-1].started - attempts[0].started
    steps = list(record.steps())
    assert [step.name for step in steps] == ["receive", "tokenize", "slot_wait", "slot_wait", "slot_wait"]
    assert [step.attempt for step in steps[2:]] == attempts
    assert steps[1].started == attempts[0].started - 0.5
    assert [step.started for step in steps[2:]] == [attempt.started for attempt in attempts]


def test_looking_at_the_steps_takes_nothing_from_the_flight() -> None:
    record = RequestRecord("r1", "/v1/completions")
    record.attempt = attempt = AttemptRecord("r1", tokenize_s=0.5)
    attempt.advance(Phase.CANCELLED)
    record.end(Outcome.CLIENT_GONE)
    assert list(record.steps()) == list(record.steps())
    assert list(attempt.phase_seconds()) == ["tokenize", "slot_wait"]


def test_everybody_is_told_of_what_concerns_him() -> None:
    listener, of_legs, recent = Listener(), OfLegs(), Recent()
    observers = Observers([listener, of_legs], [listener, recent])
    record = RequestRecord("r1", "/v1/completions")
    record.end(Outcome.DONE)
    observers.leg_finished("prefill", "p0", "ok")
    observers.request_finished(record)
    assert listener.told == [("prefill", "p0", "ok"), record]
    assert of_legs.told == ["prefill"]
    assert [facts["request_id"] for facts in recent.facts()] == ["r1"]
    assert recent.totals == {"done": 1}
