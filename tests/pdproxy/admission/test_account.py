"""One account by itself: its limit, what it takes from engines, and what its check notices."""

from __future__ import annotations

import pytest

from pdproxy.admission.account import Account, Place
from pdproxy.admission.custody import STEPS_TO, Custody, Evidence, Way
from pdproxy.errors import IntegrityError


def account_of(capacity: int, **options: int) -> Account:
    return Account(Place("o", is_owner=True), capacity, 0.0, **options)


@pytest.mark.parametrize(("concurrent", "limit"), [(None, 4), (3, 3), (9, 4)])
def test_the_limit_is_what_there_is_or_what_is_allowed(concurrent: int | None, limit: int) -> None:
    account = account_of(4) if concurrent is None else account_of(4, concurrent=concurrent)
    assert (account.limit, account.concurrent_pages) == (limit, limit)
    assert account.fits(limit)
    assert not account.fits(5)


def test_no_engine_has_less_than_a_page() -> None:
    account = account_of(4)
    for capacity in (0, -1):
        with pytest.raises(ValueError, match="at least one page"):
            account.heard(capacity, 0)
    assert (account.capacity, account.limit) == (4, 4)


def test_what_was_held_when_it_fell_below_is_no_fault_until_it_has_drained() -> None:
    account = account_of(4)
    lease = account.issue("a", 2, 0.0)
    account.issue("b", 1, 0.0)
    account.heard(4, 4 + 3)
    assert (account.foreign, account.limit) == (4, 0)
    account.check_integrity()
    for one in list(account.leases):
        account.take_back(one, Evidence.NEVER_SENT, 1.0)
    assert lease.is_returned
    account.issue("c", 1, 1.0)
    with pytest.raises(IntegrityError, match="more than 0 pages"):
        account.check_integrity()


@pytest.mark.parametrize("custody", [Custody.FILLING, Custody.READY])
def test_a_page_that_was_there_before_is_not_hidden_by_one_that_was_let_go_of_already(custody: Custody) -> None:
    """The signal of that may be late, or lost."""
    account = account_of(6)
    account.heard(6, 1, now=0.0, lease_s=15.0)
    lease = account.issue("a", 5, 0.1)
    for step in STEPS_TO[custody]:
        lease.step(step)
    for now in (0.5, 1.0, 14.9):
        account.heard(6, 1, now=now, returned_before=account.returned_total, lease_s=15.0)
        assert (account.foreign, account.limit) == (1, 5)
    account.heard(6, 0, now=14.95, returned_before=account.returned_total, lease_s=15.0)
    assert account.foreign == 0


def test_what_two_looks_have_found_comes_off_at_the_next_one_soon_after_the_first_look() -> None:
    account = account_of(6)
    account.heard(6, 0, now=0.0, lease_s=15.0)
    for now, occupied, foreign in ((1.0, 2, 0), (2.0, 2, 2), (3.0, 1, 1), (4.0, 0, 0), (5.0, 4, 0)):
        account.heard(6, occupied, now=now, lease_s=15.0)
        assert account.foreign == foreign
    account.issue("a", 4, 5.5)
    account.heard(6, 4, now=6.0, returned_before=0, lease_s=15.0)
    account.heard(6, 4, now=7.0, returned_before=0, lease_s=15.0)
    assert (account.foreign, account.limit) == (0, 6)
    for now, occupied, foreign in ((8.0, 6, 0), (9.0, 6, 2), (10.0, 4, 0)):  # at last as many are in use as are leased
        account.heard(6, occupied, now=now, returned_before=0, lease_s=15.0)
        assert account.foreign == foreign


def test_one_more_than_fits_is_noticed_where_nothing_was_held_before() -> None:
    account = account_of(4)
    account.heard(4, 4)
    account.issue("a", 1, 0.0)
    with pytest.raises(IntegrityError, match="more than 0 pages"):
        account.check_integrity()


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (None, ""),
        (Way(errand="drop it", over_after_s=60.0), "errand_done or lease_over"),
        (Way(is_closing=True), "errand_done"),
        (Way(over_after_s=60.0), "lease_over"),
    ],
    ids=["no orphan", "an errand", "its leg is closing", "nothing can be done"],
)
def test_what_an_orphan_waits_for_is_told(way: Way | None, told: str) -> None:
    lease = account_of(4).issue("a", 2, 0.0)
    lease.way = way
    assert lease.awaits == told
