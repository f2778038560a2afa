"""The two tables, step by step, and what a attempt says of itself. Custody is its lease's."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from pdproxy.admission.account import Account, Lease, Place
from pdproxy.admission.custody import CUSTODY_STEPS, PROOFS, Custody, Evidence
from pdproxy.errors import IllegalTransition
from pdproxy.telemetry.attempt_record import ENDS, PHASE_STEPS, AttemptRecord, Path, Phase

LIVES = {
    Path.DISAGGREGATED: [Phase.QUEUED, Phase.PREFILL, Phase.KV_WAIT, Phase.DECODE, Phase.DONE],
    Path.LOCAL: [Phase.QUEUED, Phase.DECODE, Phase.DONE],
    Path.PREFILL_ONLY: [Phase.QUEUED, Phase.PREFILL, Phase.DONE],
    Path.PASSED: [Phase.QUEUED, Phase.PASSED, Phase.DONE],
}
CUSTODY_WAYS = [
    [Custody.NONE, Custody.RESERVED, Custody.FILLING, Custody.READY, Custody.RETURNED],
    [Custody.NONE, Custody.RESERVED, Custody.FILLING, Custody.RETURNED],
    [Custody.NONE, Custody.RESERVED, Custody.FILLING, Custody.ORPHANED, Custody.RETURNED],
    [Custody.NONE, Custody.RESERVED, Custody.FILLING, Custody.READY, Custody.ORPHANED, Custody.RETURNED],
    [Custody.NONE, Custody.RESERVED, Custody.RETURNED],
]
LEASED = [custody for custody in Custody if custody is not Custody.NONE]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def flown_to(path: Path, phase: Phase, clock: Clock) -> AttemptRecord:
    """A attempt in `phase`, by the shortest legal way."""
    attempt = AttemptRecord("r1", path=path, clock=clock)
    life = LIVES[path]
    for step in life[1 : life.index(phase) + 1] if phase in life else [phase]:
        attempt.advance(step)
    return attempt


def a_lease() -> Lease:
    return Account(Place("d0", is_owner=True), 8, 0.0).issue("a", 4, 0.0)


def held_in(custody: Custody) -> Lease:
    """A lease in that state, by the shortest legal way."""
    lease = a_lease()
    way = next(way for way in CUSTODY_WAYS if custody in way)
    for step in way[2 : way.index(custody) + 1]:
        if step is Custody.RETURNED:
            lease.account.take_back(lease, min(PROOFS[lease.custody]), 0.0)
        else:
            lease.step(step)
    return lease


def phase_steps() -> list[tuple[Path, Phase, Phase]]:
    """Every step that is legal, written independently of the table."""
    steps = [(path, a, b) for path, life in LIVES.items() for a, b in pairwise(life)]
    breaks = [
        (path, phase, end)
        for path, life in LIVES.items()
        for phase in life[:-1]
        for end in (Phase.FAILED, Phase.CANCELLED)
    ]
    return steps + breaks


EVERY_PHASE_STEP = [
    (path, a, b)
    for path, a, b in product(Path, Phase, Phase)
    if a in LIVES[path] or a in (Phase.FAILED, Phase.CANCELLED)
]
CUSTODY_STEPS_BY_HAND = {step for way in CUSTODY_WAYS for step in pairwise(way)}


@pytest.mark.parametrize(("path", "at", "to"), EVERY_PHASE_STEP)
def test_every_phase_step_is_taken_or_refused_whole(clock, path, at, to):
    attempt = flown_to(path, at, clock)
    before = (attempt.facts(), attempt.phase_seconds())
    if (path, at, to) in phase_steps():
        attempt.advance(to)
        assert (attempt.phase, attempt.custody) == (to, Custody.NONE)
    else:
        with pytest.raises(IllegalTransition):
            attempt.advance(to)
        assert (attempt.facts(), attempt.phase_seconds()) == before


@pytest.mark.parametrize(("at", "to"), list(product(LEASED, Custody)))
def test_every_custody_step_is_taken_or_refused_whole(clock, at, to):
    lease, attempt = held_in(at), AttemptRecord("r1", clock=clock)
    attempt.hold(lease)
    if (at, to) in CUSTODY_STEPS_BY_HAND and to is not Custody.RETURNED:  # which takes evidence
        lease.step(to)
        assert (attempt.custody, attempt.phase) == (to, Phase.QUEUED)
    else:
        with pytest.raises(IllegalTransition):
            lease.step(to)
        assert lease.custody is attempt.custody is at


@pytest.mark.parametrize(("at", "evidence"), list(product(LEASED, Evidence)))
def test_pages_come_back_on_evidence_that_counts_and_on_no_other(at, evidence):
    lease = held_in(at)
    account = lease.account
    if at is Custody.RETURNED:
        assert not account.take_back(lease, evidence, 0.0)
        assert account.held == 0
    elif evidence in PROOFS[at]:
        assert account.take_back(lease, evidence, 0.0)
        assert (account.held, lease.freed_by, lease.is_returned) == (0, evidence, True)
    else:
        with pytest.raises(IllegalTransition):
            account.take_back(lease, evidence, 0.0)
        assert (account.held, lease.custody, lease.freed_by) == (4, at, None)
    account.check_integrity()


def test_the_tables_are_whole():
    assert set(CUSTODY_STEPS) == set(PROOFS) == set(Custody)
    for custody, steps in CUSTODY_STEPS.items():
        assert bool(PROOFS[custody]) is (Custody.RETURNED in steps)
    assert set(PHASE_STEPS) == set(Path)
    assert set(PHASE_STEPS[Path.DISAGGREGATED]) | {Phase.PASSED} == set(Phase)
    assert all(not PHASE_STEPS[path][end] for path, end in product(Path, ENDS))


def test_an_illegal_step_says_everything(clock):
    attempt = AttemptRecord("r7", clock=clock)
    with pytest.raises(IllegalTransition) as error:
        attempt.advance(Phase.DECODE)
    for fact in (
        attempt.id,
        "r7",
        "queued → decode",
        "cancelled, failed, prefill",
        "disaggregated",
        "custody none",
    ):
        assert fact in str(error.value)


def test_cancelling_the_request_leaves_its_pages_in_custody(clock):
    attempt, lease = flown_to(Path.DISAGGREGATED, Phase.PREFILL, clock), a_lease()
    attempt.hold(lease)
    lease.step(Custody.FILLING)
    attempt.advance(Phase.CANCELLED)
    assert (attempt.is_over, lease.is_at_risk) == (True, True)
    lease.step(Custody.ORPHANED)
    lease.account.take_back(lease, Evidence.ERRAND_DONE, 0.0)
    assert (lease.is_at_risk, attempt.custody, attempt.phase) == (False, Custody.RETURNED, Phase.CANCELLED)


@pytest.mark.parametrize("custody", LEASED)
def test_only_filling_and_ready_are_at_risk(custody):
    assert held_in(custody).is_at_risk is (custody in (Custody.FILLING, Custody.READY))


@pytest.mark.parametrize(
    ("phase", "path"),
    [(Phase.QUEUED, Path.LOCAL), (Phase.PREFILL, Path.PREFILL_ONLY), (Phase.DECODE, Path.LOCAL)],
)
def test_another_path_through_the_same_phase_may_be_taken(clock, phase, path):
    attempt = flown_to(Path.DISAGGREGATED, phase, clock)
    attempt.take_path(path)
    life = LIVES[path]
    attempt.advance(life[life.index(phase) + 1])
    assert attempt.path is path


@pytest.mark.parametrize(
    ("phase", "path"),
    [(Phase.PREFILL, Path.LOCAL), (Phase.KV_WAIT, Path.PREFILL_ONLY), (Phase.DONE, Path.LOCAL)],
)
def test_a_path_that_does_not_lead_through_here_is_refused(clock, phase, path):
    attempt = flown_to(Path.DISAGGREGATED, phase, clock)
    with pytest.raises(IllegalTransition, match="path: disaggregated"):
        attempt.take_path(path)
    assert attempt.path is Path.DISAGGREGATED


def test_each_phase_takes_its_time(clock):
    attempt = AttemptRecord("r1", tokenize_s=0.5, clock=clock)
    for seconds, phase in zip((1, 2, 4, 8), LIVES[Path.DISAGGREGATED][1:], strict=True):
        clock.now += seconds
        if phase is Phase.DONE:
            attempt.mark_first_byte()
            clock.now += 16
        attempt.advance(phase)
    clock.now += 1000
    assert list(attempt.phase_seconds().items()) == [
        ("tokenize", 0.5),
        ("slot_wait", 1.0),
        ("prefill", 2.0),
        ("kv_wait", 4.0),
        ("first_byte", 8.0),
        ("decode", 16.0),
    ]
    assert attempt.total_seconds() == 31.0


def test_a_phase_under_way_counts_up_to_now(clock):
    attempt = flown_to(Path.DISAGGREGATED, Phase.PREFILL, clock)
    clock.now += 3
    assert attempt.phase_seconds() == {"slot_wait": 0.0, "prefill": 3.0}
    assert attempt.total_seconds() == 3.0


def test_a_phase_broken_off_counts_up_to_the_end(clock):
    attempt = flown_to(Path.DISAGGREGATED, Phase.DECODE, clock)
    clock.now += 3
    attempt.advance(Phase.FAILED)
    clock.now += 5
    assert attempt.phase_seconds()["first_byte"] == 3.0
    assert "decode" not in attempt.phase_seconds()


def test_only_the_first_byte_is_the_first_byte(clock):
    attempt = flown_to(Path.LOCAL, Phase.DECODE, clock)
    clock.now += 1
    attempt.mark_first_byte()
    clock.now += 2
    attempt.mark_first_byte()
    assert attempt.phase_seconds() == {"slot_wait": 0.0, "first_byte": 1.0, "decode": 2.0}


def test_a_first_byte_after_the_end_is_not_counted(clock):
    attempt = flown_to(Path.LOCAL, Phase.DECODE, clock)
    attempt.advance(Phase.CANCELLED)
    clock.now += 1
    attempt.mark_first_byte()
    assert attempt.phase_seconds() == {"slot_wait": 0.0, "first_byte": 0.0}
    assert attempt.total_seconds() == 0.0


def test_no_first_byte_before_decode(clock):
    attempt = flown_to(Path.DISAGGREGATED, Phase.KV_WAIT, clock)
    with pytest.raises(IllegalTransition, match="first byte"):
        attempt.mark_first_byte()


def test_timing_header_is_in_milliseconds_and_in_order(clock):
    attempt = AttemptRecord("r1", tokenize_s=0.01204, clock=clock)
    assert attempt.timing_header() == b"tokenize;dur=12.0, slot_wait;dur=0.0"
    clock.now += 0.0036
    attempt.advance(Phase.PREFILL)
    clock.now += 1.5
    assert attempt.timing_header() == b"tokenize;dur=12.0, slot_wait;dur=3.6, prefill;dur=1500.0"
    attempt.advance(Phase.FAILED)
    clock.now += 1.5
    assert attempt.timing_header() == b"tokenize;dur=12.0, slot_wait;dur=3.6, prefill;dur=1500.0"


def test_facts_leave_out_what_is_not_known(clock):
    attempt = AttemptRecord("r1", decoder="d0", num_prompt_tokens=300, clock=clock)
    attempt.num_pages = 2
    attempt.num_kv_bytes = 0
    clock.now += 1
    assert attempt.facts() == {
        "attempt": attempt.id,
        "request_id": "r1",
        "path": "disaggregated",
        "phase": "queued",
        "custody": "none",
        "decoder": "d0",
        "num_prompt_tokens": 300,
        "num_pages": 2,
        "num_kv_bytes": 0,
        "slot_wait_s": 1.0,
    }


def test_every_attempt_has_its_own_id(clock):
    attempts = {AttemptRecord("r1", clock=clock).id for _ in range(3)}
    assert len(attempts) == 3
    assert all(len(attempt) == 16 for attempt in attempts)


def test_what_is_shown_of_an_attempt_is_half_of_what_engines_know_it_by(clock):
    attempt = AttemptRecord("r1", clock=clock)
    assert (len(attempt.secret), attempt.secret[:16]) == (32, attempt.id)
    assert attempt.secret not in f"{attempt!r} {attempt.facts()}"


def test_repr_is_a_status_line(clock):
    attempt = AttemptRecord("r1", prefiller="p0", clock=clock)
    assert repr(attempt) == f"<AttemptRecord {attempt.id} disaggregated: queued, pages none, p0 → ->"
