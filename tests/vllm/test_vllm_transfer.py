"""A prefiller and a decoder of vLLM with pdproxy's own connector behind the proxy answer what a single vLLM answers,
and whatever goes wrong, no block of vLLM's and no page of the buffer stays taken."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest

from pdproxy.openai.request import CHAT
from tests.e2e.cluster import free_ports
from tests.transfer.connectors.mini_vllm import HYBRID
from tests.vllm.chats import CHATS, body_of, post
from tests.vllm.engines import BLOCK_SIZE, MODEL, Engine, Fleet
from tests.vllm.proxy import Proxy, serving_ours
from tests.vllm.questions import Question, ask_all, client_of, ids, words
from tests.vllm.relay import Relay, relayed
from tests.vllm.test_vllm_answers import AT_ONCE, SEED, everything
from tests.vllm.test_vllm_faults import body, error_of, leave, reached, shown
from transfer.agents.mock import MockAgent, MockFabric
from transfer.connectors.vllm.receiver_thread import ReceiverThread
from transfer.dataplane.in_process import InProcess
from transfer.dataplane.plane import DataPlane
from transfer.errors import HandshakeRefused
from transfer.memory.buffer import PagedBuffer
from transfer.roles.handshake import Identity
from transfer.roles.receiver import Receiver, ReceiverConfig
from transfer.wire import BufferFacts, PushParams

ENGINES = ("single", "sender", "receiver")
ALL_ENGINES = ENGINES
AT_ONCE_S = 3.0
"""For blocks, pages and slots that somebody gives back."""
SILENCE_S = 6.0
"""The receiver's ``writer_timeout_s``."""

FAILED_LOADS = "vllm:pdproxy_failed_loads_total"

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]


@dataclass
class Pair:
    """Both engines, a relay before each of them, and the proxy before both."""

    proxy: Proxy
    sender: Engine
    receiver: Engine
    to_sender: Relay
    to_receiver: Relay
    client: httpx.AsyncClient

    async def post(self, request: dict[str, Any]) -> httpx.Response:
        return await self.client.post("/v1/completions", json=request)

    async def all_is_free(self, within_s: float = AT_ONCE_S) -> None:
        """No slot is held, no block taken at either engine, and no page of the buffer."""
        await self.proxy.settled(within_s)
        await asyncio.gather(self.sender.becomes_idle(within_s), self.receiver.becomes_idle(within_s))
        async with asyncio.timeout(within_s):
            while (facts := await self.receiver.buffer())["num_free"] != facts["num_pages"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert facts["num_wrong_tags"] == 0


@asynccontextmanager
async def pair(
    fleet: Fleet, *options: str, kind: str = "", names: tuple[str, str] = ("sender", "receiver")
) -> AsyncIterator[Pair]:
    """`kind` begins the engines' names."""
    sender, receiver = (f"{kind}{name}" for name in names)
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(relayed(fleet[name].port)) for name in (sender, receiver)]
        ends = {sender: relays[0].url}, {receiver: relays[1].url}
        proxy = await stack.enter_async_context(serving_ours(fleet, *ends, *options))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.url, timeout=60))
        yield Pair(proxy, fleet[sender], fleet[receiver], *relays, client)


def around_borders(dice: random.Random) -> list[Question]:
    """Prompts whose last token, or the one before, begins or ends a block."""
    lengths = [BLOCK_SIZE * blocks + rest for blocks in range(40) for rest in (-1, 0, 1, 2, 17)]
    return [Question(ids(dice, length), max_tokens=4) for length in lengths if length > 0]


