"""Load: the sums in which a front tells its leader of legs and prompt tokens, and what the leader makes of them."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest

from pdproxy.admission.custody import Evidence
from pdproxy.fleet.breaker import BreakerState
from pdproxy.fleet.instance import Instance
from pdproxy.fronts import messages
from pdproxy.fronts.mirror import MirroredInstance
from tests.fakes.fleet import Clock, facts
from tests.fakes.fronts import FrontEnd, LeaderEnd


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def connected(clock: Clock, *, term: int = 1) -> tuple[LeaderEnd, FrontEnd]:
    leader, front = LeaderEnd(clock, term=term), FrontEnd(clock)
    await asyncio.sleep(0)
    leader.look_at_all()
    front.connect(leader, term)
    front.deliver()
    return leader, front


def mirrored(front: FrontEnd, instance: Instance) -> MirroredInstance:
    found = front.pool.find(instance.name)
    assert found is not None
    return cast(MirroredInstance, found)


def settle(leader: LeaderEnd, front: FrontEnd) -> None:
    """Everybody hears all that there is to hear."""
    front.deliver()
    leader.hub.tell_news()
    front.deliver()


async def test_what_happens_in_one_frame_is_said_once(clock: Clock) -> None:
    leader, front = await connected(clock)
    seen = mirrored(front, leader.prefiller)
    for _ in range(3):
        seen.queue(100)
        era = seen.leg_started()
        seen.leg_finished(era, "ok")
        seen.queue(-100)
    last = seen.leg_started()
    seen.queue(7)
    [load] = front.to_leader
    assert (load.num_sent, load.num_ok, load.num_tokens) == (4, 3, 7)
    front.deliver()
    assert (leader.prefiller.num_legs, leader.prefiller.queued_tokens) == (1, 7)
    assert leader.prefiller.breaker.statistics().num_outcomes == 3
    seen.leg_finished(last, "ok")
    seen.queue(-7)
    [load] = front.to_leader
    assert (load.num_sent, load.num_ok, load.num_tokens) == (0, 1, -7)
    front.deliver()
    assert (leader.prefiller.num_legs, leader.prefiller.queued_tokens) == (0, 0)


async def test_the_end_of_an_attempt_is_one_message(clock: Clock) -> None:
    leader, front = await connected(clock)
    front.ask("a", 1)
    front.deliver()
    grant, lease = front.grants["a"], front.lease_of("a")
    front.admission.free(lease, Evidence.NEVER_SENT)
    for place in (grant.owner, grant.peer):
        place.unbound("a")
    [free] = front.to_leader
    assert isinstance(free, messages.Free)
    front.deliver()
    assert leader.prefiller.num_attempts == leader.decoders[0].num_attempts == 0
    assert leader.decoders[0].held == 0


async def test_faults_of_legs_that_were_summed_up_open_the_breaker(clock: Clock) -> None:
    leader, front = await connected(clock)
    seen = mirrored(front, leader.prefiller)
    eras = [seen.leg_started() for _ in range(6)]
    settle(leader, front)
    for era in eras[:5]:
        seen.leg_finished(era, "failed")
    settle(leader, front)
    assert leader.prefiller.breaker.state is seen.breaker.state is BreakerState.OPEN
    assert leader.prefiller.num_legs == 1
    seen.leg_finished(eras[5], "ok")  # from before it opened: no vote
    settle(leader, front)
    assert leader.prefiller.breaker.state is BreakerState.OPEN
    assert leader.prefiller.num_legs == 0


@pytest.mark.parametrize("outcome", ["ok", "failed", "not_tried"])
async def test_a_trial_is_told_by_itself(clock: Clock, outcome: str) -> None:
    leader, front = await connected(clock)
    seen = mirrored(front, leader.prefiller)
    for era in [seen.leg_started() for _ in range(5)]:
        seen.leg_finished(era, "failed")
    settle(leader, front)
    clock.advance(60.0)
    trial = seen.leg_started("a")
    settle(leader, front)
    assert leader.prefiller.breaker.state is seen.breaker.state is BreakerState.HALF_OPEN
    assert not leader.prefiller.breaker.allows()
    seen.leg_finished(trial, outcome)
    settle(leader, front)
    expected = {"ok": BreakerState.CLOSED, "failed": BreakerState.OPEN, "not_tried": BreakerState.HALF_OPEN}
    assert leader.prefiller.breaker.state is seen.breaker.state is expected[outcome]
    assert leader.prefiller.breaker.allows() is (outcome != "failed")
    assert leader.prefiller.num_legs == 0


async def test_another_leader_hears_of_the_whole_load_and_counts_no_votes_of_before(clock: Clock) -> None:
    first, front = await connected(clock)
    seen = mirrored(front, first.prefiller)
    early = [seen.leg_started() for _ in range(9)]
    seen.queue(50)
    second = LeaderEnd(clock, term=2)
    await asyncio.sleep(0)
    second.look_at_all()
    front.connect(second, 2)
    between = seen.leg_started()  # the fleet has not been told yet
    front.deliver()
    assert (second.prefiller.num_legs, second.prefiller.queued_tokens) == (10, 50)
    for era in early:
        seen.leg_finished(era, "failed")
    seen.leg_finished(between, "closed")
    seen.queue(-50)
    settle(second, front)
    assert (second.prefiller.num_legs, second.prefiller.queued_tokens) == (0, 0)
    assert second.prefiller.breaker.statistics().num_faults == 0
    assert (seen.num_legs, seen.queued_tokens) == (0, 0)


async def test_tokens_count_from_the_grant_on(clock: Clock) -> None:
    leader, front = await connected(clock)
    front.ask("a", 1, num_tokens=40)
    front.deliver()
    seen = mirrored(front, leader.prefiller)
    assert leader.prefiller.queued_tokens == seen.queued_tokens == 40
    with seen.prefilling(40, "a"):
        assert seen.queued_tokens == 40
        era = seen.leg_started("a")
        assert seen.queued_tokens == 40
        front.deliver()
        assert leader.prefiller.queued_tokens == 40
    seen.leg_finished(era, "ok")
    front.deliver()
    assert leader.prefiller.queued_tokens == seen.queued_tokens == 0


async def test_a_leg_that_is_longer_than_was_thought_counts_in_full(clock: Clock) -> None:
    leader, front = await connected(clock)
    front.ask("a", 1, num_tokens=40)
    front.deliver()
    seen = mirrored(front, leader.prefiller)
    with seen.prefilling(50, "a"):
        front.deliver()
        assert leader.prefiller.queued_tokens == seen.queued_tokens == 50
    seen.unbound("a")
    front.deliver()
    assert leader.prefiller.queued_tokens == seen.queued_tokens == 0


async def test_tokens_of_an_attempt_that_sends_nothing_do_not_stay(clock: Clock) -> None:
    leader, front = await connected(clock)
    front.ask("unbound", 1, num_tokens=40)
    front.deliver()
    front.admission.give_back(front.grants["unbound"])
    demand = front.ask("gone", 1, num_tokens=20)
    while front.to_leader:  # the leader grants, and meanwhile nobody waits any more
        front.deliver_to_leader()
    front.admission.leave(demand)
    front.deliver()
    assert leader.prefiller.queued_tokens == mirrored(front, leader.prefiller).queued_tokens == 0
    assert leader.decoders[0].held == leader.prefiller.num_attempts == 0


async def test_a_front_that_ends_leaves_no_load(clock: Clock) -> None:
    leader, front = await connected(clock)
    seen = mirrored(front, leader.prefiller)
    front.ask("a", 1, num_tokens=40)
    front.deliver()
    seen.leg_started("a")
    seen.queue(3)
    front.deliver()
    assert front.session is not None
    front.session.close()
    assert (leader.prefiller.num_legs, leader.prefiller.queued_tokens) == (0, 0)


async def test_sums_agree_whatever_happens(clock: Clock) -> None:
    """Legs of several fronts begin and end in any order, and messages arrive late."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    dice = random.Random(seed)
    leader, one = await connected(clock)
    two = FrontEnd(clock)
    two.connect(leader, 1)
    two.deliver()
    legs: list[tuple[MirroredInstance, int, int]] = []
    for step in range(2000):
        front = dice.choice((one, two))
        seen = mirrored(front, leader.prefiller)
        if dice.random() < 0.5 or not legs:
            tokens = dice.randrange(100)
            seen.queue(tokens)
            legs.append((seen, seen.leg_started(f"attempt {step}"), tokens))
        else:
            seen, era, tokens = legs.pop(dice.randrange(len(legs)))
            seen.queue(-tokens)
            seen.leg_finished(era, dice.choices(("ok", "failed", "closed"), (20, 1, 3))[0])
        if dice.random() < 0.3:
            settle(leader, front)
        clock.advance(dice.random())
    for seen, era, tokens in legs:
        seen.queue(-tokens)
        seen.leg_finished(era, "closed")
    for front in (one, two, one):
        settle(leader, front)
    assert [mirrored(front, leader.prefiller).num_legs for front in (one, two)] == [0, 0]
    assert (leader.prefiller.num_legs, leader.prefiller.queued_tokens) == (0, 0)


