"""Who leads, and until when: races over a store in memory, on clocks that only the test moves."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdproxy.coordination.election import Election
from pdproxy.coordination.store import MAX_TERM, Leader, Member
from pdproxy.errors import StoreUnavailable
from tests.fakes.memory_store import MemoryStore, Shelf
from tests.fakes.stepped_loop import SteppedLoop

TTL_S = 3.0
ASK_S = TTL_S / 3
ROOT = Path(__file__).parents[3]


class World:
    """Replicas as processes: a loop each, one clock for all. Mutable state: the time; what is on the shelf."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.shelf = Shelf(lambda: self.now, unix_clock=lambda: 1_800_000_000 + self.now)
        self.replicas: list[Replica] = []

    def open_store(self, replica: Replica) -> Any:
        return MemoryStore(self.shelf, timeout_s=0.9)

    def forget(self) -> None:
        """Has the store forget everything."""
        self.shelf.forget()

    def replica(self, name: str) -> Replica:
        replica = Replica(self, name)
        self.replicas.append(replica)
        replica.catch_up()
        return replica

    def advance(self, seconds: float) -> None:
        """Lets time pass in steps that are short against all that is timed, for every process that is not stopped."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.05)
            for replica in self.replicas:
                replica.catch_up()

    def leading(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.election.is_leading]


class Replica:
    """One election and all that it told. Mutable state: whether the process is stopped; its loop's clock; what was
    told."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.loop = SteppedLoop()
        self.store = world.open_store(self)
        self.told: list[tuple[str, Any]] = []
        self.told_at: list[float] = []
        self.is_stopped = False
        self.election = Election(
            self.store,
            Member(name, f"{name}:1", f"replica {name}"),
            ttl_s=TTL_S,
            on_elected=lambda leader: self._note("elected", leader.term),
            on_lapsed=lambda leader: self._note("lapsed", leader.term),
            on_leader=lambda leader: self._note("leader", leader and leader.member),
            clock=lambda: world.now,
        )
        self.run = self.start(self.election.run())

    def _note(self, what: str, whom: Any) -> None:
        assert (what == "elected") == self.election.is_leading or what == "leader"
        self.told.append((what, whom))
        self.told_at.append(self.world.now)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.loop.create_task(work)

    def catch_up(self) -> None:
        if not self.is_stopped:
            self.loop.now = self.world.now
            self.loop.step()
            self.loop.settle()

    def terms(self, what: str) -> list[int]:
        return [whom for told, whom in self.told if told == what]

    @property
    def last_told(self) -> tuple[str, float]:
        """The last word about this replica's own lead, and when it was said."""
        return next(
            (what, at) for (what, _), at in zip(self.told[::-1], self.told_at[::-1], strict=True) if what != "leader"
        )


@pytest.fixture
def world() -> Iterator[World]:
    found = World()
    yield found
    for replica in found.replicas:
        assert replica.run.done() is replica.run.cancelled(), replica.run
        replica.loop.finish()


# ── leading ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_leader_renews_and_others_know_it(world: World) -> None:
    a, b = world.replica("a"), world.replica("b")
    world.advance(10 * TTL_S)
    (term,) = a.terms("elected")
    assert a.told == [("elected", term), ("leader", "a")]
    assert b.told == [("leader", "a")]
    assert world.leading() == [a]
    assert b.election.leader == a.election.leader == Leader(term, "a", "a:1")
    assert b.election.seen_term == term
    assert [member.id for member in world.shelf.members()] == ["a", "b"]


def test_a_leader_that_dies_is_followed_within_four_thirds_of_its_time(world: World) -> None:
    a, b = world.replica("a"), world.replica("b")
    world.advance(TTL_S)
    a.is_stopped = True
    world.advance(TTL_S + ASK_S + 0.1)
    assert world.leading() == [b]
    assert b.terms("elected") > a.terms("elected")
    assert [member.id for member in world.shelf.members()] == ["b"]


def test_a_lead_lapses_by_its_own_timer_while_the_store_hangs(world: World) -> None:
    a = world.replica("a")
    world.advance(2 * ASK_S - 0.02)
    a.store.timeout_s, a.store.late_before_s = 1000.0, 999.0
    sent = 1000.0 + ASK_S  # the last that was answered
    world.advance(sent + TTL_S - world.now - 0.1)
    assert a.election.is_leading
    assert a.terms("lapsed") == []
    world.advance(0.2)
    assert not a.election.is_leading
    assert a.terms("lapsed") == a.terms("elected")
    assert a.last_told[1] == pytest.approx(sent + TTL_S, abs=0.1)
    assert a.told[-1] == ("leader", None)


