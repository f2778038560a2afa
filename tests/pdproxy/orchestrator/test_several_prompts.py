"""Several prompts in one body: one answer, though each prompt is a request of its own, and nothing is left of any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.orchestrator.several_prompts import MOST_AT_ONCE
from tests.fakes.at_once_engine import pairs
from tests.fakes.fake_engine import BROKEN, WORDS, FakeEngine, FakeReply, Seen, error_reply
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.proxy_harness import Answer, Harness, proxy_in_front_of, until

pytestmark = pytest.mark.usefixtures("both_ways")

TEXT = "".join(WORDS)
PROMPTS = [[1, 2, 3], [4], [5, 6]]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@asynccontextmanager
async def fleet(kind: str, **options: Any) -> AsyncIterator[Harness]:
    """One prefiller and one decoder of that kind."""
    if kind in ("sglang", "mooncake"):
        async with pairs(kind, **options) as both:  # type: ignore[arg-type]
            yield both.house
        return
    make: Any = FakeEngine if kind == "builtin" else FakeNixl
    async with proxy_in_front_of([make("prefill")], [make("decode")], **options) as house:
        yield house


def texts(answer: Answer, *, stream: bool) -> dict[int, str]:
    """The text of each choice."""
    chunks = [one for one in answer.events() if one != "[DONE]"] if stream else [answer.json()]
    told: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        told[choice["index"]] = told.get(choice["index"], "") + choice["text"]
    return told


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["builtin", "vllm_nixl", "mooncake", "sglang"])
async def test_every_kind_serves_them_through_both_engines(kind: str, stream: bool) -> None:
    """LMCache's engines have theirs among the other tests of pushed KV."""
    async with fleet(kind) as house:
        answer = await house.post(prompt=PROMPTS, **(WITH_USAGE if stream else {}))
        assert answer.status == 200, answer.body
        sent = [call.body["prompt"] for call in house.prefiller.generations()]
        assert len(house.decoder.generations()) == len(sent)
        if kind == "sglang":  # one attempt takes them all: what the engines answer goes to the client as it is
            assert sent == [PROMPTS]
            return
        assert sent == PROMPTS
        assert texts(answer, stream=stream) == dict.fromkeys(range(3), TEXT)
        usages = [one["usage"] for one in (answer.events()[:-1] if stream else [answer.json()]) if one.get("usage")]
        assert len(usages) == 1
        num_tokens = 9 if kind == "mooncake" else sum(map(len, PROMPTS))  # a stand-in that always says three
        assert usages[0]["prompt_tokens"] == num_tokens
        assert usages[0]["completion_tokens"] == 3 * len(WORDS)
        assert usages[0]["total_tokens"] == num_tokens + 3 * len(WORDS)
        if stream:
            events = answer.events()
            assert events.count("[DONE]") == 1
            assert events[-1] == "[DONE]"
            assert (events[-2]["choices"], events[-2]["usage"]) == ([], usages[0])
            assert len({(event["id"], event["created"], event["model"]) for event in events[:-1]}) == 1


async def test_the_answers_to_several_texts_come_interleaved() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.answer_id = "the-engine's-own"
        answer = await house.post(prompt=["a", "b"], stream=True, logprobs=1, suffix="!")
        indices = [choice["index"] for event in answer.events()[:-1] for choice in event["choices"]]
        assert sorted(indices) != indices, "one came after the other"
        assert all(call.body["suffix"] == "!" for call in house.decoder.generations())
        assert "x-pdproxy-attempt" not in answer.headers
        assert "usage" not in answer.body.decode()


async def test_several_answers_to_several_prompts_stay_in_one_request() -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(prompt=["a", "b"], n=2)
        assert answer.headers["x-pdproxy-path"] == "local"
        assert len(house.decoder.generations()) == 1


