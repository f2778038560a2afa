"""Engines whose decoder pulls the KV out of the prefiller's blocks (vLLM's NixlConnector), behind the whole proxy.

Leaving the harness checks that nothing is held; `nixl_pair` looks into the engines' own books as well.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.admission import orphans
from pdproxy.config.instances import InstanceSettings
from pdproxy.engines.vllm_nixl import NOBODY
from pdproxy.fleet.instance import Health
from tests.fakes.fake_engine import BROKEN, WORDS, FakeReply, error_reply
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.proxy_harness import Answer, Harness, proxy_in_front_of, until

pytestmark = pytest.mark.usefixtures("relay_way")

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "tell me"}]
TEXT = "".join(WORDS)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
PLAIN = {"model": "tiny", "max_tokens": 8, "prompt": "a b c"}


@asynccontextmanager
async def nixl_pair(num_prefillers: int = 1, num_decoders: int = 1, **options: Any) -> AsyncIterator[Harness]:
    """On the way out every block and every page is free, without any lease having run out."""
    prefillers = [FakeNixl("prefill") for _ in range(num_prefillers)]
    decoders = [FakeNixl("decode") for _ in range(num_decoders)]
    async with proxy_in_front_of(prefillers, decoders, **options) as house:
        yield house
        await house.settled()
        for prefiller in prefillers:
            assert (prefiller.pages, prefiller.running) == ({}, {})
            assert prefiller.expired == []
            assert prefiller.most_pages <= prefiller.num_pages
        for decoder in decoders:
            assert (decoder.running, decoder.wrong_pulls) == ({}, [])


def errands(decoder: FakeNixl) -> list[dict[str, Any]]:
    return [call.body for call in decoder.calls if call.body.get("model") == json.loads(bytes(NOBODY))]


def outcomes(house: Harness) -> dict[str, int]:
    statistics = house.proxy.reaper.statistics()
    return {name: number for name, number in statistics.items() if number and name != "adopted"}


async def metric(house: Harness, name: str) -> str:
    page = (await house.get("/metrics")).body.decode()
    return next((line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith(name)), "")


# ── served ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_answer_is_the_decoders(path: str, stream: bool) -> None:
    async with nixl_pair() as house:
        extra: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {}
        answer = await house.post(path, stream=stream, **extra)
        assert answer.headers["x-pdproxy-path"] == "disaggregated"
        if stream:
            assert answer.text() == TEXT
        else:
            choice = answer.json()["choices"][0]
            assert (choice["message"]["content"] if path == CHAT else choice["text"]) == TEXT
            assert answer.json()["kv_transfer_params"] is None
        assert "remote_request_id" not in answer.body.decode()


async def test_handoff_reaches_the_decoder_byte_for_byte() -> None:
    async with nixl_pair() as house:
        await house.post(prompt=[1, 2, 3])
        [prefill], [decode] = house.prefiller.generations(), house.decoder.generations()
        key = prefill.headers["x-request-id"]
        assert house.prefiller.handoff.encode() % key.encode() in decode.raw
        assert prefill.body["kv_transfer_params"] == {"do_remote_decode": True}
        assert key != decode.headers["x-request-id"] or key.endswith(house.proxy.recent.facts()[0]["attempt"])


async def test_a_text_is_tokenized_once() -> None:
    async with nixl_pair() as house:
        await house.post(prompt="a b c", stream=True)
        [decode] = house.decoder.generations()
        assert decode.body["prompt"] == [8, 9, 10]
        await house.post(CHAT, messages=MESSAGES)
        chat = house.decoder.generations()[-1].body
        assert chat["messages"] == MESSAGES
        assert len(chat["kv_transfer_params"]["prompt_token_ids"]) == 2


async def test_a_strangers_kv_params_are_removed() -> None:
    async with nixl_pair() as house:
        await house.post(kv_transfer_params={"remote_request_id": "x"}, bootstrap_room=1, bootstrap_host="h")
        for engine in (house.prefiller, house.decoder):
            [call] = engine.generations()
            assert not {"bootstrap_room", "bootstrap_host"} & call.body.keys()
            assert call.body["kv_transfer_params"].get("remote_request_id") != "x"


async def test_a_decoder_serves_alone_without_any_handoff() -> None:
    async with nixl_pair() as house:
        answer = await house.post(n=2, kv_transfer_params={"remote_request_id": "x"})
        assert answer.headers["x-pdproxy-path"] == "local"
        assert "kv_transfer_params" not in house.decoder.generations()[0].body
        one = await house.post(max_tokens=1)
        assert one.headers["x-pdproxy-path"] == "prefill_only"
        assert house.prefiller.generations()[0].body.get("kv_transfer_params") is None


# ── slots: the prefiller's blocks ───────────────────────────────────────────────────────────────────────────────────


async def test_slots_are_the_prefillers_blocks() -> None:
    async with nixl_pair() as house:
        prefiller, decoder = house.proxy.pool.instances
        assert prefiller.known_facts.num_pages == house.prefiller.num_pages
        assert not decoder.is_owner
        house.prefiller.hang_at.add("prefill_done")
        call = house.call(prompt=[1] * 40)
        await house.prefiller.reached("prefill_done")
        assert prefiller.held == sum(house.prefiller.pages.values()) == 3
        call.leave()
        await call.done()


async def test_a_full_prefiller_lets_requests_wait() -> None:
    async with nixl_pair() as house:
        house.decoder.hang_at.add("decode")
        first = house.call(prompt=[1] * 16 * 60)
        await house.decoder.reached("decode")
        second = house.call(prompt=[1] * 16 * 60)
        await until(lambda: house.proxy.pool.instances[0].admission.num_waiting == 1)
        assert len(house.prefiller.generations()) == 1
        house.decoder.let_go("decode")
        assert (await first.answer()).status == (await second.answer()).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_slots_come_back_with_the_first_event_that_says_something(path: str) -> None:
    async with nixl_pair() as house:
        chat: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {}
        events = house.decoder.stream(path, {"prompt": "a b c", "model": "tiny"})
        script: list[bytes | Exception | str] = [*events[:1], "said", *events[1:2], "then", *events[2:]]
        house.decoder.answer = scripted(house.decoder, script)
        house.decoder.hang_at = {"said", "then"}
        call = house.call(path, stream=True, **chat)
        await house.decoder.reached("said")
        if chat:
            assert house.held > 0, "a role says nothing"
            assert not call.is_started
            house.decoder.let_go("said")
            await house.decoder.reached("then")
        await until(lambda: house.held == 0)
        house.decoder.let_go("said")
        house.decoder.let_go("then")
        assert (await call.answer()).text() == TEXT


def scripted(engine: FakeNixl, script: list[bytes | Exception | str]) -> Any:
    """Its stream, with points between the events."""

    async def answer(path: str, body: dict[str, Any], key: str) -> FakeReply:
        return FakeReply(200, list(script), {"content-type": "text/event-stream"})

    return answer


async def test_slots_of_a_whole_answer_come_back_with_the_first_event_of_its_stream() -> None:
    async with nixl_pair() as house:
        house.decoder.hang_at |= {"first", "middle"}
        call = house.call()
        await house.decoder.reached("first")
        assert house.held == 1
        house.decoder.let_go("first")
        await house.decoder.reached("middle")
        await until(lambda: house.held == 0)
        assert not call.is_started
        house.decoder.let_go("middle")
        assert (await call.answer()).json() == house.decoder.whole("/v1/completions", PLAIN)


async def test_slots_of_an_answer_that_is_asked_for_as_a_whole_come_back_at_its_end() -> None:
    async with nixl_pair() as house:
        house.decoder.hang_at.add("first")
        call = house.call(CHAT, messages=MESSAGES, tools=TOOLS)
        await house.decoder.reached("first")
        assert house.held == 1
        house.decoder.let_go("first")
        call.block()
        await call.first_byte.wait()
        assert house.held == 0, "a slow client holds no blocks"
        call.unblock()
        assert (await call.answer()).status == 200
        assert outcomes(house) == {}


# ── what goes wrong ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
async def test_prefiller_that_hands_nothing_over_is_noticed(stream: bool) -> None:
    async with nixl_pair(retries=0) as house:
        house.prefiller.keeps_kv = False
        answer = await house.post(stream=stream)
        assert (answer.status, answer.error["code"]) == (502, "kv_not_handed_over")
        assert answer.headers["x-pdproxy-path"] == "disaggregated"
        assert house.decoder.generations() == [], "never a silent decode-only"
        leg = 'pdproxy_legs_total{instance="prefill-0",leg="prefill",outcome="no_handoff"}'
        assert await metric(house, leg) == "1.0"


async def test_another_prefiller_may_hand_over() -> None:
    async with nixl_pair(num_prefillers=2) as house:
        house.prefillers[0].keeps_kv = False
        for _ in range(2):
            assert (await house.post()).status == 200
        assert len(house.decoder.generations()) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_ends_at_its_first_token_is_the_prefillers(stream: bool) -> None:
    async with nixl_pair() as house:
        house.prefiller.finish_at_first = "stop"
        answer = await house.post(stream=stream)
        assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "prefill_only")
        assert "remote_request_id" not in answer.body.decode()
        text = answer.text() if stream else answer.json()["choices"][0]["text"]
        assert text == WORDS[0]
        await house.settled()
        assert len(errands(house.decoder)) == len(house.decoder.generations()) == 1
        assert outcomes(house) == {"dropped": 1}


ERROR = b'data: {"error": {"message": "KV load failure", "type": "InternalServerError", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"


async def test_error_in_the_first_event_is_tried_elsewhere() -> None:
    async with nixl_pair(num_prefillers=2, num_decoders=2) as house:
        role = house.decoder.stream(CHAT, {"messages": MESSAGES})[0]
        house.decoders[0].events = [role, ERROR, DONE]
        for _ in range(2):
            answer = await house.post(CHAT, messages=MESSAGES, stream=True)
            assert (answer.status, answer.text()) == (200, TEXT)
        decoders = {len(decoder.generations()) > 0 for decoder in house.decoders}
        assert decoders == {True}
        assert max(record["attempts"] for record in house.proxy.recent.facts()[:2]) == 2


async def test_error_after_the_first_event_ends_the_stream_by_an_error() -> None:
    async with nixl_pair(num_decoders=2) as house:
        events = house.decoder.stream("/v1/completions", {"prompt": "a b c"})
        for decoder in house.decoders:
            decoder.events = [*events[:2], ERROR, DONE]
        answer = await house.post(stream=True)
        assert answer.status == 200
        assert "error" in answer.events()[-1]
        assert len(house.prefiller.generations()) == 1, "it cannot be resumed"


@pytest.mark.parametrize("lease_s", [0.05, None])
async def test_decoder_must_begin_before_the_lease_is_over(lease_s: float | None) -> None:
    """Blocks whose lease is over may be another request's: reading those gives a wrong answer, not an error."""
    async with nixl_pair(engine_lease_s=lease_s, retries=0) as house:
        house.limit(first_byte_timeout_s=5.0 if lease_s else 0.03)
        house.decoder.hang_at.add("first")
        answer = await house.post(stream=True)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert ("0.04 s" if lease_s else "0.03 s") in answer.error["message"]


