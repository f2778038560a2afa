"""Requests that are served: each of the three ways, streamed and not, chat and completions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.fake_engine import WORDS, FakeEngine
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import proxy_in_front_of, until
from transfer.wire import KvGranted

pytestmark = pytest.mark.usefixtures("both_ways")

TEXT = "".join(WORDS)
AS_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "tell me"}]


async def test_completion() -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(headers={"x-request-id": "mine"})
        assert answer.status == 200
        assert answer.json()["choices"][0]["text"] == TEXT
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-pdproxy-path"] == "disaggregated"
        assert answer.headers["x-pdproxy-prefiller"] == "prefill-0"
        assert answer.headers["x-pdproxy-decoder"] == "decode-0"
        assert answer.headers["x-pdproxy-kv"] == "pages=1;bytes=1024;transfer_ms=2.000"
        steps = [part.split(";")[0].strip() for part in answer.headers["server-timing"].split(",")]
        assert steps == ["tokenize", "slot_wait", "prefill", "kv_wait", "first_byte", "decode"]
        attempt = answer.headers["x-pdproxy-attempt"]
        [prefill], [decode] = house.prefiller.generations(), house.decoder.generations()
        assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] == "mine"
        params = prefill.body["kv_transfer_params"]
        assert params["attempt"] == decode.body["kv_transfer_params"]["attempt"]
        assert (params["attempt"][:16], len(params["attempt"])) == (attempt, 32)
        assert params["notify"].startswith("tcp://127.0.0.1:")
        assert params["receivers"] == [{"rank": 0, "host": "127.0.0.1", "port": 7300}]


async def test_stream_is_the_decoders_own() -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(stream=True, stream_options={"include_usage": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "server-timing" in answer.headers
        assert answer.text() == TEXT
        assert answer.events()[-1] == "[DONE]"
        assert answer.events()[-2]["usage"]["completion_tokens"] == len(WORDS)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(stream: bool) -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(CHAT, messages=MESSAGES, stream=stream)
        assert answer.status == 200
        text = answer.text() if stream else answer.json()["choices"][0]["message"]["content"]
        assert text == TEXT


async def test_slots_come_back_when_the_decoder_has_taken_the_kv() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.hang_at.add("middle")
        call = house.call(stream=True)
        await house.decoder.reached("middle")
        assert house.held == 0, "a long answer must hold no slots"
        call.leave()
        await call.done()
        assert house.decoder.cancelled == []


async def test_without_that_word_slots_are_held_until_the_decoder_was_asked() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.consumed_signal = False
        house.decoder.hang_at.add("middle")
        call = house.call(stream=True)
        await house.decoder.reached("middle")
        assert house.held == 1
        call.leave()
        await call.done()
        await house.settled()
        assert house.decoder.cancelled == [house.decoder.generations()[0].body["kv_transfer_params"]["attempt"]]


async def test_two_ranks_must_both_be_ready() -> None:
    decoder = FakeEngine("decode", num_ranks=2)
    async with proxy_in_front_of(decoders=[decoder]) as house:
        answer = await house.post()
        assert answer.headers["x-pdproxy-kv"].startswith("pages=1;bytes=2048")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_one_token_needs_no_decoder_and_no_slots(stream: bool, path: str) -> None:
    async with proxy_in_front_of() as house:
        extra: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {}
        answer = await house.post(path, max_tokens=1, stream=stream, **extra)
        assert answer.status == 200
        assert answer.headers["x-pdproxy-path"] == "prefill_only"
        assert "x-pdproxy-decoder" not in answer.headers
        assert house.decoder.generations() == []
        assert "kv_transfer_params" not in house.prefiller.generations()[0].body
        if stream:
            assert answer.text() == WORDS[0]
            assert answer.events()[-1] == "[DONE]"
            assert answer.events()[-2]["choices"][0]["finish_reason"] == "length"
        else:
            assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_ends_at_its_first_token(stream: bool) -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.finish_at_first = "stop"
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await house.post(CHAT, messages=MESSAGES, stream=stream, **options)
        assert answer.headers["x-pdproxy-path"] == "prefill_only"
        assert house.decoder.generations() == []
        if not stream:
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            return
        events = answer.events()
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert events[0]["object"] == "chat.completion.chunk"
        assert answer.text() == WORDS[0]
        assert events[-3]["choices"][0]["finish_reason"] == "stop"
        assert events[-2]["usage"]["completion_tokens"] == 1
        assert events[-2]["choices"] == []


@pytest.mark.parametrize(
    ("body", "reason", "more"),
    [
        ({"n": 2}, "several_answers", AS_STREAM),
        ({"best_of": 3}, "several_answers", {}),
        ({"prompt": ["a", "b"], "echo": True}, "several_prompts", {}),
        ({"echo": True}, "prompt_in_answer", {}),
        ({"prompt": [1] * 100}, "oversized", AS_STREAM | {"return_token_ids": True}),
    ],
)
async def test_served_by_the_decoder_alone(body: dict[str, Any], reason: str, more: dict[str, Any]) -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4)]) as house:
        answer = await house.post(**body)
        assert answer.status == 200
        assert answer.headers["x-pdproxy-path"] == "local"
        assert house.prefiller.generations() == []
        plain = {"model": "tiny", "max_tokens": 8, "prompt": "a b c"}
        assert house.decoder.generations()[0].body == plain | body | more
        recent = house.proxy.recent.facts()[0]
        assert (recent["reason"], recent["path"]) == (reason, "local")


async def test_short_prompts_stay_where_configured() -> None:
    async with proxy_in_front_of(min_prompt_tokens=8) as house:
        assert (await house.post(prompt=[1] * 7)).headers["x-pdproxy-path"] == "local"
        assert (await house.post(prompt=[1] * 8)).headers["x-pdproxy-path"] == "disaggregated"


async def test_lease_shrinks_to_what_the_prefiller_counted() -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.hang_at.add("prefill_done")
        words = " ".join(["word"] * 20)  # 2 pages of 16 tokens; by its bytes, 7
        call = house.call(prompt=words)
        await house.prefiller.reached("prefill_done")
        assert house.held == 7
        call.leave()
        await call.done()
        house.prefiller.hang_at.clear()
        house.decoder.consumed_signal = False
        answer = await house.post(prompt=words)
        assert answer.headers["x-pdproxy-kv"].startswith("pages=2;")


async def test_a_strangers_kv_params_are_removed() -> None:
    async with proxy_in_front_of() as house:
        await house.post(kv_transfer_params={"attempt": "x"}, bootstrap_room=1, bootstrap_host="h")
        for engine in (house.prefiller, house.decoder):
            body = engine.generations()[0].body
            assert not {"bootstrap_room", "bootstrap_host"} & body.keys()
            assert body["kv_transfer_params"]["attempt"] != "x"


async def test_the_clients_key_goes_to_both_legs() -> None:
    async with proxy_in_front_of() as house:
        await house.post(headers={"authorization": "Bearer sk-1", "traceparent": "00-1"})
        for engine in (house.prefiller, house.decoder):
            headers = engine.generations()[0].headers
            assert headers["authorization"] == "Bearer sk-1"
            assert headers["traceparent"] == "00-1"


async def test_the_proxys_own_keys_stay_with_it() -> None:
    async with proxy_in_front_of(api_keys=("secret",)) as house:
        assert (await house.post()).status == 401
        assert (await house.post(headers={"authorization": "Bearer wrong"})).status == 401
        assert (await house.post(headers={"authorization": "Bearer secret"})).status == 200
        assert "authorization" not in house.prefiller.generations()[0].headers


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_lease_shrinks_as_soon_as_the_decoder_has_granted_fewer_pages(ranks: int) -> None:
    """While the prompt is still being read: what the decoder's own cache has is free for others from then on."""
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4, num_ranks=ranks)]) as house:
        house.prefiller.hang_at.add("prefill")
        first = house.call(prompt=[1] * 64)
        await house.prefiller.reached("prefill")
        second = house.call(prompt=[1] * 48)
        admission = house.proxy.pool.of_role("decode")[0].admission
        await until(lambda: admission.num_waiting > 0)
        attempt = house.prefiller.generations()[0].body["kv_transfer_params"]["attempt"]
        for rank in range(ranks):
            assert (house.held, len(house.prefiller.generations())) == (4, 1), "before every rank has said so"
            house.decoder.sink(KvGranted(attempt=attempt, rank=rank, epoch=house.decoder.epoch, num_pages=1))
            await asyncio.sleep(0)
        await until(lambda: len(house.prefiller.generations()) == 2)
        assert house.held == 1 + 3
        house.prefiller.let_go("prefill")
        for call in (first, second):
            assert (await call.answer()).status == 200


