"""Random schedules against a plain model of the page budget: lists, scans, and no event loop.

The model repeats what asyncio promises (callbacks in order, one iteration at a time), so that it can say after every
step not only what may be held but exactly who holds it, who waits and who was told what.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdproxy.admission.budget import PageBudget
from pdproxy.admission.lease import PageLease
from pdproxy.errors import NeverFits
from tests.fakes.stepped_loop import SteppedLoop


@dataclass(eq=False)
class Asker:
    """One acquire, as the model sees it."""

    pages: int
    deadline: float
    priority: int = 0
    has_begun: bool = False
    is_cancelled: bool = False
    is_granted: bool = False
    refusal: str | None = None
    overtakes: int = 0
    passes: int = 0
    passed_as_longest: int = 0
    """How often anybody went before it since it had waited longest: counted without regard to the rules."""
    outcome: str | None = None
    """``lease``, ``CancelledError`` or the refusal's class; None while it runs."""


@dataclass
class Model:
    """The rules of admission, as plainly as they can be written."""

    capacity: int
    concurrent_pages: int
    max_overtakes: int
    max_passes: int
    max_queue: int
    now: float
    held: list[int] = field(default_factory=list)
    line: list[Asker] = field(default_factory=list)
    """In order of arrival."""
    ready: list[Asker] = field(default_factory=list)
    """Whose coroutine runs next, in order."""
    granted_total: int = 0
    num_overtakes: int = 0
    num_passes: int = 0

    def fits(self, pages: int) -> bool:
        return not self.held_pages or self.held_pages + pages <= min(self.capacity, self.concurrent_pages)

    @property
    def held_pages(self) -> int:
        return sum(self.held)

    @property
    def by_priority(self) -> list[Asker]:
        return sorted(self.line, key=lambda asker: -asker.priority)

    @property
    def turn(self) -> Asker:
        """Whose turn it is while anybody waits."""
        return self.line[0] if self.line[0].passes >= self.max_passes else self.by_priority[0]

    def count_passing(self, asker: Asker) -> None:
        """`asker` goes now; it stands in line, or it is a newcomer."""
        if not self.line:
            return
        longest, turn = self.line[0], self.turn
        is_newcomers_turn = asker not in self.line and self.goes_first(asker)
        if turn is not asker and not is_newcomers_turn:
            turn.overtakes += 1
            self.num_overtakes += 1
            assert turn.overtakes <= self.max_overtakes
        if longest is not asker and (longest is not turn or is_newcomers_turn):
            longest.passes += 1
            self.num_passes += 1
        longest.passed_as_longest += longest is not asker
        assert longest.passed_as_longest <= self.max_passes + self.max_overtakes

    def grant(self, asker: Asker) -> None:
        self.count_passing(asker)
        if asker in self.line:
            self.line.remove(asker)
        asker.is_granted = True
        self.held.append(asker.pages)
        self.granted_total += asker.pages

    def look(self) -> None:
        """Until nobody in line may go."""
        while self.line:
            turn = self.turn
            may_go = [turn, *self.by_priority] if turn.overtakes < self.max_overtakes else [turn]
            going = next((asker for asker in may_go if self.fits(asker.pages)), None)
            if going is None:
                return
            self.grant(going)
            self.wake(going)

    def wake(self, asker: Asker) -> None:
        if not asker.is_cancelled:
            self.ready.append(asker)

    def refuse(self, asker: Asker, refusal: str) -> None:
        self.line.remove(asker)
        asker.refusal = refusal
        self.wake(asker)

    def give_back(self, pages: int, kept: int = 0) -> None:
        self.held.remove(pages)
        if kept:
            self.held.append(kept)
        self.look()

    def cancel(self, asker: Asker) -> None:
        asker.is_cancelled = True
        if asker in self.line:
            self.ready.append(asker)

    def step(self) -> None:
        batch, self.ready = self.ready, []
        for asker in batch:
            self.run(asker)

    def run(self, asker: Asker) -> None:
        if asker.is_cancelled:
            asker.outcome = "CancelledError"
            if asker.is_granted:
                self.give_back(asker.pages)
            elif asker in self.line:
                self.line.remove(asker)
                self.look()
        elif not asker.has_begun:
            asker.has_begun = True
            asker.outcome = self.arrive(asker)
        else:
            asker.outcome = asker.refusal or "lease"

    def try_acquire(self, asker: Asker) -> str | None:
        if asker.pages > self.capacity:
            return "NeverFits"
        if not self.fits(asker.pages):
            return None
        if self.line and self.turn.overtakes >= self.max_overtakes and not self.goes_first(asker):
            return None
        self.grant(asker)
        self.look()
        return "lease"

    def goes_first(self, newcomer: Asker) -> bool:
        return newcomer.priority > self.turn.priority and self.line[0].passes < self.max_passes

    def arrive(self, asker: Asker) -> str | None:
        if (outcome := self.try_acquire(asker)) is not None:
            return outcome
        if len(self.line) >= self.max_queue:
            return "QueueFull"
        if asker.deadline <= self.now:
            return "QueueTimeout"
        if self.line and asker.priority > (head := self.by_priority[0]).priority:
            asker.overtakes = head.overtakes
        self.line.append(asker)
        return None

    def settle(self) -> None:
        while self.ready:
            self.step()

    def advance(self, seconds: float) -> None:
        self.settle()
        self.now += seconds
        for asker in sorted(self.line, key=lambda asker: asker.deadline):
            if asker in self.line and asker.deadline <= self.now:
                self.refuse(asker, "QueueTimeout")
                self.look()
        self.settle()

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        for asker in [asker for asker in self.line if asker.pages > capacity]:
            self.refuse(asker, "NeverFits")
        self.look()


