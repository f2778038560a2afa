"""Who may be asked, who joins, and who leaves only when nothing is under way any more."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pdproxy.errors import ModelNotFound, NotReady
from pdproxy.fleet.base import NO_HINTS, C, RoutingHints
from pdproxy.fleet.breaker import BreakerLimits
from pdproxy.fleet.instance import Care, Instance
from pdproxy.fleet.lineup import Lineup
from pdproxy.fleet.policies import PolicyOptions, make_policy
from pdproxy.fleet.pool import MAX_MODELS, Pool
from pdproxy.fleet.routing import Router
from pdproxy.fleet.slow_start import SlowStart
from pdproxy.request.openai import CHAT, COMPLETIONS, parse
from tests.fakes.fake_engine import FakeEngine, error_reply
from tests.fakes.fleet import Clock, facts, make_instance, make_ready
from tests.fakes.proxy_harness import Answer, proxy_in_front_of, until

CARE = Care(breaker=BreakerLimits(consecutive_faults=1, cool_off_s=5.0))


def names(pool: Pool, role: str = "decode") -> list[str]:
    return [instance.name for instance in pool.ready(role)]  # type: ignore[arg-type]


def test_ready_leaves_out_who_is_down_draining_or_left_alone() -> None:
    clock = Clock()
    instances = [make_ready(make_instance(f"d{i}", care=CARE, clock=clock)) for i in range(4)]
    pool = Pool(instances)
    instances[1].lost("down")
    instances[2].drain()
    instances[3].leg_finished(instances[3].leg_started(), "failed")
    assert names(pool) == ["d0"]
    clock.advance(5.0)
    assert names(pool) == ["d0", "d3"]


def test_nobody_ready_and_everybody_left_alone_are_told_apart() -> None:
    clock = Clock()
    instance = make_ready(make_instance(care=CARE, clock=clock))
    pool = Pool([instance])
    with pytest.raises(ModelNotFound):
        pool.ready("decode", "huge")
    instance.leg_finished(instance.leg_started(), "failed")
    clock.advance(2.0)
    with pytest.raises(NotReady, match="left alone") as caught:
        pool.ready("decode")
    assert caught.value.retry_after_s == pytest.approx(3.0)
    assert not pool.is_ready
    instance.drain()
    with pytest.raises(NotReady, match="no decode instance is ready"):
        pool.ready("decode")


def test_who_joins_is_asked_and_names_are_unique() -> None:
    pool = Pool()
    pool.add(make_ready(make_instance("d0")))
    assert names(pool) == ["d0"]
    assert pool.changed.is_set()
    with pytest.raises(ValueError, match="d0"):
        pool.add(make_instance("d0"))


def test_who_leaves_is_let_go_when_its_work_has_ended() -> None:
    instance = make_ready(make_instance("d0"))
    pool = Pool([instance])
    era = instance.leg_started()
    pool.take_out("d0")
    assert pool.instances == ()
    assert pool.let_go() == []
    assert [status["name"] for status in pool.status() if status["leaving"]] == ["d0"]
    pool.add(make_ready(make_instance("d0")))
    assert names(pool) == ["d0"], "the name is free at once"
    instance.leg_finished(era, "ok")
    assert pool.let_go() == [instance]
    assert pool.leaving == ()


# ── routing over it ─────────────────────────────────────────────────────────────────────────────────────────────────


class Noting:
    """Implements `lineup.Policy`: the last of those it is shown."""

    def __init__(self, uses_hints: bool) -> None:
        self.uses_hints = uses_hints
        self.shown: list[str] = []
        self.hints = RoutingHints()

    def pick(self, lineup: Lineup[C], hints: RoutingHints) -> C:
        self.shown, self.hints = [member.name for member in lineup.members], hints
        return lineup.members[-1]


def make_router(pool: Pool, uses_hints: bool = True) -> tuple[Router, Noting, Noting]:
    policies = Noting(False), Noting(uses_hints)
    router = Router(pool, prefill_policy=policies[0], decode_policy=policies[1], session_header="X-Session-Id")
    return router, *policies


def make_fleet() -> Pool:
    fleet = [("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")]
    return Pool(make_ready(make_instance(name, role)) for name, role in fleet)  # type: ignore[arg-type]


def test_each_role_is_chosen_by_its_own_policy_and_avoids_who_failed() -> None:
    router, prefill, decode = make_router(make_fleet())
    route = router.pick("tiny", frozenset({"p1", "d1"}), RoutingHints(session="me"))
    assert (route.prefiller.name, route.decoder.name) == ("p0", "d0")
    assert (prefill.shown, decode.shown) == (["p0"], ["d0"])
    assert decode.hints.session == "me"
    router.pick("tiny", frozenset({"p0", "p1"}))
    assert prefill.shown == ["p0", "p1"], "where nobody else is, they are asked again"


def test_nobody_takes_over_who_gets_no_attempts() -> None:
    pool = make_fleet()
    router, _, _ = make_router(pool)
    assert router.has_other("d0", "tiny", frozenset({"d0"}))
    assert not router.has_other("d0", "tiny", frozenset({"d0", "d1"}))
    pool.instances[3].drain()
    assert not router.has_other("d0", "tiny", frozenset({"d0"}))
    assert not router.has_other("nobody", "tiny", frozenset())


def test_hints_are_the_session_header_and_the_prompts_ids_or_its_beginning() -> None:
    router, _, _ = make_router(make_fleet())
    text = parse(COMPLETIONS, b'{"prompt": "' + b"a" * 100_000 + b'"}')
    hints = router.hints(text, None, {"x-session-id": "me"})
    assert hints.session == "me"
    assert isinstance(hints.prompt, memoryview)
    assert bytes(hints.prompt) == b'"' + b"a" * 65535
    assert router.hints(text, [1, 2], {}) == RoutingHints(prompt=[1, 2])
    chat = parse(CHAT, b'{"messages": [{"role": "user", "content": "hi"}]}')
    assert router.hints(chat, None, {}).prompt == b'[{"role": "user", "content": "hi"}]'


def test_no_hints_are_made_for_policies_that_use_none() -> None:
    router, _, _ = make_router(make_fleet(), uses_hints=False)
    chat = parse(CHAT, b'{"messages": [{"role": "user", "content": "hi"}]}')
    assert router.hints(chat, [1, 2], {"x-session-id": "me"}) is NO_HINTS


# ── who can take a request, until that changes ──────────────────────────────────────────────────────────────────────


def test_the_lineups_stay_the_same_while_nobody_changes() -> None:
    pool = make_fleet()
    lineups = pool.lineups("tiny")
    for instance in pool.instances:
        instance.heard(facts(instance.role))
        instance.leg_finished(instance.leg_started(), "ok")
        instance.missed("late")
    assert pool.lineups("tiny") == lineups
    assert [[one.name for one in lineup.members] for lineup in lineups] == [["p0", "p1"], ["d0", "d1"]]


def fail(instance: Instance) -> None:
    instance.leg_finished(instance.leg_started(), "failed")


CHANGES: dict[str, Callable[[Pool, Instance], object]] = {
    "down": lambda pool, one: one.lost("silent"),
    "vanished": lambda pool, one: one.vanished("refused"),
    "draining": lambda pool, one: one.drain(),
    "forsaken": lambda pool, one: one.forsake("by hand"),
    "taken out": lambda pool, one: pool.take_out(one.name),
    "restarted": lambda pool, one: one.heard(facts(one.role, epoch="second")),
    "of another model": lambda pool, one: one.heard(replace(facts(one.role), models=frozenset({"huge"}))),
    "left alone": lambda pool, one: fail(one),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_who_can_take_no_request_is_in_no_lineup_any_more(role: str, change: str) -> None:
    one, *others = fleet = [
        make_ready(make_instance(f"{of_role[0]}{number}", of_role, care=CARE))  # type: ignore[arg-type]
        for of_role in (role, "prefill" if role == "decode" else "decode")
        for number in range(2)
    ]
    pool = Pool(fleet)
    assert one in [*pool.lineups("tiny")[0].members, *pool.lineups("tiny")[1].members]
    CHANGES[change](pool, one)
    prefillers, decoders = pool.lineups("tiny")
    assert {*prefillers.members, *decoders.members} == set(others)


def test_who_comes_up_joins_or_comes_back_is_in_the_lineup() -> None:
    pool = make_fleet()
    pool.lineups("tiny")
    late = make_instance("d2")
    pool.add(late)
    assert len(pool.lineups("tiny")[1].members) == 2
    make_ready(late)
    assert len(pool.lineups("tiny")[1].members) == 3
    late.lost("silent")
    assert len(pool.lineups("tiny")[1].members) == 2


def test_who_was_left_alone_is_tried_once_when_time_has_passed() -> None:
    """Nothing but the clock tells that: a cool-off ends by itself, and so does the wait for a probe's outcome."""
    clock = Clock()
    sick = make_ready(make_instance("d0", care=CARE, clock=clock))
    pool = Pool([sick, make_ready(make_instance("d1")), make_ready(make_instance("p0", "prefill"))])
    fail(sick)
    assert sick not in pool.lineups("tiny")[1].members
    pool.lineups(None)
    for _ in range(2):
        clock.advance(5.0)
        for model in ("tiny", None):
            assert sick in pool.lineups(model)[1].members
        era = sick.leg_started()
        for model in ("tiny", None):
            assert sick not in pool.lineups(model)[1].members, "one is trying"
    sick.leg_finished(era, "ok")
    lineups = pool.lineups("tiny")
    assert sick in lineups[1].members
    assert pool.lineups("tiny") == lineups


