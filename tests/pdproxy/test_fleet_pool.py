"""Who may be asked, who joins, and who leaves only when nothing is under way any more."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.errors import ModelNotFound, NotReady
from pdproxy.fleet.base import Candidate, RoutingHints
from pdproxy.fleet.breaker import BreakerLimits
from pdproxy.fleet.instance import Care
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.routing import Router
from pdproxy.request.openai import CHAT, COMPLETIONS, parse
from tests.fakes.fake_engine import FakeEngine, error_reply
from tests.fakes.fleet import Clock, make_instance, make_ready
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
    """Implements `base.Policy`: the last of those it is shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.hints = RoutingHints()

    def pick(self, candidates: object, hints: RoutingHints) -> Candidate:
        assert isinstance(candidates, list)
        self.shown, self.hints = [candidate.name for candidate in candidates], hints
        picked: Candidate = candidates[-1]
        return picked


def make_router(pool: Pool) -> tuple[Router, Noting, Noting]:
    policies = Noting(), Noting()
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
    assert isinstance(hints.prompt, bytes)
    assert hints.prompt.startswith(b'"aaa')
    assert len(hints.prompt) == 65536
    assert router.hints(text, [1, 2], {}) == RoutingHints(prompt=[1, 2])
    chat = parse(CHAT, b'{"messages": [{"role": "user", "content": "hi"}]}')
    assert router.hints(chat, None, {}).prompt == b'[{"role": "user", "content": "hi"}]'


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
