"""Who may be asked, who joins, and who leaves only when nothing is under way any more."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from pdproxy.admission.admission import Admission
from pdproxy.admission.custody import Custody, Way
from pdproxy.admission.grant import Grant
from pdproxy.admission.kernel import MAX_MODELS, Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.orphans import Job
from pdproxy.config.values import Role
from pdproxy.errors import ModelNotFound, NotReady
from pdproxy.fleet.breaker import BreakerLimits
from pdproxy.fleet.instance import HealthPolicy, Instance
from pdproxy.fleet.pool import ROLES, Pool
from pdproxy.fleet.routing.candidate import NO_HINTS, C, RoutingHints
from pdproxy.fleet.routing.candidates import CandidateSet
from pdproxy.fleet.routing.policies import PolicyOptions, make_policy
from pdproxy.fleet.routing.router import Router
from pdproxy.fleet.slow_start import SlowStart
from pdproxy.openai.request import CHAT, COMPLETIONS, parse
from tests.fakes.fake_engine import FakeEngine, error_reply
from tests.fakes.fleet import Clock, Held, facts, make_admission, make_instance, make_ready, settings
from tests.fakes.proxy_harness import Answer, proxy_in_front_of, until

CARE = HealthPolicy(breaker=BreakerLimits(consecutive_faults=1, cool_off_s=5.0))


def fleet_of(*names: str, admission: Admission | None = None, **options: Any) -> list[Instance]:
    """Ready ones, of the roles that their names begin like, on one admission."""
    admission = admission or make_admission()
    roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
    return [make_ready(make_instance(name, roles[name[0]], admission=admission, **options)) for name in names]


def pool_of(fleet: list[Instance]) -> Pool:
    return Pool(fleet[0].admission, fleet)


def names(pool: Pool, role: str = "decode") -> list[str]:
    return [instance.name for instance in pool.ready(role)]  # type: ignore[arg-type]


def test_who_serves_a_model_is_told_as_it_is_now() -> None:
    p0, d0, d1 = fleet_of("p0", "d0", "d1")
    pool = pool_of([p0, d0])
    assert pool.serving("tiny") == [p0, d0]
    assert pool.serving("tiny") is pool.serving("tiny"), "it is looked up once"
    pool.add(d1)
    assert pool.serving("tiny") == [p0, d0, d1]
    d0.heard(replace(facts(), models=frozenset({"other"})))
    assert (pool.serving("tiny"), pool.serving("other")) == ([p0, d1], [d0])
    d1.lost("it is down, and serves the model all the same")
    assert pool.serving("tiny") == [p0, d1]
    pool.admission.serve(d1, frozenset({"third"}))  # as a front has it when its leader tells what an engine has said
    assert (pool.serving("tiny"), pool.serving("third")) == ([p0], [d1])
    pool.take_out("p0")
    assert pool.serving("tiny") == []


def test_whoever_makes_up_names_of_models_fills_nothing() -> None:
    pool = pool_of(fleet_of("p0", "d0"))
    for number in range(2 * MAX_MODELS):
        assert pool.serving(f"made up {number}") == []
    assert len(pool._serving) <= MAX_MODELS


def test_ready_leaves_out_who_is_down_draining_or_left_alone() -> None:
    clock = Clock()
    instances = fleet_of("d0", "d1", "d2", "d3", care=CARE, clock=clock)
    pool = pool_of(instances)
    instances[1].lost("down")
    instances[2].drain()
    instances[3].leg_finished(instances[3].leg_started(), "failed")
    assert names(pool) == ["d0"]
    clock.advance(5.0)
    assert names(pool) == ["d0", "d3"]


def test_nobody_ready_and_everybody_left_alone_are_told_apart() -> None:
    clock = Clock()
    [instance] = fleet_of("d0", care=CARE, clock=clock)
    pool = pool_of([instance])
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
    [one] = fleet_of("d0")
    pool = Pool(one.admission)
    pool.add(one)
    assert names(pool) == ["d0"]
    assert pool.changed.is_set()
    with pytest.raises(ValueError, match="d0"):
        pool.add(make_instance("d0"))


def test_who_leaves_is_let_go_when_its_work_has_ended() -> None:
    [instance] = fleet_of("d0")
    pool = pool_of([instance])
    era = instance.leg_started()
    pool.take_out("d0")
    assert pool.instances == ()
    assert pool.let_go() == []
    assert [status["name"] for status in pool.status() if status["leaving"]] == ["d0"]
    pool.add(fleet_of("d0", admission=pool.admission)[0])
    assert names(pool) == ["d0"], "the name is free at once"
    instance.leg_finished(era, "ok")
    assert pool.let_go() == [instance]
    assert pool.leaving == ()


async def test_pages_move_with_a_place_that_gets_another_name() -> None:
    """It is the same process: what it holds, and may still be asked to drop, is the same."""
    [old] = fleet_of("d0")
    pool = pool_of([old])
    held = await Held(old, 4).wait()
    pool.take_out("d0")
    renamed = make_instance(settings("d9", url=old.url), admission=pool.admission)
    pool.add(renamed)
    assert (renamed.held, old.held) == (4, 0)
    assert pool.let_go() == [old], "nothing of what it held is its own any more"
    make_ready(renamed)
    assert renamed.held == 4
    pool.check_integrity()
    held.release()
    assert renamed.held == 0
    make_ready(renamed, epoch="second")
    pool.check_integrity()


@pytest.mark.parametrize("is_renamed_first", [False, True])
async def test_errands_move_with_a_place_that_gets_another_name(is_renamed_first: bool) -> None:
    """Of a request that was bound to the place by its old name; nobody can be asked by that any more."""
    [old] = fleet_of("d0")
    pool = pool_of([old])
    grant = (await Held(old, 4).wait()).grant
    assert grant is not None
    [lease] = grant.leases
    lease.step(Custody.FILLING)
    renamed = make_instance(settings("d9", url=old.url), admission=pool.admission)
    acts = [lambda: (pool.take_out("d0"), pool.add(renamed)), lambda: pool.admission.abandon(lease, way_at(old))]
    for act in acts if is_renamed_first else reversed(acts):
        act()
    make_ready(renamed)
    assert pool.admission.take_due()[0] == [Job(renamed, lease)]


def way_at(instance: Instance) -> Way:
    return Way(errand="drop it", target=instance, over_after_s=60.0)


async def test_pages_of_one_that_left_and_was_silent_for_its_lease_are_nobodys_any_more() -> None:
    clock = Clock()
    [instance] = fleet_of("d0", clock=clock)
    pool = pool_of([instance])
    await Held(instance, 4).wait()
    pool.take_out("d0")
    instance.lost("it was shut down")
    assert pool.let_go() == []
    clock.advance(instance.adapter.traits.lease_s)
    assert pool.let_go() == [], "it may still have them"
    clock.advance(1.0)
    assert pool.let_go() == [instance]
    pool.check_integrity()


# ── routing over it ─────────────────────────────────────────────────────────────────────────────────────────────────


class Noting:
    """Implements `lineup.Policy`: the last of those it is shown."""

    ties = False

    def __init__(self, uses_hints: bool) -> None:
        self.uses_hints = uses_hints
        self.shown: list[str] = []
        self.hints = RoutingHints()

    def pick(self, lineup: CandidateSet[C], hints: RoutingHints) -> C:
        self.shown, self.hints = [member.name for member in lineup.members], hints
        return lineup.members[-1]

    def home(self, lineup: CandidateSet[C], hints: RoutingHints) -> C | None:
        return None


def make_router(uses_hints: bool = True) -> tuple[Router, Noting, Noting]:
    policies = Noting(False), Noting(uses_hints)
    return Router(prefill_policy=policies[0], decode_policy=policies[1], session_header="X-Session-Id"), *policies


def make_fleet(router: Router | None = None, **options: Any) -> Pool:
    admission = make_admission() if router is None else Admission(Kernel(router), clock=Clock())
    return pool_of(fleet_of("p0", "p1", "d0", "d1", admission=admission, **options))


def grant(pool: Pool, model: str | None = "tiny", avoid: frozenset[str] = frozenset(), hints: Any = None) -> Grant:
    """A page of whoever serves such a request."""
    granted = pool.admission.bind_now(Demand("a", model, lambda shape: 1, age=0.0, avoid=avoid, hints=hints))
    assert granted is not None
    return granted


def pick(pool: Pool, model: str | None = "tiny", avoid: frozenset[str] = frozenset(), hints: Any = None) -> Any:
    """Who would serve such a request, of one page; it takes none of them."""
    granted = grant(pool, model, avoid, hints)
    pool.admission.give_back(granted)
    prefiller, decoder = sorted([granted.owner, granted.peer], key=lambda one: one.role, reverse=True)
    return SimpleNamespace(prefiller=prefiller, decoder=decoder)


def test_each_role_is_chosen_by_its_own_policy_and_avoids_who_failed() -> None:
    router, prefill, decode = make_router()
    pool = make_fleet(router)
    route = pick(pool, "tiny", frozenset({"p1", "d1"}), RoutingHints(session="me"))
    assert (route.prefiller.name, route.decoder.name) == ("p0", "d0")
    assert (prefill.shown, decode.shown) == (["p0"], ["d0"])
    assert decode.hints.session == "me"
    pick(pool, "tiny", frozenset({"p0", "p1"}))
    assert prefill.shown == ["p0", "p1"], "where nobody else is, they are asked again"


async def test_whoever_has_no_room_is_not_shown_to_the_policy() -> None:
    router, _, decode = make_router()
    pool = make_fleet(router)
    full = pool.instances[3]
    held = await Held(full, full.capacity).wait()
    assert pick(pool).decoder is pool.instances[2]
    assert decode.shown == ["d0"]
    held.release()
    assert pick(pool).decoder is full


def test_nobody_takes_over_who_gets_no_attempts() -> None:
    pool = make_fleet()
    assert pool.has_other("d0", "tiny", frozenset({"d0"}))
    assert not pool.has_other("d0", "tiny", frozenset({"d0", "d1"}))
    pool.instances[3].drain()
    assert not pool.has_other("d0", "tiny", frozenset({"d0"}))
    assert not pool.has_other("nobody", "tiny", frozenset())


def test_hints_are_the_session_header_and_the_prompts_ids_or_its_beginning() -> None:
    router, _, _ = make_router()
    text = parse(COMPLETIONS, b'{"prompt": "' + b"a" * 100_000 + b'"}')
    hints = router.hints(text, None, {"x-session-id": "me"})
    assert hints.session == "me"
    assert isinstance(hints.prompt, memoryview)
    assert bytes(hints.prompt) == b'"' + b"a" * 65535
    assert router.hints(text, [1, 2], {}) == RoutingHints(prompt=[1, 2])
    chat = parse(CHAT, b'{"messages": [{"role": "user", "content": "hi"}]}')
    assert router.hints(chat, None, {}).prompt == b'[{"role": "user", "content": "hi"}]'


def test_no_hints_are_made_for_policies_that_use_none() -> None:
    router, _, _ = make_router(uses_hints=False)
    chat = parse(CHAT, b'{"messages": [{"role": "user", "content": "hi"}]}')
    assert router.hints(chat, [1, 2], {"x-session-id": "me"}) is NO_HINTS


# ── who can take a request, until that changes ──────────────────────────────────────────────────────────────────────


def lineups(pool: Pool, model: str | None = "tiny") -> tuple[CandidateSet[Instance], CandidateSet[Instance]]:
    """Prefillers, decoders: who can be asked now."""
    found = pool.admission.open_places(model)
    return found.lineup(False), found.lineup(True)


def members(pool: Pool, model: str | None = "tiny") -> list[list[str]]:
    found = pool.admission.open_places(model)
    return [sorted(place.name for place in found.of(is_owner)) for is_owner in (False, True)]


def test_the_lineups_stay_the_same_while_nobody_changes() -> None:
    pool = make_fleet()
    before = lineups(pool)
    for instance in pool.instances:
        instance.heard(facts(instance.role))
        instance.leg_finished(instance.leg_started(), "ok")
        instance.missed("late")
    assert lineups(pool) == before
    assert [[one.name for one in lineup.members] for lineup in before] == [["p0", "p1"], ["d0", "d1"]]


def fail(instance: Instance) -> None:
    instance.leg_finished(instance.leg_started(), "failed")


CHANGES: dict[str, Callable[[Pool, Instance], object]] = {
    "down": lambda pool, one: one.lost("silent"),
    "refused": lambda pool, one: one.suspect("refused", is_lost=True),
    "draining": lambda pool, one: one.drain(),
    "taken out": lambda pool, one: pool.take_out(one.name),
    "restarted": lambda pool, one: one.heard(facts(one.role, epoch="second")),
    "of another model": lambda pool, one: one.heard(replace(facts(one.role), models=frozenset({"huge"}))),
    "left alone": lambda pool, one: fail(one),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_who_can_take_no_request_is_in_no_lineup_any_more(name: str, change: str) -> None:
    pool = make_fleet(care=CARE)
    one = pool.find(name)
    assert one is not None
    assert name in chain(*members(pool))
    CHANGES[change](pool, one)
    assert list(chain(*members(pool))) == [other for other in ("p0", "p1", "d0", "d1") if other != name]
    for _ in range(4):
        route = pick(pool)
        assert one not in (route.prefiller, route.decoder)


def test_who_comes_up_joins_or_comes_back_is_in_the_lineup() -> None:
    pool = make_fleet()
    assert members(pool)[1] == ["d0", "d1"]
    late = make_instance("d2", admission=pool.admission, care=HealthPolicy(successes=1))
    pool.add(late)
    assert members(pool)[1] == ["d0", "d1"]
    make_ready(late)
    assert members(pool)[1] == ["d0", "d1", "d2"]
    late.lost("silent")
    assert members(pool)[1] == ["d0", "d1"]
    late.heard(facts("decode"))
    assert members(pool)[1] == ["d0", "d1", "d2"]


async def test_who_was_left_alone_is_tried_once_when_time_has_passed() -> None:
    """Nothing but the clock tells that: a cool-off ends by itself, and so does the wait for a probe's outcome."""
    clock = Clock()
    pool = pool_of(fleet_of("d0", "d1", "p0", care=CARE, clock=clock, admission=make_admission(clock)))
    sick = pool.instances[0]
    fail(sick)
    assert members(pool) == [["p0"], ["d1"]]
    for _ in range(2):
        clock.advance(5.0)
        for model in ("tiny", None):
            assert members(pool, model)[1] == ["d0", "d1"]
        demands = [Demand("a", "tiny", lambda shape: 1, age=0.0) for _ in range(4)]
        grants = [grant for demand in demands if (grant := pool.admission.bind_now(demand)) is not None]
        assert [grant.owner.name for grant in grants].count("d0") == 1
        assert members(pool)[1] == ["d1"], "somebody may try it"
        era = sick.leg_started()
        for model in ("tiny", None):
            assert members(pool, model)[1] == ["d1"], "one is trying"
        for grant in grants:
            pool.admission.give_back(grant)
    sick.leg_finished(era, "ok")
    assert members(pool)[1] == ["d0", "d1"]
    before = lineups(pool)
    assert lineups(pool) == before