@pytest.mark.parametrize("is_frozen", [False, True])
async def test_whole_answer_is_waited_for_while_its_prefiller_is_well(is_frozen: bool) -> None:
    """It has no first event; a decoder that pulls from a frozen process waits for ever."""
    async with nixl_pair(retries=0) as house:
        house.limit(first_byte_timeout_s=0.02)
        house.decoder.hang_at.add("decode")
        call = house.call(CHAT, messages=MESSAGES, tools=TOOLS)
        await house.decoder.reached("decode")
        if is_frozen:
            house.proxy.pool.instances[0].missed("no answer in time")
            answer = await call.answer()
            assert (answer.status, answer.error["code"]) == (502, "leg_failed")
            assert "prefill-0" in answer.error["message"]
        else:
            await asyncio.sleep(0.04)
            house.decoder.let_go("decode")
            assert (await call.answer()).status == 200


LOST, FLAPPING, RESTARTED, WELL = "lost", "flapping", "restarted", "well"


@pytest.mark.parametrize("state", [LOST, FLAPPING, RESTARTED, WELL])
async def test_stream_is_waited_for_while_its_prefiller_is_well(state: str) -> None:
    """A decoder that pulls from a process which has frozen, or is not there any more, says nothing until its time is
    over, and is not to blame. A prefiller that has missed one look, or refused one connection, may be well."""
    async with nixl_pair() as house:
        house.limit(first_byte_timeout_s=1.5, _probe_timeout_s=0.3)
        prefiller, decoder = house.proxy.pool.instances
        house.decoder.hang_at.add("first")
        call = house.call(CHAT, messages=MESSAGES, stream=True)
        await house.decoder.reached("first")
        house.decoder.hang_at.discard("first")
        if state == LOST:
            prefiller.lost("no answer in time")
        elif state == RESTARTED:
            house.prefiller.restart()
            prefiller.look_soon()
        else:
            await asyncio.sleep(0.4)
            if state == FLAPPING:
                prefiller.missed("no answer in time")
            await asyncio.sleep(0.2)  # in which it is judged
            prefiller.look_soon()
            await asyncio.sleep(0.3)  # and here
            house.decoder.let_go("first")
        answer = await call.answer()
        assert (answer.status, answer.text()) == (200, TEXT)
        assert answer.headers["x-pdproxy-path"] == ("local" if state == LOST else "disaggregated")
        assert len(house.decoder.generations()) == (1 if state in (FLAPPING, WELL) else 2)
        assert decoder.breaker.statistics().num_faults == prefiller.breaker.statistics().num_faults == 0
        await house.settled()
        assert errands(house.decoder) == [], "the end of the leg has freed the blocks"


