"""Room in decoders' KV caches for the answers of several fronts, and of the next leader."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from math import inf

import pytest

from pdproxy.admission.custody import Evidence
from pdproxy.admission.room import Room
from pdproxy.fronts.mirror import MirroredInstance
from tests.fakes.fleet import Clock
from tests.fakes.fronts import FrontEnd, LeaderEnd

NUM_CACHE_PAGES = 10
"""160 tokens."""


@dataclass
class Shown:
    num_shown: int = 0


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def lead(clock: Clock, *fronts: FrontEnd, term: int = 1, claims_until: float = -inf) -> LeaderEnd:
    leader = LeaderEnd(clock, (8,), term=term, claims_until=claims_until, num_cache_pages=NUM_CACHE_PAGES)
    await asyncio.sleep(0)
    leader.look_at_all()
    for front in fronts:
        front.connect(leader, term)
        front.deliver()
    return leader


def ask(front: FrontEnd, attempt: str, tokens: int = 96) -> None:
    front.ask(attempt, 1, room=Room(16, tokens - 16))
    front.deliver()


def end(front: FrontEnd, attempt: str) -> None:
    front.end(attempt, evidence=Evidence.NEVER_SENT)
    front.deliver()


async def test_answers_of_all_fronts_count(clock: Clock) -> None:
    one, other = FrontEnd(clock), FrontEnd(clock)
    leader = await lead(clock, one, other)
    ask(one, "a")
    ask(other, "b")
    assert ("a" in one.grants, "b" in other.grants) == (True, False)
    assert leader.decoders[0].residency.used == 96
    end(one, "a")
    other.deliver()
    assert "b" in other.grants
    assert other.grants["b"].demand.lacks == "kv_cache"
    end(other, "b")
    assert leader.decoders[0].residency.stays == {}
    assert all(not instance.residency.stays for front in (one, other) for instance in front.pool.instances)


async def test_a_front_that_goes_leaves_its_room_to_others(clock: Clock) -> None:
    one, other = FrontEnd(clock), FrontEnd(clock)
    leader = await lead(clock, one, other)
    ask(one, "a")
    ask(other, "b")
    assert one.session is not None
    one.session.close()
    other.deliver()
    assert "b" in other.grants
    assert list(leader.decoders[0].residency.stays) == ["b"]
    end(other, "b")


async def test_the_next_leader_hears_what_is_being_written(clock: Clock) -> None:
    front = FrontEnd(clock)
    await lead(clock, front)
    ask(front, "a")
    mirrored = front.grants["a"].owner
    assert isinstance(mirrored, MirroredInstance)
    mirrored.residency.follow("a", shown := Shown())
    until = clock() + 8.0
    leader = await lead(clock, front, term=2, claims_until=until)
    decoder = leader.decoders[0]
    assert decoder.residency.used == 96
    shown.num_shown = 40
    clock.advance(8.1)
    for _ in range(2):
        leader.look_at_all()
        await asyncio.sleep(0)
        front.deliver()
    assert decoder.residency.stays["a"].written == 40
    ask(front, "b")
    assert "b" not in front.grants
    end(front, "a")
    assert "b" in front.grants
    end(front, "b")
    assert decoder.residency.stays == {}
    leader.admission.check_integrity()


async def test_an_answer_that_was_refused_by_its_front_takes_no_room(clock: Clock) -> None:
    front = FrontEnd(clock)
    leader = await lead(clock, front)
    demand = front.ask("a", 1, room=Room(16, 80))
    front.deliver_to_leader()
    assert leader.decoders[0].residency.used == 96
    front.admission.leave(demand)
    front.deliver()
    assert leader.decoders[0].residency.used == 0


async def test_a_decoder_that_began_anew_forgets_what_fronts_have_there(clock: Clock) -> None:
    front = FrontEnd(clock)
    leader = await lead(clock, front)
    decoder = leader.decoders[0]
    ask(front, "a")
    decoder.heard(replace(decoder.known_facts, epoch="d0 2"), decoder.asked())
    assert decoder.residency.stays == {}
    front.deliver()
    end(front, "a")
    assert decoder.residency.used == 0
    leader.admission.check_integrity()
