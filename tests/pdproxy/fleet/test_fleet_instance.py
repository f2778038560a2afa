"""What an instance's health, breaker and weight make of what is heard of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.admission.admission import Admission
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.room import KvCache, Room
from pdproxy.engines.adapter import MalformedReply
from pdproxy.engines.info import Receiver
from pdproxy.fleet.breaker import BreakerLimits, BreakerState
from pdproxy.fleet.instance import Health, HealthPolicy, Instance
from pdproxy.fleet.pace import Pace
from pdproxy.fleet.routing.policies import PolicyOptions, make_policy
from pdproxy.fleet.routing.router import Router
from pdproxy.fleet.slow_start import SlowStart
from tests.fakes.fleet import Clock, Held, facts, make_admission, make_instance, make_ready, settings


def hear(instance: Instance, **different: object) -> None:
    instance.heard(facts(instance.role, **different))


def test_down_after_misses_in_a_row_and_up_after_answers_in_a_row() -> None:
    instance = make_ready(make_instance(care=HealthPolicy(misses=3, successes=2)))
    instance.missed("late")
    assert instance.is_doubted, "to be looked at again soon"
    instance.missed("late")
    hear(instance)
    assert not instance.is_doubted
    instance.missed("late")
    instance.missed("late")
    assert instance.health is Health.READY, "an answer in between is a new start"
    instance.missed("late")
    assert (instance.health, instance.why) == (Health.DOWN, "late")
    hear(instance)
    assert instance.health is Health.DOWN
    instance.missed("late again")
    hear(instance)
    assert instance.health is Health.DOWN, "a miss in between is a new start"
    hear(instance)
    assert instance.health is Health.READY


def test_who_never_was_down_needs_one_answer_only() -> None:
    instance = make_instance(care=HealthPolicy(successes=5))
    hear(instance)
    assert instance.health is Health.ALIVE


def test_a_canary_does_not_shorten_the_way_back() -> None:
    """One that was under way when the instance went down must not make it ready."""
    instance = make_ready(make_instance(care=HealthPolicy(successes=2)))
    instance.lost("gone")
    instance.proven()
    assert instance.health is Health.DOWN


def test_a_process_has_ended_when_another_one_answers_and_each_is_told_of_once() -> None:
    told: list[tuple[str, str]] = []
    instance = make_instance(care=HealthPolicy(successes=1), on_ended=lambda epoch, why: told.append((epoch, why)))
    instance.lost("refused")
    assert told == [], "nobody has heard of any process there"
    make_ready(instance, epoch="first")
    instance.lost("refused")
    instance.lost("refused")
    hear(instance, epoch="first")
    assert told == [], "it was there all the time"
    hear(instance, epoch="second")
    hear(instance, epoch="second")
    hear(instance, epoch="third")
    assert told == [("first", "d0: it was restarted"), ("second", "d0: it was restarted")]


async def test_pages_stay_where_an_instance_is_down_and_come_back_with_a_new_process() -> None:
    instance = make_ready(make_instance(care=HealthPolicy(misses=1, successes=1)), num_pages=4)
    held = await Held(instance, 3).wait()
    for fall in (lambda: instance.missed("late"), lambda: instance.lost("senseless"), lambda: instance.drain()):
        fall()
        assert instance.held == 3
    hear(instance, num_pages=4)
    assert instance.held == 3
    hear(instance, num_pages=4, epoch="second")
    assert instance.held == 0
    held.release()
    assert instance.held == 0, "they came back before"
    instance.admission.check_integrity()


def test_a_refused_leg_makes_an_instance_down_and_proves_nothing_of_its_process() -> None:
    told: list[str] = []
    instance = make_ready(make_instance(on_ended=lambda epoch, why: told.append(epoch)))
    instance.suspect("a connection broke", is_lost=False)
    assert instance.health is Health.READY
    instance.suspect("refused", is_lost=True)
    assert instance.health is Health.DOWN
    assert instance.suspected.is_set()
    assert told == []


# ── a peer's fault, or its own ──────────────────────────────────────────────────────────────────────────────────────


def accuse(instance: Instance) -> bool:
    return instance.accuse("epoch-of-decode", "KV did not reach it")


def test_whoever_is_accused_is_in_doubt_until_it_has_been_looked_at() -> None:
    instance = make_ready(make_instance())
    assert not accuse(instance)
    assert accuse(instance), "it is about to be looked at"
    instance.examine()
    assert accuse(instance), "it is being looked at"
    instance.examined()
    assert not instance.is_suspected, "with ever more of it its peers would never be blamed"
    assert not accuse(instance)


def test_a_look_that_began_before_an_accusation_does_not_answer_it() -> None:
    instance = make_ready(make_instance())
    instance.examine()
    assert not accuse(instance)
    instance.examined()
    assert accuse(instance)


def lose(instance: Instance) -> None:
    instance.lost("gone")


def miss(instance: Instance) -> None:
    instance.missed("late")


def restart(instance: Instance) -> None:
    make_ready(instance, epoch="second")


@pytest.mark.parametrize("befall", [lose, miss, restart])
def test_one_that_is_not_well_or_another_by_now_is_in_doubt_and_looked_at_no_sooner(
    befall: Callable[[Instance], None],
) -> None:
    instance = make_ready(make_instance())
    befall(instance)
    assert accuse(instance)
    assert not instance.is_suspected


# ── breaker ─────────────────────────────────────────────────────────────────────────────────────────────────────────

OPENS_AT_TWO = HealthPolicy(breaker=BreakerLimits(consecutive_faults=2, cool_off_s=5.0))


def finish(instance: Instance, outcome: str) -> None:
    instance.leg_finished(instance.leg_started(), outcome)


@pytest.mark.parametrize("fault", ["failed", "timed_out"])
def test_faults_in_a_row_close_it_to_new_attempts(fault: str) -> None:
    instance = make_ready(make_instance(care=OPENS_AT_TWO))
    finish(instance, fault)
    finish(instance, "ok")
    finish(instance, fault)
    assert instance.is_routable
    finish(instance, fault)
    assert not instance.is_routable
    assert instance.is_ready, "it may well be healthy: only its legs fail"
    assert instance.num_legs == 0


@pytest.mark.parametrize("outcome", ["busy", "refused", "closed", "no_kv", "stale_term"])
def test_what_is_no_fault_never_opens_it_nor_proves_its_health(outcome: str) -> None:
    instance = make_ready(make_instance(care=OPENS_AT_TWO))
    for _ in range(10):
        finish(instance, outcome)
    assert instance.is_routable
    finish(instance, "failed")
    finish(instance, outcome)
    finish(instance, "failed")
    assert not instance.is_routable


def test_half_open_lets_one_try_and_its_success_closes_it() -> None:
    clock = Clock()
    instance = make_ready(make_instance(care=OPENS_AT_TWO, clock=clock))
    finish(instance, "failed")
    finish(instance, "failed")
    clock.advance(5.0)
    assert instance.is_routable
    era = instance.leg_started()
    assert not instance.is_routable, "one is trying"
    instance.leg_finished(era, "ok")
    assert instance.is_routable
    assert instance.breaker.state is BreakerState.CLOSED


def test_a_try_that_comes_to_nothing_is_another_attempts() -> None:
    """Nothing was sent, so the breaker has nothing to count, and the instance must not wait for it for ever."""
    clock = Clock()
    admission = make_admission(clock)
    options: dict[str, Any] = {"care": OPENS_AT_TWO, "clock": clock, "admission": admission}
    decoder, prefiller = (make_ready(make_instance(role, role, **options)) for role in ("decode", "prefill"))
    for instance in (decoder, prefiller):
        admission.add(instance)
    finish(decoder, "failed")
    finish(decoder, "failed")
    clock.advance(5.0)
    grant = admission.bind_now(Demand("first", None, lambda shape: 1, age=0.0))
    assert grant is not None
    assert not decoder.is_open, "one is trying"
    admission.give_back(grant)
    assert decoder.is_open
    assert admission.bind_now(Demand("second", None, lambda shape: 1, age=0.0)) is not None


def test_a_new_process_does_not_answer_for_the_old_one() -> None:
    instance = make_ready(make_instance(care=OPENS_AT_TWO))
    finish(instance, "failed")
    finish(instance, "failed")
    hear(instance, epoch="second")
    instance.proven()
    assert instance.is_routable


# ── slow start ──────────────────────────────────────────────────────────────────────────────────────────────────────

RAMP = HealthPolicy(successes=1, slow_start=SlowStart(ramp_s=10.0, floor=0.1))


def test_full_weight_at_the_start_and_a_ramp_after_every_return() -> None:
    clock = Clock()
    instance = make_ready(make_instance(care=RAMP, clock=clock))
    assert instance.weight == 1.0
    instance.lost("gone")
    hear(instance)
    assert instance.weight == pytest.approx(0.1)
    clock.advance(5.0)
    hear(instance)
    assert instance.weight == pytest.approx(0.55), "looking at it does not start the ramp anew"
    clock.advance(5.0)
    assert instance.weight == 1.0
    hear(instance, epoch="second")
    instance.proven()
    assert instance.weight == pytest.approx(0.1), "a new process has cold caches"


def test_a_newcomer_starts_slowly() -> None:
    assert make_ready(make_instance(care=RAMP, is_newcomer=True)).weight == pytest.approx(0.1)


# ── what is known of it ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"chunk_size": 32}, "its chunk_size is 16, and 32 is configured"),
        ({"model": "huge"}, "its model is tiny, and huge is configured"),
        ({"receiver_ports": (7301,)}, r"listen on \(7300,\)"),
    ],
)
def test_one_that_is_not_as_configured(more: dict[str, object], says: str) -> None:
    with pytest.raises(MalformedReply, match=says):
        hear(make_instance(settings("d0", **more)))


def test_ranks_may_share_a_receiver() -> None:
    ranks = tuple(Receiver(rank=rank, host="h", port=7300) for rank in range(2))
    make = lambda *ports: make_instance(settings("d0", receiver_ports=ports))  # noqa: E731
    hear(make(7300), receivers=ranks)
    with pytest.raises(MalformedReply, match=r"listen on \(7300,\), and \(7300, 7301\) are configured"):
        hear(make(7300, 7301), receivers=ranks)


@pytest.mark.parametrize("what", ["model", "dtype", "chunk_size"])
def test_a_misfit_is_named_by_what_differs(what: str) -> None:
    prefiller, decoder = make_instance("p0", "prefill"), make_instance()
    assert prefiller.misfit(decoder) is None, "nothing is known"
    hear(prefiller)
    hear(decoder, **{what: 7 if what == "chunk_size" else "7"})
    assert f"its {what} is" in (prefiller.misfit(decoder) or "")
    assert "does not fit p0" in (decoder.misfit(prefiller) or "")


async def test_idle_when_nothing_is_bound_under_way_or_held() -> None:
    instance = make_ready(make_instance(), num_pages=4)
    assert instance.is_idle
    era = instance.leg_started()
    assert not instance.is_idle
    instance.leg_finished(era, "ok")
    assert instance.is_idle
    instance.bound("a", 0)
    assert not instance.is_idle
    instance.unbound("")
    assert instance.is_idle
    (await Held(instance, 4).wait()).release()
    held = await Held(instance, 4).wait()
    assert not instance.is_idle
    waiting = Held(instance, 4)
    held.release()
    assert not instance.is_idle, "granted in the same instant"
    (await waiting.wait()).release()
    assert instance.is_idle


async def test_whoever_watches_is_told_of_every_change_of_load() -> None:
    instance = make_ready(make_instance(), num_pages=4)
    touched: dict[Instance, None] = {}
    other: dict[Instance, None] = {}
    instance.watch(other)
    instance.watch(touched)

    def seen() -> tuple[bool, int, int, int, int]:
        load = instance.held, instance.capacity, instance.num_legs, instance.queued_tokens
        was_told = touched == other == {instance: None}
        touched.clear()
        other.clear()
        return was_told, *load

    held = await Held(instance, 3).wait()
    assert held.grant is not None
    assert seen() == (True, 3, 4, 0, 0)
    era = instance.leg_started()
    assert seen() == (True, 3, 4, 1, 0)
    with instance.prefilling(100):
        assert seen() == (True, 3, 4, 1, 100)
    assert seen() == (True, 3, 4, 1, 0)
    instance.leg_finished(era, "closed")
    assert seen() == (True, 3, 4, 0, 0)
    instance.admission.shrink(held.grant.leases[0], 1)
    assert seen() == (True, 1, 4, 0, 0)
    hear(instance, num_pages=5)
    assert seen() == (True, 1, 5, 0, 0)
    instance.unwatch(other)
    held.release()
    assert (touched, other) == ({instance: None}, {})


async def test_who_stops_watching_is_told_nothing_more() -> None:
    instance = make_ready(make_instance(), num_pages=4)
    touched: dict[Instance, None] = {}
    instance.watch(touched)
    instance.unwatch(touched)
    instance.leg_started()
    await Held(instance, 3).wait()
    with instance.prefilling(100):
        assert touched == {}


@pytest.mark.parametrize("how", ["by calling", "by leaving", "by an error"])
def test_prefilling_ends_once(how: str) -> None:
    instance = make_ready(make_instance())
    with contextlib.suppress(KeyError), instance.prefilling(100) as prefilled, instance.prefilling(7):
        assert instance.queued_tokens == 107
        if how == "by calling":
            prefilled()
            prefilled()
            assert instance.queued_tokens == 7
        if how == "by an error":
            raise KeyError
    assert instance.queued_tokens == 0


def test_status_tells_why_it_gets_no_requests() -> None:
    instance = make_ready(make_instance(care=OPENS_AT_TWO))
    finish(instance, "failed")
    finish(instance, "failed")
    instance.drain()
    status = instance.status()
    assert (status["state"], status["draining"], status["routable"], status["weight"]) == ("ready", True, False, 1.0)
    assert (status["breaker"]["state"], status["breaker"]["leg"]) == ("open", "decode")


async def test_prompts_that_are_granted_in_one_instant_go_to_several_prefillers() -> None:
    queued = make_policy("least_queued_tokens", PolicyOptions(rng=random.Random(0)))
    turns = make_policy("round_robin", PolicyOptions(rng=random.Random(0)))
    router = Router(prefill_policy=queued, decode_policy=turns, session_header="x-session-id")
    admission = Admission(Kernel(router), clock=Clock())
    prefillers = [make_ready(make_instance(f"p{n}", "prefill", admission=admission)) for n in range(4)]
    decoder = make_instance(admission=admission)
    for instance in (*prefillers, decoder):
        admission.add(instance)
    for instance in prefillers:
        instance.proven()
    demands = [Demand(f"a{n}", None, lambda shape: 1, age=float(n), num_tokens=100) for n in range(8)]
    grants: list[Any] = []
    for demand in demands:
        assert admission.ask(demand, lambda grant, error: grants.append(grant)) is None
    make_ready(decoder, num_pages=8)
    assert len(grants) == 8
    assert [one.queued_tokens for one in prefillers] == [200] * 4
    first = grants[0].peer
    with first.prefilling(100):
        first.leg_started("a0")
        assert first.queued_tokens == 200, "not counted twice"
    for grant in grants:
        for place in (grant.owner, grant.peer):
            place.unbound(grant.demand.attempt)
    assert [one.queued_tokens for one in prefillers] == [0] * 4


def test_memory_by_which_an_answer_has_grown_comes_back_with_it() -> None:
    clock = Clock()
    instance = make_ready(make_instance(clock=clock))
    instance.pace = Pace()
    for attempt in ("outgrows", "stays"):
        instance.admission.reside(instance, attempt, Room(50, 50))
        instance.bound(attempt, 0)
    instance.residency.told({"outgrows": 400, "stays": 2})
    instance.residency.heard(KvCache(10_000))
    clock.now += 10.0
    num_tokens = instance.residency.stays["outgrows"].tokens
    assert num_tokens > 400
    instance.unbound("outgrows")
    assert instance.pace.freed_per_s(clock.now) == pytest.approx(100 * num_tokens / 2000), "as many as were held of it"