# ── slots ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Counting(FakeEngine):
    """A decoder that notes how many of a body's prompts wait for its pages."""

    house: Harness | None = None
    most_waiting = 0
    most_held = 0

    async def pass_point(self, point: str) -> None:
        await asyncio.sleep(0)
        if self.house is not None:
            self.most_waiting = max(self.most_waiting, self.house.admission.num_waiting)
            self.most_held = max(self.most_held, self.house.held)
        await super().pass_point(point)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_body_of_more_prompts_than_slots_is_served_and_one_at_a_time_stands_in_line(stream: bool) -> None:
    decoder = Counting("decode", num_pages=4)
    async with proxy_in_front_of(decoders=[decoder], max_queue=0 if stream else 1024) as house:
        decoder.house = house
        num_prompts = 2 * MOST_AT_ONCE + 3
        answer = await house.post(prompt=[[1] * 48] * num_prompts, stream=stream)
        assert answer.status == 200, answer.body
        assert texts(answer, stream=stream) == dict.fromkeys(range(num_prompts), TEXT)
        assert decoder.num_reservations_waited == 0
        assert (decoder.most_held, decoder.most_waiting) == (3, 1)


async def test_a_body_that_waits_for_slots_lets_go_of_them_when_its_client_leaves() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4)]) as house:
        house.prefiller.hang_at.add("prefill_done")
        call = house.call(prompt=[[1] * 48] * 5)
        await house.prefiller.reached("prefill_done")
        await until(lambda: house.admission.num_waiting == 1)
        assert house.held == 3
        call.leave()
        await call.done()
        await house.settled()
        assert (house.held, house.admission.num_waiting) == (0, 0)


async def test_all_prompts_have_one_deadline() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4)]) as house:
        house.prefiller.hang_at.add("prefill_done")
        answer = await house.post(prompt=[[1] * 48] * 5, timeout=0.1)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert house.prefiller.closed == ["/v1/completions"]
        assert {(one["outcome"], one["error"]) for one in house.proxy.recent.facts()} == {
            ("failed", "deadline_exceeded")
        }


# ── failures ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Picky(FakeEngine):
    """Refuses the prompt [9], and breaks at [8]."""

    refusal: FakeReply = error_reply(422, "nine is too many")

    async def generate(self, seen: Seen) -> FakeReply:
        if seen.body["prompt"] == [9]:
            await self.pass_point("picky")
            return self.refusal
        if seen.body["prompt"] == [8]:
            await self.pass_point("picky")
            raise BROKEN
        return await super().generate(seen)


async def test_the_error_of_one_prompt_is_the_answer_and_the_others_are_cancelled() -> None:
    async with proxy_in_front_of(prefillers=[Picky("prefill")]) as house:
        house.decoder.hang_at.add("first")
        house.prefiller.hang_at.add("picky")
        call = house.call(prompt=[[1], [9]])
        await house.decoder.reached("first")
        house.prefiller.let_go("picky")
        answer = await call.answer()
        assert (answer.status, answer.error["message"]) == (422, "nine is too many")
        assert house.decoder.closed == ["/v1/completions"]
        by_prompt = {facts["prompt"]: (facts["outcome"], facts["error"]) for facts in house.proxy.recent.facts()}
        assert by_prompt == {0: ("refused", "engine_reply"), 1: ("refused", "engine_reply")}


@pytest.mark.parametrize(("bad", "message"), [([9], "nine is too many"), ([8], "prefill-0")])
async def test_in_a_stream_that_has_begun_it_is_the_last_event(bad: list[int], message: str) -> None:
    async with proxy_in_front_of(prefillers=[Picky("prefill")], retries=0) as house:
        house.decoder.hang_at.add("middle")
        house.prefiller.hang_at.add("picky")
        call = house.call(prompt=[[1], bad], stream=True)
        await house.decoder.reached("middle")
        house.prefiller.let_go("picky")
        answer = await call.answer()
        events = answer.events()
        assert answer.status == 200
        assert message in events[-1]["error"]["message"]
        assert "[DONE]" not in events
        assert all(choice["index"] == 0 for event in events[:-1] for choice in event["choices"])
        assert house.decoder.closed == ["/v1/completions"]


