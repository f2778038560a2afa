"""The table of attempts: every step from every state, first come first served, all or nothing, no page lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from tests.fakes.reservations import wanted
from tests.fakes.snapshot import snapshot
from transfer.errors import AttemptLost, IllegalTransition, IntegrityError, ReservationRefused
from transfer.memory.deadlines import SPARE, Deadlines
from transfer.memory.reservations import Grant, Holding, Reservation, Reservations, WriterState

ZERO, ONE, TWO = b"rank 0", b"rank 1", b"rank 2"


def state(table: Reservations, attempt: str) -> str:
    reservation = table.get(attempt)
    return "GONE" if reservation is None else reservation.holding.name


def grant_of(table: Reservations) -> Grant:
    [grant] = table.pump()
    return grant


def refused(table: Reservations, step: Callable[[], object], error: type[Exception], match: str | None = None) -> None:
    before = snapshot(table)
    with pytest.raises(error, match=match):
        step()
    assert snapshot(table) == before
    table.check_integrity()


# ── the state table ─────────────────────────────────────────────────────────────────────────────────────────────────


def bring_to(holding: str) -> Reservations:
    """A table of 4 pages with attempt ``a`` (2 pages, one writer) in this state."""
    table = Reservations(4)
    if holding == "QUEUED":
        table.request(wanted("blocker", 3))
        table.pump()
    if holding != "GONE":
        table.request(wanted("a"), 0, ZERO)
        table.pump()
    if holding in ("READY", "TAKEN"):
        table.writes_done("a")
    if holding == "TAKEN":
        table.take("a")
    if holding == "QUARANTINED":
        table.withdraw("a", "cancelled")
    assert state(table, "a") == holding
    return table


STEPS: dict[str, Callable[[Reservations], object]] = {
    "request": lambda table: table.request(wanted("a"), 0, ZERO),
    "writes_done": lambda table: table.writes_done("a"),
    "writes_ended": lambda table: table.writes_ended("a"),
    "take": lambda table: table.take("a"),
    "consume": lambda table: table.consume("a"),
    "withdraw": lambda table: table.withdraw("a", "cancelled"),
    "written": lambda table: table.note_written("a", 0, 1),
    "page_taken": lambda table: table.page_taken("a", 0),
}

TABLE: dict[str, dict[str, str | type[Exception]]] = {
    "GONE": {
        "request": "QUEUED",
        "writes_done": AttemptLost,
        "writes_ended": "GONE",
        "take": AttemptLost,
        "consume": AttemptLost,
        "withdraw": "GONE",
        "written": AttemptLost,
        "page_taken": AttemptLost,
    },
    "QUEUED": {
        "request": ReservationRefused,
        "writes_done": IllegalTransition,
        "writes_ended": "GONE",
        "take": IllegalTransition,
        "consume": IllegalTransition,
        "withdraw": "GONE",
        "written": IllegalTransition,
        "page_taken": IllegalTransition,
    },
    "RESERVED": {
        "request": ReservationRefused,
        "writes_done": "READY",
        "writes_ended": "GONE",
        "take": IllegalTransition,
        "consume": IllegalTransition,
        "withdraw": "QUARANTINED",
        "written": IllegalTransition,
        "page_taken": IllegalTransition,
    },
    "READY": {
        "request": ReservationRefused,
        "writes_done": IllegalTransition,
        "writes_ended": "READY",
        "take": "TAKEN",
        "consume": IllegalTransition,
        "withdraw": "GONE",
        "written": IllegalTransition,
        "page_taken": IllegalTransition,
    },
    "TAKEN": {
        "request": ReservationRefused,
        "writes_done": IllegalTransition,
        "writes_ended": "TAKEN",
        "take": IllegalTransition,
        "consume": "GONE",
        "withdraw": "TAKEN",
        "written": IllegalTransition,
        "page_taken": IllegalTransition,
    },
    "QUARANTINED": {
        "request": ReservationRefused,
        "writes_done": "GONE",
        "writes_ended": "GONE",
        "take": AttemptLost,
        "consume": AttemptLost,
        "withdraw": "QUARANTINED",
        "written": AttemptLost,
        "page_taken": AttemptLost,
    },
}


def test_the_table_names_every_step_from_every_state() -> None:
    assert set(TABLE) == {holding.name for holding in Holding}
    assert all(set(steps) == set(STEPS) for steps in TABLE.values())


@pytest.mark.parametrize(("holding", "step"), [(holding, step) for holding in TABLE for step in STEPS])
def test_step(holding: str, step: str) -> None:
    table = bring_to(holding)
    outcome = TABLE[holding][step]
    if isinstance(outcome, str):
        before = snapshot(table)
        STEPS[step](table)
        assert state(table, "a") == outcome
        assert outcome != holding or snapshot(table) == before, "what does not lead on changes nothing"
    else:
        refused(table, lambda: STEPS[step](table), outcome)
    if outcome == "GONE":
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
    assert table.consume("a").pages == [0, 1]
    assert table.num_free == 4


# ── granting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def granted(table: Reservations) -> list[str]:
    return [grant.reservation.attempt for grant in table.pump()]


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


@pytest.mark.parametrize(
    "impossible",
    [
        wanted("a", 5),
        wanted("a", 2, 3),
        wanted("a", 2, 0),
        wanted("a", 2, -1),
        wanted("a", 0),
        wanted("a", -1),
        wanted("a", expected=()),
        wanted("a", 2, keys=[b"x", b"y", b"z"]),
        wanted("a", 2, keys=[b"x", b"x"]),
        wanted("a", 2, 1, expected=(0, 1)),
        wanted("a", 2, 1, expected=(1,)),
    ],
)
def test_what_can_never_be_granted_is_refused_at_once(impossible: Reservation) -> None:
    table = Reservations(4)
    refused(table, lambda: table.request(impossible, 0, ZERO), ReservationRefused)


def test_private_pages_need_no_keys_of_their_own() -> None:
    table = Reservations(4)
    table.request(wanted("a", 3, keys=[b"", b"x", b""]), 0, ZERO)
    assert grant_of(table).present == []


def test_larger_than_the_buffer_is_refused_with_both_numbers() -> None:
    with pytest.raises(ReservationRefused, match="needs 5 pages and this PD buffer has 4"):
        Reservations(4).request(wanted("a", 5))


# ── several writers ─────────────────────────────────────────────────────────────────────────────────────────────────


def pair(*, joined: int = 2, num_pages: int = 2, keys: Iterable[bytes] = ()) -> Reservations:
    """A table of 4 pages; attempt ``a`` expects ranks 0 and 1, of which so many have joined; granted."""
    table = Reservations(4)
    for rank, identity in list(enumerate((ZERO, ONE)))[:joined]:
        table.request(wanted("a", num_pages, expected=(0, 1), keys=keys), rank, identity)
    table.pump()
    return table


def test_a_grant_is_told_to_everyone_who_has_asked() -> None:
    table = Reservations(4)
    for rank, identity in enumerate((ZERO, ONE)):
        assert table.request(wanted("a", expected=(0, 1)), rank, identity) is None
    grant = grant_of(table)
    assert (grant.pages, grant.present) == ([0, 1], [])
    assert grant.tell == (ZERO, ONE)


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_a_rank_that_writes_nothing_has_nothing_to_ask_for(joined: int) -> None:
    table = pair(joined=joined)
    refused(table, lambda: table.request(wanted("a", expected=(0, 1)), 2, TWO), ReservationRefused, "rank 2 writes")


def test_who_joins_a_granted_attempt_gets_the_grant_at_once() -> None:
    table = pair(joined=1)
    grant = table.request(wanted("a", expected=(0, 1)), 1, ONE)
    assert grant is not None
    assert (grant.pages, grant.tell) == ([0, 1], (ONE,))
    assert table.pump() == []


def test_an_attempt_is_ready_when_every_expected_rank_is_done() -> None:
    table = pair()
    assert not table.writes_done("a", 1).is_ready
    assert state(table, "a") == "RESERVED"
    assert table.writes_done("a", 0).is_ready
    assert state(table, "a") == "READY"


def test_it_is_not_ready_before_the_last_one_has_even_joined() -> None:
    table = pair(joined=1)
    assert not table.writes_done("a", 0).is_ready
    table.request(wanted("a", expected=(0, 1)), 1, ONE)
    assert table.writes_done("a", 1).is_ready


@pytest.mark.parametrize("rank", [1, 2])
def test_who_has_not_joined_cannot_be_done(rank: int) -> None:
    table = pair(joined=1)
    refused(table, lambda: table.writes_done("a", rank), IllegalTransition, f"rank {rank} has not joined")


def test_who_is_done_cannot_be_done_again() -> None:
    table = pair()
    table.writes_done("a", 0)
    refused(table, lambda: table.writes_done("a", 0), IllegalTransition, "DONE")


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (wanted("a", 3, num_tokens=8, expected=(0, 1), keys=[b"", b"", b""]), "num_pages"),
        (wanted("a", num_tokens=9, expected=(0, 1)), "num_tokens"),
        (wanted("a", expected=(0, 1), keys=[b"x", b""]), "keys"),
        (wanted("a", expected=(1,)), "expected"),
        (replace(wanted("a", expected=(0, 1)), num_senders=2), "num_senders"),
    ],
)
def test_ranks_that_ask_for_different_things_are_told_which(other: Reservation, field: str) -> None:
    table = pair(joined=1)
    refused(table, lambda: table.request(other, 1, ONE), ReservationRefused, f"another {field} than")


@pytest.mark.parametrize(("rank", "identity"), [(0, TWO), (1, ZERO)])
def test_a_rank_has_one_connection_and_a_connection_one_rank(rank: int, identity: bytes) -> None:
    table = pair(joined=1)
    refused(
        table, lambda: table.request(wanted("a", expected=(0, 1)), rank, identity), ReservationRefused, "connection"
    )


def test_only_writers_speak_for_an_attempt() -> None:
    table = pair(joined=1)
    reservation = table.get("a")
    assert reservation is not None
    assert [reservation.rank_of(identity) for identity in (ZERO, ONE, TWO)] == [0, None, None]


def test_a_writer_that_gives_up_fails_the_attempt_and_the_others_are_told_to_stop() -> None:
    table = pair()
    change = table.writes_ended("a", 0, "out of time")
    assert change is not None
    assert (change.is_failed, change.is_released, change.stop) == (True, False, (ONE,))
    assert change.reservation.reason == "out of time"
    assert (state(table, "a"), table.num_quarantined) == ("QUARANTINED", 2)
    last = table.writes_ended("a", 1)
    assert last is not None
    assert (last.is_failed, last.is_released) == (False, True)
    assert table.num_free == 4


def test_pages_stay_in_quarantine_until_the_last_writer_that_joined_has_ended() -> None:
    table = pair()
    change = table.withdraw("a", "cancelled")
    assert change is not None
    assert (change.is_failed, change.is_released, change.stop) == (True, False, (ZERO, ONE))
    assert not table.writes_done("a", 1).is_released, "what crosses with the cancellation ends its writer as well"
    refused(table, lambda: table.request(wanted("c", 5), 0, ZERO), ReservationRefused)
    assert table.num_free == 2
    ended = table.writes_ended("a", 0)
    assert ended is not None
    assert ended.is_released


def test_a_writer_that_was_done_holds_nothing_in_quarantine() -> None:
    table = pair()
    table.writes_done("a", 0)
    change = table.withdraw("a", "cancelled")
    assert change is not None
    assert (change.stop, change.is_released) == ((ONE,), False)
    assert table.writes_ended("a", 0) is None
    assert [c.is_released for c in table.writer_gone(ONE)] == [True]


def test_a_writer_that_never_joined_holds_nothing_in_quarantine() -> None:
    table = pair(joined=1)
    change = table.withdraw("a", "cancelled")
    assert change is not None
    refused(table, lambda: table.request(wanted("a", expected=(0, 1)), 1, ONE), ReservationRefused, "over: cancelled")
    ended = table.writes_ended("a", 0)
    assert ended is not None
    assert ended.is_released
    assert table.num_free == 4


def test_a_gone_writer_fails_what_it_was_writing_and_nothing_else() -> None:
    table = Reservations(8)
    for attempt in ("written", "done", "withdrawn", "others"):
        identity = ONE if attempt == "others" else ZERO
        table.request(wanted(attempt), 0, identity)
    table.pump()
    table.request(wanted("queued"), 0, ZERO)
    table.writes_done("done")
    table.withdraw("withdrawn", "cancelled")
    assert [r.attempt for r in table.of_writer(ZERO)] == ["written", "withdrawn", "queued"]
    changes = {c.reservation.attempt: (c.is_failed, c.is_released) for c in table.writer_gone(ZERO, "it died")}
    assert changes == {"written": (True, True), "withdrawn": (False, True), "queued": (True, True)}
    assert (state(table, "done"), state(table, "others")) == ("READY", "RESERVED")
    assert table.of_writer(ZERO) == table.writer_gone(ZERO) == table.writer_gone(b"stranger") == []
    table.check_integrity()


# ── sharing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def ask(table: Reservations, attempt: str, *keys: bytes, identity: bytes = ZERO) -> list[Grant]:
    table.request(wanted(attempt, len(keys), keys=keys), 0, identity)
    return table.pump()


def test_a_ready_chunk_is_shared_and_not_written_again() -> None:
    table = Reservations(4)
    ask(table, "a", b"s", b"x")
    table.writes_done("a")
    [grant] = ask(table, "b", b"s", b"y")
    assert (grant.pages, grant.present) == ([0, 2], [0])
    assert (table.num_free, table.statistics()["writes_saved"]) == (1, 1)
    table.writes_done("b")
    for attempt in ("a", "b"):
        table.take(attempt)
        table.consume(attempt)
        table.check_integrity()
    assert table.num_free == 4


def test_a_chunk_that_is_still_being_written_is_not_shared() -> None:
    table = Reservations(4)
    ask(table, "a", b"s")
    [grant] = ask(table, "b", b"s")
    assert (grant.pages, grant.present) == ([1], [])


def test_a_failed_write_leaves_nothing_behind_that_could_be_found() -> None:
    table = Reservations(4)
    ask(table, "a", b"s")
    table.writes_ended("a")
    assert ask(table, "b", b"s")[0].present == []


def test_a_chunk_stays_findable_after_its_last_owner_and_costs_nothing() -> None:
    table = Reservations(2)
    ask(table, "a", b"s", b"x")
    table.writes_done("a")
    table.withdraw("a", "expired")
    assert table.num_free == 2
    [grant] = ask(table, "b", b"s", b"y")
    assert (grant.pages, grant.present) == ([0, 1], [0])


def test_hits_that_are_free_count_as_pages_needed() -> None:
    """Two of the three pages are free, and both are hits or wanted: three are needed, with the one that is held."""
    table = Reservations(3)
    ask(table, "a", b"s")
    table.writes_done("a")
    table.withdraw("a", "expired")
    ask(table, "blocker", b"")
    assert table.num_free == 2
    assert ask(table, "b", b"s", b"y", b"z") == []
    table.writes_ended("blocker")
    [grant] = table.pump()
    assert (grant.present, sorted(grant.pages)) == ([0], [0, 1, 2])


def test_hits_that_are_held_cost_nothing() -> None:
    table = Reservations(3)
    ask(table, "a", b"s", b"t")
    table.writes_done("a")
    [grant] = ask(table, "b", b"s", b"t", b"y")
    assert (grant.present, grant.pages) == ([0, 1], [0, 1, 2])


def test_what_is_all_there_is_ready_when_its_writers_say_so() -> None:
    table = Reservations(2)
    ask(table, "a", b"s", b"t")
    table.writes_done("a")
    [grant] = ask(table, "b", b"s", b"t")
    assert grant.present == [0, 1]
    assert state(table, "b") == "RESERVED"
    assert table.writes_done("b").is_ready


def test_a_withdrawn_attempt_leaves_shared_pages_at_once_and_keeps_its_own() -> None:
    table = Reservations(4)
    ask(table, "a", b"s", b"x")
    table.writes_done("a")
    ask(table, "b", b"s", b"y", identity=ONE)
    table.take("a")
    table.consume("a")
    assert table.num_free == 2
    table.withdraw("b", "cancelled")
    assert (table.num_free, table.num_quarantined) == (3, 1)
    table.check_integrity()
    table.writes_ended("b")
    assert table.num_free == 4
    assert ask(table, "c", b"s")[0].present == [0], "the shared chunk is none the worse for it"


def test_a_second_copy_of_a_chunk_stays_private() -> None:
    table = Reservations(4)
    ask(table, "a", b"s")
    ask(table, "b", b"s", identity=ONE)
    for attempt in ("b", "a"):
        table.writes_done(attempt)
    assert ask(table, "c", b"s")[0].pages == [1], "the first that was ready is the one"
    table.check_integrity()


def test_attempts_with_several_writers_share_as_well() -> None:
    table = pair(keys=[b"s", b"x"])
    for rank in (0, 1):
        table.writes_done("a", rank)
    table.request(wanted("b", 2, expected=(0, 1), keys=[b"s", b"y"]), 1, ONE)
    assert grant_of(table).present == [0]
    late = table.request(wanted("b", 2, expected=(0, 1), keys=[b"s", b"y"]), 0, ZERO)
    assert late is not None
    assert late.present == [0]


# ── through the window ──────────────────────────────────────────────────────────────────────────────────────────────


def through_window(num_pages: int = 5, ranks: Iterable[int] = (0,)) -> Reservations:
    """A table of 3 pages whose attempt ``a`` is larger than that, and granted."""
    table = Reservations(3)
    for rank in ranks:
        table.request(wanted("a", num_pages, expected=ranks), rank, b"rank %d" % rank, windowed=True)
    grant = grant_of(table)
    assert (grant.pages, grant.reservation.window) == ([0, 1, 2], 3)
    return table


def test_a_windowed_attempt_waits_until_every_page_is_free_and_holds_up_those_behind_it() -> None:
    table = Reservations(3)
    table.request(wanted("before", 1), 0, ZERO)
    table.request(wanted("a", 5), 0, ONE, windowed=True)
    table.request(wanted("behind", 1), 0, TWO)
    assert granted(table) == ["before"]
    table.withdraw("before", "cancelled")
    assert granted(table) == [], "pages in quarantine are not free"
    table.writes_ended("before")
    assert granted(table) == ["a"]
    table.writes_ended("a")
    assert granted(table) == ["behind"]


def test_what_fits_is_not_windowed_though_it_might_be() -> None:
    table = Reservations(3)
    table.request(wanted("a", 2, keys=[b"s", b""]), 0, ZERO, windowed=True)
    assert grant_of(table).reservation.window == 0


def test_a_windowed_attempt_cannot_be_asked_for_page_by_page_nor_without_any_page() -> None:
    table = Reservations(3)
    refused(table, lambda: table.request(wanted("a", 5, 1), 0, ZERO, windowed=True), ReservationRefused)
    empty = Reservations(0)
    refused(empty, lambda: empty.request(wanted("a", 1), 0, ZERO, windowed=True), ReservationRefused)


def test_a_windowed_attempt_neither_finds_chunks_nor_leaves_any() -> None:
    table = Reservations(3)
    ask(table, "first", b"s")
    table.writes_done("first")
    table.withdraw("first", "expired")
    table.request(wanted("a", 4, keys=[b"s", b"t", b"u", b"v"]), 0, ZERO, windowed=True)
    assert grant_of(table).present == []
    for count in (3, 4):
        table.note_written("a", 0, count)
        table.page_taken("a", count)
    assert table.writes_done("a").is_ready
    assert table.statistics()["findable"] == 0
    table.take("a")
    table.consume("a")
    assert ask(table, "b", b"s", b"t")[0].present == []


def test_pages_pass_through_the_window() -> None:
    table = through_window()
    assert table.note_written("a", 0, 2) == range(2)
    credit = table.page_taken("a", 1)
    assert (credit.count, credit.tell, credit.is_ready) == (1, (ZERO,), False)
    assert table.note_written("a", 0, 4) == range(2, 4)
    assert table.note_written("a", 0, 4) == range(4, 4)
    table.page_taken("a", 4)
    assert table.note_written("a", 0, 5) == range(4, 5)
    assert not table.writes_done("a").is_ready, "the consumer has not seen the last one"
    credit = table.page_taken("a", 5)
    assert (credit.tell, credit.is_ready, state(table, "a")) == ((), True, "READY")
    assert table.take("a") == [0, 1, 2]
    table.consume("a")
    assert table.num_free == 3


def test_an_ordinal_is_complete_when_the_slowest_writer_has_written_it() -> None:
    table = through_window(ranks=(0, 1))
    assert table.note_written("a", 0, 3) == range(0)
    assert table.note_written("a", 1, 1) == range(1)
    assert table.page_taken("a", 1).tell == (ZERO, ONE)
    assert table.note_written("a", 0, 4) == range(1, 1)
    assert table.note_written("a", 1, 4) == range(1, 4)


def test_nothing_is_complete_before_every_writer_has_joined() -> None:
    table = Reservations(3)
    table.request(wanted("a", 5, expected=(0, 1)), 0, ZERO, windowed=True)
    table.pump()
    assert table.note_written("a", 0, 3) == range(0)
    refused(table, lambda: table.page_taken("a", 1), IllegalTransition)


@pytest.mark.parametrize("count", [-1, 1, 5, 6])
def test_a_writer_goes_neither_back_nor_over_what_has_not_been_read(count: int) -> None:
    table = through_window(num_pages=9)
    table.note_written("a", 0, 2)
    table.page_taken("a", 1)
    refused(table, lambda: table.note_written("a", 0, count), IllegalTransition, "may have written 4")


def test_a_writer_cannot_have_written_more_than_there_is() -> None:
    table = through_window(num_pages=4)
    table.note_written("a", 0, 3)
    table.page_taken("a", 3)
    refused(table, lambda: table.note_written("a", 0, 5), IllegalTransition, "may have written 4")


@pytest.mark.parametrize("count", [-1, 0, 3])
def test_what_was_taken_goes_neither_back_nor_beyond_what_was_written(count: int) -> None:
    table = through_window()
    table.note_written("a", 0, 2)
    table.page_taken("a", 1)
    refused(table, lambda: table.page_taken("a", count), IllegalTransition, "pages taken")


def test_a_writer_is_not_done_before_it_has_written_everything() -> None:
    table = through_window()
    table.note_written("a", 0, 3)
    refused(table, lambda: table.writes_done("a"), IllegalTransition, "3 of 5 pages written")


def test_who_is_done_writes_no_more() -> None:
    table = through_window(num_pages=4)
    table.note_written("a", 0, 3)
    table.page_taken("a", 3)
    table.note_written("a", 0, 4)
    table.writes_done("a")
    refused(table, lambda: table.note_written("a", 0, 4), IllegalTransition, "DONE")


def test_what_is_copied_from_a_withdrawn_window_does_not_count() -> None:
    table = through_window()
    table.note_written("a", 0, 2)
    table.withdraw("a", "cancelled")
    refused(table, lambda: table.page_taken("a", 1), AttemptLost, "cancelled")
    refused(table, lambda: table.note_written("a", 0, 3), AttemptLost)
    table.writes_ended("a")
    assert table.num_free == 3


# ── page by page ────────────────────────────────────────────────────────────────────────────────────────────────────


def extend(table: Reservations, attempt: str, num_pages: int = 3, identity: bytes = ZERO) -> None:
    table.request(wanted(attempt, num_pages, 1), 0, identity)


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
    grant = grant_of(table)
    assert (len(grant.pages), len(grant.reservation.pages)) == (1, 2)
    table.check_integrity()


def test_an_attempt_cannot_be_ready_before_all_its_pages_were_granted() -> None:
    table = Reservations(3)
    extend(table, "a")
    table.pump()
    refused(table, lambda: table.writes_done("a"), IllegalTransition, "1 of 3")
    extend(table, "a")
    refused(table, lambda: table.writes_done("a"), IllegalTransition, "QUEUED")


def test_only_the_writer_of_an_attempt_can_extend_it_and_not_beyond_its_size() -> None:
    table = Reservations(4)
    extend(table, "a", 2)
    table.pump()
    refused(table, lambda: extend(table, "a", 2, b"stranger"), ReservationRefused, "another connection")
    refused(table, lambda: table.request(wanted("a", 2, 2), 0, ZERO), ReservationRefused, "more than its 2")


def test_page_by_page_nothing_is_shared() -> None:
    table = Reservations(4)
    ask(table, "a", b"s", b"x")
    table.writes_done("a")
    for num_granted in (1, 2):
        table.request(wanted("b", 2, 1, keys=[b"s", b"y"]), 0, ONE)
        grant = grant_of(table)
        assert (grant.present, len(grant.reservation.pages)) == ([], num_granted)
    assert table.writes_done("b").is_ready
    assert table.statistics()["findable"] == 2, "those of the first"


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
    assert (state(table, "a"), table.num_free) == ("GONE", 1)


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


def test_what_expires_first_comes_first_and_is_listed_until_it_is_withdrawn() -> None:
    table = Reservations(4)
    for attempt, expires_at in (("late", 30.0), ("early", 10.0), ("middle", 20.0), ("too", 20.0)):
        table.request(wanted(attempt, 1, expires_at=expires_at))
    for _ in range(2):
        assert [r.attempt for r in table.expired(20.0)] == ["early", "middle", "too"]
    table.withdraw("early", "expired")
    assert table.next_expiry() == 20.0
    table.request(wanted("early", 1, expires_at=5.0))
    assert table.next_expiry() == 5.0, "an attempt that comes again has its own time"


def test_deadlines_that_are_over_do_not_pile_up() -> None:
    live: set[int] = set()
    deadlines = Deadlines[int](live.__contains__)
    for number in range(20 * SPARE):
        live.add(number)
        deadlines.add(1e9 - number, number)
        live.discard(number - 3)
        assert len(deadlines) <= 2 * 4 + SPARE
    last = 20 * SPARE - 1
    assert deadlines.due(1e9) == [last, last - 1, last - 2]
    assert repr(deadlines) == f"<Deadlines 3 entries, next {1e9 - last}>"


# ── what it says of itself ──────────────────────────────────────────────────────────────────────────────────────────


def test_statistics_and_repr() -> None:
    table = pair(keys=[b"s", b"x"])
    for rank in (0, 1):
        table.writes_done("a", rank)
    table.request(wanted("b", 2, expected=(0, 1), keys=[b"s", b"y"]), 0, ZERO)
    table.pump()
    table.request(wanted("c", 4), 0, TWO)
    assert table.pump() == []
    assert repr(table.get("b")) == "<Reservation b reserved, 2/2 pages, 1 shared, 0/2 writers done>"
    table.withdraw("b", "cancelled")
    assert table.statistics() == {
        "pages": 4,
        "free": 1,
        "held": 3,
        "shared": 0,
        "findable": 2,
        "idle": 0,
        "attempts_queued": 1,
        "attempts_reserved": 0,
        "attempts_ready": 1,
        "attempts_taken": 0,
        "attempts_quarantined": 1,
        "quarantined": 1,
        "reserved": 0,
        "writes_saved": 1,
        "cached": 0,
        "waited": 1,
    }
    assert repr(table) == "<Reservations 3/4 pages, 3 attempts, 1 queued, 1 pages in quarantine>"
    windowed = through_window()
    windowed.note_written("a", 0, 2)
    assert repr(windowed.get("a")) == "<Reservation a reserved, 3/5 pages, 0/2 taken through 3, 0/1 writers done>"


def _of(table: Reservations, attempt: str) -> Reservation:
    reservation = table.get(attempt)
    assert reservation is not None
    return reservation


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: _of(table, "a").pages.pop(),
        lambda table: table._pool.allocate(1, "stranger"),
        lambda table: table._pool.share([0], "q"),
        lambda table: table._queue.pop("q"),
        lambda table: table._queue.update(a=None),
        lambda table: table._writing.pop(ZERO),
        lambda table: table._writing.setdefault(TWO, {}),
        lambda table: setattr(_of(table, "a").writers[0], "state", WriterState.DONE),
        lambda table: setattr(_of(table, "a"), "holding", Holding.READY),
        lambda table: setattr(_of(table, "a"), "num_taken", 1),
        lambda table: (table.withdraw("a", ""), _of(table, "a").writers.clear(), table._writing.pop(ZERO)),
    ],
)
def test_damage_is_noticed(damage: Callable[[Reservations], object]) -> None:
    table = Reservations(4)
    table.request(wanted("a"), 0, ZERO)
    table.pump()
    table.request(wanted("q", 3), 0, ONE)
    table.check_integrity()
    damage(table)
    with pytest.raises(IntegrityError):
        table.check_integrity()


# ── who had to wait ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_attempt_that_waits_is_counted_once() -> None:
    table = Reservations(4)
    for attempt in ("a", "b"):
        table.request(wanted(attempt), 0, attempt.encode())
        table.pump()
    assert table.num_waited == 0
    for attempt in ("c", "d"):
        table.request(wanted(attempt), 0, attempt.encode())
        table.pump()
        table.pump()
    assert (table.num_waited, table.num_queued) == (2, 2)
    assert grant_after_end(table, "a") == ["c"]
    assert grant_after_end(table, "b") == ["d"]
    assert table.num_waited == 2


def test_attempts_that_enter_together_are_counted_each() -> None:
    table = Reservations(4)
    for attempt in ("a", "b", "c", "d"):
        table.request(wanted(attempt), 0, attempt.encode())
    assert [grant.reservation.attempt for grant in table.pump()] == ["a", "b"]
    assert table.num_waited == 2


def test_who_leaves_the_queue_has_waited_all_the_same() -> None:
    table = bring_to("QUEUED")
    table.withdraw("a", "cancelled")
    assert (table.num_queued, table.num_waited) == (0, 1)


@pytest.mark.parametrize(
    ("holding", "num_reserved"),
    [("QUEUED", 3), ("RESERVED", 2), ("READY", 0), ("TAKEN", 0), ("QUARANTINED", 0), ("GONE", 0)],
)
def test_pages_whose_kv_is_still_arriving(holding: str, num_reserved: int) -> None:
    assert bring_to(holding).num_reserved == num_reserved


def grant_after_end(table: Reservations, attempt: str) -> list[str]:
    """Who gets pages when this attempt has been read."""
    table.writes_done(attempt)
    table.take(attempt)
    table.consume(attempt)
    return [grant.reservation.attempt for grant in table.pump()]