async def test_stream_that_has_begun_needs_its_prefiller_no_more() -> None:
    async with nixl_pair() as house:
        house.limit(first_byte_timeout_s=0.6, _probe_timeout_s=0.1)
        house.decoder.hang_at.add("middle")
        call = house.call(CHAT, messages=MESSAGES, stream=True)
        await house.decoder.reached("middle")
        house.proxy.pool.instances[0].lost("no answer in time")
        await asyncio.sleep(0.5)
        house.decoder.let_go("middle")
        answer = await call.answer()
        assert (answer.status, answer.text()) == (200, TEXT)
        assert answer.headers["x-pdproxy-path"] == "disaggregated"


# ── what an early end leaves ────────────────────────────────────────────────────────────────────────────────────────


async def leave_at(house: Harness, engine: FakeNixl, point: str, **body: Any) -> None:
    engine.hang_at.add(point)
    call = house.call(**body)
    await engine.reached(point)
    call.leave()
    await call.done()
    engine.hang_at.discard(point)


@pytest.mark.parametrize(("role", "point"), [("prefill", "prefill"), ("prefill", "prefill_done"), ("decode", "first")])
@pytest.mark.parametrize("stream", [False, True])
async def test_closed_legs_free_the_blocks_which_count_until_the_prefiller_was_heard_after_that(
    role: str, point: str, stream: bool
) -> None:
    async with nixl_pair() as house:
        await leave_at(house, house.prefiller if role == "prefill" else house.decoder, point, stream=stream)
        assert house.held == 1
        assert house.prefiller.pages == {}
        house.prefiller.forget()
        await house.settled()
        assert house.held == 0
        assert house.prefiller.calls, "it was looked at"
        assert outcomes(house) == {"freed": 1}
        assert errands(house.decoder) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_leg_that_nobody_has_answered_proves_nothing(stream: bool) -> None:
    async with nixl_pair() as house:
        await leave_at(house, house.decoder, "decode", stream=stream)
        assert house.held == 1
        await house.settled()
        assert outcomes(house) == {"dropped": 1}
        assert len(errands(house.decoder)) == 1