@pytest.mark.parametrize("is_first_gone_first", [False, True])
@pytest.mark.parametrize("prompts", [[[1], [9]], [[9], [1]]])
async def test_a_refusal_in_the_moment_in_which_another_prompt_begins_the_stream(
    prompts: list[list[int]], is_first_gone_first: bool
) -> None:
    """Which moment that is nobody knows, so one goes on so many turns of the loop after the other."""
    async with proxy_in_front_of(prefillers=[Picky("prefill")], retries=0) as house:
        gates = [(house.decoder, "first"), (house.prefiller, "picky")]
        if not is_first_gone_first:
            gates.reverse()
        for num_turns in range(10):
            for engine, point in gates:
                engine.forget()
                engine.hang_at.add(point)
            call = house.call(prompt=prompts, stream=True)
            await house.decoder.reached("first")
            await house.prefiller.reached("picky")
            (one, point), (other, other_point) = gates
            one.let_go(point)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            other.let_go(other_point)
            answer = await call.answer()
            error = answer.error if answer.status == 422 else answer.events()[-1]["error"]
            assert error["message"] == "nine is too many"


async def test_an_error_of_the_proxy_names_the_prompt() -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(prompt=[[1], [2], [3] * 5000])
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == "prompt[2]"
        answer = await house.post(prompt=[[1], []])
        assert (answer.status, answer.error["param"]) == (400, "prompt[1]")


async def test_a_lost_leg_is_tried_again_for_its_prompt_alone() -> None:
    async with proxy_in_front_of(prefillers=[FakeEngine("prefill") for _ in range(2)]) as house:
        house.prefillers[0].fail_at["prefill_done"] = BROKEN
        answer = await house.post(prompt=PROMPTS)
        assert texts(answer, stream=False) == dict.fromkeys(range(3), TEXT)
        assert house.prefillers[0].calls


async def test_too_many_prompts_are_refused_before_anybody_is_asked() -> None:
    async with proxy_in_front_of(max_prompts=2) as house:
        assert (await house.post(prompt=["a", "b"])).status == 200
        house.decoder.forget()
        for body in ({}, {"n": 2}):
            answer = await house.post(prompt=["a", "b", "c"], **body)
            assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "prompt", "too_many_prompts")
            assert "prompt has 3 prompts, and 2 are taken (max_prompts)" in answer.error["message"]
        assert house.decoder.generations() == []


# ── memory, and what is seen of it ──────────────────────────────────────────────────────────────────────────────────


async def test_the_answers_have_one_limit_together() -> None:
    async with proxy_in_front_of(max_answer_bytes=3000) as house:
        assert (await house.post(prompt=["a"] * 2)).status == 200
        answer = await house.post(prompt=["a"] * 20)
        assert answer.status == 400
        assert "send fewer prompts in one body" in answer.error["message"]


async def test_fields_that_every_prompt_needs_count_for_each() -> None:
    async with proxy_in_front_of(max_body_bytes=100_000, memory_budget=400_000) as house:
        assert (await house.post(prompt=["a"], user="u" * 50_000)).status == 200
        answer = await house.post(prompt=["a"] * 20, user="u" * 50_000)
        assert (answer.status, answer.error["code"]) == (503, "memory_budget_spent")
        assert house.prefiller.generations() == house.prefiller.generations()[:1]


async def test_each_prompt_is_a_request_in_the_books() -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.hang_at.add("prefill_done")
        call = house.call(prompt=["a", "b"], headers={"x-request-id": "the-body"})
        await until(lambda: len(house.prefiller.generations()) == 2)
        seen = (await house.get("/status")).json()["in_flight"]
        assert sorted((one["request_id"], one["prompt"]) for one in seen) == [("the-body", 0), ("the-body", 1)]
        assert "pdproxy_requests_in_flight 2.0" in (await house.get("/metrics")).body.decode()
        house.prefiller.let_go("prefill_done")
        assert (await call.answer()).status == 200
        page = (await house.get("/metrics")).body.decode()
        assert 'pdproxy_requests_total{outcome="done",path="disaggregated",reason="fits"} 2.0' in page


async def test_at_shutdown_a_body_that_was_begun_is_served_to_its_end() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4)]) as house:
        house.prefiller.hang_at.add("prefill_done")
        call = house.call(prompt=[[1] * 48] * (MOST_AT_ONCE + 2))
        await house.prefiller.reached("prefill_done")
        house.proxy.orchestrator.stop_accepting()
        house.prefiller.let_go("prefill_done")
        assert (await call.answer()).status == 200
        assert (await house.post(prompt=["a", "b"])).error["code"] == "shutting_down"
