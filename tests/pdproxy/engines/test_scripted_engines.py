"""The scripted engines themselves: what can happen to one as a whole, and that it tells how much it holds."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.engines.http.base import EngineBroken, EngineRefused
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.vllm_nixl import VllmNixlAdapter
from tests.fakes.at_once_engine import AtOnceEngine, Meetings
from tests.fakes.calls import until
from tests.fakes.fake_engine import FakeClient, FakeEngine, ScriptedEngine
from tests.fakes.fake_lmcache import FakeLMCache
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.proxy_harness import proxy_in_front_of
from transfer.wire import AnySignal, KvFailed, KvReady, KvReleased

COMPLETIONS = "/v1/completions"
MAKE: dict[str, Callable[[], ScriptedEngine]] = {
    "builtin": lambda: FakeEngine("decode"),
    "nixl": lambda: FakeNixl("decode"),
    "lmcache": lambda: FakeLMCache("decode"),
    "mooncake": lambda: AtOnceEngine("mooncake", "decode", Meetings()),
}


@pytest.fixture(params=MAKE)
def client(request: pytest.FixtureRequest) -> FakeClient:
    """A client in front of a decoder of each kind."""
    return FakeClient(MAKE[request.param]())


async def ask(client: FakeClient, request_id: str | None = None, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": 8} | fields
    headers = {"x-request-id": request_id or uuid.uuid4().hex}
    return await client.post(COMPLETIONS, json.dumps(body).encode(), headers)


def waiting(work: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(work)


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# ── its address refuses connections ─────────────────────────────────────────────────────────────────────────────────


async def test_a_refused_connection_leaves_what_is_under_way_and_what_it_holds(client: FakeClient) -> None:
    engine = client.engine
    engine.pages["a"] = 3
    leg = await ask(client, stream=True)
    with client.refusing():
        with pytest.raises(EngineRefused):
            await ask(client)
        with pytest.raises(EngineRefused):
            await client.get("/health", timeout_s=1)
        assert await leg.read()
        assert (engine.pages, engine.life) == ({"a": 3}, 1)
    assert (await ask(client)).status == 200


# ── it stands still ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_frozen_engine_neither_answers_nor_resets(client: FakeClient) -> None:
    engine = client.engine
    leg = await ask(client, stream=True)
    first = await leg.read_chunk()
    with engine.frozen():
        new, rest = waiting(ask(client)), waiting(leg.read())
        await some_turns()
        assert not new.done()
        assert not rest.done()
        assert len(engine.calls) == 1, "it has not read the new one"
    assert (await new).status == 200
    assert (first + await rest).endswith(b"data: [DONE]\n\n")


async def test_a_look_at_a_frozen_engine_ends_with_its_time(client: FakeClient) -> None:
    with client.engine.frozen(), pytest.raises(EngineBroken, match=r"no answer within 0\.01 s"):
        await client.get("/health", timeout_s=0.01)
    await client.get("/v1/models", timeout_s=0.01)


async def test_frozen_at_a_point_it_goes_on_when_it_is_thawed() -> None:
    client = FakeClient(FakeEngine("decode"))
    client.engine.hang_at.add("decode")
    call = waiting(ask(client))
    await client.engine.reached("decode")
    with client.engine.frozen():
        client.engine.let_go("decode")
        await some_turns()
        assert not call.done()
    assert (await call).status == 200


async def test_it_notices_a_closed_leg_when_it_is_thawed() -> None:
    engine = FakeNixl("decode")
    leg = await ask(FakeClient(engine), stream=True)
    assert engine.num_occupied == 1
    with engine.frozen():
        leg.close()
        assert engine.num_occupied == 1
    assert engine.num_occupied == 0


async def test_a_push_to_a_frozen_decoder_waits() -> None:
    prefiller, decoder = pair()
    with decoder.frozen():
        call = waiting(push(prefiller, "a"))
        await some_turns()
        assert (call.done(), decoder.pages) == (False, {})
    await call
    assert decoder.pages == {"a": 1}


def test_it_is_frozen_once() -> None:
    engine = FakeEngine("decode")
    with engine.frozen(), pytest.raises(AssertionError, match="already"):
        engine.freeze()
    with pytest.raises(AssertionError, match="not frozen"):
        engine.thaw()


# ── another process ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_restart_breaks_what_is_under_way_and_leaves_nothing(client: FakeClient) -> None:
    engine = client.engine
    engine.pages["a"] = 3
    before = engine.epoch
    leg = await ask(client, stream=True)
    engine.restart()
    with pytest.raises(EngineBroken, match="reset"):
        await leg.read()
    leg.close()
    assert (engine.num_occupied, engine.life) == (0, 2)
    assert engine.epoch != before
    assert (await ask(client)).status == 200


@pytest.mark.parametrize("point", ["decode", "first", "middle"])
async def test_who_hangs_at_a_point_when_it_restarts(point: str) -> None:
    client = FakeClient(FakeEngine("decode"))
    client.engine.hang_at.add(point)

    async def read() -> bytes:
        leg = await ask(client, stream=True)
        data: bytes = await leg.read()
        return data

    call = waiting(read())
    await client.engine.reached(point)
    client.engine.restart()
    with pytest.raises(EngineBroken):
        await call
    client.engine.hang_at.clear()
    assert b"[DONE]" in await read()


async def test_a_frozen_engine_that_is_restarted_serves(client: FakeClient) -> None:
    client.engine.freeze()
    call = waiting(ask(client))
    await some_turns()
    client.engine.restart()
    with pytest.raises(EngineBroken):
        await call
    assert not client.engine.is_frozen
    assert (await ask(client)).status == 200


async def test_what_the_old_process_would_have_noticed_is_no_concern_of_the_new_one() -> None:
    engine = FakeNixl("decode")
    client = FakeClient(engine)
    old = await ask(client, "same", stream=True)
    engine.freeze()
    old.close()
    engine.restart()
    await ask(client, "same", stream=True)
    assert engine.running == {"same": 1}


# ── what it holds ───────────────────────────────────────────────────────────────────────────────────────────────────


def pair(**options: Any) -> tuple[FakeEngine, FakeEngine]:
    prefiller, decoder = FakeEngine("prefill"), FakeEngine("decode", **options)
    prefiller.decoders = [decoder]
    return prefiller, decoder


async def push(prefiller: FakeEngine, attempt: str, num_tokens: int = 3) -> None:
    params = {"attempt": attempt, "receivers": [{"port": prefiller.decoders[0].port}]}
    await (await ask(FakeClient(prefiller), prompt=[1] * num_tokens, kv_transfer_params=params)).read()


def heard(decoder: FakeEngine) -> list[AnySignal]:
    signals: list[AnySignal] = []
    decoder.sink = signals.append
    return signals


async def told(engine: FakeEngine) -> EngineInfo:
    """As an adapter reads it of what a client gets."""
    client = FakeClient(engine)
    answers = {path: (await client.get(path, timeout_s=1))[1] for path in ("/kv_buffer", "/v1/models")}
    assert json.loads(answers["/kv_buffer"])["num_reservations_waited"] == engine.num_reservations_waited
    return engine.known_facts()


async def test_a_buffer_tells_how_much_of_it_is_in_use() -> None:
    prefiller, decoder = pair()
    assert (await told(decoder)).num_occupied == 0
    await push(prefiller, "a", num_tokens=40)
    assert (await told(decoder)).num_occupied == decoder.num_occupied == 3
    assert (await told(prefiller)).num_occupied is None
    await FakeClient(decoder).post("/kv_transfer/cancel", b'{"attempt":"a"}', {})
    assert (await told(decoder)).num_occupied == 0


async def test_pushes_beyond_the_buffer_are_counted() -> None:
    prefiller, decoder = pair(num_pages=4)
    await push(prefiller, "a", num_tokens=40)
    await push(prefiller, "b")
    assert decoder.num_reservations_waited == 0
    await push(prefiller, "c")
    await push(prefiller, "d")
    assert ((await told(decoder)).num_occupied, decoder.num_reservations_waited) == (4, 2)
    decoder.restart()
    assert ((await told(decoder)).num_occupied, decoder.num_reservations_waited) == (0, 0)


async def test_what_cannot_be_dropped_yet_is_held() -> None:
    prefiller, decoder = pair()
    signals = heard(decoder)
    decoder.answers_cancel = False
    await push(prefiller, "a")
    leg = await FakeClient(decoder).post("/kv_transfer/cancel", b'{"attempt":"a"}', {})
    assert json.loads(await leg.read()) == {"released": False}
    assert decoder.num_occupied == 1
    decoder.release("a", "cancelled")
    assert decoder.num_occupied == 0
    assert [type(signal) for signal in signals] == [KvReady, KvReleased]


async def test_a_lease_ends() -> None:
    prefiller, decoder = pair(num_ranks=2)
    signals = heard(decoder)
    decoder.lease_s = 0.01
    await push(prefiller, "a")
    assert decoder.num_occupied == 1
    await until(lambda: decoder.num_occupied == 0)
    assert decoder.expired == ["a"]
    assert [type(signal) for signal in signals] == [KvReady] * 2 + [KvFailed] * 2 + [KvReleased] * 2
    assert isinstance(signals[-1], KvReleased)
    assert signals[-1].reason == "expired"


async def test_a_lease_that_ends_while_it_is_frozen_ends_when_it_is_thawed() -> None:
    prefiller, decoder = pair()
    decoder.lease_s = 0.01
    await push(prefiller, "a")
    with decoder.frozen():
        await asyncio.sleep(0.03)
        assert (decoder.num_occupied, decoder.expired) == (1, [])
    assert (decoder.num_occupied, decoder.expired) == (0, ["a"])


@pytest.mark.parametrize("how", ["cancelled", "restarted"])
async def test_what_is_gone_does_not_expire(how: str) -> None:
    prefiller, decoder = pair()
    decoder.lease_s = 0.01
    await push(prefiller, "a")
    if how == "cancelled":
        await FakeClient(decoder).post("/kv_transfer/cancel", b'{"attempt":"a"}', {})
    else:
        decoder.restart()
    decoder.lease_s = None
    await push(prefiller, "a")
    await asyncio.sleep(0.03)
    assert (decoder.pages, decoder.expired) == ({"a": 1}, [])


async def test_blocks_of_a_prefiller_are_told_as_a_share() -> None:
    prefiller = FakeNixl("prefill", num_pages=30)
    for held in (0, 7, 30):
        prefiller.pages["a"] = held
        client, adapter = FakeClient(prefiller), VllmNixlAdapter("prefill")
        answers = {path: (await client.get(path, timeout_s=1))[1] for path in adapter.looks}
        facts = adapter.read_facts(answers)
        assert (facts.num_pages, facts.num_occupied) == (30, held)


# ── behind a proxy ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_outlives_a_moment_in_which_its_decoder_stands_still() -> None:
    async with proxy_in_front_of() as house:
        with house.decoder.frozen():
            call = house.call(stream=True)
            await house.prefiller.reached("prefill")
            await some_turns()
            assert house.decoder.pages == {}
        answer = await call.answer()
        assert (answer.status, house.decoder.num_occupied) == (200, 0)


async def test_a_proxy_sees_that_a_decoder_is_another_process() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.restart()
        decoder = house.proxy.pool.of_role("decode")[0]
        await house.proxy.probe.look(decoder)
        await house.is_ready()
        assert decoder.facts is not None
        assert decoder.facts.epoch == house.decoder.epoch
        assert (await house.post()).status == 200