def test_lineups_of_made_up_models_are_not_kept_for_ever() -> None:
    """Who names no models is taken to serve any; a stranger may ask for ever new ones."""
    admission = make_admission()
    pool = Pool(admission, (make_instance(role, role, admission=admission) for role in ROLES))
    for instance in pool.instances:
        instance.heard(replace(facts(instance.role), models=frozenset()))
        instance.proven()
    for number in range(3 * MAX_MODELS):
        pool.open_places(f"model-{number}")
        assert members(pool, f"model-{number}") == [["prefill"], ["decode"]]
    assert len(admission.kernel._open) <= MAX_MODELS


def test_models_that_the_same_instances_serve_share_their_lineups() -> None:
    """Adapters of one base model, for one: else everybody's load would be told once for each of them."""
    pool = make_fleet()
    for instance in pool.instances:
        names = {"base", "adapter"} if instance.name in ("p1", "d1") else {"base"}
        instance.heard(replace(facts(instance.role), models=frozenset(names)))
    base, adapter = lineups(pool, "base"), lineups(pool, "adapter")
    assert [lineup.members for lineup in adapter] == [(pool.instances[1],), (pool.instances[3],)]
    assert len(base[0].members) == 2
    for instance in pool.instances:
        instance.heard(replace(facts(instance.role), models=frozenset({"base", "adapter"})))
    base, adapter = lineups(pool, "base"), lineups(pool, "adapter")
    assert base == adapter
    assert base[0] is adapter[0]