# ── what one frame may not change ───────────────────────────────────────────────────────────────────────────────────


async def test_a_front_that_ends_while_one_of_its_attempts_lets_another_go_leaves_no_tokens(clock: Clock) -> None:
    leader, other, front = LeaderEnd(clock, term=1, max_overtakes=0), FrontEnd(clock), FrontEnd(clock)
    await asyncio.sleep(0)
    leader.look_at_all()
    for one in (other, front):
        one.connect(leader, 1)
        one.deliver()
    for one, attempt, pages in ((other, "x", 2), (front, "large", 4), (front, "small", 2)):
        one.ask(attempt, pages, num_tokens=10)
        one.deliver()
    assert leader.prefiller.queued_tokens == 10, "those of x"
    assert front.session is not None
    front.session.close()
    assert (leader.prefiller.queued_tokens, leader.prefiller.num_attempts) == (10, 1)


async def test_votes_of_one_frame_keep_their_order(clock: Clock) -> None:
    leader, front = await connected(clock)
    seen = mirrored(front, leader.prefiller)
    eras = [seen.leg_started() for _ in range(9)]
    for era, outcome in zip(eras, ["failed"] * 4 + ["ok"] + ["failed"] * 4, strict=True):
        seen.leg_finished(era, outcome)
    settle(leader, front)
    assert leader.prefiller.breaker.state is BreakerState.CLOSED, "never five in a row"