async def test_decoder_out_of_reach_leaves_blocks_pinned_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not seen the leg, so that closing it tells nobody anything."""
    monkeypatch.setattr(orphans, "FIRST_PAUSE_S", 0.001)
    async with nixl_pair(retries=0) as house:
        house.client_of(house.decoder).is_up = False
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")
        assert house.held == sum(house.prefiller.pages.values()) == 1
        house.client_of(house.decoder).is_up = True
        await house.settled()
        assert house.prefiller.pages == {}
        assert outcomes(house) == {"dropped": 1}


@pytest.mark.parametrize("fault", [BROKEN, error_reply(500, "KV load failure"), error_reply(503, "busy")])
async def test_decoder_that_failed_may_have_told_nobody(fault: Exception | FakeReply) -> None:
    async with nixl_pair(retries=0) as house:
        house.decoder.fail_at["decode"] = fault
        assert (await house.post()).status in (502, 503)
        await house.settled()
        assert len(errands(house.decoder)) == 1
        assert outcomes(house) == {"dropped": 1}


async def test_refused_decode_leg_has_told_the_prefiller() -> None:
    async with nixl_pair(retries=0) as house:
        house.decoder.fail_at["decode"] = error_reply(422, "temperature must be below 2")
        assert (await house.post()).status == 422
        await house.settled()
        assert errands(house.decoder) == []
        assert outcomes(house) == {"freed": 1}


async def eos(house: Harness) -> Answer:
    """What leaves an errand, and nothing else."""
    house.prefiller.finish_at_first = "stop"
    return await house.post()


async def test_errand_is_done_again_while_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "FIRST_PAUSE_S", 0.001)
    async with nixl_pair() as house:
        house.decoder.fail_at["refuse"] = error_reply(503, "starting")
        await eos(house)
        await until(lambda: len(errands(house.decoder)) >= 3)
        assert house.held == sum(house.prefiller.pages.values()) == 1
        house.decoder.fail_at["refuse"] = BROKEN
        await until(lambda: len(errands(house.decoder)) >= 5)
        house.decoder.fail_at.clear()
        await house.settled()
        assert outcomes(house) == {"dropped": 1}


async def test_errand_ends_with_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "FIRST_PAUSE_S", 0.001)
    prefiller, decoder = FakeNixl("prefill", lease_s=0.03), FakeNixl("decode")
    async with proxy_in_front_of([prefiller], [decoder], engine_lease_s=0.04) as house:
        decoder.fail_at["refuse"] = BROKEN
        await eos(house)
        assert house.held == 1
        await house.settled()
        assert outcomes(house) == {"expired": 1}
        assert len(prefiller.expired) == 1
        assert prefiller.pages == {}


async def test_errand_is_void_when_the_prefillers_process_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "FIRST_PAUSE_S", 0.001)
    async with nixl_pair() as house:
        house.decoder.fail_at["refuse"] = BROKEN
        await eos(house)
        await until(lambda: len(errands(house.decoder)) >= 1)
        house.prefiller.finish_at_first = None
        house.prefiller.restart()
        house.proxy.pool.instances[0].suspected.set()
        await house.settled()
        assert outcomes(house) == {"void": 1}


async def test_prefiller_that_tells_no_start_is_taken_for_the_same_after_nobody_listened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several API servers vLLM's /metrics does not say when its process began. That nobody listened for a moment
    proves nothing: its blocks are free when it is heard after their lease."""
    monkeypatch.setattr(orphans, "FIRST_PAUSE_S", 0.001)
    prefiller, decoder = FakeNixl("prefill"), FakeNixl("decode")
    prefiller.tells_start = decoder.tells_start = False
    async with proxy_in_front_of([prefiller], [decoder], probe_successes=1, engine_lease_s=0.3) as house:
        instance, client = house.proxy.pool.instances[0], house.client_of(prefiller)
        decoder.fail_at["refuse"] = BROKEN
        began = asyncio.get_running_loop().time()
        await eos(house)
        await until(lambda: len(errands(decoder)) >= 1)
        with client.refusing():
            instance.suspected.set()
            await until(lambda: not instance.is_ready)
            prefiller.finish_at_first = None
            prefiller.restart()
        assert house.held == 1
        instance.suspected.set()
        await until(lambda: instance.health is not Health.DOWN)
        await house.settled()
        assert asyncio.get_running_loop().time() - began >= 0.3
        assert outcomes(house) == {"expired": 1}
        decoder.fail_at.clear()
        await house.is_ready()