async def test_every_answer_equals_a_single_engines(using: Fleet, say: Callable[[str], None]) -> None:
    questions = everything(random.Random(SEED)) + around_borders(random.Random(SEED))
    async with pair(using) as two, client_of(using["single"].url) as single, client_of(two.proxy.url) as ours:
        expected = await ask_all(single, questions, AT_ONCE)
        answers = await ask_all(ours, questions, AT_ONCE)
        wrong = [
            (question, one, other)
            for question, one, other in zip(questions, expected, answers, strict=True)
            if one != other
        ]
        num_tokens = sum(said.usage[0] for said in expected)
        loaded = await two.receiver.value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        say(
            f"seed {SEED}: {len(questions)} answers compared; of {num_tokens} prompt tokens {loaded:g} came by transfer"
        )
        assert not wrong, f"{len(wrong)} of {len(questions)} (seed {SEED}), the first: {wrong[0]}"
        assert loaded >= 0.95 * (num_tokens - len(questions))
        await two.all_is_free()


async def test_chats_one_system_prompt_for_many_and_conversations(using: Fleet) -> None:
    dice = random.Random(SEED)
    system = {"role": "system", "content": words(dice, 120)}
    many = [
        Question([system, {"role": "user", "content": words(dice, 20)}], is_chat=True, stream=bool(i % 2))
        for i in range(20)
    ]
    async with pair(using) as two, client_of(using["single"].url) as single, client_of(two.proxy.url) as ours:
        assert await ask_all(ours, many, 20) == await ask_all(single, many, 20)
        for _ in range(3):
            messages = [system]
            for _ in range(3):
                messages = [*messages, {"role": "user", "content": words(dice, 40)}]
                question = Question(messages, is_chat=True, max_tokens=30)
                (expected,), (got,) = await ask_all(single, [question], 1), await ask_all(ours, [question], 1)
                assert got == expected
                messages = [*messages, {"role": "assistant", "content": got.text}]
        for fields in CHATS.values():
            alone, answer = [await post(url, CHAT, body_of(fields)) for url in (using["single"].url, two.proxy.url)]
            assert (alone[0], answer[0]) == (200, 200), answer
            assert answer[1]["choices"] == alone[1]["choices"]
        await two.all_is_free()


async def test_an_answer_that_ends_with_its_first_token_and_one_of_a_single_token(using: Fleet) -> None:
    async with pair(using) as two:
        ended = await two.post(body("e", logit_bias={"1": 100}))
        assert ended.json()["choices"][0]["finish_reason"] == "stop"
        assert (await two.post(body("o", max_tokens=1))).status_code == 200
        await two.all_is_free()


async def test_clients_that_leave_in_each_phase(using: Fleet) -> None:
    """Also after the prefiller's reply, where blocks of vLLM's own connector stay for a lease."""
    async with pair(using) as two:
        await leave(two, body("prefill"), two.to_sender.stop("request", "prefill"))
        await two.all_is_free()
        await leave(two, body("reply"), two.to_sender.stop("reply", "reply"))
        await two.all_is_free()
        await leave(two, body("asked"), two.to_receiver.stop("request", "asked"))
        await two.all_is_free()
        await leave(two, body("decode"), two.to_receiver.stop("reply", "decode"))
        await two.all_is_free()
        await leave(two, body("event", stream=True, max_tokens=1200), two.to_receiver.stop("event", "event"))
        await two.all_is_free()
        assert (await two.post(body("after"))).status_code == 200


@pytest.mark.parametrize("name", ["sender", "receiver"])
async def test_an_engine_that_freezes_for_long(using: Fleet, name: str, say: Callable[[str], None]) -> None:
    """Longer than any deadline, between the legs or while a prompt is sent; afterwards everything is as before."""
    limits = ("--prefill-timeout-s", "3", "--first-byte-timeout-s", "4", "--kv-timeout-s", "3", "--retries", "0")
    async with pair(using, *limits, "--probe-misses", "2", "--probe-timeout-s", "1") as two:
        expected = shown(await two.post(body("freeze")))
        request = body("freeze", user="frozen")
        engine = using[name]
        stop = two.to_sender.stop("request", "frozen")
        task = asyncio.create_task(two.post(request))
        await reached(stop)
        engine.freeze()
        stop.go.set()
        reply = await task
        say(f"{name} frozen: {reply.status_code} {reply.text[:160]}")
        assert reply.status_code in (502, 503, 504), reply.text
        await asyncio.sleep(2 * SILENCE_S)
        engine.thaw()
        await two.proxy.wait_ready()
        await two.all_is_free(3 * SILENCE_S)
        assert shown(await two.post(body("freeze"))) == expected
        await two.all_is_free()