def test_lineups_of_made_up_models_are_not_kept_for_ever() -> None:
    """Who names no models is taken to serve any; a stranger may ask for ever new ones."""
    pool = Pool(make_instance(role, role) for role in ("prefill", "decode"))
    for instance in pool.instances:
        instance.heard(replace(facts(instance.role), models=frozenset()))
        instance.proven()
    for number in range(3 * MAX_MODELS):
        assert len(pool.lineups(f"model-{number}")[0].members) == 1
    assert len(pool._lineups) <= MAX_MODELS


def test_models_that_the_same_instances_serve_share_their_lineups() -> None:
    """Adapters of one base model, for one: else everybody's load would be told once for each of them."""
    pool = make_fleet()
    for instance in pool.instances:
        names = {"base", "adapter"} if instance.name in ("p1", "d1") else {"base"}
        instance.heard(replace(facts(instance.role), models=frozenset(names)))
    base, adapter = pool.lineups("base"), pool.lineups("adapter")
    assert [lineup.members for lineup in adapter] == [(pool.instances[1],), (pool.instances[3],)]
    assert len(base[0].members) == 2
    for instance in pool.instances:
        instance.heard(replace(facts(instance.role), models=frozenset({"base", "adapter"})))
    base, adapter = pool.lineups("base"), pool.lineups("adapter")
    assert base == adapter
    assert base[0] is adapter[0]


