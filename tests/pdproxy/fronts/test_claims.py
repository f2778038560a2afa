"""Another leader: what fronts claim of it, what it grants and when, and what a leader may not do whose time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pdproxy.admission.custody import Custody, Evidence, Way
from pdproxy.errors import NotReady, QueueFull
from tests.fakes.fleet import Clock, facts
from tests.fakes.fronts import FrontEnd, LeaderEnd

WINDOW_S = 8.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leaders(clock: Clock) -> Iterator[LeaderEnd]:
    """Leaders in turn, of terms that grow: the first one claims nothing, because there was none before it."""

    def make() -> Iterator[LeaderEnd]:
        yield LeaderEnd(clock, term=1)
        term = 1
        while True:
            term += 1
            yield LeaderEnd(clock, term=term, claims_until=clock() + WINDOW_S)

    return make()


async def begin(leaders: Iterator[LeaderEnd], *fronts: FrontEnd, **occupied: int) -> LeaderEnd:
    """The next leader, of which these fronts hear, and which hears of the engines."""
    leader = next(leaders)
    await asyncio.sleep(0)
    leader.look_at_all(**occupied)
    for front in fronts:
        front.connect(leader, leader.hub.term or 0)
        front.deliver()
    return leader


def end_claims(leader: LeaderEnd, clock: Clock, *fronts: FrontEnd, **occupied: int) -> None:
    clock.advance(WINDOW_S + 0.01)
    leader.look_at_all(**occupied)
    for front in fronts:
        front.deliver()


async def granted(front: FrontEnd, attempt: str, pages: int, *, sent: bool = True) -> None:
    front.ask(attempt, pages)
    front.deliver()
    assert attempt in front.grants, front.errors
    if sent:
        front.send_prefill(attempt)
        front.deliver()


async def test_what_was_granted_before_is_held_by_the_next_leader(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    front = FrontEnd(clock)
    await begin(leaders, front)
    await granted(front, "a", 3)
    second = await begin(leaders, front, d0=3)
    decoder = second.decoders[0]
    assert decoder.held == 3
    front.ask("b", 2)
    front.ask("c", 1)
    front.deliver()
    assert not {"b", "c"} & front.grants.keys(), "nothing is granted before all have claimed"
    end_claims(second, clock, front, d0=3)
    assert decoder.account is not None
    # Pages that are claimed count twice, until the engine says that it has let go of them.
    assert decoder.account.foreign == 3
    front.lease_of("a").step(Custody.READY)
    front.end("a", evidence=Evidence.FIRST_EVENT)
    front.deliver()
    assert decoder.held == 1, "one page is nobody's by all accounts"
    second.look_at_all(d0=0)
    second.look_at_all(d0=0)
    front.deliver()
    assert {"b", "c"} <= front.grants.keys()
    assert decoder.held == 3
    second.admission.check_integrity()


async def test_pages_that_nobody_claims_are_held_as_long_as_the_engine_has_them(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    gone, front = FrontEnd(clock), FrontEnd(clock)
    await begin(leaders, gone, front)
    await granted(gone, "lost", 3)
    second = await begin(leaders, front, d0=3)
    end_claims(second, clock, front, d0=3)
    await granted(front, "fits", 1)
    front.ask("waits", 2)
    front.deliver()
    assert "waits" not in front.grants
    second.look_at_all(d0=1)
    second.look_at_all(d0=1)
    front.deliver()
    assert "waits" in front.grants


async def test_who_waits_keeps_his_turn(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    """Two fronts whose requests came in turns: the next leader serves them in that order, whoever tells of them
    first."""
    first, second = FrontEnd(clock), FrontEnd(clock)
    await begin(leaders, first, second)
    await granted(first, "all", 4)
    for number, front in enumerate((second, first, second, first)):
        clock.advance(0.1)
        front.ask(f"waits {number}", 4)
        front.deliver()
    leader = await begin(leaders, first, second, d0=4)
    end_claims(leader, clock, first, second, d0=4)
    first.lease_of("all").step(Custody.READY)
    first.end("all", evidence=Evidence.FIRST_EVENT)
    order = []
    for _ in range(4):
        for front in (first, second):
            front.deliver()
            leader.look_at_all(d0=0)
            leader.look_at_all(d0=0)
        for front in (first, second):
            front.deliver()
            for attempt in list(front.grants):
                order.append(attempt)
                front.end(attempt, evidence=Evidence.NEVER_SENT)
                front.deliver()
    assert order == [f"waits {number}" for number in range(4)]


async def test_an_orphan_is_handed_on(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    """Its front has abandoned it to a leader that has gone. The next one waits for the engine's lease, less the time
    that has passed."""
    front = FrontEnd(clock)
    await begin(leaders, front)
    await granted(front, "a", 3)
    front.end("a", way=Way(over_after_s=20.0))
    second = await begin(leaders, front, d0=3)
    (orphan,) = second.decoders[0].account.orphans  # type: ignore[union-attr]
    assert orphan.over_at == pytest.approx(clock() + 20.0)
    clock.advance(5.0)
    third = await begin(leaders, front, d0=3)
    (orphan,) = third.decoders[0].account.orphans  # type: ignore[union-attr]
    assert orphan.over_at == pytest.approx(clock() + 15.0)
    clock.advance(16.0)
    third.look_at_all(d0=0)
    front.deliver()
    assert third.decoders[0].held == 0
    assert front.admission.num_held == 0, "the front has heard that its pages came back"


async def test_an_orphan_of_the_time_between_two_leaders_is_handed_on(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    """The next leader is there, and has not told of the fleet yet."""
    front = FrontEnd(clock)
    await begin(leaders, front)
    await granted(front, "a", 3)
    second = next(leaders)
    await asyncio.sleep(0)  # its reaper is at work
    front.connect(second, 2)
    second.look_at_all(d0=3)
    front.end("a", way=Way(over_after_s=20.0))
    front.deliver()
    assert len(second.decoders[0].account.orphans) == 1  # type: ignore[union-attr]
    assert front.admission.num_held == 1, "the leader after that one hears of it, too"


async def test_what_is_said_of_pages_whose_owner_was_not_heard_of_yet_is_not_lost(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    front = FrontEnd(clock)
    await begin(leaders, front)
    await granted(front, "freed", 1)
    await granted(front, "kept", 2)
    second = next(leaders)  # which has not looked at anybody
    front.connect(second, 2)
    front.deliver()
    front.lease_of("freed").step(Custody.READY)
    front.end("freed", evidence=Evidence.FIRST_EVENT)
    front.deliver()
    second.look_at_all(d0=2)
    front.deliver()
    assert second.decoders[0].held == 2


async def test_pages_of_a_process_that_has_ended_are_not_claimed(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    front = FrontEnd(clock)
    await begin(leaders, front)
    await granted(front, "a", 3)
    second = next(leaders)
    front.admission._held["a"].owner.facts = None  # it was another process when it was granted
    front.connect(second, 2)
    second.look_at_all()
    front.deliver()
    assert second.decoders[0].held == 0
    assert front.lease_of("a").is_returned


async def test_an_attempt_whose_prefiller_has_left_is_claimed(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    """It needs it no more: the KV is at the decoder."""
    front = FrontEnd(clock)
    await begin(leaders, front)
    await granted(front, "a", 3)
    held = front.admission._held["a"]
    held.peer.unbound("a")
    held.peer = SimpleNamespace(number=99)  # the next leader has nobody of this number
    second = next(leaders)
    front.connect(second, 2)
    second.look_at_all(d0=3)
    front.deliver()
    assert second.decoders[0].held == 3


async def test_an_attempt_is_claimed_by_a_leader_that_has_no_such_prefiller(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    """That one has left, or has another role by now; the attempt goes on at the decoder, with its pages there."""
    front = FrontEnd(clock)
    await begin(leaders, front)
    await granted(front, "a", 3)
    front.admission._held["a"].peer.unbound("a")
    front.lease_of("a").step(Custody.READY)
    second = next(leaders)
    await asyncio.sleep(0)  # its reaper is at work
    second.pool.take_out("p0")
    second.pool.let_go()
    second.prefiller = second.join("p1", "prefill")
    front.connect(second, 2)
    second.look_at_all(d0=3)
    front.deliver()
    decoder = second.decoders[0]
    assert (decoder.held, decoder.num_attempts) == (3, 1)
    front.admission.abandon(front.lease_of("a"), Way(over_after_s=20.0))
    front.deliver()
    assert len(decoder.account.orphans) == 1  # type: ignore[union-attr]
    assert not front.lease_of("a").is_returned


@pytest.mark.parametrize("is_heard_first", [True, False])
async def test_a_leader_that_saw_no_restart_takes_the_claims_of_one_that_did(
    clock: Clock, leaders: Iterator[LeaderEnd], is_heard_first: bool
) -> None:
    """Where only counts tell one process from the next, the first leader has another epoch for the second process than
    a leader that has seen no other."""

    def hear(leader: LeaderEnd, *counts: float) -> None:
        told = facts("decode", num_pages=4, num_free=4)
        leader.decoders[0].heard(
            replace(told, epoch=None, counts=counts, num_occupied=None), leader.decoders[0].asked()
        )
        leader.decoders[0].proven()
        leader.hub.tell_news()
        front.deliver()

    front = FrontEnd(clock)
    first = await begin(leaders, front)
    for counts in ((5.0, 1.0), (0.0, 0.0), (7.0, 1.0)):
        hear(first, *counts)
    await granted(front, "a", 3)
    second = next(leaders)
    if is_heard_first:
        hear(second, 9.0, 1.0)
    front.connect(second, 2)
    front.deliver()
    hear(second, 9.0, 1.0)
    assert second.decoders[0].epoch != first.decoders[0].epoch
    assert second.decoders[0].held == 3
    assert not front.lease_of("a").is_returned
    hear(second, 9.0, 2.0)
    assert second.decoders[0].held == 3
    hear(second, 0.0, 0.0)
    assert second.decoders[0].held == 0
    assert front.lease_of("a").is_returned


async def test_a_leader_that_took_a_front_for_gone_keeps_what_it_took(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    """The session has ended, and the reaper answers for the pages. The same front comes back: they are not its own."""
    front = FrontEnd(clock)
    leader = await begin(leaders, front)
    await granted(front, "a", 3)
    assert front.session is not None
    front.session.close()
    front.connect(leader, 1)
    front.deliver()
    assert front.lease_of("a").is_returned
    assert leader.decoders[0].held == 3, "they are the reaper's"
    front.end("a")
    front.deliver()
    assert front.session is not None
    assert front.session.num_attempts == 0
    assert leader.prefiller.num_attempts == leader.decoders[0].num_attempts == 0


async def test_nothing_is_sent_for_pages_for_which_nobody_answers(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    front = FrontEnd(clock)
    await begin(leaders, front)
    await granted(front, "a", 3, sent=False)
    front.is_held = False
    with pytest.raises(NotReady) as refused:
        front.send_prefill("a")
    assert refused.value.retry_after_s
    assert front.lease_of("a").custody is Custody.RESERVED


async def test_a_leader_whose_time_is_over_grants_nothing(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    """It stood still and goes on: what frees pages there comes too late."""
    front = FrontEnd(clock)
    leader = await begin(leaders, front)
    await granted(front, "a", 4)
    front.ask("b", 1)
    front.deliver()
    leader.leads = False
    front.lease_of("a").step(Custody.READY)
    front.end("a", evidence=Evidence.FIRST_EVENT)
    front.deliver()
    assert "b" not in front.grants
    assert front.session is not None
    front.session.close()
    assert not leader.reaper.statistics()["adopted"], "it takes nobody for gone either"


async def test_a_request_that_comes_while_nobody_leads_waits_for_the_next(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    front = FrontEnd(clock)
    leader = await begin(leaders, front)
    front.cut()
    front.is_held = False
    front.ask("early", 1)
    assert not front.errors
    front.is_held = True
    front.connect(leader, 1)
    front.deliver()
    assert "early" in front.grants


async def test_a_request_does_not_wait_for_ever_for_a_leader(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    front = FrontEnd(clock, patience_s=0.01)
    await begin(leaders, front)
    front.ask("waits", 5)
    front.ask("asked before", 1)
    front.is_held = False
    front.admission.lapse()
    demand = front.ask("asked after", 1)
    with pytest.raises(NotReady) as refused:
        await front.admission.wait(demand)
    assert refused.value.retry_after_s
    assert front.errors.keys() == {"waits", "asked before", "asked after"}


async def test_an_instance_that_the_next_leader_does_not_know_leaves(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    front = FrontEnd(clock)
    first = await begin(leaders, front)
    first.join("d9")
    front.deliver()
    first.hub.tell_news()
    front.deliver()
    assert front.pool.find("d9") is not None
    await begin(leaders, front)
    assert front.pool.find("d9") is None
    assert front.pool.find("d0") is not None


async def test_requests_wait_for_instances_that_only_the_leader_before_knew_to_be_well(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    """The next leader has looked at nobody yet. What it finds out counts."""
    front = FrontEnd(clock)
    await begin(leaders, front)
    second = next(leaders)
    front.connect(second, 2)
    front.deliver()
    assert [one.is_ready for one in front.pool.instances] == [True, True]
    front.ask("waits", 1)
    front.deliver()
    assert second.admission.num_waiting == 1
    second.look_at_all()
    assert second.decoders[0].is_ready, "one front has told that the process is proven"
    second.decoders[0].lost("it cannot be reached")
    second.hub.tell_news()
    front.deliver()
    assert [one.is_ready for one in front.pool.instances] == [True, False]


async def test_the_next_leader_knows_who_was_proven_alone_only(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    """Else it would take the way of that instance's KV for proven, and no canary would try it."""
    front = FrontEnd(clock)
    first = await begin(leaders, front)
    first.decoders[0].proven(is_alone=True)
    first.hub.tell_news()
    front.deliver()
    second = next(leaders)
    front.connect(second, 2)
    front.deliver()
    for one in (second.prefiller, *second.decoders):
        one.heard(facts(one.role, epoch=f"{one.name} 1"), one.asked())
    assert [(one.name, one.is_ready, one.is_proven_alone) for one in second.pool.instances] == [
        ("p0", True, False),
        ("d0", True, True),
    ]


