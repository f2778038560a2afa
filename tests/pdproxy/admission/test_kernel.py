"""The kernel of admission by named behaviour, and random schedules of events against what must always hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdproxy.admission.account import Lease, Place
from pdproxy.admission.custody import PROOFS, Custody, Evidence, Way
from pdproxy.admission.grant import Grant, Granted, Refused, Settled
from pdproxy.admission.kernel import SETTLE_S, Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.orphans import MAX_ERRANDS, Job
from pdproxy.errors import IllegalTransition, IntegrityError, NeverFits, NotReady, QueueFull, QueueTimeout


class First:
    """Picks the first of a lineup, and the home of whoever is tied to one."""

    def line_up(self, places: Sequence[Place], *, is_lasting: bool) -> list[Place]:
        return list(places)

    def pick(self, lineup: list[Place], demand: Demand) -> Place:
        return self.home(lineup, demand) or lineup[0]

    def home(self, lineup: list[Place], demand: Demand) -> Place | None:
        return next((place for place in lineup if place.name == demand.hints), None)

    def end(self, lineup: list[Place]) -> None:
        """Nothing is kept."""


class Fleet:
    """A kernel with open places that were all heard at time 0, and whoever asks it."""

    def __init__(
        self,
        owners: Sequence[int] = (8,),
        peers: Sequence[int] = (0,),
        *,
        models: frozenset[str] = frozenset(),
        **options: Any,
    ) -> None:
        self.kernel = Kernel(First(), **options)
        self.now = 0.0
        self.num_asked = 0
        self.owners = [Place(f"o{n}", is_owner=True, models=models) for n in range(len(owners))]
        self.peers = [Place(f"p{n}", is_owner=False, models=models) for n in range(len(peers))]
        for place, capacity in zip(self.owners + self.peers, [*owners, *peers], strict=True):
            self.kernel.add(place)
            self.hear(place, capacity)
            self.kernel.open(place, self.now)

    def hear(
        self,
        place: Place,
        capacity: int,
        epoch: str = "1",
        *,
        occupied: int | None = None,
        asked_at: float | None = None,
    ) -> None:
        self.kernel.heard(
            place,
            epoch,
            shape=place.is_owner,
            capacity=capacity,
            occupied=occupied,
            asked_at=self.now if asked_at is None else asked_at,
            now=self.now,
        )

    def demand(self, pages: int, peer_pages: int = 0, **options: Any) -> Demand:
        self.num_asked += 1

        def size(shape: Hashable) -> int:
            return pages if shape else peer_pages

        return Demand(f"a{self.num_asked}", options.pop("model", None), size, **{"age": self.now, **options})

    def ask(self, pages: int, peer_pages: int = 0, **options: Any) -> tuple[Demand, Grant | None]:
        demand = self.demand(pages, peer_pages, **options)
        return demand, self.kernel.arrive(demand, self.now)

    def wait(self, pages: int, peer_pages: int = 0, **options: Any) -> Demand:
        demand, grant = self.ask(pages, peer_pages, **options)
        assert grant is None
        return demand

    def take(self, pages: int, peer_pages: int = 0, **options: Any) -> Grant:
        _, grant = self.ask(pages, peer_pages, **options)
        assert grant is not None
        return grant

    def give(self, grant: Grant) -> None:
        for lease in grant.leases:
            self.kernel.free(lease, Evidence.NEVER_SENT, self.now)

    def news(self) -> list[Grant | Refused]:
        """What has followed since the last call."""
        found = [effect.grant if isinstance(effect, Granted) else effect for effect in self.kernel.effects]
        self.kernel.effects.clear()
        self.kernel.check_integrity(self.now)
        return found

    def granted(self) -> list[Demand]:
        return [one.demand for one in self.news() if isinstance(one, Grant)]

    def orphan(self, grant: Grant, way: Way) -> Lease:
        lease = grant.leases[0]
        lease.step(Custody.FILLING)
        self.kernel.abandon(lease, way, self.now)
        return lease


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    """Fleets; whatever the test did to them, they add up in the end."""
    made: list[Fleet] = []

    def make(*args: Any, **options: Any) -> Fleet:
        made.append(Fleet(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.kernel.check_integrity(one.now)


# ── pages of two accounts ───────────────────────────────────────────────────────────────────────────────────────────


def test_pages_of_two_accounts_are_leased_together_or_not_at_all(fleet):
    house = fleet((8,), (4,))
    first = house.take(2, 3)
    assert [lease.pages for lease in first.leases] == [2, 3]
    second = house.wait(2, 2)
    assert (house.owners[0].account.held, house.peers[0].account.held) == (2, 3)
    house.kernel.free(first.leases[0], Evidence.NEVER_SENT, 0.0)
    assert house.granted() == []
    house.kernel.free(first.leases[1], Evidence.NEVER_SENT, 0.0)
    assert house.granted() == [second]


def test_a_place_without_pages_to_take_gets_no_lease(fleet):
    grant = fleet((8,), (4,)).take(2, 0)
    assert [lease.account.place.name for lease in grant.leases] == ["o0"]


def test_one_that_takes_less_of_the_peer_does_not_wait_behind_one_that_takes_more(fleet):
    house = fleet((8,), (4,))
    house.take(1, 3)
    house.wait(1, 2)
    house.take(1, 1)


# ── order ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_more_urgent_goes_first_and_among_equals_the_older(fleet):
    house = fleet((4,))
    held = house.take(4)
    late, early = house.wait(4, age=5.0), house.wait(4, age=3.0)
    urgent = house.wait(4, age=9.0, priority=1)
    for expected in (urgent, early, late):
        house.give(held)
        (held,) = [one for one in house.news() if isinstance(one, Grant)]
        assert held.demand is expected


def test_a_retry_keeps_its_age(fleet):
    house = fleet((4,))
    held = house.take(4)
    house.wait(4, age=2.0)
    retry = house.wait(4, age=1.0)
    house.give(held)
    assert house.granted() == [retry]


def test_among_equal_ages_the_first_to_ask_goes_first_and_a_newcomer_passes_it_with_a_count(fleet):
    house = fleet((8,), max_overtakes=1)
    house.take(6, age=1.0)
    big = house.wait(4, age=1.0)
    house.take(1, age=1.0)
    assert big.overtakes == 1
    house.wait(1, age=1.0)


@pytest.mark.parametrize("max_overtakes", [0, 1, 3])
def test_a_small_one_passes_a_big_one_so_many_times(fleet, max_overtakes):
    house = fleet((64,), max_overtakes=max_overtakes)
    held = [house.take(32)]
    big = house.wait(63)
    held += [house.take(4) for _ in range(max_overtakes)]
    house.wait(4)
    for grant in held:
        assert house.granted() == []
        house.give(grant)
    assert house.granted() == [big]
    assert house.owners[0].account.num_overtakes == max_overtakes


def test_saving_up_closes_one_place_and_not_the_pool(fleet):
    house = fleet((8, 8), max_overtakes=0)
    first, second = house.take(4), house.take(6)
    assert (first.owner, second.owner) == tuple(house.owners)
    big = house.wait(8)
    assert [place.name for place in big.saves] == ["o0"]
    assert house.take(1).owner is house.owners[1]
    house.wait(2)


def test_a_place_that_can_never_hold_it_is_not_saved_up(fleet):
    house = fleet((4, 8), max_overtakes=0)
    house.take(2)
    house.take(6)
    big = house.wait(8)
    assert [place.name for place in big.saves] == ["o1"]


def test_whoever_waits_longest_is_passed_by_more_urgent_ones_so_many_times(fleet):
    house = fleet((8,), max_overtakes=0, max_passes=2)
    held = house.take(8)
    patient = house.wait(8)
    urgent = [house.wait(8, priority=1, age=1.0 + n) for n in range(3)]
    order = []
    for _ in range(4):
        house.give(held)
        (held,) = [one for one in house.news() if isinstance(one, Grant)]
        order.append(held.demand)
    assert order == [*urgent[:2], patient, urgent[2]]


@pytest.mark.parametrize("max_overtakes", [0, 1, 16])
def test_a_request_for_63_of_64_pages_gets_in_among_small_ones_that_never_stop(fleet, max_overtakes):
    house = fleet((64,), max_overtakes=max_overtakes)
    held = [house.take(4) for _ in range(16)]
    for _ in range(16):
        house.wait(4)
    house.now = 1.0
    big = house.wait(63)
    num_after = 0
    while held:
        house.now += 1.0
        house.give(held.pop(0))
        going = [one for one in house.news() if isinstance(one, Grant)]
        if big in [grant.demand for grant in going]:
            break
        num_after += sum(grant.demand.age > 1.0 for grant in going)
        held += going
        grant = house.ask(4)[1]
        if grant is not None:
            held.append(grant)
            num_after += 1
    else:
        pytest.fail("everything stands still, or it has starved")
    assert num_after <= max_overtakes


def test_cancelling_the_one_saved_up_for_lets_the_others_go(fleet):
    house = fleet((8,), max_overtakes=0)
    house.take(4)
    big, small = house.wait(8), house.wait(4)
    assert house.granted() == []
    house.kernel.cancel(big, 0.0)
    assert house.granted() == [small]


# ── who may go where ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_place_to_avoid_counts_only_where_nobody_else_is_open(fleet):
    house = fleet((8, 8))
    avoiding = {"avoid": frozenset({"o0"})}
    assert house.take(1, **avoiding).owner is house.owners[1]
    house.take(7)
    held = house.owners[1].account
    assert held.held == 1
    big = house.wait(8, **avoiding)
    house.kernel.close(house.owners[1], 0.0)
    assert house.granted() == []
    small = house.take(1, **avoiding)
    assert small.owner is house.owners[0]
    house.kernel.cancel(big, 0.0)


def test_one_that_avoids_a_place_goes_there_as_soon_as_the_others_close(fleet):
    house = fleet((8, 8))
    for _ in range(2):
        house.take(1, avoid=frozenset({"o0"}))
    demand = house.wait(8, avoid=frozenset({"o0"}))
    house.kernel.close(house.owners[1], 0.0)
    assert house.granted() == [demand]


def test_a_tie_holds_until_it_is_undone_or_its_home_closes(fleet):
    house = fleet((8, 8))
    house.take(8, hints="o1", tied_until=9.0)
    tied = [house.wait(8, hints="o1", tied_until=9.0), house.wait(8, hints="o1", tied_until=9.0)]
    house.kernel.untie(tied[1], 0.0)
    assert house.granted() == [tied[1]]
    house.kernel.close(house.owners[1], 0.0)
    assert house.granted() == []  # the other is taken as well


def test_who_may_not_wait_for_its_home_goes_elsewhere(fleet):
    """A cache that has the prompt is not worth a refusal."""
    house = fleet((8, 8), max_queue=0)
    house.take(8, hints="o1")
    assert house.take(4, hints="o1", tied_until=9.0).owner is house.owners[0]
    with pytest.raises(QueueFull):
        house.ask(8, hints="o1", tied_until=9.0)


def test_a_pair_is_asked_although_it_is_closed_and_takes_no_trial(fleet):
    house = fleet((8, 8))
    owner, peer = house.owners[1], house.peers[0]
    house.kernel.close(owner, 0.0)
    grant = house.take(8, pair=(owner, peer))
    assert (grant.owner, grant.peer) == (owner, peer)
    waiting = house.wait(1, pair=(owner, peer))
    house.give(grant)
    assert house.granted() == [waiting]


def test_a_pair_of_which_one_was_removed_is_told_at_once(fleet):
    house = fleet((8, 8))
    house.take(8, pair=(house.owners[1], house.peers[0]))
    waiting = house.wait(1, pair=(house.owners[1], house.peers[0]))
    house.kernel.discard(house.owners[1], 0.0)
    (refused,) = house.news()
    assert refused.demand is waiting
    assert isinstance(refused.error, NotReady)


def test_so_many_trials_may_go_and_then_it_closes_by_itself(fleet):
    house = fleet()
    house.kernel.close(house.owners[0], 0.0)
    waiting = [house.wait(1) for _ in range(3)]
    house.kernel.open(house.owners[0], 0.0, trials=2)
    assert house.granted() == waiting[:2]
    assert not house.owners[0].is_open
    house.kernel.open(house.owners[0], 0.0)
    assert house.granted() == waiting[2:]


def test_a_place_that_is_closed_for_a_time_opens_by_itself(fleet):
    house = fleet()
    house.kernel.close(house.owners[0], 0.0, until=5.0, trials=1)
    assert house.kernel.reopens_at == inf, "nobody waits"
    waiting = [house.wait(1), house.wait(1)]
    assert house.kernel.reopens_at == 5.0
    house.kernel.advance(4.9)
    assert house.granted() == []
    house.kernel.advance(5.0)
    assert house.granted() == waiting[:1]


def test_a_newcomer_opens_a_place_whose_time_has_come(fleet):
    house = fleet()
    house.kernel.close(house.owners[0], 0.0, until=5.0)
    house.now = 5.0
    house.take(1)


def test_models_have_lines_of_their_own(fleet):
    house = fleet((8,), models=frozenset({"a", "b"}))
    held = house.take(8, model="a")
    first, second = house.wait(8, model="b"), house.wait(8, model="a", age=1.0)
    house.give(held)
    assert house.granted() == [first]
    with pytest.raises(NotReady):
        house.ask(1, model="c")
    house.kernel.serve(house.owners[0], frozenset({"b"}), 0.0)
    (refused,) = house.news()
    assert (refused.demand, type(refused.error)) == (second, NotReady)


# ── what does not get in ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_no_place_could_ever_hold_is_refused_at_once(fleet):
    house = fleet((4, 8), (3,))
    with pytest.raises(NeverFits) as error:
        house.ask(9)
    assert (error.value.pages, error.value.capacity) == (9, 8)
    with pytest.raises(NeverFits):
        house.ask(1, 4)


def test_who_fits_nowhere_any_more_is_told(fleet):
    house = fleet()
    house.take(1)
    big, small = house.wait(8), house.ask(6)
    assert small[1] is not None
    house.hear(house.owners[0], 7)
    (refused,) = house.news()
    assert (refused.demand, type(refused.error)) == (big, NeverFits)


def test_of_those_in_line_only_who_fits_at_no_shape_is_told(fleet):
    house = fleet((8, 8), (8,))
    large = house.owners[1]
    house.kernel.heard(large, "1", shape=2, capacity=8, occupied=None, asked_at=0.0, now=0.0)
    house.take(8, 8)
    waiting = {
        name: Demand(name, None, sizes.get, age=0.0)
        for name, sizes in (("both", {True: 6, 2: 3, False: 8}), ("large", {True: None, 2: 4, False: 8}))
    }
    for demand in waiting.values():
        assert house.kernel.arrive(demand, 0.0) is None
    assert house.kernel.waiting(None) == (2, 3)
    house.kernel.heard(large, "1", shape=2, capacity=3, occupied=None, asked_at=0.0, now=0.0)
    assert [one.demand for one in house.news()] == [waiting["large"]]
    assert house.kernel.waiting(None) == (1, 3)
    house.kernel.discard(large, 0.0)
    assert house.kernel.waiting(None) == (1, 6)
    house.kernel.discard(house.peers[0], 0.0)
    assert [type(one.error) for one in house.news()] == [NotReady]


@pytest.mark.parametrize(
    ("held_s", "retry_after_s"),
    [(8.0, 6.0), (72.0, 54.0), (0.5, 1.0), (128.0, 60.0)],
    ids=["8 pages a second", "less than one", "at least a second", "at most a minute"],
)
def test_a_full_line_refuses_and_says_when_to_come_back(fleet, held_s, retry_after_s):
    """64 pages were held for so long; 48 have to come back first."""
    house = fleet((64,), max_queue=1)
    grant = house.take(64)
    house.now = held_s
    house.give(grant)
    house.take(64)
    house.wait(40)
    with pytest.raises(QueueFull) as error:
        house.ask(8)
    assert error.value.retry_after_s == pytest.approx(retry_after_s)
    assert house.owners[0].account.num_queue_full == 1


def test_while_nothing_has_come_back_nobody_knows_when_to_come_again(fleet):
    house = fleet((8,), max_queue=0)
    house.take(8)
    with pytest.raises(QueueFull) as error:
        house.ask(1)
    assert error.value.retry_after_s == 5.0


def test_waiting_too_long_ends_in_a_refusal_and_wakes_who_was_kept_from_going(fleet):
    house = fleet((8,), max_overtakes=0)
    house.take(4)
    big = house.wait(8, deadline=9.0)
    house.kernel.expire(big, 9.0)
    (refused,) = house.news()
    assert (refused.demand, type(refused.error)) == (big, QueueTimeout)
    house.kernel.expire(big, 9.0)
    assert house.news() == []
    house.take(4)


def test_a_deadline_that_has_passed_does_not_wait(fleet):
    house = fleet()
    house.take(8)
    with pytest.raises(QueueTimeout):
        house.ask(1, deadline=0.0)
    assert house.kernel.num_waiting == 0


def test_above_the_budget_runs_alone(fleet):
    house = fleet((64,), concurrent_pages=16)
    small = house.take(4)
    big = house.wait(40)
    house.give(small)
    assert house.granted() == [big]
    house.wait(1)


def test_unlimited_grants_everything_and_keeps_the_ledger(fleet):
    house = fleet((1,), is_limited=False)
    grants = [house.take(100), house.take(7)]
    house.give(grants[0])
    assert house.owners[0].account.held == 7


# ── what engines say ────────────────────────────────────────────────────────────────────────────────────────────────


def test_pages_of_others_count_at_the_first_look_and_later_when_two_in_a_row_find_them(fleet):
    house = fleet()
    account = house.owners[0].account
    for occupied, foreign in ((3, 3), (5, 3), (4, 4), (0, 0), (8, 0), (2, 2), (0, 0)):
        house.hear(house.owners[0], 8, occupied=occupied)
        assert account.foreign == foreign
        assert account.limit == 8 - foreign
    grant = house.take(5)
    house.hear(house.owners[0], 8, occupied=5)
    assert account.foreign == 0
    house.give(grant)


def test_when_others_let_go_whoever_waits_for_it_goes(fleet):
    house = fleet()
    house.hear(house.owners[0], 8, occupied=8)
    waiting = house.wait(8)
    house.hear(house.owners[0], 8, occupied=0)
    assert house.granted() == [waiting]


def test_a_new_process_ends_the_leases_of_the_one_before_and_no_other(fleet):
    house = fleet((8, 8))
    ended, kept = house.take(8), house.take(8)
    waiting = house.wait(8)
    house.hear(house.owners[0], 8, "2")
    assert ended.leases[0].freed_by is Evidence.INCARNATION_ENDED
    assert not kept.leases[0].is_returned
    assert house.granted() == [waiting]
    assert not house.kernel.free(ended.leases[0], Evidence.ENGINE_SAID, 0.0)
    assert house.owners[0].account.held == 8


def test_a_peer_that_comes_back_without_pages_of_its_own_wakes_who_waited_for_them(fleet):
    house = fleet((8,), (4,))
    house.take(1, 4)
    waiting = house.wait(1, 4)
    house.hear(house.peers[0], 0, "2")
    assert house.granted() == [waiting]


def test_silence_frees_nothing(fleet):
    house = fleet()
    grant = house.take(8)
    house.kernel.close(house.owners[0], 0.0)
    house.kernel.lost(house.owners[0])
    assert not grant.leases[0].is_returned


def test_a_lease_is_over_only_when_its_place_was_asked_after_that(fleet):
    house = fleet()
    lease = house.orphan(house.take(8), Way(over_after_s=5.0))
    waiting = house.wait(8)
    house.now = 6.0
    assert house.kernel.orphans.next_due == 5.0
    assert house.kernel.orphans.take_due(6.0) == [Job(house.owners[0], None)]
    house.hear(house.owners[0], 8, asked_at=4.9)
    assert not lease.is_returned
    house.hear(house.owners[0], 8, asked_at=5.0)
    assert lease.freed_by is Evidence.LEASE_OVER
    assert house.granted() == [waiting]


def test_a_closed_leg_is_an_errand_that_takes_its_time(fleet):
    house = fleet()
    lease = house.orphan(house.take(8), Way(over_after_s=1.0, is_closing=True))
    house.now = 1.0
    house.hear(house.owners[0], 8)
    assert lease.freed_by is Evidence.ERRAND_DONE


# ── errands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def errands(house: Fleet) -> list[Lease]:
    return [job.lease for job in house.kernel.orphans.take_due(house.now) if job.lease is not None]


def test_so_many_errands_run_at_one_place_and_the_next_begins_when_one_ends(fleet):
    house = fleet((64,))
    way = Way(errand="drop", target=house.owners[0])
    leases = [house.orphan(house.take(1), way) for _ in range(MAX_ERRANDS + 2)]
    assert errands(house) == leases[:MAX_ERRANDS]
    assert house.kernel.orphans.next_due == inf, "nothing can be handed out until one ends"
    house.kernel.errand_ended(leases[0], True, 0.0)
    assert leases[0].freed_by is Evidence.ERRAND_DONE
    assert errands(house) == [leases[MAX_ERRANDS]]


def test_an_errand_waits_while_its_place_is_down(fleet):
    house = fleet()
    lease = house.orphan(house.take(8), Way(errand="drop", target=house.owners[0], over_after_s=60.0))
    house.kernel.lost(house.owners[0])
    assert errands(house) == []
    house.hear(house.owners[0], 8)
    assert errands(house) == [lease]


def test_an_errand_that_failed_is_tried_again_after_a_pause(fleet):
    house = fleet()
    lease = house.orphan(house.take(8), Way(errand="drop", target=house.owners[0], not_before_s=1.0))
    assert house.kernel.orphans.next_due == 1.0
    house.now = 1.0
    assert errands(house) == [lease]
    house.kernel.errand_ended(lease, False, 1.0)
    assert not lease.is_returned
    assert 1.0 < house.kernel.orphans.next_due <= 3.0


def test_a_place_that_has_nothing_to_be_asked_is_not_asked_when_it_is_heard(fleet):
    house = fleet()
    house.orphan(house.take(8), Way(target=house.owners[0], over_after_s=9.0))
    house.hear(house.owners[0], 8)
    assert errands(house) == []


# ── custody ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "custody", [Custody.RESERVED, Custody.FILLING, Custody.READY, Custody.ORPHANED, Custody.RETURNED]
)
@pytest.mark.parametrize("evidence", list(Evidence))
def test_every_evidence_in_every_state(fleet, custody, evidence):
    house = fleet()
    lease = house.take(3).leases[0]
    if custody is not Custody.RESERVED:
        lease.step(Custody.FILLING)
    if custody is Custody.READY:
        lease.step(Custody.READY)
    if custody in (Custody.ORPHANED, Custody.RETURNED):
        house.kernel.abandon(lease, Way(), 0.0)
    if custody is Custody.RETURNED:
        assert house.kernel.free(lease, Evidence.ENGINE_SAID, 0.0)
        assert not house.kernel.free(lease, evidence, 0.0)
        assert lease.freed_by is Evidence.ENGINE_SAID
    elif evidence in PROOFS[custody]:
        assert house.kernel.free(lease, evidence, 0.0)
        assert (house.owners[0].account.held, lease.freed_by) == (0, evidence)
    else:
        with pytest.raises(IllegalTransition):
            house.kernel.free(lease, evidence, 0.0)
        assert (house.owners[0].account.held, lease.custody) == (3, custody)


def test_no_step_leads_to_pages_that_came_back(fleet):
    lease = fleet().take(3).leases[0]
    with pytest.raises(IllegalTransition):
        lease.step(Custody.RETURNED)


def test_pages_that_are_not_needed_come_back_early(fleet):
    house = fleet()
    grant = house.take(8)
    waiting = house.wait(3)
    house.kernel.shrink(grant.leases[0], 6, 0.0)
    assert house.granted() == []
    house.kernel.shrink(grant.leases[0], 9, 0.0)
    assert grant.leases[0].pages == 6
    house.kernel.shrink(grant.leases[0], 5, 0.0)
    assert house.granted() == [waiting]
    with pytest.raises(ValueError, match="-1"):
        house.kernel.shrink(grant.leases[0], -1, 0.0)


def test_a_process_moves_with_its_account_its_leases_and_its_errands(fleet):
    house = fleet()
    old, new = house.owners[0], Place("new", is_owner=True)
    lease = house.orphan(house.take(8), Way(errand="drop", target=old))
    house.hear(old, 8)
    house.kernel.add(new)
    house.kernel.move(old, new, 0.0)
    assert (lease.account.place, lease.way.target, old.account) == (new, new, None)
    waiting = house.wait(1)
    house.kernel.lost(new)
    assert errands(house) == []
    house.hear(new, 8)
    house.kernel.open(new, 0.0)
    assert errands(house) == [lease]
    house.kernel.errand_ended(lease, True, 0.0)
    assert house.granted() == [waiting]


def test_an_orphan_that_nobody_answers_for_is_noticed(fleet):
    house = Fleet()
    house.orphan(house.take(1), Way())
    house.kernel.orphans._leases.clear()
    with pytest.raises(IntegrityError, match="nobody answers"):
        house.kernel.check_integrity(0.0)


# ── what a small change in a decision would break ───────────────────────────────────────────────────────────────────


def test_a_ledger_that_does_not_add_up_is_noticed(fleet):
    house = Fleet()
    house.take(3)
    house.owners[0].account.held = 2
    with pytest.raises(IntegrityError, match="= 2 pages, but 1 leases hold 3"):
        house.kernel.check_integrity(0.0)


def test_somebody_who_could_go_is_noticed_behind_one_who_could_not(fleet):
    house = Fleet((8,), (8,))
    house.take(6)
    house.wait(8)
    behind = house.wait(3)
    house.kernel.check_integrity(0.0)
    house.owners[0].account.shrink(next(iter(house.owners[0].account.leases)), 5, 0.0)
    with pytest.raises(IntegrityError, match=behind.attempt):
        house.kernel.check_integrity(0.0)


def test_what_was_granted_and_returned_is_counted_from_nothing(fleet):
    house = fleet()
    account = house.owners[0].account
    assert (account.granted_total, account.returned_total) == (0, 0)
    house.give(house.take(3))
    house.take(2)
    assert (account.granted_total, account.returned_total, account.held) == (5, 3, 2)
    assert house.kernel.freed[Evidence.NEVER_SENT] == 1
    assert sum(house.kernel.freed.values()) == 1


def test_the_place_that_is_saved_up_stays_the_same(fleet):
    house = fleet((8, 8), (0, 0), max_overtakes=0)
    first = house.take(5, hints="o0")
    house.take(3, hints="o1")
    big = house.wait(8)
    assert big.saves == (house.owners[1],)
    house.kernel.shrink(first.leases[0], 1, 0.0)
    house.kernel.close(house.peers[1], 0.0)
    assert big.saves == (house.owners[1],)


def test_one_that_fits_soonest_is_saved_up(fleet):
    house = fleet((8, 8), max_overtakes=0)
    house.take(7, hints="o0")
    house.take(3, hints="o1")
    assert [owner.account.excess(6) for owner in house.owners] == [5, 1]
    assert [owner.account.excess(5) for owner in house.owners] == [4, 0]
    big = house.wait(6)
    assert big.saves == (house.owners[1],)


def test_no_priority_is_priority_0(fleet):
    house = fleet((4,))
    held = house.take(4)
    first, second, third = house.wait(4, age=1.0), house.wait(4, age=2.0, priority=0), house.wait(4, age=3.0)
    for expected in (first, second, third):
        house.give(held)
        (held,) = [one for one in house.news() if isinstance(one, Grant)]
        assert held.demand is expected


def test_what_takes_all_there_is_runs_alone_whatever_the_budget(fleet):
    house = fleet((8,), concurrent_pages=4)
    house.take(8)
    house.wait(1)
    house = fleet((8,), concurrent_pages=4)
    house.hear(house.owners[0], 8, occupied=2)
    house.hear(house.owners[0], 8, occupied=2)
    house.take(6)


def test_one_larger_than_the_budget_is_woken_when_somebody_elses_pages_are_gone(fleet):
    house = fleet((8,), concurrent_pages=4)
    house.hear(house.owners[0], 8, occupied=4, epoch="2")
    waiting = house.wait(8)
    for _ in range(2):  # the limit of what several hold together is 4 before and after
        house.hear(house.owners[0], 8, occupied=0, epoch="2")
    assert house.granted() == [waiting]


def test_one_that_comes_before_the_head_has_been_passed_as_often_as_the_head(fleet):
    house = fleet((8,), max_overtakes=3)
    house.take(6)
    house.wait(4, age=5.0)
    older = house.wait(4, age=1.0)
    assert (older.overtakes, older.saves) == (0, ())
    house.take(1, age=6.0)
    oldest = house.wait(5, age=0.5)
    assert (older.overtakes, oldest.overtakes, oldest.saves) == (1, 1, ())


def test_both_places_are_saved_up_for_who_needs_pages_of_both(fleet):
    house = fleet((8,), (4,), max_overtakes=0)
    house.take(5, 3)
    assert house.wait(4, 2).saves == (house.owners[0], house.peers[0])
    house = fleet((8,), (4,), max_overtakes=0)
    house.take(5, 3)
    assert house.wait(4, 0).saves == (house.owners[0],)


def test_nothing_is_saved_up_for_who_cannot_be_served_on_both_sides(fleet):
    house = fleet((8,), (4, 4), max_overtakes=0)
    house.take(5, 3, hints="p0")
    house.take(0, 3, hints="p1")
    big = house.wait(4, 2)
    assert len(big.saves) == 2
    for peer in house.peers:
        house.kernel.close(peer, 0.0)
    assert big.saves == ()


def test_nobody_is_behind_one_who_waits_because_he_avoids_a_place(fleet):
    house = fleet((8, 8))
    house.take(8, hints="o1")
    house.wait(1, avoid=frozenset({"o0"}))
    assert house.take(2).owner is house.owners[0]


def test_one_without_a_tie_any_more_is_saved_up_for_elsewhere(fleet):
    house = fleet((8, 8), max_overtakes=0)
    house.take(5, hints="o0")
    house.take(1, hints="o1")
    first = house.wait(8, hints="o0", tied_until=inf)
    second = house.wait(8, hints="o0", tied_until=inf)
    assert (first.saves, second.saves) == ((house.owners[0],), ())
    house.kernel.untie(second, 0.0)
    assert second.saves == (house.owners[1],)


def test_who_takes_no_pages_of_a_peer_passes_nobody_there(fleet):
    house = fleet((8,), (4,))
    house.take(0, 3, hints="o0")
    waiting = house.wait(1, 2)
    house.take(1, 0)
    assert (waiting.overtakes, house.peers[0].account.num_overtakes) == (1, 0)
    assert house.owners[0].account.num_overtakes == 1


def test_one_that_is_served_by_a_pair_waits_behind_nobody_else(fleet):
    house = fleet((8, 8))
    house.kernel.close(house.owners[1], 0.0)
    house.take(7)
    house.wait(2)
    house.take(3, pair=(house.owners[1], house.peers[0]))


def test_one_that_grows_serves_as_many_more_at_once(fleet):
    house = fleet((4,))
    house.kernel.open_places(None)
    with pytest.raises(NeverFits) as refused:
        house.ask(6)
    assert (refused.value.pages, refused.value.capacity) == (6, 4)
    house.hear(house.owners[0], 8)
    house.take(6)


def test_one_of_another_shape_is_seen_by_who_is_new(fleet):
    house = fleet((8,))
    house.kernel.open_places(None)
    other = house.owners[0]
    house.kernel.heard(other, "1", shape="other", capacity=8, occupied=None, asked_at=0.0, now=0.0)
    assert house.kernel.open_places(None).shapes == {"other"}
    assert house.kernel.holders(None).owner_shapes == {"other"}


def test_who_holds_pages_is_known_by_who_is_there(fleet):
    house = fleet((8,), (4,))
    assert list(house.kernel.holders(None).places) == [*house.owners, *house.peers]
    late = Place("late", is_owner=True)
    house.kernel.add(late)
    house.hear(late, 4)
    assert list(house.kernel.holders(None).places) == [*house.owners, *house.peers, late]
    house.kernel.discard(late, 0.0)
    assert list(house.kernel.holders(None).places) == [*house.owners, *house.peers]


def test_what_is_remembered_of_models_has_a_limit(fleet, monkeypatch):
    monkeypatch.setattr("pdproxy.admission.kernel.MAX_MODELS", 3)
    house = fleet()
    for number in range(10):
        house.kernel.holders(f"m{number}")
        house.kernel.open_places(f"m{number}")
    assert len(house.kernel._holders) <= 3
    assert len(house.kernel._open) <= 3


def test_pages_of_those_who_wait_where_nobody_has_any(fleet):
    house = fleet((8,))
    house.take(8)
    house.wait(3)
    assert house.kernel.waiting(None) == (1, 3)
    house.owners[0].account, kept = None, house.owners[0].account
    house.kernel._holders.clear()
    assert house.kernel.waiting(None) == (1, 0)
    house.owners[0].account = kept


def test_pages_that_came_back_say_how_fast(fleet):
    house = fleet((8,))
    grant = house.take(4)
    house.now = 2.0
    house.give(grant)
    account = house.owners[0].account
    assert account.drain.per_second(4) == pytest.approx(2.0)
    grant = house.take(8)
    house.now = 3.0
    house.kernel.shrink(grant.leases[0], 4, house.now)
    assert account.drain.per_second(4) == pytest.approx(4 * 8 / (4 * 2 + 8 * 1))


def test_a_place_that_was_moved_answers_and_has_no_account_of_its_own(fleet):
    house = fleet()
    old, new = house.owners[0], Place("new", is_owner=True)
    house.kernel.add(new)
    house.kernel.move(old, new, 0.0)
    house.kernel.lost(old)
    house.hear(old, 8)
    assert (old.is_up, old.account, new.account.place) == (True, None, new)


def test_an_errand_at_an_owner_is_done_where_the_pages_are_and_at_a_peer_where_it_was_said(fleet):
    house = fleet((8,), (0,))
    first, second = house.take(2), house.take(2)
    stranger = Place("old name", is_owner=True)
    assert house.orphan(first, Way(errand="drop", target=stranger)).way.target is house.owners[0]
    assert house.orphan(second, Way(errand="drop", target=house.peers[0])).way.target is house.peers[0]


# ── random schedules ────────────────────────────────────────────────────────────────────────────────────────────────


def test_those_who_waited_until_the_claims_were_over_are_spread_over_all_owners(fleet):
    house = fleet((8, 8, 8), claims_until=5.0)
    waiting = [house.wait(1) for _ in range(6)]
    house.now = 5.1
    for owner in house.owners[:2]:
        house.hear(owner, 8, occupied=0)
        assert house.granted() == []
    house.hear(house.owners[2], 8, occupied=0)
    assert house.granted() == waiting
    assert [owner.account.held for owner in house.owners] == [2, 2, 2]


def test_an_owner_that_says_nothing_after_the_claims_holds_nobody_up_for_long(fleet):
    house = fleet((8, 8), claims_until=5.0)
    waiting = house.wait(1)
    house.now = 5.1
    house.hear(house.owners[1], 8, occupied=0)
    assert house.granted() == []
    assert house.kernel.reopens_at == 5.0 + SETTLE_S
    house.now = 5.0 + SETTLE_S
    house.kernel.advance(house.now)
    assert house.granted() == [waiting]
    assert house.kernel.reopens_at == inf
    house.take(1)


def test_an_owner_that_does_not_answer_is_not_awaited_after_the_claims(fleet):
    house = fleet((8, 8), claims_until=5.0)
    waiting = house.wait(1)
    house.kernel.lost(house.owners[0])
    house.now = 5.1
    house.hear(house.owners[1], 8, occupied=0)
    assert house.granted() == [waiting]


def test_before_the_claims_are_over_no_look_opens_anything(fleet):
    house = fleet((8,), claims_until=5.0)
    waiting = house.wait(1)
    house.now = 4.9
    house.hear(house.owners[0], 8, occupied=0)
    house.now = 5.1
    house.hear(house.owners[0], 8, occupied=0, asked_at=4.9)
    house.now = 5.0 + SETTLE_S
    house.kernel.advance(house.now)
    assert house.granted() == []
    house.hear(house.owners[0], 8, occupied=0)
    assert house.granted() == [waiting]


class AnySchedule(RuleBasedStateMachine):
    """Two owners and two peers of any size, under everything that a proxy does to its kernel."""

    @initialize(
        capacities=st.lists(st.integers(1, 9), min_size=4, max_size=4),
        bounds=st.tuples(st.integers(0, 3), st.integers(0, 3)),
        concurrent=st.none() | st.integers(1, 9),
    )
    def begin(self, capacities: list[int], bounds: tuple[int, int], concurrent: int | None) -> None:
        self.house = Fleet(
            capacities[:2], capacities[2:], max_overtakes=bounds[0], max_passes=bounds[1], concurrent_pages=concurrent
        )
        self.places = self.house.owners + self.house.peers
        self.capacities = dict(zip(self.places, capacities, strict=True))
        self.epochs = dict.fromkeys(self.places, 1)
        self.waiting: list[Demand] = []
        self.leases: list[Lease] = []
        self.returned: list[Lease] = []

    def read(self) -> None:
        for effect in self.house.kernel.effects:
            if isinstance(effect, Settled):
                continue
            demand = effect.grant.demand if isinstance(effect, Granted) else effect.demand
            self.waiting.remove(demand)
            if isinstance(effect, Granted):
                self.leases += effect.grant.leases
        self.house.kernel.effects.clear()

    @rule(
        pages=st.integers(1, 9),
        peer_pages=st.integers(0, 4),
        priority=st.sampled_from([0, 0, 1]),
        age=st.integers(-3, 0),
        avoid=st.sets(st.sampled_from(["o0", "o1", "p0", "p1"]), max_size=2),
        home=st.none() | st.sampled_from(["o0", "p1"]),
    )
    def arrive(self, pages: int, peer_pages: int, priority: int, age: int, avoid: set[str], home: str | None) -> None:
        demand = self.house.demand(
            pages,
            peer_pages,
            priority=priority,
            age=self.house.now + age,
            avoid=frozenset(avoid),
            hints=home,
            tied_until=inf if home else -inf,
        )
        self.waiting.append(demand)
        try:
            grant = self.house.kernel.arrive(demand, self.house.now)
        except NeverFits:
            self.waiting.remove(demand)
            return
        if grant is not None:
            self.waiting.remove(demand)
            self.leases += grant.leases

    @rule(number=st.integers(0, 99), how=st.sampled_from(["cancel", "expire", "untie"]))
    def leave(self, number: int, how: str) -> None:
        if self.waiting:
            demand = self.waiting[number % len(self.waiting)]
            if how == "cancel":
                self.waiting.remove(demand)
            getattr(self.house.kernel, how)(demand, self.house.now)

    @rule(number=st.integers(0, 99), evidence=st.sampled_from(list(Evidence)))
    def free(self, number: int, evidence: Evidence) -> None:
        if self.leases:
            lease = self.leases[number % len(self.leases)]
            before = lease.custody
            if before is not Custody.RETURNED and evidence not in PROOFS[before]:
                with pytest.raises(IllegalTransition):
                    self.house.kernel.free(lease, evidence, self.house.now)
            else:
                assert self.house.kernel.free(lease, evidence, self.house.now) is (before is not Custody.RETURNED)

    @rule(
        number=st.integers(0, 99), act=st.sampled_from(["send", "ready", "abandon", "shrink"]), is_asked=st.booleans()
    )
    def go_on(self, number: int, act: str, is_asked: bool) -> None:
        if not self.leases:
            return
        lease = self.leases[number % len(self.leases)]
        if act == "send" and lease.custody is Custody.RESERVED:
            lease.step(Custody.FILLING)
        elif act == "ready" and lease.custody is Custody.FILLING:
            lease.step(Custody.READY)
        elif act == "abandon" and lease.is_at_risk:
            target = lease.account.place
            way = Way(errand="drop" if is_asked else None, target=target, over_after_s=2.0)
            self.house.kernel.abandon(lease, way, self.house.now)
        elif act == "shrink":
            self.house.kernel.shrink(lease, lease.pages // 2, self.house.now)

    @rule(is_done=st.booleans())
    def reap(self, is_done: bool) -> None:
        for job in self.house.kernel.orphans.take_due(self.house.now):
            if job.lease is not None:
                self.house.kernel.errand_ended(job.lease, is_done, self.house.now)
            else:
                self.hear(self.places.index(job.place), False, 0)

    @rule(number=st.integers(0, 3), act=st.sampled_from(["open", "close", "half", "until", "lost"]))
    def turn(self, number: int, act: str) -> None:
        kernel, place, now = self.house.kernel, self.places[number], self.house.now
        if act == "open":
            kernel.open(place, now)
        elif act == "half":
            kernel.open(place, now, trials=1)
        elif act == "until":
            kernel.close(place, now, until=now + 1.0, trials=1)
        else:
            kernel.close(place, now)
            if act == "lost":
                kernel.lost(place)

    @rule(number=st.integers(0, 3), is_new=st.booleans(), occupied=st.none() | st.integers(0, 9))
    def hear(self, number: int, is_new: bool, occupied: int | None) -> None:
        place = self.places[number]
        self.epochs[place] += is_new
        self.house.hear(place, self.capacities[place], str(self.epochs[place]), occupied=occupied)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.house.now += seconds
        self.house.kernel.advance(self.house.now)

    @invariant()
    def adds_up(self) -> None:
        self.read()
        kernel = self.house.kernel
        kernel.check_integrity(self.house.now)
        assert kernel.num_waiting == len(self.waiting)
        held = {id(lease) for place in self.places if place.account for lease in place.account.leases}
        assert held == {id(lease) for lease in self.leases if not lease.is_returned}


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