def test_a_check_and_a_pick_raise_the_same() -> None:
    pool = make_fleet()
    router, _, _ = make_router(pool)
    for act in (lambda: router.check("huge"), lambda: router.pick("huge", frozenset())):
        with pytest.raises(ModelNotFound):
            act()
    pool.instances[0].drain()
    pool.instances[1].drain()
    for act in (lambda: router.check("tiny"), lambda: router.pick("tiny", frozenset())):
        with pytest.raises(NotReady, match="no prefill instance is ready"):
            act()


@pytest.mark.parametrize("load", ["slots", "queue"])
async def test_the_least_loaded_is_known_whatever_changed_since_the_last_pick(load: str) -> None:
    pool = Pool(
        make_ready(make_instance(name, role), num_pages=8)  # type: ignore[arg-type]
        for name, role in [("p0", "prefill"), ("d0", "decode"), ("d1", "decode"), ("d2", "decode")]
    )
    policy = make_policy("least_slots", PolicyOptions(rng=random.Random(1)))
    router = Router(pool, prefill_policy=policy, decode_policy=policy, session_header="x")
    decoders = pool.of_role("decode")
    leases = {one.name: one.admission.try_acquire(6, attempt="a") for one in decoders}
    for idle in decoders * 2:
        lease = leases[idle.name]
        assert lease is not None
        if load == "slots":
            lease.shrink(5)
        else:
            waiting = [asyncio.create_task(wait_for_pages(one)) for one in decoders if one is not idle]
            await asyncio.sleep(0)
        assert router.pick("tiny", frozenset()).decoder is idle
        if load == "slots":
            lease.release()
            leases[idle.name] = idle.admission.try_acquire(6, attempt="a")
        else:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def wait_for_pages(instance: Instance) -> None:
    await instance.admission.acquire(4, deadline=1e9, attempt="b")


@pytest.mark.parametrize("name", ["round_robin", "least_slots", "power_of_two"])
def test_who_came_back_gets_its_full_share_once_its_ramp_is_over(name: str) -> None:
    clock = Clock()
    care = Care(successes=1, slow_start=SlowStart(ramp_s=10.0, floor=0.1))
    fleet = [make_ready(make_instance(f"d{number}", care=care, clock=clock)) for number in range(3)]
    pool = Pool([make_ready(make_instance("p0", "prefill")), *fleet])
    policies = [make_policy(name, PolicyOptions(rng=random.Random(3))) for _ in range(2)]
    router = Router(pool, prefill_policy=policies[0], decode_policy=policies[1], session_header="x")
    fleet[0].lost("silent")
    fleet[0].heard(facts("decode"))

    def share() -> float:
        return sum(router.pick("tiny", frozenset()).decoder is fleet[0] for _ in range(300)) / 300

    assert share() == pytest.approx(0.1 / 2.1, abs=0.03)
    lineups = pool.lineups("tiny")
    clock.advance(10.0)
    assert share() == pytest.approx(1 / 3, abs=0.06)
    assert pool.lineups("tiny") == lineups