async def test_an_attempt_that_was_a_trial_is_none_once_the_breaker_has_closed(clock: Clock) -> None:
    leader, front = await connected(clock)
    seen = mirrored(front, leader.prefiller)

    def open_breaker() -> None:
        for era in [seen.leg_started() for _ in range(5)]:
            seen.leg_finished(era, "failed")
        settle(leader, front)
        clock.advance(60.0)

    open_breaker()
    front.ask("first", 1)
    settle(leader, front)
    slow = seen.leg_started("first")
    settle(leader, front)
    clock.advance(60.0)
    front.ask("second", 1)
    settle(leader, front)
    seen.leg_finished(slow, "ok")
    settle(leader, front)
    seen.leg_finished(seen.leg_started("second"), "ok")  # its answer goes on at the decoder
    settle(leader, front)
    assert leader.prefiller.on_trial == {}
    open_breaker()
    seen.leg_finished(seen.leg_started("another"), "not_tried")
    settle(leader, front)
    assert leader.prefiller.is_open


async def test_the_end_of_a_trial_is_not_told_before_its_begin(clock: Clock) -> None:
    leader, front = await connected(clock)
    seen = mirrored(front, leader.decoders[0])
    for era in [seen.leg_started() for _ in range(5)]:
        seen.leg_finished(era, "failed")
    settle(leader, front)
    clock.advance(60.0)
    for attempt in ("trial", "waits"):
        front.ask(attempt, 0)
        settle(leader, front)
    mirrored(front, leader.prefiller).unbound("trial")  # it is served by the decoder alone
    seen.leg_finished(seen.leg_started("trial"), "failed")
    seen.unbound("trial")
    settle(leader, front)
    assert "trial" in front.grants
    assert "waits" not in front.grants


async def sent_before(clock: Clock, *, is_heard: bool) -> tuple[LeaderEnd, FrontEnd]:
    """A second leader, and a front with an attempt that the first one granted. The second has heard of the decoder, or
    has not."""
    _, front = await connected(clock)
    front.ask("a", 1)
    front.deliver()
    front.send_prefill("a")
    front.deliver()
    second = LeaderEnd(clock, term=2)
    await asyncio.sleep(0)
    if is_heard:
        second.look_at_all()
    else:
        second.prefiller.heard(facts("prefill", epoch="p0 1"), second.prefiller.asked())
        second.prefiller.proven()
    front.connect(second, 2)
    return second, front


async def test_an_end_that_was_told_before_the_claim_is_told_again(clock: Clock) -> None:
    second, front = await sent_before(clock, is_heard=True)
    front.admission.free(front.lease_of("a"), Evidence.ENGINE_SAID)
    while front.from_leader:
        message = front.from_leader.popleft()
        front.mirror.handlers[type(message)](message)
    for place in (front.grants["a"].owner, front.grants["a"].peer):
        place.unbound("a")
    front.deliver()
    assert second.prefiller.num_attempts == second.decoders[0].num_attempts == 0


async def test_an_owner_that_was_never_heard_of_can_be_let_go(clock: Clock) -> None:
    second, front = await sent_before(clock, is_heard=False)
    front.deliver()
    assert second.prefiller.num_attempts == 1
    front.end("a", evidence=Evidence.ENGINE_SAID)
    front.deliver()
    assert second.prefiller.num_attempts == second.decoders[0].num_attempts == 0
    second.pool.take_out("d0")
    assert second.pool.let_go()
    front.deliver()
    assert front.session is not None
    assert front.session.num_attempts == 0
