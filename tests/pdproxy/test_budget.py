"""The page budget at its seams: order, overtaking, running alone, every race of grant, cancel and timeout by name."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from pdproxy.admission.budget import PageBudget
from pdproxy.admission.lease import PageLease
from pdproxy.admission.unlimited import Unlimited
from pdproxy.errors import IntegrityError, NeverFits, QueueFull, QueueTimeout
from tests.fakes.stepped_loop import SteppedLoop

Asked = asyncio.Task[PageLease]


@pytest.fixture
def make(loop: SteppedLoop) -> Iterator[Callable[..., PageBudget]]:
    """Budgets on the loop's clock; whatever the test did to them, they must add up in the end."""
    budgets = []

    def make(capacity: int = 64, **options: Any) -> PageBudget:
        budgets.append(PageBudget("d0", capacity, clock=loop.time, **options))
        return budgets[-1]

    yield make
    for budget in budgets:
        budget.check_integrity()


def start(loop: SteppedLoop, budget: PageBudget, pages: int, patience_s: float = 10.0) -> Asked:
    return loop.create_task(budget.acquire(pages, deadline=loop.now + patience_s, attempt=f"{pages}p"))


def ask(loop: SteppedLoop, budget: PageBudget, pages: int, patience_s: float = 10.0) -> Asked:
    """An acquire that is granted, refused or in line."""
    task = start(loop, budget, pages, patience_s)
    loop.settle()
    return task


def take(budget: PageBudget, pages: int) -> PageLease:
    lease = budget.try_acquire(pages, attempt=f"{pages}p")
    assert lease is not None
    return lease


# ── granting and giving back ────────────────────────────────────────────────────────────────────────────────────────


def test_free_pages_are_granted_without_a_task_switch(loop, make):
    budget = make(8)
    acquiring = budget.acquire(8, deadline=loop.now, attempt="a")
    with pytest.raises(StopIteration) as returned:
        acquiring.send(None)
    assert (returned.value.value.pages, returned.value.value.attempt, budget.held) == (8, "a", 8)


def test_release_is_idempotent_and_the_ledger_balances(make):
    budget = make(8)
    first, second = take(budget, 3), take(budget, 5)
    first.release()
    first.release()
    stats = budget.statistics()
    assert (stats.granted_total, stats.returned_total, stats.held, stats.num_leases) == (8, 3, 5, 1)
    assert (first.is_released, first.pages, second.is_released) == (True, 0, False)
    second.release()
    assert budget.held == 0


def test_shrink_gives_back_the_rest_and_wakes_who_fits(loop, make):
    budget = make(8)
    lease = take(budget, 8)
    waiting = ask(loop, budget, 3)
    lease.shrink(6)
    loop.settle()
    assert not waiting.done()
    lease.shrink(5)
    loop.settle()
    assert waiting.result().pages == 3
    lease.release()
    assert budget.held == 3


@pytest.mark.parametrize("pages", [-1, 9])
def test_shrink_to_what_is_not_held_changes_nothing(make, pages):
    budget = make(8)
    lease = take(budget, 8)
    with pytest.raises(ValueError, match="8 pages"):
        lease.shrink(pages)
    assert (lease.pages, budget.held) == (8, 8)


def test_shrink_after_release_does_nothing(make):
    budget = make(8)
    lease = take(budget, 8)
    lease.release()
    lease.shrink(2)
    assert (lease.pages, budget.held) == (0, 0)


@pytest.mark.parametrize("pages", [0, -1])
def test_a_lease_has_at_least_one_page(make, pages):
    with pytest.raises(ValueError, match="at least one page"):
        make().try_acquire(pages, attempt="a")


@pytest.mark.parametrize("sizes", [{"capacity": 0}, {"capacity": 8, "concurrent_pages": 0}])
def test_a_budget_has_room_for_a_page(make, sizes):
    with pytest.raises(ValueError, match="no room for a page"):
        make(**sizes)