def test_time_counts_from_the_moment_before_a_question_is_sent(world: World) -> None:
    a = world.replica("a")
    world.advance(0.5)
    a.store.late_before_s = a.store.late_after_s = 0.4
    world.advance(ASK_S)
    a.store.is_down = True
    # Asked at +1, done by the store at +1.4, answered at +1.8.
    world.advance(1001 + TTL_S - 0.1 - world.now)
    assert a.election.is_leading
    world.advance(0.2)
    assert not a.election.is_leading


@pytest.mark.parametrize("stopped_s", [1.6, 2.4])
def test_a_late_answer_does_not_revive_a_lead_that_has_ended(world: World, stopped_s: float) -> None:
    """The answer was under way while the process stood still, and is seen before the timer of the lead's end."""
    a = world.replica("a")
    world.advance(ASK_S - 0.02)
    a.store.late_after_s = 0.8
    world.advance(0.1)
    a.is_stopped = True  # asked at +1: by that answer it would lead until +4, and by the last one until +3
    world.advance(1001 + stopped_s - world.now)
    is_over = stopped_s > 2
    assert a.election.is_leading is not is_over
    a.store.late_after_s = 0.0
    a.loop.now = 1002.0  # it had looked at its clock, and not at its timers, when it was stopped
    a.loop.settle()
    a.loop.step()
    a.loop.settle()
    a.is_stopped = False
    a.catch_up()
    assert a.terms("lapsed") == (a.terms("elected")[:1] if is_over else [])
    world.advance(TTL_S)
    assert a.terms("elected") == sorted(set(a.terms("elected")))
    assert len(a.terms("elected")) == 1 + is_over
    assert world.leading() == [a]


def test_a_lead_that_the_store_still_grants_is_given_up_after_a_lapse(world: World) -> None:
    a = world.replica("a")
    world.advance(0.5)
    a.store.is_down = True
    world.advance(TTL_S)
    world.shelf.leads_until += 100  # a server that counts longer than asked, as etcd may
    assert world.leading() == []
    assert "down" in a.election.why
    a.store.is_down = False
    world.advance(ASK_S)
    assert a.election.why == ""
    assert len(a.terms("elected")) == 2
    assert a.terms("elected")[1] > a.terms("elected")[0]


def test_an_answer_that_took_as_long_as_the_lead_elects_nobody(world: World) -> None:
    a = Replica(world, "a")
    world.replicas.append(a)
    a.store.timeout_s, a.store.late_after_s = 10.0, TTL_S + 0.1
    a.catch_up()
    world.advance(TTL_S + 0.2)
    assert a.told == []
    a.store.late_after_s = 0.0
    world.advance(TTL_S)
    assert world.leading() == [a]


# ── others ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_leader_of_a_store_that_was_restarted_empty_leads_anew_with_a_greater_term(world: World) -> None:
    a = world.replica("a")
    world.advance(0.5)
    a.election.note_term(old := world.shelf.term + 10**9)
    world.advance(0.5)
    world.shelf.forget()
    world.advance(ASK_S)
    first, second, third = a.terms("elected")
    assert first < old < second < third
    assert a.terms("lapsed") == [first, second]
    assert world.leading() == [a]
    assert [member.id for member in world.shelf.members()] == ["a"]


def test_a_leader_whom_the_store_forgot_stops_when_it_hears_of_another(world: World) -> None:
    a, b = world.replica("a"), world.replica("b")
    world.advance(0.5)
    a.is_stopped = True
    world.shelf.forget()
    world.advance(ASK_S)
    assert world.leading() == [a, b], "for as long as the time of its lead runs"
    assert a.election.leader != b.election.leader
    a.is_stopped = False
    a.catch_up()
    assert world.leading() == [b]
    assert a.told[-2:] == [("leader", None), ("leader", "b")]
    assert b.terms("elected") > a.terms("lapsed") == a.terms("elected")


def test_another_took_over_while_the_process_stood_still(world: World) -> None:
    a, b = world.replica("a"), world.replica("b")
    world.advance(0.5)
    a.is_stopped = True
    world.advance(60)
    assert world.leading() == [b]
    assert a.terms("lapsed") == [], "nothing has run in it"
    a.is_stopped = False
    a.catch_up()
    assert a.terms("lapsed") == a.terms("elected")
    assert a.election.leader is not None
    assert a.election.leader.member == "b"
    world.advance(TTL_S)
    assert world.leading() == [b]
    assert len(b.terms("elected")) == 1, "whom the other's old lead does not disturb"


