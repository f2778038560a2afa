"""Requests through a front, whose leader admits them, and what becomes of them when either goes."""

from __future__ import annotations

import asyncio
import random
import socket
from dataclasses import replace
from typing import Any, cast

import pytest

from pdproxy import serve
from pdproxy.admission.custody import Evidence
from pdproxy.config.instances import InstanceSettings
from pdproxy.fronts import channel, messages
from pdproxy.fronts.front import assemble_front
from pdproxy.fronts.front_admission import MAX_UNSENT_BYTES
from tests.fakes.fake_engine import FakeClient, FakeEngine
from tests.fakes.proxy_harness import WAYS, Harness, Way, proxy_in_front_of, until


def owner_of(house: Harness) -> Any:
    assert house.leader is not None
    return house.leader.pool.of_role("decode")[0]


@pytest.mark.parametrize("way", WAYS)
async def test_a_front_serves_as_the_proxy_does(way: Way) -> None:
    async with proxy_in_front_of(way=way, by_front=True) as house:
        answers = [await house.post(stream=stream) for stream in (False, True)]
        assert [answer.status for answer in answers] == [200, 200]
        owner = owner_of(house)
        await until(lambda: owner.held == 0)
        assert owner.account.granted_total == 2 + 1, "two requests, and the canary before them"


async def test_the_leaders_line_is_the_fronts_line() -> None:
    """A request that does not fit waits at the leader, and goes when the one before it gives its pages back."""
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=1)], by_front=True) as house:
        house.prefiller.hang_at.add("prefill")
        first, second = house.call(), house.call()
        await until(lambda: owner_of(house).pages.num_waiting == 1)
        house.prefiller.let_go("prefill")
        assert [(await call.answer()).status for call in (first, second)] == [200, 200]


async def test_a_client_that_leaves_the_line_leaves_it_at_the_leader() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=1)], by_front=True) as house:
        house.prefiller.hang_at.add("prefill")
        first, second = house.call(), house.call()
        await until(lambda: owner_of(house).pages.num_waiting == 1)
        second.leave()
        await second.done()
        await until(lambda: owner_of(house).pages.num_waiting == 0)
        house.prefiller.let_go("prefill")
        assert (await first.answer()).status == 200


async def test_a_grant_that_meets_its_cancellation_comes_back() -> None:
    """The client leaves while the grant is on its way: nobody waits for it any more when it arrives."""
    async with proxy_in_front_of(by_front=True) as house:
        admission = house.admission
        granted, late = admission.granted, []
        admission.granted = lambda *grant: late.append(grant)
        call = house.call()
        await until(lambda: bool(late))
        call.leave()
        await call.done()
        admission.granted = granted
        granted(*late[0])
        await until(lambda: owner_of(house).held == 0)
        assert house.leader is not None
        assert house.leader.pool.admission.kernel.freed[Evidence.NEVER_SENT] == 1


async def test_errors_of_the_line_are_the_same() -> None:
    options = {"slot_timeout_s": 0.05, "max_queue": 1, "affinity_wait_s": 0.01}
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=1)], by_front=True, **options) as house:
        house.prefiller.hang_at.add("prefill")
        first, second = house.call(), house.call()
        await until(lambda: owner_of(house).pages.num_waiting == 1)
        full = await house.post()
        assert (full.status, full.json()["error"]["code"]) == (429, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        late = await second.answer()
        assert (late.status, late.json()["error"]["code"]) == (503, "queue_timeout")
        house.prefiller.let_go("prefill")
        await first.answer()


async def test_an_instance_that_joins_is_known_to_those_who_wait() -> None:
    """An owner of another size joins: a front that waits is asked what it takes there, and is not told that nobody can
    serve it."""
    small, large = FakeEngine("decode", num_pages=1), FakeEngine("decode", num_pages=7)
    async with proxy_in_front_of(decoders=[small], by_front=True) as house:
        assert house.leader is not None
        large.port, large.epoch, large.sink = 7400, "another", small.sink
        large.prefillers, house.prefiller.decoders = house.prefillers, [small, large]
        house.prefiller.hang_at.add("prefill")
        house.prefiller.forget()
        first, second = house.call(), house.call()
        await until(lambda: owner_of(house).pages.num_waiting == 1)
        await house.prefiller.reached("prefill")
        house.by_url["http://d9:1"] = FakeClient(large)
        house.leader.membership.add(InstanceSettings(name="large", role="decode", url="http://d9:1"))
        house.prefiller.hang_at.discard("prefill")
        await until(lambda: house.leader is not None and house.leader.pool.instances[-1].is_ready)
        answer = await second.answer()
        assert (answer.status, answer.headers["x-pdproxy-decoder"]) == (200, "large")
        house.prefiller.let_go("prefill")
        await first.answer()
        await until(lambda: house.leader is not None and not house.leader.pool.instances[-1].held)


async def test_a_front_without_a_leader_finishes_what_runs_and_refuses_the_rest() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=2)], by_front=True) as house:
        house.decoder.hang_at.add("first")
        running = house.call(stream=True)
        await house.decoder.reached("first")
        await until(lambda: owner_of(house).num_legs == 1)
        house.cut()
        await until(lambda: not house.admission.has_leader)
        refused = await house.post()
        assert (refused.status, refused.json()["error"]["code"]) == (503, "no_ready_instance")
        house.decoder.let_go("first")
        assert (await running.answer()).status == 200