# ── order ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_first_come_first_served(loop, make):
    budget = make(4)
    lease = take(budget, 4)
    asked = [ask(loop, budget, 4) for _ in range(5)]
    for turn, task in enumerate(asked):
        assert [other.done() for other in asked] == [True] * turn + [False] * (5 - turn)
        lease.release()
        loop.settle()
        lease = task.result()


def test_a_small_one_passes_a_head_that_does_not_fit_at_most_k_times(loop, make):
    budget = make(64, max_overtakes=3)
    lease = take(budget, 32)
    big = ask(loop, budget, 63)
    passed = [ask(loop, budget, 4) for _ in range(5)]
    assert [task.done() for task in passed] == [True] * 3 + [False] * 2
    assert budget.try_acquire(1, attempt="newcomer") is None
    for task in passed[:3]:
        task.result().release()
    lease.release()
    loop.settle()
    assert big.done()
    assert not passed[3].done()
    assert budget.statistics().num_overtakes == 3


def test_each_head_may_be_passed_k_times(loop, make):
    budget = make(8, max_overtakes=1)
    lease = take(budget, 6)
    heads = [ask(loop, budget, 7), ask(loop, budget, 7)]
    assert ask(loop, budget, 1).done()
    assert not ask(loop, budget, 1, patience_s=1.0).done()
    loop.advance(1.0)
    heads[0].cancel()
    loop.settle()
    assert ask(loop, budget, 1).done()
    assert not ask(loop, budget, 1, patience_s=1.0).done()
    lease.release()


def test_without_overtakes_the_order_is_strict(loop, make):
    budget = make(8, max_overtakes=0)
    take(budget, 6)
    assert not ask(loop, budget, 7).done()
    assert not ask(loop, budget, 1).done()
    assert budget.try_acquire(1, attempt="newcomer") is None


def test_the_earliest_that_fits_overtakes(loop, make):
    budget = make(8, max_overtakes=1)
    lease = take(budget, 8)
    big, middle, early, late = (ask(loop, budget, pages) for pages in (8, 5, 3, 2))
    lease.shrink(5)
    loop.settle()
    assert [task.done() for task in (big, middle, early, late)] == [False, False, True, False]


def test_one_big_release_serves_as_many_as_fit(loop, make):
    budget = make(8)
    lease = take(budget, 8)
    asked = [ask(loop, budget, pages) for pages in (3, 3, 3, 2)]
    lease.release()
    loop.settle()
    assert [task.done() for task in asked] == [True, True, False, True]


def test_no_starvation_of_a_big_one_among_closed_loop_clients(loop, make):
    """A 63-page request among 32 clients of 4 pages each on 64 pages, every one of which asks again at once."""
    max_overtakes = 16
    budget = make(64, max_overtakes=max_overtakes)
    clients = deque(ask(loop, budget, 4, patience_s=1e6) for _ in range(32))
    big = ask(loop, budget, 63, patience_s=1e6)
    num_served = 0
    while not big.done():
        client = next((task for task in clients if task.done()), None)
        assert client is not None, "everything stands still"
        clients.remove(client)
        num_served += 1
        client.result().release()
        clients.append(ask(loop, budget, 4, patience_s=1e6))
        assert num_served <= 32 + max_overtakes
    assert budget.statistics().num_overtakes == max_overtakes


# ── a budget smaller than the buffer ────────────────────────────────────────────────────────────────────────────────


def test_above_the_budget_runs_alone(loop, make):
    budget = make(64, concurrent_pages=16, max_overtakes=1)
    small = take(budget, 4)
    big = ask(loop, budget, 40)
    overtaker, behind = ask(loop, budget, 4), ask(loop, budget, 4)
    assert [task.done() for task in (big, overtaker, behind)] == [False, True, False]
    small.release()
    loop.settle()
    assert not big.done(), "not alone yet"
    overtaker.result().release()
    loop.settle()
    assert big.done()
    assert not behind.done()
    assert budget.try_acquire(1, attempt="newcomer") is None
    budget.check_integrity()
    big.result().release()
    loop.settle()
    assert behind.done()


