"""The KV cache in which answers are written: what counts there, and who waits for room in it."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass
from math import inf

import pytest

from pdproxy.admission.account import Place
from pdproxy.admission.custody import Evidence
from pdproxy.admission.grant import Grant, Granted
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.residency import Residency
from pdproxy.admission.room import KvCache, Room
from pdproxy.errors import IntegrityError
from tests.pdproxy.admission.test_kernel import First


@dataclass
class Shown:
    """An answer of which so many tokens were seen."""

    num_shown: int = 0


def residency(tokens: int | None = 1000, *, block: int = 1, used: int | None = None) -> Residency:
    made = Residency()
    made.heard(KvCache(tokens, block, used))
    return made


# ── what counts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_waits_where_nobody_knows_the_size() -> None:
    unknown = residency(None)
    unknown.enter("a", Room(10**9, 10**9))
    assert unknown.fits(10**9)
    assert unknown.excess(10**9) == 0.0
    assert unknown.used == 2 * 10**9


def test_an_attempt_counts_whole_blocks_until_it_leaves() -> None:
    cache = residency(96, block=32)
    cache.enter("a", Room(30, 3))
    assert cache.used == 64
    assert cache.fits(32)
    assert not cache.fits(33)
    assert cache.leave("a")
    assert not cache.leave("a")
    assert cache.used == 0


def test_one_that_comes_twice_counts_once() -> None:
    cache = residency()
    cache.enter("a", Room(100))
    cache.enter("a", Room(200))
    assert (cache.used, len(cache.stays)) == (200, 1)


def test_one_that_is_larger_than_all_there_is_may_have_it_alone() -> None:
    cache = residency(100)
    assert cache.fits(1000)
    cache.enter("a", Room(1000))
    assert not cache.fits(1)


def test_more_is_promised_than_there_is_where_that_is_wanted() -> None:
    cache = Residency()
    cache.oversubscribe = 1.5
    cache.heard(KvCache(100))
    cache.enter("a", Room(100))
    assert cache.fits(50)
    assert not cache.fits(51)


def test_an_answer_that_grows_longer_than_was_thought_counts_what_it_is_and_some_more() -> None:
    cache, shown = residency(), Shown()
    cache.enter("a", Room(100, 50))
    cache.follow("a", shown)
    shown.num_shown = 49
    cache.heard(KvCache(1000))
    assert cache.used == 150
    shown.num_shown = 50
    cache.heard(KvCache(1000))
    assert cache.used == 100 + 50 + 64
    shown.num_shown = 400
    cache.heard(KvCache(1000))
    assert cache.used == 100 + 400 + 100


def test_an_answer_never_counts_more_than_it_may_have() -> None:
    cache, shown = residency(), Shown()
    cache.enter("a", Room(100, 50, most=60))
    cache.follow("a", shown)
    for num in (50, 60):
        shown.num_shown = num
        cache.heard(KvCache(1000))
        assert cache.used == 160


def test_what_an_attempt_had_written_elsewhere_does_not_count_twice() -> None:
    cache, shown = residency(), Shown(num_shown=300)
    cache.enter("a", Room(400, 50))
    cache.follow("a", shown)
    shown.num_shown = 310
    cache.heard(KvCache(1000))
    assert cache.news() == {"a": 10}
    assert cache.news() == {}
    cache.begin_anew()
    assert cache.news() == {"a": 10}
    assert cache.used == 450


def test_what_another_process_has_seen_of_an_answer() -> None:
    cache = residency()
    cache.enter("a", Room(100, 50))
    cache.told({"a": 50, "gone": 7})
    cache.told({"a": 20})
    cache.heard(KvCache(1000))
    assert cache.used == 214


def test_those_that_share_memory_count_what_the_engine_has_in_use() -> None:
    cache, shown = residency(), [Shown(), Shown()]
    for n, one in enumerate(shown):
        cache.enter(f"a{n}", Room(400, 50))
        cache.follow(f"a{n}", one)
        one.num_shown = 10
    cache.heard(KvCache(1000, used=420))
    assert (cache.shared, cache.used) == (400, 500)
    assert cache.fits(500)
    cache.leave("a0")
    cache.check_integrity()
    assert (cache.shared, cache.used) == (200, 250)


def test_one_that_has_not_begun_shares_nothing() -> None:
    cache = residency()
    cache.enter("a", Room(400, 10))
    cache.heard(KvCache(1000, used=0))
    assert cache.used == 410


def test_one_of_which_only_the_prefillers_token_was_seen_shares_nothing() -> None:
    cache, shown = residency(), Shown(num_shown=0)
    cache.enter("a", Room(400, 10))
    cache.follow("a", shown)
    shown.num_shown = 1
    cache.heard(KvCache(1000, used=0))
    assert cache.used == 410
    shown.num_shown = 2
    cache.heard(KvCache(1000, used=0))
    assert cache.used == 8


def test_an_engine_that_queues_has_less_in_use_than_it_will_have() -> None:
    cache, shown = residency(), Shown()
    cache.enter("a", Room(400, 10))
    cache.follow("a", shown)
    shown.num_shown = 5
    cache.heard(KvCache(1000, used=0, is_queueing=True))
    assert cache.used == 410


def test_answers_that_end_one_after_the_other_leave_room_to_each_other() -> None:
    cache = residency()
    for name, written in (("a", 250), ("b", 150), ("c", 50)):
        cache.enter(name, Room(100, 300))
        cache.told({name: written})
    assert cache.used == 1200
    cache.heard(KvCache(1000))
    assert 900 <= cache.used <= 930  # when the first ends, after 50 steps: 400, 300 and 200
    cache.enter("d", Room(0, 70))
    assert 970 <= cache.used <= 1000, "of one that has not begun nobody knows when it will end"
    cache.leave("a")
    assert cache.used <= 780
    cache.check_integrity()


@pytest.mark.parametrize("seed", range(30))
def test_there_is_never_more_than_what_counts(seed: int) -> None:
    """Answers as long as is thought, each of which gets a token per step; those that had not begun begin whenever they
    like."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    block = rng.choice([1, 16, 32])
    cache = residency(10**9, block=block)
    sizes = {f"a{n}": (rng.randint(1, 500), rng.randint(2, 600)) for n in range(rng.randint(1, 12))}
    nums = {name: rng.choice([1, 1, 3]) for name in sizes}
    ends = {}
    for name, (prompt, growth) in sizes.items():
        num = nums[name]
        cache.enter(name, Room(prompt, growth * num, num=num))
        written = rng.choice([0, rng.randint(2, growth)])
        cache.told({name: written * num})
        begins = -written if written else rng.randrange(800)
        ends[name] = (begins, begins + growth)
        if written == growth:
            cache.leave(name)  # it has ended; without that it would get more room
    cache.heard(KvCache(10**9, block))
    for name in [name for name in cache.stays if rng.random() < 0.2]:
        cache.leave(name)
    cache.check_integrity()
    for step in range(1500):
        there = 0
        for name in cache.stays:
            begins, end = ends[name]
            if begins <= step <= end:
                there += -(-(sizes[name][0] + (step - begins) * nums[name]) // block) * block
        assert there <= cache.used, f"after {step} steps"


def test_the_word_of_an_engine_that_is_a_block_ahead_makes_nothing_foreign() -> None:
    cache = residency(1000, block=16)
    cache.enter("a", Room(64, 200))
    cache.told({"a": 30})
    for used, foreign in ((112, 0), (112, 0), (212, 0), (212, 100)):
        cache.heard(KvCache(1000, 16, used))
        assert cache.foreign == foreign


def test_what_nobody_here_has_sent_counts_once_two_looks_have_found_it() -> None:
    cache = residency(1000, used=300)
    assert cache.used == 0
    cache.heard(KvCache(1000, used=200))
    assert cache.used == 200
    cache.enter("a", Room(500))
    cache.heard(KvCache(1000, used=500))
    assert cache.used == 500


def test_a_process_that_has_ended_holds_nothing() -> None:
    cache = residency(1000, used=300)
    cache.heard(KvCache(1000, used=300))
    cache.enter("a", Room(500))
    cache.clear()
    assert (cache.used, cache.stays) == (0, {})
    cache.check_integrity()


def test_sums_that_are_not_those_of_the_stays_are_noticed() -> None:
    cache = residency()
    cache.enter("a", Room(500))
    cache.tokens += 1
    with pytest.raises(IntegrityError, match="should have 500 tokens"):
        cache.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_it_adds_up_and_comes_back_to_nothing(seed: int) -> None:
    print(f"seed {seed}")
    rng, cache, shown = random.Random(seed), residency(5000, block=16), dict[str, Shown]()
    for n in range(400):
        match rng.randrange(4):
            case 0:
                name = f"a{n}"
                shown[name] = Shown()
                cache.enter(name, Room(rng.randrange(500), rng.randrange(200), rng.choice([inf, 100])))
                cache.follow(name, shown[name])
            case 1 if shown:
                cache.leave(gone := rng.choice(list(shown)))
                del shown[gone]
            case 2 if shown:
                rng.choice(list(shown.values())).num_shown += rng.randrange(100)
            case _:
                cache.heard(KvCache(5000, 16, rng.choice([None, rng.randrange(5000)]), rng.random() < 0.2))
        cache.check_integrity()
        assert cache.used >= 0
    for name in shown:
        cache.leave(name)
    cache.heard(KvCache(5000, 16, 0))
    assert cache.used == 0


# ── who waits ───────────────────────────────────────────────────────────────────────────────────────────────────────


class House:
    """A kernel with an owner of 8 pages and writers with KV caches of so many tokens."""

    def __init__(self, *caches: int | None, **options: object) -> None:
        self.kernel = Kernel(First(), **options)  # type: ignore[arg-type]
        self.owner = Place("o", is_owner=True)
        self.writers = [Place(f"w{n}", is_owner=False, is_writer=True) for n in range(len(caches))]
        self.num_asked = 0
        for place, tokens in zip([self.owner, *self.writers], [None, *caches], strict=True):
            self.kernel.add(place)
            self.look(place, tokens)
            self.kernel.open(place, 0.0)

    def look(self, place: Place, tokens: int | None, *, used: int | None = None, epoch: str = "1") -> None:
        capacity = 8 if place.is_owner else 0
        self.kernel.heard(
            place,
            epoch,
            shape=place.is_owner,
            capacity=capacity,
            occupied=None,
            asked_at=0.0,
            now=0.0,
            cache=KvCache(tokens, used=used),
        )

    def ask(self, tokens: int, pages: int = 1, hints: str | None = None) -> tuple[Demand, Grant | None]:
        self.num_asked += 1

        def size(shape: Hashable) -> int:
            return pages if shape else 0

        demand = Demand(f"a{self.num_asked}", None, size, age=float(self.num_asked), hints=hints, room=Room(0, tokens))
        return demand, self.kernel.arrive(demand, 0.0)

    def take(self, tokens: int, pages: int = 1, hints: str | None = None) -> Grant:
        _, grant = self.ask(tokens, pages, hints)
        assert grant is not None
        return grant

    def wait(self, tokens: int, pages: int = 1, hints: str | None = None) -> Demand:
        demand, grant = self.ask(tokens, pages, hints)
        assert grant is None
        self.kernel.check_integrity(0.0)
        return demand

    def over(self, grant: Grant) -> list[Demand]:
        """Ends an answer, and returns who could go then."""
        for lease in grant.leases:
            self.kernel.free(lease, Evidence.NEVER_SENT, 0.0)
        self.kernel.vacate(grant.peer, grant.demand.attempt, 0.0)
        return self.granted()

    def granted(self) -> list[Demand]:
        found = [effect.grant.demand for effect in self.kernel.effects if isinstance(effect, Granted)]
        self.kernel.effects.clear()
        self.kernel.check_integrity(0.0)
        return found


def test_one_waits_in_line_until_an_answer_is_over() -> None:
    house = House(100)
    held = house.take(60)
    waiting, small = house.wait(50), house.take(40)
    assert house.over(small) == []
    assert house.over(held) == [waiting]


def test_two_below_the_limit_whose_sum_is_above_it_go_one_after_the_other() -> None:
    house = House(100)
    first = house.take(70)
    second = house.wait(70)
    assert house.over(first) == [second]


def test_one_goes_where_there_is_room() -> None:
    house = House(100, 100)
    assert house.take(70).peer is house.writers[0]
    assert house.take(70).peer is house.writers[1]
    house.wait(70)


def test_the_pages_that_are_guarded_go_on_while_a_cache_is_full() -> None:
    house = House(100, None)
    house.take(100, hints="w0")
    assert house.take(100).peer is house.writers[1]


def test_nobody_waits_without_admission() -> None:
    house = House(100, is_limited=False)
    house.take(90)
    house.take(90)


def test_a_cache_that_is_full_is_saved_up_for_who_was_passed_often_enough() -> None:
    house = House(100, max_overtakes=1)
    held = [house.take(40), house.take(40)]
    large = house.wait(90)
    assert house.take(20)
    behind = house.wait(10)
    assert large.saves[-1] is house.writers[0]
    assert house.over(held[0]) == []
    assert not behind.saves
    house.kernel.cancel(large, 0.0)
    assert house.granted() == [behind]


def test_an_engine_that_has_less_in_use_than_was_thought_has_room_for_who_waits() -> None:
    house = House(1000)
    grant = house.take(600)
    waiting = house.wait(500)
    shown = Shown()
    house.writers[0].residency.follow(grant.demand.attempt, shown)
    shown.num_shown = 500
    house.look(house.writers[0], 1000, used=500)
    assert house.granted() == []
    house.look(house.writers[0], 1000, used=300)
    assert house.granted() == [waiting]


def test_a_cache_that_is_larger_than_before_has_room_for_who_waits() -> None:
    house = House(100)
    house.take(60)
    waiting = house.wait(60)
    house.look(house.writers[0], 200)
    assert house.granted() == [waiting]


def test_a_process_that_began_anew_has_room_for_who_waits() -> None:
    house = House(100)
    house.take(60)
    waiting = house.wait(60)
    house.look(house.writers[0], 100, epoch="2")
    assert house.granted() == [waiting]


def test_what_was_granted_elsewhere_takes_room_here() -> None:
    house = House(100)
    house.kernel.reside(house.writers[0], "other", Room(60))
    waiting = house.wait(60)
    house.kernel.vacate(house.writers[0], "other", 0.0)
    house.kernel.vacate(house.writers[0], "other", 0.0)
    assert house.granted() == [waiting]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_engines_say_of_their_memory_everybody_goes_in_the_end(seed: int) -> None:
    """Engines that say for ever that all of it is in use, too: whoever is alone at a place may have it."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    house = House(100, 100, max_overtakes=rng.choice([0, 1, 16]))
    running: list[Grant] = []
    waiting: set[Demand] = set()

    def take_in() -> None:
        for effect in house.kernel.effects:
            assert isinstance(effect, Granted)
            running.append(effect.grant)
            waiting.remove(effect.grant.demand)
        house.kernel.effects.clear()
        house.kernel.check_integrity(0.0)

    def end(grant: Grant) -> None:
        for lease in grant.leases:
            house.kernel.free(lease, Evidence.NEVER_SENT, 0.0)
        house.kernel.vacate(grant.peer, grant.demand.attempt, 0.0)

    for _ in range(300):
        match rng.randrange(4):
            case 0:
                demand, grant = house.ask(rng.choice([0, 5, 40, 90, 1000]), rng.randrange(4))
                if grant is None:
                    waiting.add(demand)
                else:
                    running.append(grant)
            case 1 if running:
                end(running.pop(rng.randrange(len(running))))
            case 2 if running:
                grant = rng.choice(running)
                grant.peer.residency.told({grant.demand.attempt: rng.randrange(200)})
            case _:
                house.look(rng.choice(house.writers), 100, used=rng.choice([None, 0, 50, 100, 10_000]))
        take_in()
    while running or waiting:
        for place in house.writers:
            house.look(place, 100, used=100)
        take_in()
        assert running, f"{len(waiting)} wait, and nobody is there"
        end(running.pop(rng.randrange(len(running))))
        take_in()
    assert [place.residency.tokens for place in house.writers] == [0, 0]


def test_an_instance_that_has_moved_keeps_its_answers() -> None:
    house = House(100)
    grant = house.take(60)
    new = Place("new", is_owner=False, is_writer=True)
    house.kernel.add(new)
    house.kernel.move(house.writers[0], new, 0.0)
    house.look(new, 100)
    house.kernel.open(new, 0.0)
    waiting = house.wait(60)
    assert house.over(grant) == [waiting]


def test_an_answer_that_grows_to_its_end_between_two_looks_counts_whole() -> None:
    cache, answer = residency(), Shown()
    cache.enter("a", Room(100, 10, 100))
    cache.follow("a", answer)
    answer.num_shown = 100
    cache.heard(KvCache(1000, 1, used=0))
    assert cache.tokens == 200
    assert cache.used >= 0
    cache.check_integrity()


def test_an_answer_longer_than_it_may_be_leaves_no_less_than_nothing_in_use() -> None:
    cache, answer = residency(), Shown()
    cache.enter("a", Room(10, 5, 5))
    cache.follow("a", answer)
    answer.num_shown = 60
    cache.heard(KvCache(1000, 1, used=0))
    assert cache.used >= 0
    cache.check_integrity()
