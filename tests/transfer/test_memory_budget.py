"""The budget of bytes alone: what shares take and give back always adds up, whoever gets nothing more."""

from __future__ import annotations

import random

import pytest

from transfer.memory_budget import SMALL_BYTES, MemoryBudget, least_budget


def test_a_share_gets_all_that_it_asks_for_or_nothing() -> None:
    budget = MemoryBudget(1000)
    one, other = budget.share(), budget.share()
    assert one.take(600)
    assert not other.take(401)
    assert (budget.num_bytes, other.num_bytes, budget.num_refused) == (600, 0, 1)
    assert other.take(400)
    one.release()
    one.release()
    assert budget.num_bytes == 400


def test_small_shares_get_what_large_ones_may_not_have() -> None:
    budget = MemoryBudget(16 * SMALL_BYTES)
    large, small = budget.share(), budget.share()
    assert not large.take(14 * SMALL_BYTES + 1)
    assert large.take(14 * SMALL_BYTES)
    assert small.take(SMALL_BYTES)
    assert not small.take(1), "it is no small one any more"
    assert budget.share().take(SMALL_BYTES)
    assert not budget.share().take(1)


def test_a_request_that_is_served_comes_before_those_that_begin() -> None:
    budget = MemoryBudget(32 * SMALL_BYTES)
    served, small = budget.share(), budget.share()
    assert served.take(28 * SMALL_BYTES)
    assert not served.take(1)
    assert served.take_on(2 * SMALL_BYTES)
    assert not served.take_on(1)
    assert small.take(SMALL_BYTES)


def test_what_is_in_memory_already_counts_whether_or_not_there_is_room() -> None:
    budget = MemoryBudget(100)
    one = budget.share()
    one.charge(150)
    assert not budget.share().take(1)
    one.give_back(50)
    assert budget.num_bytes == 100


def test_a_share_cannot_give_back_more_than_it_has() -> None:
    budget = MemoryBudget(100)
    one, other = budget.share(), budget.share()
    assert one.take(10)
    assert other.take(10)
    with pytest.raises(ValueError, match="cannot be given back"):
        one.give_back(11)
    assert (budget.num_bytes, one.num_bytes) == (20, 10)


@pytest.mark.parametrize("num_bytes", [1, 7, 1000, 2 * SMALL_BYTES, 32 << 20])
def test_the_least_budget_has_room_for_one_share(num_bytes: int) -> None:
    assert MemoryBudget(least_budget(num_bytes)).share().take(num_bytes)
    if num_bytes > SMALL_BYTES:
        assert not MemoryBudget(least_budget(num_bytes) - 2).share().take(num_bytes)


@pytest.mark.parametrize("seed", range(5))
def test_shares_always_add_up(seed: int) -> None:
    dice = random.Random(seed)
    print(f"seed {seed}")
    budget = MemoryBudget(dice.randrange(1, 10) * SMALL_BYTES)
    shares = [budget.share() for _ in range(8)]
    for _ in range(2000):
        share, num_bytes = dice.choice(shares), dice.choice((1, 100, SMALL_BYTES // 2, SMALL_BYTES + 1))
        step = dice.randrange(4)
        if step == 0:
            share.release()
        elif step == 1:
            share.give_back(dice.randint(0, share.num_bytes))
        else:
            had, refused = share.num_bytes, budget.num_refused
            taken = dice.choice((share.take, share.take_on))(num_bytes)
            assert share.num_bytes == had + taken * num_bytes
            assert budget.num_refused == refused + (not taken)
        assert sum(one.num_bytes for one in shares) == budget.num_bytes <= budget.limit_bytes
    for share in shares:
        share.release()
    assert budget.num_bytes == 0