def test_above_the_budget_starts_at_once_when_nothing_is_held(make):
    budget = make(64, concurrent_pages=16)
    take(budget, 64)
    assert budget.try_acquire(1, attempt="b") is None


def test_more_than_the_buffer_never_waits(loop, make):
    budget = make(64, concurrent_pages=16)
    task = ask(loop, budget, 65)
    with pytest.raises(NeverFits) as refused:
        task.result()
    assert (refused.value.pages, refused.value.capacity, refused.value.status) == (65, 64, 400)
    assert budget.statistics().num_never_fits == 1


# ── the queue's bounds ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_queue_refuses_at_once(loop, make):
    budget = make(8, max_queue=2)
    lease = take(budget, 8)
    waiting = [ask(loop, budget, 1), ask(loop, budget, 1)]
    refused = ask(loop, budget, 1)
    with pytest.raises(QueueFull) as error:
        refused.result()
    assert (error.value.status, error.value.retry_after_s) == (429, 5.0)
    lease.release()
    loop.settle()
    assert all(task.done() for task in waiting)


def test_a_waiter_times_out_at_its_deadline(loop, make):
    budget = make(8)
    lease = take(budget, 8)
    task = ask(loop, budget, 1, patience_s=3.0)
    loop.advance(2.9)
    assert not task.done()
    loop.advance(0.2)
    with pytest.raises(QueueTimeout) as error:
        task.result()
    assert (error.value.status, budget.num_waiting) == (503, 0)
    lease.release()
    assert budget.statistics().granted_total == 8


def test_a_deadline_that_has_passed_does_not_wait(loop, make):
    budget = make(8)
    take(budget, 8)
    task = ask(loop, budget, 1, patience_s=0.0)
    with pytest.raises(QueueTimeout):
        task.result()
    assert budget.num_waiting == 0


def test_waiting_costs_nothing_and_leaves_no_timer(loop, make):
    budget = make(8)
    lease = take(budget, 8)
    served = [ask(loop, budget, 1) for _ in range(8)]
    gone = [ask(loop, budget, 1) for _ in range(92)]
    assert (loop.is_idle, loop.num_timers) == (True, 100)
    lease.release()
    for task in gone:
        task.cancel()
    loop.settle()
    assert all(task.done() for task in served)
    assert loop.num_timers == 0


@pytest.mark.parametrize(
    ("hold_s", "idle_s", "retry_after_s"),
    [(8.0, 0.0, 6.0), (8.0, 86400.0, 6.0), (0.5, 0.0, 1.0), (3600.0, 0.0, 60.0)],
    ids=["measured", "unchanged by an idle day", "at least a second", "at most a minute"],
)
def test_retry_after_is_pages_ahead_over_pages_per_second(loop, make, hold_s, idle_s, retry_after_s):
    """64 pages held for `hold_s` come back at 64 / hold_s per second; 40 are ahead and 8 are its own."""
    budget = make(64, max_queue=1)
    lease = take(budget, 64)
    loop.now += hold_s
    lease.release()
    loop.now += idle_s
    take(budget, 64)
    ask(loop, budget, 40)
    refused = ask(loop, budget, 8)
    with pytest.raises(QueueFull) as error:
        refused.result()
    assert error.value.retry_after_s == pytest.approx(retry_after_s)
    assert budget.statistics().drain_pages_per_s == pytest.approx(64 / hold_s)


def test_retry_after_grows_while_nothing_comes_back(loop, make):
    budget = make(64, max_queue=0)
    lease = take(budget, 64)
    loop.now += 8.0
    lease.release()
    take(budget, 64)
    told = []
    for _ in range(2):
        refused = ask(loop, budget, 32)
        with pytest.raises(QueueFull) as error:
            refused.result()
        told.append(error.value.retry_after_s)
        loop.now += 20.0
    assert told[0] == pytest.approx(4.0)
    assert told[1] > 3 * told[0]


# ── races, by name ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ["release first", "release last"])
def test_cancel_during_acquire(loop, make, order):
    """Release and cancel fall between the same two steps of the loop; either way the next in line gets the pages."""
    budget = make(4)
    lease = take(budget, 4)
    cancelled, behind = ask(loop, budget, 4), ask(loop, budget, 4)
    if order == "release first":
        lease.release()
        cancelled.cancel()
    else:
        cancelled.cancel()
        lease.release()
    loop.settle()
    assert cancelled.cancelled()
    assert behind.result().pages == budget.held == 4
    assert budget.statistics().num_abandoned == 1


def test_cancelled_after_grant_with_nobody_behind_leaves_nothing_held(loop, make):
    budget = make(4)
    lease = take(budget, 4)
    task = ask(loop, budget, 4)
    lease.release()
    assert budget.held == 4, "granted before it is woken: nobody can slip in between"
    assert budget.try_acquire(1, attempt="newcomer") is None
    task.cancel()
    loop.settle()
    assert task.cancelled()
    assert (budget.held, budget.statistics().num_leases) == (0, 0)


def test_cancelled_after_acquire_keeps_the_lease(loop, make):
    """Once acquire has returned, the lease is its owner's; a cancellation no longer touches it."""
    budget = make(4)
    task = ask(loop, budget, 4)
    assert not task.cancel()
    loop.settle()
    assert (task.result().pages, budget.held) == (4, 4)


def test_cancelled_before_the_first_step_never_asks(loop, make):
    budget = make(4)
    task = start(loop, budget, 4)
    task.cancel()
    loop.settle()
    assert task.cancelled()
    assert budget.statistics().granted_total == 0


def test_big_head_cancelled_looks_again_at_those_behind(loop, make):
    budget = make(8, max_overtakes=0)
    take(budget, 4)
    head, behind = ask(loop, budget, 8), ask(loop, budget, 4)
    assert not behind.done()
    head.cancel()
    loop.settle()
    assert behind.result().pages == 4


def test_big_head_timed_out_looks_again_at_those_behind(loop, make):
    budget = make(8, max_overtakes=0)
    take(budget, 4)
    head, behind = ask(loop, budget, 8, patience_s=1.0), ask(loop, budget, 4)
    loop.advance(1.0)
    assert isinstance(head.exception(), QueueTimeout)
    assert behind.result().pages == 4


def test_cancelled_in_the_middle_of_the_line_leaves_no_trace(loop, make):
    budget = make(4)
    lease = take(budget, 4)
    asked = [ask(loop, budget, pages) for pages in (4, 3, 1)]
    asked[1].cancel()
    loop.settle()
    stats = budget.statistics()
    assert (stats.num_waiting, stats.waiting_pages, stats.granted_total) == (2, 5, 4)
    lease.release()
    loop.settle()
    assert [task.done() for task in asked] == [True, True, False]


@pytest.mark.parametrize("order", ["grant first", "timeout first"])
def test_timeout_at_the_instant_of_grant(loop, make, order):
    """Its timer and the release are due in the same iteration: one of them wins, and both agree on which."""
    budget = make(4)
    lease = take(budget, 4)
    if order == "grant first":
        loop.call_at(loop.now + 1.0, lease.release)
        task = ask(loop, budget, 4, patience_s=1.0 + 1e-10)
    else:
        task = ask(loop, budget, 4, patience_s=1.0)
        loop.call_at(loop.now + 1.0 + 1e-10, lease.release)
    loop.advance(2.0)
    if order == "grant first":
        assert task.result().pages == budget.held == 4
    else:
        assert isinstance(task.exception(), QueueTimeout)
        assert budget.held == 0


def test_cancelled_at_the_instant_of_timeout(loop, make):
    budget = make(4)
    lease = take(budget, 4)
    task = ask(loop, budget, 4, patience_s=1.0)
    loop.call_at(loop.now + 1.0 + 1e-10, task.cancel)
    loop.advance(1.5)
    assert task.cancelled()
    lease.release()
    stats = budget.statistics()
    assert (stats.held, stats.num_waiting, stats.num_abandoned, stats.num_queue_timeouts) == (0, 0, 0, 1)


def test_a_chain_of_cancelled_grants_reaches_the_one_who_stays(loop, make):
    budget = make(4)
    lease = take(budget, 4)
    asked = [ask(loop, budget, 4) for _ in range(5)]
    lease.release()
    for task in asked[:4]:
        task.cancel()
    loop.settle()
    assert [task.cancelled() for task in asked] == [True] * 4 + [False]
    assert asked[4].result().pages == 4


def test_a_coroutine_thrown_away_while_queued_leaves_the_line(loop, make):
    budget = make(4)
    take(budget, 4)

    async def abandon() -> None:
        acquiring = budget.acquire(1, deadline=loop.now + 10.0, attempt="a")
        acquiring.send(None)
        assert budget.num_waiting == 1
        acquiring.close()

    loop.run_until_complete(abandon())
    assert (budget.num_waiting, loop.num_timers) == (0, 0)


# ── a decoder that changed ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_larger_buffer_serves_those_who_wait(loop, make):
    budget = make(8)
    take(budget, 8)
    task = ask(loop, budget, 4)
    budget.resize(12)
    loop.settle()
    assert task.done()


def test_a_smaller_buffer_grants_nothing_until_it_fits(loop, make):
    budget = make(8)
    leases = [take(budget, 2) for _ in range(4)]
    task = ask(loop, budget, 2)
    budget.resize(4)
    for lease, is_served in zip(leases, (False, False, True), strict=False):
        budget.check_integrity()
        lease.release()
        loop.settle()
        assert task.done() is is_served


def test_a_smaller_buffer_refuses_who_can_never_fit_and_looks_behind(loop, make):
    budget = make(8, max_overtakes=0)
    take(budget, 2)
    never, fits = ask(loop, budget, 7), ask(loop, budget, 2)
    budget.resize(6)
    loop.settle()
    error = never.exception()
    assert isinstance(error, NeverFits)
    assert (error.pages, error.capacity) == (7, 6)
    assert fits.done()


def test_the_budget_follows_a_buffer_smaller_than_it(make):
    budget = make(64, concurrent_pages=16)
    budget.resize(8)
    assert (budget.concurrent_pages, budget.capacity) == (8, 8)
    budget.resize(64)
    assert budget.concurrent_pages == 16
    with pytest.raises(ValueError, match="at least one page"):
        budget.resize(0)