def outcome_of(task: asyncio.Task[PageLease]) -> str | None:
    if not task.done():
        return None
    if task.cancelled():
        return "CancelledError"
    return "lease" if task.exception() is None else type(task.exception()).__name__


PAGES = st.sampled_from([1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])
PRIORITIES = st.sampled_from([0, 0, 0, 1, 2, -1])
PATIENCE_S = st.sampled_from([1000, 1000, 4, 3, 2, 1, 0])


class BudgetAgainstModel(RuleBasedStateMachine):
    """Every rule does the same to both; every invariant compares them."""

    @initialize(
        capacity=st.integers(4, 12),
        concurrent_pages=st.none() | st.integers(2, 12),
        max_overtakes=st.sampled_from([0, 1, 1, 3]),
        max_passes=st.sampled_from([2, 1, 3, 0, 10]),
        max_queue=st.sampled_from([100, 100, 4, 0]),
    )
    def begin(
        self, capacity: int, concurrent_pages: int | None, max_overtakes: int, max_passes: int, max_queue: int
    ) -> None:
        self.loop = SteppedLoop()
        self.budget = PageBudget(
            "d0",
            capacity,
            concurrent_pages=concurrent_pages,
            max_overtakes=max_overtakes,
            max_passes=max_passes,
            max_queue=max_queue,
            clock=self.loop.time,
        )
        limit = 10**6 if concurrent_pages is None else concurrent_pages
        self.model = Model(capacity, limit, max_overtakes, max_passes, max_queue, self.loop.now)
        self.asked: list[tuple[Asker, asyncio.Task[PageLease]]] = []
        self.leases: list[PageLease] = []
        self.released: list[PageLease] = []
        self.inherited = 0
        self.num_asked = 0

    def collect(self) -> None:
        """Leases whose acquire has returned now belong to the test."""
        for asker, task in [pair for pair in self.asked if pair[1].done()]:
            assert outcome_of(task) == asker.outcome
            if asker.outcome == "lease":
                self.leases.append(task.result())
            self.asked.remove((asker, task))

    @rule(asked=st.lists(st.tuples(PAGES, PATIENCE_S, PRIORITIES), min_size=1, max_size=6), is_stepped=st.booleans())
    def acquire(self, asked: list[tuple[int, int, int]], is_stepped: bool) -> None:
        for pages, patience_s, priority in asked:
            # No two deadlines alike: asyncio leaves the order of equal ones open.
            self.num_asked += 1
            deadline = self.loop.now + patience_s + 1e-6 * self.num_asked * bool(patience_s)
            asker = Asker(pages, deadline, priority)
            self.model.ready.append(asker)
            acquiring = self.budget.acquire(pages, deadline=deadline, attempt="a", priority=priority)
            task = self.loop.create_task(acquiring)
            self.asked.append((asker, task))
        if is_stepped:
            self.step()

    @rule(pages=st.integers(1, 12), priority=PRIORITIES)
    def try_acquire(self, pages: int, priority: int) -> None:
        expected = self.model.try_acquire(Asker(pages, deadline=0.0, priority=priority))
        try:
            lease = self.budget.try_acquire(pages, attempt="a", priority=priority)
        except NeverFits:
            assert expected == "NeverFits"
        else:
            assert expected == (None if lease is None else "lease")
            self.leases += [] if lease is None else [lease]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        pages = lease.pages
        lease.release()
        self.model.give_back(pages)
        self.released.append(lease)

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.released)).release()

    @precondition(lambda self: any(lease.pages > 1 for lease in self.leases))
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([lease for lease in self.leases if lease.pages > 1]))
        pages, kept = lease.pages, data.draw(st.integers(1, lease.pages - 1))
        lease.shrink(kept)
        self.model.give_back(pages, kept)

    @precondition(lambda self: any(not asker.is_cancelled for asker, _ in self.asked))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Before its first step, while queued, or between its grant and its waking: whatever it has come to."""
        asker, task = data.draw(st.sampled_from([pair for pair in self.asked if not pair[0].is_cancelled]))
        task.cancel()
        self.model.cancel(asker)

    @precondition(lambda self: self.model.line and not self.model.turn.is_cancelled)
    @rule()
    def cancel_whose_turn_it_is(self) -> None:
        head = self.model.turn
        next(task for asker, task in self.asked if asker is head).cancel()
        self.model.cancel(head)

    @rule()
    def step(self) -> None:
        self.loop.step()
        self.model.step()
        self.collect()

    @rule(seconds=st.integers(1, 2))
    def advance(self, seconds: int) -> None:
        self.loop.advance(seconds)
        self.model.advance(seconds)
        self.collect()

    @rule(capacity=st.integers(3, 14))
    def resize(self, capacity: int) -> None:
        self.inherited = self.budget.held
        self.budget.resize(capacity)
        self.model.resize(capacity)

    @invariant()
    def agree(self) -> None:
        budget, model = self.budget, self.model
        stats = budget.statistics()
        assert stats.held == stats.granted_total - stats.returned_total == model.held_pages
        assert stats.granted_total == model.granted_total
        assert stats.num_leases == len(model.held)
        assert (stats.num_waiting, stats.waiting_pages) == (len(model.line), sum(a.pages for a in model.line))
        assert (stats.num_overtakes, stats.num_passes) == (model.num_overtakes, model.num_passes)
        assert [outcome_of(task) for _, task in self.asked] == [asker.outcome for asker, _ in self.asked]

    @invariant()
    def never_over_capacity_and_alone_above_the_budget(self) -> None:
        stats = self.budget.statistics()
        self.inherited = min(self.inherited, stats.held)
        assert stats.held <= max(self.model.capacity, self.inherited)
        if stats.num_leases > 1:
            assert stats.held <= max(min(self.model.capacity, self.model.concurrent_pages), self.inherited)

    @invariant()
    def add_up(self) -> None:
        self.budget.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "budget"):
            return
        for _, task in self.asked:
            task.cancel()
        self.loop.settle()
        for lease in self.leases + [task.result() for _, task in self.asked if outcome_of(task) == "lease"]:
            lease.release()
        assert (self.budget.held, self.budget.num_waiting, self.loop.num_timers) == (0, 0, 0)
        self.budget.check_integrity()
        self.loop.finish()


TestBudgetAgainstModel = BudgetAgainstModel.TestCase
TestBudgetAgainstModel.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