async def test_so_many_errands_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage must not become a storm."""
    async with nixl_pair() as house:
        house.decoder.hang_at.add("refuse")
        num = orphans.MAX_ERRANDS + 3
        for _ in range(num):
            await eos(house)
        await until(lambda: len(errands(house.decoder)) == orphans.MAX_ERRANDS)
        assert house.held == num
        house.decoder.let_go("refuse")
        await house.settled()
        assert len(errands(house.decoder)) == num
        assert outcomes(house) == {"dropped": num}


async def test_decoder_before_032_is_made_to_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    prefiller, decoder = FakeNixl("prefill"), FakeNixl("decode")
    prefiller.version = decoder.version = "0.31.2"
    decoder.refusals_free = False
    async with proxy_in_front_of([prefiller], [decoder]) as house:
        await eos(house)
        await house.settled()
        [errand] = decoder.generations()
        assert errand.body["max_tokens"] == 1
        assert prefiller.pages == {}
        assert outcomes(house) == {"dropped": 1}


# ── data-parallel ranks ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_two_ranks_behind_one_address() -> None:
    prefiller, decoder = FakeNixl("prefill"), FakeNixl("decode")
    prefiller.num_ranks = decoder.num_ranks = 2
    instances = tuple(
        InstanceSettings(name=f"{role}-{rank}", role=role, url=url, engine="vllm_nixl", data_parallel_rank=rank)
        for role, url in (("prefill", "http://p0:1"), ("decode", "http://d0:1"))
        for rank in (0, 1)
    )
    async with proxy_in_front_of([prefiller], [decoder], instances=instances) as house:
        for _ in range(4):
            assert (await house.post()).status == 200
        for engine in (prefiller, decoder):
            ranks = [call.headers["x-data-parallel-rank"] for call in engine.generations()]
            assert set(ranks) == {"0", "1"}
        for call in (*prefiller.generations(), *decoder.generations()):
            assert call.headers["x-request-id"].count("-") >= 1