@pytest.mark.parametrize("name", ["sender", "receiver"])
async def test_an_engine_that_is_killed_under_a_request(fleet: Fleet, name: str, say: Callable[[str], None]) -> None:
    fleet.use("sender", "receiver")
    async with pair(fleet, "--retries", "0") as two:
        expected = shown(await two.post(body("killed")))
        relay = two.to_sender if name == "sender" else two.to_receiver
        stop = relay.stop("request", "victim")
        task = asyncio.create_task(two.post(body("killed", user="victim")))
        await reached(stop)
        fleet.kill(name)
        stop.go.set()
        reply = await task
        say(f"{name} killed: {reply.status_code} {error_of(reply)['message'][:160]}")
        assert reply.status_code in (502, 503)
        fleet.use("sender", "receiver")
        await two.proxy.wait_ready()
        await two.all_is_free(3 * SILENCE_S)
        assert shown(await two.post(body("killed"))) == expected
        await two.all_is_free()


async def test_the_longest_prompt_is_served_and_a_receiver_that_is_not_there_is_told(using: Fleet) -> None:
    """The latter to the proxy, by the prefiller's answer."""
    async with pair(using) as two:
        facts = await two.receiver.buffer()
        too_long = body("x", prompt=ids(random.Random(1), 1900), max_tokens=2)
        assert facts["num_pages"] * facts["chunk_size"] > 1900
        assert (await two.post(too_long)).status_code == 200
        params = {"attempt": "not-ours", "receivers": [{"rank": 0, "host": "127.0.0.1", "port": 1}], "timeout_s": 1.0}
        raw = body("y", max_tokens=1) | {"model": MODEL, "kv_transfer_params": params}
        reply = (await two.client.post(f"{two.sender.url}/v1/completions", json=raw)).json()
        assert reply["kv_transfer_params"]["failure"]
        await two.all_is_free()


async def test_vllms_own_metrics_tell_what_was_sent_and_loaded(using: Fleet, say: Callable[[str], None]) -> None:
    async def counts(engine: Engine) -> dict[str, float]:
        names = "pushes_total", "loads_total", "sent_bytes_total", "page_wait_seconds_count", "send_tail_seconds_count"
        return {name: await engine.value(f"vllm:pdproxy_{name}") for name in names}

    async with pair(using) as two:
        await two.post(body("before"))
        await two.all_is_free()
        sent, loaded, facts = await counts(two.sender), await counts(two.receiver), await two.receiver.buffer()
        prompts = [ids(random.Random(f"{SEED} {i}"), 3 * BLOCK_SIZE + 1) for i in range(4)]
        replies = await asyncio.gather(*(two.post(body(f"m{i}", prompt=one)) for i, one in enumerate(prompts)))
        assert [reply.status_code for reply in replies] == [200] * 4
        await two.all_is_free()
        more = {name: count - sent[name] for name, count in (await counts(two.sender)).items()}
        say(f"metrics of four prompts of three blocks: {more}")
        assert more.pop("sent_bytes_total") == 4 * 3 * facts["page_bytes"]
        assert more == {
            "pushes_total": 4,
            "loads_total": 0,
            "page_wait_seconds_count": 4,
            "send_tail_seconds_count": 4,
        }
        assert (await counts(two.receiver))["loads_total"] == loaded["loads_total"] + 4
        pages = [await two.receiver.value("vllm:pdproxy_pages", state=state) for state in ("free", "quarantined")]
        assert pages == [facts["num_pages"], 0]


