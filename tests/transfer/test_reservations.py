"""The table of attempts: every step from every state, first come first served, all or nothing, no page lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from transfer.errors import AttemptLost, IllegalTransition, ReservationRefused
from transfer.memory.reservations import Holding, Reservation, Reservations

WRITER = b"writer"


def wanted(attempt: str, num_pages: int, num_now: int | None = None, *, writer: bytes = WRITER) -> Reservation:
    return Reservation(
        attempt=attempt,
        writer=writer,
        num_pages=num_pages,
        num_tokens=num_pages * 4,
        expires_at=10.0,
        notify=None,
        num_now=num_pages if num_now is None else num_now,
    )


def state(table: Reservations, attempt: str) -> str:
    reservation = table.get(attempt)
    return "gone" if reservation is None else reservation.holding.name


# ── the state table ─────────────────────────────────────────────────────────────────────────────────────────────────


def bring_to(holding: str) -> Reservations:
    """A table of 4 pages with attempt ``a`` (2 pages) in this state."""
    table = Reservations(4)
    if holding == "QUEUED":
        table.request(wanted("blocker", 3))
        table.pump()
    if holding != "gone":
        table.request(wanted("a", 2))
        table.pump()
    if holding in ("READY", "TAKEN"):
        table.ready("a")
    if holding == "TAKEN":
        table.take("a")
    if holding == "QUARANTINED":
        table.withdraw("a", "cancelled")
    assert state(table, "a") == holding
    return table


STEPS: dict[str, Callable[[Reservations], object]] = {
    "request": lambda table: table.request(wanted("a", 2)),
    "ready": lambda table: table.ready("a"),
    "take": lambda table: table.take("a"),
    "consume": lambda table: table.consume("a"),
    "withdraw": lambda table: table.withdraw("a", "cancelled"),
    "writes_ended": lambda table: table.writes_ended("a"),
}

TABLE: dict[tuple[str, str], str | type[Exception]] = {
    ("gone", "request"): "QUEUED",
    ("gone", "ready"): AttemptLost,
    ("gone", "take"): AttemptLost,
    ("gone", "consume"): AttemptLost,
    ("gone", "withdraw"): "gone",
    ("gone", "writes_ended"): "gone",
    ("QUEUED", "request"): ReservationRefused,
    ("QUEUED", "ready"): IllegalTransition,
    ("QUEUED", "take"): IllegalTransition,
    ("QUEUED", "consume"): IllegalTransition,
    ("QUEUED", "withdraw"): "gone",
    ("QUEUED", "writes_ended"): "gone",
    ("RESERVED", "request"): ReservationRefused,
    ("RESERVED", "ready"): "READY",
    ("RESERVED", "take"): IllegalTransition,
    ("RESERVED", "consume"): IllegalTransition,
    ("RESERVED", "withdraw"): "QUARANTINED",
    ("RESERVED", "writes_ended"): "gone",
    ("READY", "request"): ReservationRefused,
    ("READY", "ready"): IllegalTransition,
    ("READY", "take"): "TAKEN",
    ("READY", "consume"): IllegalTransition,
    ("READY", "withdraw"): "gone",
    ("READY", "writes_ended"): "READY",
    ("TAKEN", "request"): ReservationRefused,
    ("TAKEN", "ready"): IllegalTransition,
    ("TAKEN", "take"): IllegalTransition,
    ("TAKEN", "consume"): "gone",
    ("TAKEN", "withdraw"): "TAKEN",
    ("TAKEN", "writes_ended"): "TAKEN",
    ("QUARANTINED", "request"): ReservationRefused,
    ("QUARANTINED", "ready"): AttemptLost,
    ("QUARANTINED", "take"): AttemptLost,
    ("QUARANTINED", "consume"): AttemptLost,
    ("QUARANTINED", "withdraw"): "QUARANTINED",
    ("QUARANTINED", "writes_ended"): "gone",
}


def test_the_table_names_every_step_from_every_state() -> None:
    states = {"gone", *(holding.name for holding in Holding)}
    assert set(TABLE) == {(holding, step) for holding in states for step in STEPS}


@pytest.mark.parametrize(("holding", "step"), TABLE)
def test_step(holding: str, step: str) -> None:
    table = bring_to(holding)
    num_free = table.num_free
    outcome = TABLE[holding, step]
    if isinstance(outcome, str):
        STEPS[step](table)
        assert state(table, "a") == outcome
    else:
        with pytest.raises(outcome):
            STEPS[step](table)
        assert state(table, "a") == holding
        assert table.num_free == num_free
    if outcome == "gone":
        table.withdraw("blocker", "")
        table.writes_ended("blocker")
        assert table.num_free == table.num_pages
    table.check_integrity()


def test_a_lost_attempt_says_why() -> None:
    with pytest.raises(AttemptLost, match="attempt a holds no pages here: cancelled"):
        bring_to("QUARANTINED").take("a")


def test_taken_pages_are_the_readers_own_list() -> None:
    table = bring_to("READY")
    table.take("a").clear()
    table.consume("a")
    assert table.num_free == 4


# ── granting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def granted(table: Reservations) -> list[str]:
    return [reservation.attempt for reservation, _ in table.pump()]


def test_first_come_first_served_even_where_a_later_one_would_fit() -> None:
    table = Reservations(4)
    for attempt, num_pages in (("a", 3), ("b", 4), ("c", 1)):
        table.request(wanted(attempt, num_pages))
    assert granted(table) == ["a"]
    table.writes_ended("a")
    assert granted(table) == ["b"]
    table.writes_ended("b")
    assert granted(table) == ["c"]


def test_a_withdrawn_head_lets_those_behind_it_pass() -> None:
    table = Reservations(4)
    for attempt, num_pages in (("a", 3), ("b", 4), ("c", 1)):
        table.request(wanted(attempt, num_pages))
    table.pump()
    table.withdraw("b", "cancelled")
    assert granted(table) == ["c"]
    table.check_integrity()


@pytest.mark.parametrize(("num_pages", "num_now"), [(5, 5), (2, 3), (2, 0), (2, -1), (0, 0), (-1, -1)])
def test_what_can_never_be_granted_is_refused_at_once(num_pages: int, num_now: int) -> None:
    table = Reservations(4)
    with pytest.raises(ReservationRefused):
        table.request(wanted("a", num_pages, num_now))
    assert table.get("a") is None
    assert table.num_queued == 0
    table.check_integrity()


def test_larger_than_the_buffer_is_refused_with_both_numbers() -> None:
    with pytest.raises(ReservationRefused, match="needs 5 pages and this PD buffer has 4"):
        Reservations(4).request(wanted("a", 5))


# ── page by page ────────────────────────────────────────────────────────────────────────────────────────────────────


def extend(table: Reservations, attempt: str, num_pages: int = 3) -> None:
    table.request(wanted(attempt, num_pages, 1))


def test_a_request_grows_page_by_page_and_goes_to_the_end_of_the_queue() -> None:
    table = Reservations(3)
    extend(table, "a")
    extend(table, "b", 1)
    assert granted(table) == ["a", "b"]
    table.request(wanted("c", 1))
    extend(table, "a")
    assert granted(table) == ["c"]
    assert state(table, "a") == "QUEUED"
    table.writes_ended("b")
    assert granted(table) == ["a"]
    assert len(table.get("a").pages) == 2  # type: ignore[union-attr]
    table.check_integrity()


def test_an_attempt_cannot_be_ready_before_all_its_pages_were_granted() -> None:
    table = Reservations(3)
    extend(table, "a")
    table.pump()
    with pytest.raises(IllegalTransition, match="1 of 3"):
        table.ready("a")
    assert state(table, "a") == "RESERVED"


def test_only_the_writer_of_an_attempt_can_extend_it_and_not_beyond_its_size() -> None:
    table = Reservations(4)
    extend(table, "a", 2)
    table.pump()
    with pytest.raises(ReservationRefused):
        table.request(wanted("a", 2, 1, writer=b"stranger"))
    with pytest.raises(ReservationRefused, match="more than its 2"):
        table.request(wanted("a", 2, 2))
    assert state(table, "a") == "RESERVED"
    table.check_integrity()


@pytest.mark.parametrize("is_silent", [False, True])
def test_one_that_waits_for_more_pages_keeps_its_own_in_quarantine(is_silent: bool) -> None:
    table = Reservations(2)
    extend(table, "a", 2)
    extend(table, "b", 2)
    table.pump()
    extend(table, "a", 2)
    assert table.pump() == []
    if not is_silent:
        assert table.withdraw("a", "expired") is not None
        assert (state(table, "a"), table.num_quarantined, table.num_queued) == ("QUARANTINED", 1, 0)
        table.check_integrity()
    table.writes_ended("a")
    table.check_integrity()
    assert (state(table, "a"), table.num_free) == ("gone", 1)


def test_two_that_each_hold_half_block_each_other_until_one_is_withdrawn() -> None:
    table = Reservations(2)
    for attempt in ("a", "b"):
        extend(table, attempt, 2)
    table.pump()
    for attempt in ("a", "b"):
        extend(table, attempt, 2)
    assert table.pump() == []
    table.withdraw("a", "expired")
    assert table.pump() == []
    table.writes_ended("a")
    assert granted(table) == ["b"]


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("holding", "is_listed"),
    [("QUEUED", True), ("RESERVED", True), ("READY", True), ("TAKEN", False), ("QUARANTINED", False)],
)
def test_what_expires(holding: str, is_listed: bool) -> None:
    table = bring_to(holding)
    table.withdraw("blocker", "")
    assert [r.attempt for r in table.expired(10.0)] == (["a"] if is_listed else [])
    assert table.expired(9.9) == []
    assert table.next_expiry() == (10.0 if is_listed else None)


# ── interleavings ───────────────────────────────────────────────────────────────────────────────────────────────────

Path = tuple[tuple[str, str], ...]
TWO_ATTEMPTS = [(attempt, step) for attempt in ("a", "b") for step in STEPS]


def act(table: Reservations, attempt: str, step: str) -> None:
    """One step of an attempt of 2 pages, legal or not, and the grants that follow from it."""
    before = (state(table, attempt), table.num_free)
    try:
        if step == "request":
            table.request(wanted(attempt, 2))
        elif step == "withdraw":
            table.withdraw(attempt, "cancelled")
        else:
            getattr(table, step)(attempt)
    except (AttemptLost, IllegalTransition, ReservationRefused):
        assert (state(table, attempt), table.num_free) == before, f"{step} was refused and changed something"
    table.pump()
    table.check_integrity()


def play(path: Path) -> Reservations:
    """A table of 3 pages, which cannot hold both attempts at once, after these steps."""
    table = Reservations(3)
    for attempt, step in path:
        act(table, attempt, step)
    return table


def end(table: Reservations) -> None:
    """What happens in the end to every attempt: it is consumed if it is being read, else its time runs out."""
    for _ in range(2):
        for attempt in ("a", "b"):
            reservation = table.get(attempt)
            is_taken = reservation is not None and reservation.holding is Holding.TAKEN
            for step in ("consume",) if is_taken else ("withdraw", "writes_ended"):
                act(table, attempt, step)


def test_every_interleaving_of_two_attempts() -> None:
    """All sequences of steps, of any length: from every state that can be reached, every step is tried.

    Two paths that lead to the same holdings are the same state. In each of them the counts add up, the two never hold
    more than there is, nobody waits beside free room, and when both attempts end every page is free.
    """
    seen: dict[tuple[str, str], Path] = {}
    frontier: list[Path] = [()]
    while frontier:
        path = frontier.pop(0)
        table = play(path)
        signature = (state(table, "a"), state(table, "b"))
        if signature in seen:
            continue
        seen[signature] = path
        assert signature.count("QUEUED") < 2, f"both wait: {path}"
        assert "QUEUED" not in signature or table.num_free < 2, f"one waits beside free room: {path}"
        end(table)
        assert table.num_free == 3, f"pages were lost: {path}"
        frontier += [(*path, following) for following in TWO_ATTEMPTS]
    holding = {"RESERVED", "READY", "TAKEN", "QUARANTINED"}
    assert set(seen) == {
        ("gone", "gone"),
        *((one, other) for one in holding for other in ("gone", "QUEUED")),
        *((other, one) for one in holding for other in ("gone", "QUEUED")),
    }


class Model(RuleBasedStateMachine):
    """Random lives of many attempts, whole and page by page, against a plain model of who holds what."""

    attempts = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.table = Reservations(6)
        self.serial = 0
        self.sizes: dict[str, int] = {}
        self.held: dict[str, list[int]] = {}
        self.queue: list[tuple[str, int]] = []

    @rule(target=attempts, num_pages=st.integers(1, 6), is_whole=st.booleans())
    def request(self, num_pages: int, is_whole: bool) -> str:
        self.serial += 1
        attempt = f"attempt-{self.serial}"
        num_now = num_pages if is_whole else 1
        self.table.request(wanted(attempt, num_pages, num_now))
        self.sizes[attempt] = num_pages
        self.held[attempt] = []
        self.queue.append((attempt, num_now))
        return attempt

    @rule(attempt=attempts)
    def extend(self, attempt: str) -> None:
        can = state(self.table, attempt) == "RESERVED" and len(self.held[attempt]) < self.sizes[attempt]
        if attempt not in self.held:
            return
        if not can:
            with pytest.raises(ReservationRefused):
                self.table.request(wanted(attempt, self.sizes[attempt], 1))
            return
        self.table.request(wanted(attempt, self.sizes[attempt], 1))
        self.queue.append((attempt, 1))

    @rule()
    def pump(self) -> None:
        for reservation, pages in self.table.pump():
            attempt, num_now = self.queue.pop(0)
            assert (reservation.attempt, len(pages)) == (attempt, num_now)
            self.held[attempt] += pages
        assert not self.queue or self.queue[0][1] > self.table.num_free

    @rule(attempt=attempts)
    def ready(self, attempt: str) -> None:
        is_complete = len(self.held.get(attempt, [])) == self.sizes[attempt]
        if state(self.table, attempt) == "RESERVED" and is_complete:
            self.table.ready(attempt)
        else:
            with pytest.raises((AttemptLost, IllegalTransition)):
                self.table.ready(attempt)

    @rule(attempt=attempts)
    def take(self, attempt: str) -> None:
        if state(self.table, attempt) == "READY":
            assert self.table.take(attempt) == self.held[attempt]
        else:
            with pytest.raises((AttemptLost, IllegalTransition)):
                self.table.take(attempt)

    @rule(attempt=attempts)
    def withdraw(self, attempt: str) -> None:
        before = state(self.table, attempt)
        changed = self.table.withdraw(attempt, "cancelled")
        assert (changed is not None) == (before in ("QUEUED", "RESERVED", "READY"))
        if before == "READY" or (before == "QUEUED" and not self.held[attempt]):
            self.forget(attempt)
        self.queue = [entry for entry in self.queue if entry[0] != attempt]

    @rule(attempt=attempts)
    def writes_ended(self, attempt: str) -> None:
        before = state(self.table, attempt)
        changed = self.table.writes_ended(attempt)
        assert (changed is not None) == (before in ("QUEUED", "RESERVED", "QUARANTINED"))
        if changed is not None:
            self.forget(attempt)

    @precondition(lambda self: self.held)
    @rule(attempt=consumes(attempts))
    def consume(self, attempt: str) -> None:
        if state(self.table, attempt) == "TAKEN":
            self.table.consume(attempt)
            self.forget(attempt)
        else:
            with pytest.raises((AttemptLost, IllegalTransition)):
                self.table.consume(attempt)

    def forget(self, attempt: str) -> None:
        del self.held[attempt]
        self.queue = [entry for entry in self.queue if entry[0] != attempt]

    @invariant()
    def holdings_agree(self) -> None:
        self.table.check_integrity()
        held = sorted(page for pages in self.held.values() for page in pages)
        assert len(held) == len(set(held)) == self.table.num_pages - self.table.num_free
        for attempt, pages in self.held.items():
            reservation = self.table.get(attempt)
            assert reservation is not None
            assert reservation.pages == pages
        assert self.table.num_queued == len(self.queue)

    def teardown(self) -> None:
        for attempt in list(self.held):
            if state(self.table, attempt) == "TAKEN":
                self.table.consume(attempt)
            else:
                self.table.withdraw(attempt, "over")
                self.table.writes_ended(attempt)
        assert self.table.num_free == self.table.num_pages
        self.table.check_integrity()


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase
