"""Priorities in the page budget: the more urgent first, and nobody passed for ever."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from pdproxy.admission.budget import PageBudget
from pdproxy.admission.lease import PageLease
from pdproxy.admission.priority_line import PriorityLine
from pdproxy.admission.unlimited import Unlimited
from pdproxy.errors import NeverFits, QueueTimeout
from tests.fakes.stepped_loop import SteppedLoop

Asked = asyncio.Task[PageLease]


@pytest.fixture
def make(loop: SteppedLoop) -> Iterator[Callable[..., PageBudget]]:
    budgets = []

    def make(capacity: int = 8, **options: Any) -> PageBudget:
        budgets.append(PageBudget("d0", capacity, clock=loop.time, **options))
        return budgets[-1]

    yield make
    for budget in budgets:
        budget.check_integrity()


def ask(loop: SteppedLoop, budget: PageBudget, pages: int, priority: int = 0, patience_s: float = 10.0) -> Asked:
    acquiring = budget.acquire(pages, deadline=loop.now + patience_s, attempt=f"{pages}p", priority=priority)
    task = loop.create_task(acquiring)
    loop.settle()
    return task


def take(budget: PageBudget, pages: int, priority: int = 0) -> PageLease:
    lease = budget.try_acquire(pages, attempt=f"{pages}p", priority=priority)
    assert lease is not None
    return lease


def served_in_order(loop: SteppedLoop, lease: PageLease, asked: list[Asked]) -> list[int]:
    """Release what is held, then whoever got it, and so on; who came when, by place in `asked`."""
    order: list[int] = []
    while len(order) < len(asked):
        lease.release()
        loop.settle()
        (turn,) = [place for place, task in enumerate(asked) if task.done() and place not in order]
        order.append(turn)
        lease = asked[turn].result()
    lease.release()
    return order


def test_the_more_urgent_first_and_first_come_first_served_among_equals(loop, make):
    budget = make()
    lease = take(budget, 8)
    asked = [ask(loop, budget, 8, priority) for priority in (0, 1, -1, 1, 2, 0)]
    assert served_in_order(loop, lease, asked) == [4, 1, 3, 0, 5, 2]


def test_who_waited_longest_is_passed_by_the_more_urgent_at_most_so_often(loop, make):
    budget = make(max_passes=3)
    lease = take(budget, 8)
    asked = [ask(loop, budget, 8, priority) for priority in (0, 0, *[1] * 6)]
    assert served_in_order(loop, lease, asked) == [2, 3, 4, 0, 5, 6, 7, 1]
    assert budget.statistics().num_passes == 6


def test_without_passes_priorities_count_for_nothing(loop, make):
    budget = make(max_passes=0)
    lease = take(budget, 8)
    asked = [ask(loop, budget, 8, priority) for priority in (0, 1, 2)]
    assert served_in_order(loop, lease, asked) == [0, 1, 2]
    assert budget.statistics().num_passes == 0


def test_a_more_urgent_newcomer_that_fits_goes_at_once_past_a_head_that_may_not_be_passed(loop, make):
    budget = make(max_overtakes=0, max_passes=1)
    take(budget, 4)
    ask(loop, budget, 8)
    assert budget.try_acquire(1, attempt="as urgent") is None
    assert budget.try_acquire(1, attempt="less urgent", priority=-1) is None
    take(budget, 1, priority=1)
    assert budget.try_acquire(1, attempt="one too many", priority=1) is None
    stats = budget.statistics()
    assert (stats.num_overtakes, stats.num_passes) == (0, 1)


def test_a_small_one_overtakes_a_big_urgent_one_while_that_does_not_fit(loop, make):
    budget = make(max_overtakes=1)
    take(budget, 4)
    urgent = ask(loop, budget, 8, priority=5)
    assert ask(loop, budget, 1).done()
    assert not ask(loop, budget, 1).done()
    assert not urgent.done()


def test_the_most_urgent_that_fits_overtakes(loop, make):
    budget = make(max_overtakes=1)
    lease = take(budget, 8)
    asked = [ask(loop, budget, pages, priority) for pages, priority in ((2, 0), (2, 1), (8, 2), (4, 1))]
    lease.shrink(6)
    loop.settle()
    assert [task.done() for task in asked] == [False, True, False, False]


def test_pages_saved_up_for_the_head_are_saved_up_for_a_more_urgent_one_from_then_on(loop, make):
    """A drain under way is not undone: the newcomer takes over how often the head was passed."""
    budget = make(max_overtakes=1)
    lease = take(budget, 4)
    big = ask(loop, budget, 8)
    first = ask(loop, budget, 1)
    small = ask(loop, budget, 1)
    urgent = ask(loop, budget, 7, priority=1)
    assert [task.done() for task in (big, first, small, urgent)] == [False, True, False, False]
    lease.shrink(3)
    loop.settle()
    assert not small.done()
    lease.release()
    loop.settle()
    assert urgent.done()
    assert not small.done()


def test_one_that_is_only_as_urgent_as_the_head_takes_nothing_over(loop, make):
    budget = make(max_overtakes=1)
    take(budget, 6)
    head = ask(loop, budget, 7)
    assert ask(loop, budget, 1).done()
    ask(loop, budget, 7)
    head.cancel()
    loop.settle()
    assert ask(loop, budget, 1).done(), "the next head was never passed"


def test_the_turn_of_the_longest_waiting_comes_with_the_last_pass(loop, make):
    """A newcomer's grant is the last pass; the one that has waited longest fits now and must not be forgotten."""
    budget = make(max_overtakes=0, max_passes=1)
    lease = take(budget, 5)
    longest = ask(loop, budget, 4)
    urgent = ask(loop, budget, 6, priority=1)
    lease.shrink(3)
    loop.settle()
    assert not longest.done(), "the turn is the urgent one's, which may not be passed"
    take(budget, 1, priority=2)
    loop.settle()
    assert longest.done()
    assert not urgent.done()