def test_nobody_is_told_of_load_for_a_lineup_that_has_ended() -> None:
    pool = make_fleet()
    policies = [make_policy("least_queued_tokens", PolicyOptions(rng=random.Random(1))) for _ in range(2)]
    router = Router(pool, prefill_policy=policies[0], decode_policy=policies[1], session_header="x")
    for number in range(5):
        router.pick("tiny", frozenset())
        router.pick(None, frozenset({"p0"}))
        pool.instances[0].heard(facts("prefill", epoch=f"epoch-{number}"))
        pool.instances[0].proven()
    router.pick("tiny", frozenset())
    assert [len(instance._watched_by) for instance in pool.instances] == [1, 1, 1, 1]


# ── through the whole proxy ─────────────────────────────────────────────────────────────────────────────────────────


def pairs_of(answers: list[Answer]) -> set[tuple[str, str]]:
    return {(one.headers["x-pdproxy-prefiller"], one.headers["x-pdproxy-decoder"]) for one in answers}


def several(role: str) -> list[FakeEngine]:
    return [FakeEngine(role) for _ in range(4)]


async def test_a_session_stays_where_it_is_and_sessions_are_spread() -> None:
    options: dict[str, Any] = {
        "decode_policy": "session_affinity",
        "prefill_policy": "session_affinity",
        "session_header": "X-User",
    }
    async with proxy_in_front_of(several("prefill"), several("decode"), **options) as house:
        spread = set()
        for user in range(8):
            pairs = pairs_of([await house.post(headers={"x-user": str(user)}) for _ in range(3)])
            assert len(pairs) == 1
            spread |= pairs
        assert len(spread) > 2


async def test_prompts_that_begin_alike_go_to_one_prefiller() -> None:
    options: dict[str, Any] = {"prefill_policy": "prefix_affinity", "chunk_size": 4, "prefix_chunks": 1}
    async with proxy_in_front_of(several("prefill"), several("decode"), **options) as house:
        alike = [await house.post(prompt=f"You are a helpful assistant. {i}") for i in range(4)]
        assert len({one.headers["x-pdproxy-prefiller"] for one in alike}) == 1
        assert len({one.headers["x-pdproxy-decoder"] for one in alike}) > 1, "decoders are chosen on their own"


async def test_the_next_prompt_goes_where_fewest_tokens_are_queued() -> None:
    async with proxy_in_front_of(several("prefill")[:2], chunk_size=16) as house:
        for engine in house.prefillers:
            engine.hang_at.add("prefill")
        long, short = house.call(prompt=list(range(200))), house.call(prompt=[1])
        await until(lambda: all(engine.generations() for engine in house.prefillers))
        queued = {instance.name: instance.queued_tokens for instance in house.proxy.pool.of_role("prefill")}
        assert sorted(queued.values()) == [1, 200]
        third = house.call(prompt=[1])
        await until(lambda: sum(len(engine.generations()) for engine in house.prefillers) == 3)
        assert sorted(instance.queued_tokens for instance in house.proxy.pool.of_role("prefill")) == [2, 200]
        for call in (long, short, third):
            call.leave()
            await call.done()
        assert not any(instance.queued_tokens for instance in house.proxy.pool.of_role("prefill"))


async def test_a_prefiller_that_fails_again_and_again_is_left_alone() -> None:
    async with proxy_in_front_of(several("prefill")[:2], breaker_faults=2, retries=1, retry_min_per_s=100) as house:
        house.prefiller.fail_at["prefill"] = error_reply(500, "broken")
        for _ in range(8):
            assert (await house.post()).status == 200
        assert len(house.prefiller.generations()) == 2
        page = (await house.get("/metrics")).body.decode()
        assert 'pdproxy_breaker_state{instance="prefill-0",leg="prefill",state="open"} 1.0' in page
        assert 'pdproxy_instance_routable{instance="prefill-0",role="prefill"} 0.0' in page
        assert 'pdproxy_instance_ready{instance="prefill-0",role="prefill"} 1.0' in page