def test_a_leader_steps_down_for_a_term_that_others_have_seen(world: World) -> None:
    a = world.replica("a")
    world.advance(0.5)
    (first,) = a.terms("elected")
    a.election.note_term(first)
    a.election.note_term(first - 1)
    assert world.leading() == [a]
    a.election.note_term(first + 7)
    assert world.leading() == []
    assert a.told[-2:] == [("lapsed", first), ("leader", None)]
    a.catch_up()
    assert a.terms("elected") == [first, first + 8], "at once, and not after the old lead's time"
    with pytest.raises(ValueError, match="no term can follow"):
        a.election.note_term(MAX_TERM)


def test_a_term_noted_while_a_renewal_is_under_way_ends_the_lead_all_the_same(world: World) -> None:
    a = world.replica("a")
    a.store.late_after_s = 0.5
    world.advance(ASK_S + 0.1)
    (first,) = a.terms("elected")
    a.election.note_term(first + 7)
    world.advance(2 * ASK_S)
    assert a.terms("elected") == [first, first + 8]


def test_a_term_noted_while_the_first_answer_is_under_way_keeps_a_lower_one_from_beginning(world: World) -> None:
    a = Replica(world, "a")
    world.replicas.append(a)
    a.store.late_after_s = 0.5
    a.catch_up()
    a.election.note_term(noted := world.shelf.term + 7)
    world.advance(2 * ASK_S)
    assert a.terms("elected") == [noted + 1]