def test_no_starvation_of_a_patient_one_among_urgent_closed_loop_clients(loop, make):
    budget = make(64, max_overtakes=16, max_passes=32)
    clients = [ask(loop, budget, 4, priority=9, patience_s=1e6) for _ in range(32)]
    patient = ask(loop, budget, 63, priority=0, patience_s=1e6)
    num_served = 0
    while not patient.done():
        client = next(task for task in clients if task.done())
        clients.remove(client)
        num_served += 1
        client.result().release()
        clients.append(ask(loop, budget, 4, priority=9, patience_s=1e6))
        assert num_served <= 16 + (16 + 1) * (32 + 16), "16 wait ahead of it"


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_an_urgent_head_that_leaves_lets_those_behind_be_looked_at(loop, make, how):
    budget = make(max_overtakes=0)
    take(budget, 4)
    behind = ask(loop, budget, 4, priority=0, patience_s=100.0)
    assert behind.done()
    head = ask(loop, budget, 8, priority=1, patience_s=1.0)
    behind.result().release()
    behind = ask(loop, budget, 4, priority=0, patience_s=100.0)
    assert not behind.done()
    if how == "cancelled":
        head.cancel()
        loop.settle()
    else:
        loop.advance(1.0)
        assert isinstance(head.exception(), QueueTimeout)
    assert behind.result().pages == 4


def test_a_smaller_buffer_refuses_who_can_never_fit_whatever_its_priority(loop, make):
    budget = make(max_overtakes=0)
    take(budget, 2)
    never, fits = ask(loop, budget, 7, priority=3), ask(loop, budget, 2)
    budget.resize(6)
    loop.settle()
    assert isinstance(never.exception(), NeverFits)
    assert fits.done()


async def test_unlimited_takes_a_priority():
    lease = await Unlimited("d0").acquire(3, deadline=0.0, attempt="a", priority=7)
    assert lease.pages == 3


# ── the line ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Person:
    def __init__(self, pages: int, priority: int) -> None:
        self.pages, self.priority, self.place = pages, priority, -1


def test_the_line_by_priority_and_by_arrival():
    line: PriorityLine[Person] = PriorityLine()
    assert (line.first_within(9), len(line)) == (None, 0)
    low, high, high_small, lowest = people = [Person(5, 0), Person(6, 1), Person(2, 1), Person(1, -1)]
    for person in people:
        line.append(person)
    assert (line.head, line.earliest, list(line)) == (high, low, people)
    assert [line.first_within(pages) for pages in (6, 5, 1, 0)] == [high, high_small, lowest, None]
    line.remove(high)
    line.remove(low)
    assert (line.head, line.earliest, len(line)) == (high_small, high_small, 2)
    line.remove(high_small)
    line.append(low)
    assert (line.head, line.earliest) == (low, lowest)


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


async def test_fifty_thousand_waiters_of_ten_priorities_cost_hardly_more_each_than_five_hundred():
    def cost(num_waiting: int) -> int:
        budget = PageBudget("d0", 64, max_queue=num_waiting)
        lease = take(budget, 64)
        queued: list[Coroutine[Any, Any, PageLease]] = []
        for number in range(num_waiting):
            acquiring = budget.acquire(60, deadline=float("inf"), attempt="a", priority=number % 10)
            acquiring.send(None)
            queued.append(acquiring)
        acts = (lambda: lease.shrink(59), queued.pop(num_waiting // 2).close, queued.pop(9).close, queued.pop(0).close)
        num_lines = sum(lines_run(act) for act in acts)
        budget.check_integrity()
        for acquiring in queued:
            acquiring.close()
        lease.release()
        return num_lines

    assert cost(50_000) <= 2 * cost(500)