@pytest.mark.parametrize("seed", range(6))
async def test_a_front_that_dies_leaves_nothing_behind(seed: int) -> None:
    """At any moment, with requests in every phase. What it held comes back by an errand of the leader's, or when the
    engines' own lease is over, and not before."""
    dice = random.Random(seed)
    print(f"seed {seed}")
    prefillers, decoders = ([FakeEngine(role, num_pages=6) for _ in range(2)] for role in ("prefill", "decode"))
    options: dict[str, Any] = {"kv_timeout_s": 0.05, "probe_interval_s": 0.01, "engine_lease_s": 0.2}
    async with proxy_in_front_of(list(prefillers), list(decoders), by_front=True, **options) as house:
        calls = []
        for _ in range(40):
            tokens = [1] * dice.randrange(1, 97)
            calls.append(house.call(prompt=tokens, stream=dice.random() < 0.5, max_tokens=dice.randrange(1, 9)))
            for _ in range(dice.randrange(8)):
                await asyncio.sleep(0)
        for _ in range(dice.randrange(120)):
            await asyncio.sleep(0)
        house.cut()
        statuses = [(await call.answer()).status for call in calls]
        assert set(statuses) <= {200, 503}, statuses
        assert house.leader is not None
        assert sum(one.account.granted_total for one in house.leader.pool.of_role("decode") if one.account) > 2


async def test_a_front_keeps_no_shapes_of_engines_that_are_gone() -> None:
    """Each request is counted for each shape, and an engine may find room for another number of pages at each start."""
    async with proxy_in_front_of(by_front=True) as house:
        front: Any = house.proxy
        place, known = front.pool.of_role("decode")[0].number, front.pool.of_role("decode")[0].facts
        told = front.channel.handlers[messages.Facts]
        for count in range(20):
            told(messages.Facts(place, replace(known, epoch=f"start {count}", num_pages=100 + count), 100 + count))
        assert len(front.admission.shapes) <= 2
        told(messages.Facts(place, known, 1))
        assert (await house.post()).status == 200


async def test_a_front_does_not_mind_news_of_an_instance_that_it_has_let_go() -> None:
    async with proxy_in_front_of(by_front=True) as house:
        front: Any = house.proxy
        front.channel.handlers[messages.Tokenizer](messages.Tokenizer(99, None, None, "", None))


async def test_engines_signal_the_leaders_port_where_that_is_given() -> None:
    """No instance that signals need have joined when the front starts, so that the leader need not listen yet."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        front = assemble_front(messages.Welcome(messages.PROTOCOL, {"proxy_port": 9470}, 2, "nowhere"), theirs)
        assert front.orchestrator._disaggregated._notify() == "tcp://127.0.0.1:9470"


async def test_a_server_that_retires_cuts_no_request_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes, and however patient it is with clients that want nothing."""
    monkeypatch.setattr(serve, "KEEP_ALIVE_S", 0)
    async with proxy_in_front_of(drain_timeout_s=0.01) as house:
        server = serve.Server(house.proxy)
        server.servers = []
        house.decoder.hang_at.add("first")
        call = house.call(stream=True)
        await house.decoder.reached("first")
        server.server_state.connections.add(cast(Any, object()))  # the client's, of which it has said nothing
        server.retire()
        assert not await server.on_tick(0)
        house.decoder.let_go("first")
        assert (await call.answer()).status == 200
        await until(lambda: not house.proxy.orchestrator.num_requests)
        assert await server.on_tick(0)


async def test_a_grant_of_an_owner_that_cannot_serve_it_is_given_back_and_asked_for_anew() -> None:
    """The leader did not know: the owner has said something else of itself in that moment."""
    decoders = [FakeEngine("decode", num_pages=num) for num in (8, 9)]
    async with proxy_in_front_of(decoders=decoders, by_front=True) as house:
        asked, granted = house.admission._asked, house.admission.granted
        unfit: list[str] = []

        def late(attempt: str, owner: Any, *rest: Any) -> bool:
            if not unfit:
                unfit.append(owner.name)
                asked[attempt]._sizes[owner.shape] = None
            return granted(attempt, owner, *rest)

        house.admission.granted = late
        answer = await house.post()
        assert answer.status == 200
        assert answer.headers["x-pdproxy-decoder"] not in unfit
        assert house.leader is not None
        assert house.leader.pool.admission.kernel.freed[Evidence.NEVER_SENT] == 1


async def test_a_leader_that_takes_nothing_is_not_told_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_in_front_of(by_front=True) as house:
        monkeypatch.setattr(channel.Channel, "num_unsent_bytes", MAX_UNSENT_BYTES + 1)
        refused = await house.post()
        assert (refused.status, refused.json()["error"]["code"]) == (503, "no_ready_instance")
        monkeypatch.undo()
        assert (await house.post()).status == 200


async def test_what_is_too_long_for_a_frame_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_FRAME_BYTES", 512)
    async with proxy_in_front_of(by_front=True) as house:
        answers = await asyncio.gather(*(house.post(prompt="a b c " * 5) for _ in range(12)))
        assert {answer.status for answer in answers} == {200}