# ── many ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def lines_run(act: Callable[[], object]) -> int:
    """Lines of the admission package executed by `act`: its cost, whatever the machine."""
    num_lines = 0

    def on_line(frame: Any, event: str, arg: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return on_line

    def on_call(frame: Any, event: str, arg: object) -> Any:
        return on_line if "admission" in frame.f_code.co_filename else None

    previous = sys.gettrace()
    sys.settrace(on_call)
    try:
        act()
    finally:
        sys.settrace(previous)
    return num_lines


class Crowd:
    """A full budget, a head that needs nearly all of it, and behind it only ones that do not fit; no tasks."""

    def __init__(self, num_waiting: int) -> None:
        self.budget = PageBudget("d0", 64, max_queue=num_waiting + 10)
        self.leases = [take(self.budget, 4) for _ in range(16)]
        self.queued = [self.line_up(63)] + [self.line_up(60) for _ in range(num_waiting - 1)]

    def line_up(self, pages: int) -> Coroutine[Any, Any, PageLease]:
        acquiring = self.budget.acquire(pages, deadline=float("inf"), attempt="a")
        acquiring.send(None)
        return acquiring

    def release_for_the_last(self) -> None:
        last = self.line_up(4)
        self.leases.pop().release()
        with pytest.raises(StopIteration):
            last.send(None)

    def cancel_the_middle(self) -> None:
        self.queued.pop(len(self.queued) // 2).close()

    def cancel_the_head(self) -> None:
        self.queued.pop(0).close()

    def costs(self) -> list[int]:
        return [lines_run(act) for act in (self.release_for_the_last, self.cancel_the_middle, self.cancel_the_head)]

    def go_home(self) -> None:
        for acquiring in self.queued:
            acquiring.close()
        for lease in self.leases:
            lease.release()


async def test_a_hundred_thousand_waiters_cost_hardly_more_each_than_a_thousand():
    costs = []
    for num_waiting in (1_000, 100_000):
        crowd = Crowd(num_waiting)
        costs.append(crowd.costs())
        crowd.budget.check_integrity()
        crowd.go_home()
        assert crowd.budget.num_waiting == 0
    for few, many in zip(*costs, strict=True):
        assert many <= 2 * few


async def test_a_burst_costs_in_proportion_to_its_length():
    def burst(num_waiting: int) -> None:
        crowd = Crowd(num_waiting)
        crowd.go_home()

    assert lines_run(lambda: burst(4_000)) <= 8 * 1.5 * lines_run(lambda: burst(500))


# ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_repr_is_a_status_line(loop, make):
    budget = make(64, concurrent_pages=16)
    lease = take(budget, 10)
    ask(loop, budget, 8)
    assert repr(budget) == "<PageBudget d0: 10/16 pages held by 1 leases, 1 waiting for 8>"
    assert repr(lease) == "<PageLease 10p: 10 pages>"
    lease.release()
    assert repr(lease) == "<PageLease 10p: released>"


def test_integrity_sees_a_ledger_that_does_not_balance():
    budget = PageBudget("d0", 8)
    take(budget, 2).pages = 3
    with pytest.raises(IntegrityError, match="leases hold 3"):
        budget.check_integrity()


def test_integrity_sees_more_held_than_there_is():
    budget = PageBudget("d0", 8)
    take(budget, 4)
    take(budget, 4)
    budget._limit = 7
    with pytest.raises(IntegrityError, match="more than 7 pages held"):
        budget.check_integrity()


def test_integrity_forgives_what_a_smaller_buffer_inherited_only_until_it_has_drained():
    budget = PageBudget("d0", 8)
    leases = [take(budget, 4), take(budget, 4)]
    budget.resize(6)
    budget.check_integrity()
    leases[0].release()
    take(budget, 2)
    budget._limit = 5
    with pytest.raises(IntegrityError, match="more than 5 pages held"):
        budget.check_integrity()


def test_integrity_sees_a_lost_wakeup(loop):
    budget = PageBudget("d0", 8, clock=loop.time)
    take(budget, 8)
    ask(loop, budget, 4)
    budget._limit = 16
    with pytest.raises(IntegrityError, match="could go and was not woken"):
        budget.check_integrity()


# ── telling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_change_of_what_is_held_or_waited_for_is_told(loop, make):
    budget = make(8)
    told = []
    budget.on_change = lambda: told.append((budget.held, budget.waiting_pages))
    lease = take(budget, 8)
    waiting = [ask(loop, budget, 3), ask(loop, budget, 2, patience_s=1.0)]
    lease.shrink(6)
    loop.advance(1.0)
    lease.release()
    loop.settle()
    waiting[0].result().release()
    assert [now for before, now in zip([None, *told], told, strict=False) if now != before] == [
        (8, 0),
        (8, 3),
        (8, 5),
        (6, 5),
        (6, 3),
        (8, 3),
        (2, 3),
        (2, 0),
        (5, 0),
        (2, 0),
    ]


def test_unlimited_tells_too():
    admission = Unlimited("d0")
    told = []
    admission.on_change = lambda: told.append(admission.held)
    admission.try_acquire(3, attempt="a").release()
    assert told == [3, 0]


# ── switched off ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_unlimited_grants_everything_and_keeps_the_ledger():
    admission = Unlimited("d0")
    first = await admission.acquire(10**6, deadline=0.0, attempt="a")
    second = await admission.acquire(1, deadline=0.0, attempt="b")
    admission.resize(1)
    assert repr(admission) == "<Unlimited d0: 1000001 pages held by 2 leases>"
    first.shrink(10)
    second.release()
    second.release()
    stats = admission.statistics()
    assert (stats.granted_total, stats.returned_total, stats.held, stats.capacity) == (1_000_001, 999_991, 10, None)
    admission.check_integrity()
    first.release()
    assert admission.held == 0