def test_a_check_says_who_is_missing() -> None:
    pool = make_fleet()
    pool.open_places("tiny")
    with pytest.raises(ModelNotFound):
        pool.open_places("huge")
    pool.instances[0].drain()
    pool.instances[1].drain()
    with pytest.raises(NotReady, match="no prefill instance is ready"):
        pool.open_places("tiny")


def policies_of(name: str, seed: int) -> Router:
    prefill, decode = (make_policy(name, PolicyOptions(rng=random.Random(seed))) for _ in range(2))
    return Router(prefill_policy=prefill, decode_policy=decode, session_header="x")


async def test_the_least_loaded_is_known_whatever_changed_since_the_last_pick() -> None:
    admission = Admission(Kernel(policies_of("least_slots", 1)), clock=Clock())
    pool = Pool(admission, (make_instance(n, r, admission=admission) for n, r in EIGHT_PAGES))
    for instance in pool.instances:
        make_ready(instance, num_pages=8)
    decoders = pool.of_role("decode")
    held = {one: await Held(one, 6).wait() for one in decoders}
    for idle in decoders * 2:
        grant = held[idle].grant
        assert grant is not None
        admission.shrink(grant.leases[0], 5)
        assert pick(pool).decoder is idle
        held[idle].release()
        assert pick(pool).decoder is idle
        held[idle] = await Held(idle, 6).wait()