async def test_nothing_is_sent_for_what_a_leader_before_has_granted(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    """The front was stopped between the grant and the leg, and the next leader has granted the pages to another. Its
    lease runs again as soon as it follows that leader."""
    stopped, front = FrontEnd(clock), FrontEnd(clock)
    await begin(leaders, stopped, front)
    await granted(stopped, "a", 3, sent=False)
    second = await begin(leaders, front)
    end_claims(second, clock, front)
    await granted(front, "b", 3)
    stopped.connect(second, 2)
    assert stopped.lease_of("a").is_returned, "also before it has told this leader of anything"
    stopped.deliver()
    assert second.decoders[0].held == 3
    stopped.end("a")
    stopped.deliver()
    assert stopped.admission.num_held == 0
    assert second.prefiller.num_attempts == second.decoders[0].num_attempts == 1


async def test_claims_do_not_hide_what_nobody_claims(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    """The engine has let go of the pages of one attempt, whose front has not said so yet. What it has in use are those
    of another one, whose front has gone."""
    gone, front = FrontEnd(clock), FrontEnd(clock)
    await begin(leaders, gone, front)
    await granted(gone, "lost", 2)
    await granted(front, "read", 2)
    front.lease_of("read").step(Custody.READY)
    second = await begin(leaders, front, d0=4)
    end_claims(second, clock, front, d0=2)
    second.look_at_all(d0=2)
    front.end("read", evidence=Evidence.FIRST_EVENT)
    front.deliver()
    front.ask("fits", 2)
    front.ask("waits", 2)
    front.deliver()
    assert "fits" in front.grants
    assert "waits" not in front.grants
    second.look_at_all(d0=0)
    second.look_at_all(d0=0)
    front.deliver()
    assert "waits" in front.grants


async def test_a_request_that_comes_while_the_leader_is_late_is_heard_by_it(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    """The leader stood still for longer than a lease, and goes on: no session begins anew."""
    front = FrontEnd(clock)
    await begin(leaders, front)
    front.is_held = False
    front.admission.lapse()
    front.ask("late", 1)
    front.is_held = True
    front.deliver()
    assert "late" in front.grants


async def test_what_was_abandoned_is_forgotten_with_its_process(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    """The leader hears that the process has ended before it hears that the attempt was abandoned."""
    front = FrontEnd(clock)
    leader = await begin(leaders, front)
    await granted(front, "a", 3)
    front.end("a", way=Way(over_after_s=20.0))
    leader.decoders[0].heard(facts("decode", epoch="d0 2", num_pages=4, num_free=4))
    leader.hub.tell_news()
    front.deliver()
    assert leader.decoders[0].held == 0
    assert front.admission.num_held == 0


def look_at_engines_that_do_not_tell(leader: LeaderEnd) -> None:
    """All engines answer, and do not say how many pages are in use."""
    for one in (leader.prefiller, *leader.decoders):
        told = facts(one.role, epoch=f"{one.name} 1", **({"num_pages": 4} if one.role == "decode" else {}))
        one.heard(replace(told, num_occupied=None), one.asked())
        one.proven()


async def test_what_an_engine_does_not_tell_is_held_until_its_lease_is_over(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    """A front went together with its leader. Nobody can know what it held there."""
    gone, front = FrontEnd(clock), FrontEnd(clock)
    first = next(leaders)
    await asyncio.sleep(0)
    look_at_engines_that_do_not_tell(first)
    for one in (gone, front):
        one.connect(first, 1)
        one.deliver()
    await granted(gone, "lost", 3)
    await granted(front, "known", 1)
    second = next(leaders)
    front.connect(second, 2)
    look_at_engines_that_do_not_tell(second)
    second.hub.tell_news()
    front.deliver()
    clock.advance(WINDOW_S + 0.01)
    look_at_engines_that_do_not_tell(second)
    front.ask("waits", 2)
    front.lease_of("known").step(Custody.READY)
    front.end("known", evidence=Evidence.FIRST_EVENT)
    await granted(front, "after it", 1)
    assert "waits" not in front.grants
    clock.advance(second.decoders[0].adapter.traits.lease_s)
    look_at_engines_that_do_not_tell(second)
    front.deliver()
    assert "waits" in front.grants


async def test_a_claim_that_was_lost_on_the_wire_is_a_claim_still(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    """The leader took the front for gone before it had heard a claim. The front comes back in the same term."""
    front = FrontEnd(clock)
    await begin(leaders, front)
    await granted(front, "a", 3)
    second = next(leaders)
    await asyncio.sleep(0)
    second.look_at_all(d0=3)
    front.connect(second, 2)
    while front.from_leader:
        message = front.from_leader.popleft()
        front.mirror.handlers[type(message)](message)
    assert front.session is not None
    front.session.close()  # with the claim on its way
    front.connect(second, 2)
    front.deliver()
    assert second.decoders[0].held == 3
    assert not front.lease_of("a").is_returned


async def test_what_no_leader_knows_is_forgotten_when_it_is_abandoned(
    clock: Clock, leaders: Iterator[LeaderEnd]
) -> None:
    """The next leader has another fleet: it will never say that the pages have come back."""
    front = FrontEnd(clock)
    await begin(leaders, front)
    await granted(front, "a", 3)
    other = LeaderEnd(clock, (), term=2)
    front.connect(other, 2)
    front.deliver()
    front.end("a", way=Way(over_after_s=60.0))
    front.deliver()
    assert front.admission.num_held == 0
    assert not list(front.admission.kernel.orphans)


async def test_the_line_is_not_longer_after_a_time_without_a_leader(clock: Clock, leaders: Iterator[LeaderEnd]) -> None:
    front = FrontEnd(clock)
    for number in range(5):
        front.ask(f"early {number}", 4)
    leader = LeaderEnd(clock, term=2, claims_until=clock() + WINDOW_S, max_queue=2)
    await asyncio.sleep(0)
    leader.look_at_all()
    front.connect(leader, 2)
    front.deliver()
    assert leader.admission.num_waiting == 2
    assert {type(error) for error in front.errors.values()} == {QueueFull}