def test_a_lead_that_cannot_be_given_back_is_not_prolonged_either(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = world.replica("a"), world.replica("b")
    world.advance(0.5)

    async def refuse(leader: Leader) -> None:
        raise StoreUnavailable("not now")

    monkeypatch.setattr(a.store, "release", refuse)
    a.election.note_term(a.terms("elected")[0] + 7)
    assert world.leading() == []
    world.advance(TTL_S + ASK_S)
    assert a.election.why == "not now"
    assert world.leading() == [b]


def test_who_resigns_leads_no_more_before_the_store_knows_and_the_next_begins_soon(world: World) -> None:
    a, b = world.replica("a"), world.replica("b")
    world.advance(0.5)
    a.store.late_before_s = 0.4
    a.election.is_candidate = False
    resigned = a.start(a.election.resign())
    a.catch_up()
    assert world.leading() == []
    assert world.shelf.who_leads() == Leader(a.terms("lapsed")[0], "a", "a:1")
    world.advance(0.45)
    assert resigned.done()
    assert world.shelf.who_leads() is None
    a.store.late_before_s = 0.0
    world.advance(ASK_S + 0.1)
    assert world.leading() == [b]
    world.advance(ASK_S + 0.1)
    assert a.told[-1] == ("leader", "b"), "it looks on"
    b.is_stopped = True
    world.advance(5 * TTL_S)
    assert world.leading() == []
    assert a.told[-1] == ("leader", None)
    a.election.is_candidate = True
    world.advance(ASK_S + 0.1)
    assert world.leading() == [a]


def test_a_lead_that_comes_to_one_who_is_no_candidate_any_more_is_given_back(world: World) -> None:
    a = Replica(world, "a")
    world.replicas.append(a)
    a.store.late_after_s = 0.5
    a.catch_up()
    a.election.is_candidate = False
    world.advance(1.1)
    assert a.terms("elected") == []
    assert world.shelf.who_leads() is None


def test_a_lead_that_the_store_forgot_ends_also_where_the_store_grants_another_one(world: World) -> None:
    a = world.replica("a")
    world.advance(0.5)
    a.election.is_candidate = False
    world.shelf.forget()
    world.advance(ASK_S)
    assert a.terms("lapsed") == a.terms("elected")
    assert world.leading() == []
    assert world.shelf.who_leads() is None


def test_a_resignation_that_the_store_does_not_hear_is_told_again(world: World) -> None:
    a = world.replica("a")
    world.advance(0.5)
    a.election.is_candidate = False
    a.store.is_down = True
    a.start(a.election.resign())
    a.catch_up()
    assert "down" in a.election.why
    world.shelf.leads_until += 100
    a.store.is_down = False
    world.advance(ASK_S)
    assert world.shelf.who_leads() is None


def test_when_the_work_ends_so_does_the_lead(world: World) -> None:
    a = world.replica("a")
    world.advance(0.5)
    a.run.cancel()
    a.catch_up()
    assert a.run.cancelled()
    assert a.terms("lapsed") == a.terms("elected")
    assert world.leading() == []
    assert a.loop.num_timers == 0


def test_what_is_told_of_the_store(world: World) -> None:
    a = Replica(world, "a")
    world.replicas.append(a)
    assert a.election.last_answer_age_s is None
    a.store.is_down = True
    a.catch_up()
    assert a.election.last_answer_age_s is None
    assert a.election.why == "the store is down"
    a.store.is_down = False
    world.advance(ASK_S)
    assert a.election.why == ""
    a.store.late_before_s = math.inf
    world.advance(2.5)
    assert a.election.last_answer_age_s == pytest.approx(2.5, abs=0.1)
    assert a.election.why == "no answer within 0.9 s"
    assert repr(a.election).startswith("<Election of replica a: leads, Leader(")


# ── anything ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("round_number", range(5))
def test_never_do_two_lead_under_one_term_nor_at_once_unless_the_store_forgot(
    world: World, forgets: bool, round_number: int
) -> None:
    try_anything(world, forgets=forgets)


def try_anything(world: World, *, forgets: bool) -> None:
    """Lets anything happen to three replicas. Never do two lead under one term, nor at once unless the store forgot.
    When all is well again, one leads, and all know it."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for name in "abc":
        world.replica(name)
    forgot_at = world.now
    num_ticks_led = 0
    for _ in range(500):
        happens(world, dice.choice(world.replicas), dice)
        if forgets and dice.random() < 0.03 and world.now > forgot_at + 2:
            world.forget()
            forgot_at = world.now
        world.advance(dice.choice([0.05, 0.05, 0.3]))
        leading = world.leading()
        num_ticks_led += bool(leading)
        terms = [one.election.leader.term for one in leading if one.election.leader]
        assert len(terms) == len(set(terms)) == len(leading), (seed, leading)
        assert forgets or len(leading) <= 1, (seed, leading)
    for replica in world.replicas:
        assert replica.terms("elected") == sorted(set(replica.terms("elected"))), seed
    assert num_ticks_led, f"seed {seed}: nothing was tried"
    for replica in world.replicas:
        replica.is_stopped = replica.store.is_down = False
        replica.store.late_before_s = replica.store.late_after_s = 0.0
        replica.election.is_candidate = True
    world.advance(4 * TTL_S)
    assert len(world.leading()) == 1, seed
    assert len({replica.election.leader for replica in world.replicas}) == 1, seed


def happens(world: World, replica: Replica, dice: random.Random) -> None:
    """Something that may happen to one replica at any time."""
    late = [0.0, 0.0, 0.2, 0.7, math.inf]
    match dice.randrange(16):
        case 0:
            replica.store.is_down = not replica.store.is_down
        case 1:
            replica.store.late_before_s = dice.choice(late)
        case 2:
            replica.store.late_after_s = dice.choice(late)
        case 3:
            replica.is_stopped = not replica.is_stopped
        case 4:
            replica.election.note_term(dice.choice(world.replicas).election.seen_term)
        case 5 if not replica.is_stopped and dice.random() < 0.3:
            replica.start(replica.election.resign())
        case 6 if dice.random() < 0.3:
            replica.election.is_candidate = not replica.election.is_candidate
        case 7:
            replica.is_stopped = replica.store.is_down = False


# ── a real process ──────────────────────────────────────────────────────────────────────────────────────────────

STOPPED_LEADER = """
import asyncio, os, signal, sys
from pdproxy.coordination.election import Election
from pdproxy.coordination.store import Member
from pdproxy.errors import StoreUnavailable
from tests.fakes.memory_store import MemoryStore

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

num_lapsed = 0
def lapsed(leader):
    global num_lapsed
    num_lapsed += 1
    say("lapsed", leader.term, election.is_leading)

election = Election(
    MemoryStore(), Member("a", "a:1", "a"), ttl_s=0.5,
    on_elected=lambda leader: say("elected", leader.term),
    on_lapsed=lapsed, on_leader=lambda leader: None,
)
# Python runs this between two instructions, before the loop gets to its timers.
signal.signal(signal.SIGCONT, lambda *_: say("went on", election.is_leading, num_lapsed))
asyncio.run(election.run())
"""


def test_a_process_that_was_stopped_does_not_lead_from_its_first_instruction_on() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED_LEADER], cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
    )
    try:
        assert child.stdout is not None
        word, first = child.stdout.readline().split()
        assert word == b"elected"
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(child.pid, signal.SIGCONT)
        assert child.stdout.readline() == b"went on False 0\n"
        assert child.stdout.readline() == b"lapsed %b False\n" % first
        word, second = child.stdout.readline().split()
        assert word == b"elected"
        assert int(second) > int(first)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