EIGHT_PAGES: list[tuple[str, Role]] = [("p0", "prefill"), ("d0", "decode"), ("d1", "decode"), ("d2", "decode")]


@pytest.mark.parametrize("name", ["round_robin", "least_slots", "power_of_two"])
def test_who_came_back_gets_its_full_share_once_its_ramp_is_over(name: str) -> None:
    clock = Clock()
    care = HealthPolicy(successes=1, slow_start=SlowStart(ramp_s=10.0, floor=0.1))
    admission = Admission(Kernel(policies_of(name, 3)), clock=clock)
    pool = pool_of(fleet_of("p0", "d0", "d1", "d2", care=care, clock=clock, admission=admission))
    back = pool.instances[1]
    back.lost("silent")
    back.heard(facts("decode"))

    def share() -> float:
        return sum(pick(pool).decoder is back for _ in range(300)) / 300

    assert share() == pytest.approx(0.1 / 2.1, abs=0.03)
    before = lineups(pool)
    clock.advance(10.0)
    assert share() == pytest.approx(1 / 3, abs=0.06)
    assert lineups(pool) == before


def test_nobody_is_told_of_load_for_a_lineup_that_has_ended() -> None:
    pool = make_fleet(policies_of("least_queued_tokens", 1))
    for number in range(5):
        pick(pool)
        pick(pool, None, frozenset({"p0"}))
        pool.instances[0].heard(facts("prefill", epoch=f"epoch-{number}"))
        pool.instances[0].proven()
    pick(pool)
    assert [len(instance.watched_by) for instance in pool.instances] == [1, 1, 1, 1]


def test_who_was_avoided_once_is_not_told_of_load_for_that_ever_after() -> None:
    admission = Admission(Kernel(policies_of("least_queued_tokens", 1)), clock=Clock())
    pool = pool_of(fleet_of("p0", "d0", "d1", "d2", admission=admission))
    pick(pool)
    for name in ("d0", "d1", "d2", "d0"):
        pick(pool, avoid=frozenset({name}))
    assert [len(decoder.watched_by) for decoder in pool.of_role("decode")] == [1, 1, 1]


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