async def test_an_unlike_engine_on_either_side_is_refused_and_nothing_hangs(
    using: Fleet, say: Callable[[str], None]
) -> None:
    """The proxy pairs no engines that say unlike things of their model. So the first decoder says what the second one
    is: its address answers what the real one's does, with a receiver of another layout."""
    async with AsyncExitStack() as stack:
        sender, receiver = using["sender"], using["receiver"]
        facts = msgspec.convert(await receiver.buffer(), BufferFacts)
        layout, is_swapped = HYBRID.of_rank(), False

        def told(stranger: Receiver | None) -> BufferFacts:
            assert stranger is not None
            return msgspec.structs.replace(facts, receivers=stranger.endpoints) if is_swapped else facts

        (port,) = free_ports(1)
        thread = ReceiverThread(told, lambda: True, "127.0.0.1", port)
        stack.callback(thread.close)
        thread.start()
        buffer = PagedBuffer(4, layout.page_bytes)
        thread.receive(MockAgent(MockFabric(), "s"), buffer, Identity(facts.model, layout), ReceiverConfig())
        proxy = await stack.enter_async_context(
            serving_ours(using, {"sender": sender.url}, {"receiver": receiver.url}, kv_port=port)
        )
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.url, timeout=60))
        expected = shown(await client.post("/v1/completions", json=body("like")))
        is_swapped = True
        async with asyncio.timeout(20):
            while (reply := await client.post("/v1/completions", json=body("unlike"))).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        say(f"a decoder that is unlike: {reply.status_code} {reply.text[:300]}")
        assert reply.status_code == 502
        assert "cannot exchange KV" in error_of(reply)["message"]
        assert await sender.value("vllm:pdproxy_failed_pushes_total", reason="unlike_engines") >= 1
        await proxy.settled(AT_ONCE_S)
        await sender.becomes_idle(AT_ONCE_S)

        memory = PagedBuffer(4, layout.page_bytes)
        plane = DataPlane(InProcess(lambda: MockAgent(MockFabric(), "p"), memory, Identity("another", layout)))
        plane.start().result(10)
        stack.callback(plane.close)
        params = PushParams(attempt="unlike", receivers=facts.receivers, timeout_s=10.0)
        with pytest.raises(HandshakeRefused, match="model"):
            await asyncio.to_thread(plane.open(params, num_tokens=5).granted.result, 20)

        is_swapped = False
        async with asyncio.timeout(20):
            while (reply := await client.post("/v1/completions", json=body("like"))).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert shown(reply) == expected
        assert (await receiver.buffer())["num_free"] == facts.num_pages


async def test_kv_of_another_prompt_is_not_read(using: Fleet, say: Callable[[str], None]) -> None:
    """One token of 200 is another one. The proxy would try again; here nobody does."""
    prompt = ids(random.Random(SEED), 200)
    other = [*prompt[:100], prompt[100] % 90 + 1, *prompt[101:]]
    assert other != prompt
    async with pair(using) as two:
        receivers = (await two.receiver.buffer())["receivers"]

        async def handed_over(attempt: str) -> dict[str, Any]:
            params = {"attempt": attempt, "receivers": receivers, "timeout_s": 20.0}
            return await ask(two.sender, prompt, params)

        async def ask(engine: Engine, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
            raw = body("p", prompt=prompt, max_tokens=1) | {"model": MODEL, "kv_transfer_params": params}
            reply = await two.client.post(f"{engine.url}/v1/completions", json=raw)
            return {"status": reply.status_code} | reply.json()

        expected = await handed_over("planted")
        before = await two.receiver.value(FAILED_LOADS, reason="other_prompt")
        wrong = await ask(two.receiver, other, expected["kv_transfer_params"])
        say(f"KV of another prompt: {str(wrong)[:200]}")
        assert wrong["status"] == 500
        await two.all_is_free()
        assert await two.receiver.value(FAILED_LOADS, reason="other_prompt") == before + 1
        right = await ask(two.receiver, prompt, (await handed_over("good"))["kv_transfer_params"])
        assert right["status"] == 200
        assert right["choices"][0]["text"] == expected["choices"][0]["text"]
        await two.all_is_free()
