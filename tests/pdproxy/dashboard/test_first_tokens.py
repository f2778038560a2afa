"""How long clients waited for first tokens, of single requests on a clock that the tests move."""

from __future__ import annotations

from pdproxy.dashboard.first_tokens import LEAST, first_token_facts, waits_s
from pdproxy.openai.request import COMPLETIONS
from pdproxy.telemetry.attempt_record import AttemptRecord, Path, Phase
from pdproxy.telemetry.observer import Recent
from pdproxy.telemetry.record import Outcome, RequestRecord


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


def record_of(wait_s: float | None, *, came: float = 0.0, stream: bool = True) -> RequestRecord:
    """One whose first token came at `came`, after `wait_s` seconds; None: it has not come."""
    CLOCK.now = 1000.0 + came - (wait_s or 0.0)
    record = RequestRecord("id", COMPLETIONS, clock=CLOCK)
    record.stream, record.num_attempts = stream, 1
    record.attempt = AttemptRecord("id", path=Path.LOCAL, clock=CLOCK)
    record.attempt.advance(Phase.DECODE)
    if wait_s is not None:
        CLOCK.now = 1000.0 + came
        record.attempt.mark_first_byte()
    return record


def ended(record: RequestRecord) -> RequestRecord:
    assert record.attempt is not None
    CLOCK.now += 5.0
    record.attempt.advance(Phase.DONE)
    record.end(Outcome.DONE)
    return record


def recent_of(*records: RequestRecord) -> Recent:
    recent = Recent()
    for record in records:
        recent.request_finished(record)
    return recent


def test_percentiles_are_those_of_single_requests() -> None:
    recent = recent_of(*(ended(record_of(0.01 * num)) for num in range(1, 101)))
    facts = first_token_facts(waits_s(recent, [], 1010.0))
    assert facts == {"num": 100, "least": LEAST, "p50": 0.5, "p95": 0.95}


def test_too_few_have_none() -> None:
    recent = recent_of(*(ended(record_of(0.5)) for _ in range(LEAST - 1)))
    assert first_token_facts(waits_s(recent, [], 1010.0)) == {"num": LEAST - 1, "least": LEAST}
    under_way = [record_of(0.5)]
    assert first_token_facts(waits_s(recent, under_way, 1010.0)) == {
        "num": LEAST,
        "least": LEAST,
        "p50": 0.5,
        "p95": 0.5,
    }


def test_only_streams_whose_first_token_came_within_the_minute_count() -> None:
    not_counted = record_of(0.5)
    not_counted.is_counted = False
    recent = recent_of(ended(record_of(0.5, came=-55.1)), ended(record_of(0.5, stream=False)), ended(record_of(0.5)))
    under_way = [record_of(None), record_of(0.5, came=-56.0), record_of(0.5, stream=False), not_counted, record_of(9.0)]
    assert first_token_facts(waits_s(recent, under_way, 1005.0))["num"] == 2, "one that has ended, and one that has not"


def test_a_second_attempt_does_not_make_the_first_token_later() -> None:
    record = record_of(0.5)
    CLOCK.now += 3.0
    record.attempt = AttemptRecord("id", path=Path.LOCAL, clock=CLOCK)
    record.num_attempts = 2
    record.attempt.advance(Phase.DECODE)
    CLOCK.now += 1.0
    record.attempt.mark_first_byte()
    facts = first_token_facts(waits_s(recent_of(), [record] * LEAST, 1010.0))
    assert facts["p50"] == 0.5
    assert first_token_facts(waits_s(recent_of(), [record] * LEAST, 1061.0))["num"] == 0
