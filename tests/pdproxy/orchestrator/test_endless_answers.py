"""Engines whose answers do not end, or are more than there is memory for: each has a limit, and its client is told."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.fakes.fake_engine import BROKEN, FakeReply
from tests.fakes.proxy_harness import proxy_in_front_of

pytestmark = pytest.mark.usefixtures("both_ways")

WHOLE = {"prompt": "one", "echo": True}
"""A request that engines are asked for as a whole answer."""
STREAMED = {"prompt": "one"}
"""A request whose whole answer is put together from a stream."""
PIECE = "x" * 1000


def endless(*, is_stream: bool) -> FakeReply:
    event = {"id": "a", "created": 1, "model": "tiny", "choices": [{"index": 0, "text": PIECE}]}
    begin, piece = (b"", b"data: " + json.dumps(event).encode() + b"\n\n") if is_stream else (b'{"a":"', PIECE.encode())
    chunks: Any = itertools.chain([begin] if begin else [], itertools.repeat(piece))
    return FakeReply(200, chunks, {"content-type": "text/event-stream" if is_stream else "application/json"})


@pytest.mark.parametrize(("body", "is_stream"), [(WHOLE, False), (STREAMED, True)])
async def test_a_whole_answer_has_a_limit(body: dict[str, Any], is_stream: bool) -> None:
    async with proxy_in_front_of(max_answer_bytes=50_000) as house:
        house.decoder.fail_at["decode"] = endless(is_stream=is_stream)
        answer = await house.post(**body)
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")
        assert "larger than the 50000 bytes of --max-answer-bytes" in answer.error["message"]


@pytest.mark.parametrize(("body", "is_stream"), [(WHOLE, False), (STREAMED, True)])
async def test_an_answer_for_which_there_is_no_memory_is_nobodys_fault(body: dict[str, Any], is_stream: bool) -> None:
    async with proxy_in_front_of(max_body_bytes=1000, memory_budget=400_000) as house:
        house.decoder.fail_at["decode"] = endless(is_stream=is_stream)
        answer = await house.post(**body)
        assert (answer.status, answer.error["code"]) == (503, "memory_budget_spent")
        assert answer.headers["retry-after"] == "1"
        assert len(house.decoder.generations()) == 1, "another attempt would find as little"
        page = (await house.get("/metrics")).body.decode()
        assert 'pdproxy_legs_total{instance="decode-0",leg="decode",outcome="closed"} 1.0' in page
        assert "pdproxy_memory_refused_total 1.0" in page
        house.decoder.fail_at.clear()
        assert (await house.post(**body)).status == 200


@pytest.mark.parametrize("status", [400, 429])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_error_body_for_which_there_is_no_memory(leg: str, status: int) -> None:
    async with proxy_in_front_of(max_body_bytes=1000, memory_budget=400_000) as house:
        engine = house.decoder if leg == "decode" else house.prefiller
        engine.fail_at[leg] = FakeReply(status, endless(is_stream=False).chunks)
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (503, "memory_budget_spent")
        engine.fail_at[leg] = FakeReply(status, [b" " * 100_000, b"{}"])
        assert (await house.post()).body[-2:] == b"{}", "what there is room for is passed on"
        assert not house.proxy.memory.num_bytes


async def test_a_prefill_reply_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdproxy.orchestrator.leg.MAX_REPLY_BYTES", 50_000)
    async with proxy_in_front_of() as house:
        house.prefiller.fail_at["prefill"] = endless(is_stream=False)
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")
        assert "its answer is larger than 50000 bytes" in answer.error["message"]


async def test_what_an_attempt_kept_is_given_back_when_the_next_begins() -> None:
    """Its budget has room for one answer and not for two."""
    async with proxy_in_front_of(max_body_bytes=1000, memory_budget=400_000, max_answer_bytes=250_000) as house:
        for body, is_stream in ((WHOLE, False), (STREAMED, True)):
            house.decoder.fail_at["decode"] = endless(is_stream=is_stream)
            assert (await house.post(**body)).status == 502
            assert len(house.decoder.generations()) == 2
            house.decoder.forget()


async def test_a_request_is_counted_while_it_is_served() -> None:
    async with proxy_in_front_of(max_body_bytes=100_000) as house:
        house.prefiller.hang_at.add("prefill")
        call = house.call(user="u" * 40_000)
        await house.prefiller.reached("prefill")
        facts = (await house.get("/status")).json()["memory"]
        assert 80_000 < facts["used_bytes"] < facts["budget_bytes"]
        house.prefiller.let_go("prefill")
        assert (await call.answer()).status == 200


async def test_what_was_put_together_in_vain_does_not_count_any_more() -> None:
    async with proxy_in_front_of() as house:
        whole = endless(is_stream=True)
        house.decoder.fail_at["decode"] = FakeReply(
            200, [*itertools.islice(whole.chunks, 100), "cut", BROKEN], whole.headers
        )
        house.decoder.hang_at.add("cut")
        call = house.call(**STREAMED)
        await house.decoder.reached("cut")
        assert house.proxy.memory.num_bytes > 100_000
        house.prefiller.forget()
        house.prefiller.hang_at.add("prefill")
        house.decoder.fail_at.clear()
        house.decoder.let_go("cut")
        await house.prefiller.reached("prefill")
        assert house.proxy.memory.num_bytes < 1000
        house.prefiller.let_go("prefill")
        assert (await call.answer()).status == 200


async def test_a_request_that_is_served_is_finished_while_there_is_no_room_for_new_ones() -> None:
    async with proxy_in_front_of(max_body_bytes=100_000, memory_budget=400_000) as house:
        house.prefiller.hang_at.add("prefill")
        call = house.call(user="u" * 40_000)
        await house.prefiller.reached("prefill")
        with house.proxy.memory.share() as others:
            assert others.take(house.proxy.memory.begin_limit_bytes - house.proxy.memory.num_bytes)
            assert (await house.post(user="u" * 40_000)).status == 503
            house.prefiller.let_go("prefill")
            assert (await call.answer()).status == 200