async def test_admission_makes_the_second_request_wait() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4)]) as house:
        house.prefiller.hang_at.add("prefill")
        first = house.call(prompt=[1] * 64)
        await house.prefiller.reached("prefill")
        second = house.call(prompt=[1] * 64)
        admission = house.proxy.pool.of_role("decode")[0].admission
        await until(lambda: admission.num_waiting > 0)
        assert len(house.prefiller.generations()) == 1
        house.prefiller.hang_at.clear()
        first.leave()
        assert (await second.answer()).status == 200


async def test_admission_can_be_switched_off() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4)], admission=False) as house:
        house.prefiller.hang_at.add("prefill")
        calls = [house.call(prompt=[1] * 64) for _ in range(3)]
        await until(lambda: len(house.prefiller.generations()) == 3)
        assert house.held == 12
        for call in calls:
            call.leave()
            await call.done()


async def test_instances_take_turns() -> None:
    prefillers = [FakeEngine("prefill") for _ in range(2)]
    async with proxy_in_front_of(prefillers) as house:
        for _ in range(4):
            await house.post()
        assert [len(engine.generations()) for engine in prefillers] == [2, 2]


async def test_decoder_with_fewer_held_slots_is_chosen() -> None:
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of(decoders=decoders) as house:
        lease = await Held(house.proxy.pool.of_role("decode")[0], 10).wait()
        for _ in range(3):
            answer = await house.post()
            assert answer.headers["x-pdproxy-decoder"] == "decode-1"
        lease.release()
