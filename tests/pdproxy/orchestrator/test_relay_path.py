"""A stream's way from an engine's socket to a client's through the whole proxy, on which nothing is awaited: who waits
for whom, and how it ends. (What holds on both ways is with the tests of what it is that holds.)
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdproxy.orchestrator import error_reply as refusal
from tests.fakes.connected_call import ConnectedCall
from tests.fakes.fake_engine import BROKEN, FIRST_ID, WORDS, FakeEngine, FakeReply, Pump
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until
from tests.fakes.suspension import Suspensions

pytestmark = pytest.mark.usefixtures("relay_way")

LEG = ["/v1/completions"]
BODY = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 8, "stream": True}).encode()
TEXT = "".join(WORDS)
STREAM = {"content-type": "text/event-stream"}
DONE = b"data: [DONE]\n\n"
LONG = b'data: {"choices": [{"index": 0, "text": "%b"}]}\n\n' % (b"x" * 1000)
ERROR = b'data: {"error": {"message": "the KV is gone", "type": "x", "code": 500}}\n\n'
NUM = 100


def connected(house: Harness, **body: Any) -> ConnectedCall:
    call = house.call(**body)
    assert isinstance(call, ConnectedCall)
    return call


def event(number: int) -> bytes:
    choice = {"index": 0, "text": WORDS[number], "token_ids": [FIRST_ID + number], "finish_reason": None}
    return b"data: " + json.dumps({"id": "answer-1", "choices": [choice]}).encode() + b"\n\n"


EVENTS = [event(number) for number in range(len(WORDS))]


async def turns(num: int = 50) -> None:
    """Of the loop: enough for whatever can happen by itself."""
    for _ in range(num):
        await asyncio.sleep(0)


async def paused(house: Harness) -> Pump:
    """The pump of the one stream, once it has been told to wait."""
    await until(lambda: any(pump.is_paused for pump in house.decoder.pumps))
    [pump] = house.decoder.pumps
    assert isinstance(pump, Pump)
    return pump


async def legs(house: Harness, outcome: str) -> list[str]:
    page = (await house.get("/metrics")).body.decode()
    return [line for line in page.splitlines() if line.startswith("pdproxy_legs_total") and outcome in line]


async def test_streams_are_poured_those_of_whole_answers_too_and_whatever_is_read_as_a_whole_is_not() -> None:
    async with proxy_in_front_of() as house:
        assert (await house.post(stream=True)).text() == TEXT
        assert len(house.decoder.pumps) == 1
        assert (await house.post()).json()["choices"][0]["text"] == TEXT
        assert len(house.decoder.pumps) == 2
        assert (await house.post(max_tokens=1)).status == 200
        assert house.prefiller.pumps == []


async def test_a_long_stream_takes_no_more_steps_than_a_short_one() -> None:
    async with proxy_in_front_of() as house:
        nums = []
        for num_events in (1, NUM):
            house.decoder.events = [LONG] * num_events + [DONE]
            suspensions = Suspensions(-1, lambda: None)
            call = house.call_raw(LEG[0], BODY, watch=suspensions.watch)
            assert (await call.answer()).body == LONG * num_events + DONE
            nums.append(suspensions.num)
        assert nums[0] == nums[1]


# ── a client that takes less than the engine gives ──────────────────────────────────────────────────────────────────


async def test_an_engine_waits_for_its_client_and_what_is_kept_meanwhile_is_bounded() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.events = [LONG] * NUM + [DONE]
        call = connected(house, stream=True)
        await call.first_byte.wait()
        for _ in range(5):
            call.block()
            await paused(house)
            num = len(call.pieces)
            await turns()
            assert len(call.pieces) == num < NUM
            call.unblock()
        answer = await call.answer()
        assert answer.body == LONG * NUM + DONE
        assert call.line.most_kept <= 2 * (len(LONG) + 10)
        assert house.decoder.closed == []


async def test_a_client_that_is_slow_all_the_time_gets_it_all() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.events = [LONG] * NUM + [DONE]
        call = house.call_raw(LEG[0], BODY, is_slow=True)
        assert (await call.answer()).body == LONG * NUM + DONE


async def test_a_stream_that_ends_while_its_client_takes_nothing() -> None:
    """Its end needs room like everything else."""
    async with proxy_in_front_of() as house:
        call = connected(house, stream=True)
        call.block()
        await turns()
        while DONE not in call.pieces:
            call.unblock()
            call.block()
            await turns()
        assert not call.is_whole
        call.unblock()
        assert (await call.answer()).text() == TEXT


async def test_a_client_that_stops_taking_in_the_middle_is_given_up_and_costs_nothing_more() -> None:
    async with proxy_in_front_of(idle_timeout_s=0.05) as house:
        house.decoder.events = [LONG] * NUM + [DONE]
        call = connected(house, stream=True)
        await call.first_byte.wait()
        call.block()
        await call.done()
        assert not call.is_whole
        assert house.proxy.recent.facts()[0]["outcome"] == "client_gone"
        assert house.decoder.closed == LEG
        assert await legs(house, "timed_out") == []
        await until(lambda: call.line.is_lost)


async def test_a_client_that_takes_all_but_the_end_is_no_engines_fault() -> None:
    async with proxy_in_front_of(idle_timeout_s=0.05) as house:
        house.decoder.fail_at["decode"] = all_here(b"".join([*EVENTS, DONE]))
        call = connected(house, stream=True)
        call.block()
        await call.done()
        assert call.so_far().events()[-1] == "[DONE]"
        assert not call.is_whole
        assert house.proxy.recent.facts()[0]["outcome"] == "client_gone"
        assert await legs(house, "timed_out") == []
        assert await legs(house, 'outcome="closed"') == [], "it was heard to its end"


async def test_an_engine_that_falls_silent_after_its_client_was_slow_is_the_one_to_blame() -> None:
    async with proxy_in_front_of(idle_timeout_s=0.1, continue_streams=False) as house:
        house.decoder.hang_at.add("middle")
        call = connected(house, stream=True)
        call.block()
        await paused(house)
        await asyncio.sleep(0.06)
        call.unblock()
        answer = await call.answer()
        assert answer.events()[-1]["error"]["code"] == "deadline_exceeded"
        [line] = await legs(house, "timed_out")
        assert 'leg="decode"' in line


async def test_every_piece_gives_the_engine_its_time_again() -> None:
    async with proxy_in_front_of(idle_timeout_s=0.1) as house:
        points = [f"pause {number}" for number in range(5)]
        script: list[bytes | Exception | str] = [EVENTS[0]]
        for point in points:
            script += [point, EVENTS[1]]
        house.decoder.hang_at |= set(points)
        house.decoder.fail_at["decode"] = FakeReply(200, [*script, DONE], STREAM)
        call = connected(house, stream=True)
        for point in points:
            await house.decoder.reached(point)
            await asyncio.sleep(0.05)
            house.decoder.let_go(point)
        assert (await call.answer()).events()[-1] == "[DONE]"


@pytest.mark.parametrize("is_blocked", [False, True], ids=["idle", "engine paused"])
async def test_a_client_that_leaves_is_not_written_to_and_its_leg_is_closed_at_once(is_blocked: bool) -> None:
    async with proxy_in_front_of() as house:
        house.decoder.hang_at |= set() if is_blocked else {"middle"}
        house.decoder.events = [LONG] * NUM + [DONE]
        call = connected(house, stream=True)
        await call.first_byte.wait()
        if is_blocked:
            call.block()
            await paused(house)
        else:
            await house.decoder.reached("middle")
        num = len(call.pieces)
        call.leave()
        await call.done()
        assert house.decoder.closed == LEG
        house.decoder.let_go("middle")
        await turns()
        assert len(call.pieces) == num
        assert house.proxy.recent.facts()[0]["outcome"] == "client_gone"


@pytest.mark.parametrize("is_blocked", [False, True], ids=["told", "not listening"])
async def test_shutdown_in_the_middle(is_blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal, "TELL_S", 0.02)
    async with proxy_in_front_of() as house:
        house.decoder.events = [LONG] * NUM + [DONE]
        house.decoder.hang_at |= set() if is_blocked else {"middle"}
        call = connected(house, stream=True)
        await call.first_byte.wait()
        if is_blocked:
            call.block()
            await paused(house)
        else:
            await house.decoder.reached("middle")
        house.proxy.orchestrator.abort_all()
        await call.done()
        assert house.proxy.recent.facts()[0]["outcome"] == "shutdown"
        assert house.decoder.closed == LEG
        assert call.is_whole is not is_blocked
        if is_blocked:
            await until(lambda: call.line.is_lost)
        else:
            assert call.so_far().events()[-1]["error"]["code"] == "shutting_down"


# ── answers to a client that has yet to take an earlier one ─────────────────────────────────────────────────────────


async def full_line(house: Harness, **body: Any) -> ConnectedCall:
    """The answer is there, and there is no room for it."""
    house.decoder.hang_at.add("first")
    call = connected(house, **body)
    call.block()
    call.line.fill(1)
    await house.decoder.reached("first")
    house.decoder.let_go("first")
    await turns()
    assert call.pieces == []
    return call


async def test_a_stream_waits_for_room() -> None:
    async with proxy_in_front_of() as house:
        call = await full_line(house, stream=True)
        assert house.decoder.pumps == []
        call.unblock()
        assert (await call.answer()).text() == TEXT


async def test_a_whole_answer_waits_for_room() -> None:
    async with proxy_in_front_of() as house:
        call = await full_line(house)
        call.unblock()
        assert (await call.answer()).json()["choices"][0]["text"] == TEXT


async def test_a_whole_answer_whose_client_leaves() -> None:
    async with proxy_in_front_of() as house:
        call = await full_line(house)
        call.leave()
        await call.done()
        assert not call.is_started
        assert house.proxy.recent.facts()[0]["outcome"] == "client_gone"


async def test_a_whole_answer_that_nobody_takes() -> None:
    async with proxy_in_front_of(idle_timeout_s=0.05) as house:
        call = await full_line(house)
        await call.done()
        assert not call.is_started
        assert house.proxy.recent.facts()[0]["outcome"] == "client_gone"
        await until(lambda: call.line.is_lost)


# ── all that there is to hear has come before anybody pours it ──────────────────────────────────────────────────────


def all_here(*chunks: bytes | Exception | str) -> FakeReply:
    return FakeReply(200, list(chunks), STREAM, is_all_here=True)


@pytest.mark.parametrize("num_first", [1, 3, len(WORDS)])
async def test_all_at_once(num_first: int) -> None:
    async with proxy_in_front_of() as house:
        first, rest = b"".join(EVENTS[:num_first]), [*EVENTS[num_first:], DONE]
        house.decoder.fail_at["decode"] = all_here(first, *rest)
        answer = await house.post(stream=True)
        assert (answer.text(), answer.events()[-1]) == (TEXT, "[DONE]")
        house.decoder.fail_at["decode"] = all_here(b"".join([first, *rest]))
        assert (await house.post(stream=True)).text() == TEXT


@pytest.mark.parametrize(
    "rest",
    [[], [BROKEN], [EVENTS[1], EVENTS[2][:9]], [EVENTS[1], BROKEN], [EVENTS[1] + ERROR], [ERROR, DONE]],
    ids=["nothing", "broken", "half an event", "broken after another", "an error behind text", "an error"],
)
@pytest.mark.parametrize("num_decoders", [1, 2])
async def test_a_bad_end_at_once(num_decoders: int, rest: list[bytes | Exception | str]) -> None:
    """Another decoder goes on where there is one; else it is told."""
    decoders = [FakeEngine("decode") for _ in range(num_decoders)]
    async with proxy_in_front_of(decoders=decoders, retries=num_decoders - 1) as house:
        decoders[0].fail_at["decode"] = all_here(EVENTS[0], *rest)
        other = house.proxy.pool.of_role("decode")[-1]
        lease = await Held(other, 9).wait()
        answer = await house.post(stream=True)
        lease.release()
        if num_decoders > 1:
            assert (answer.text(), answer.events()[-1]) == (TEXT, "[DONE]")
            assert house.proxy.orchestrator.num_continued == 1
        else:
            assert TEXT.startswith(answer.text())
            assert any("error" in event for event in answer.events()[-2:])
        assert await legs(house, 'outcome="failed"') != []


async def test_what_follows_the_end_was_not_an_answer() -> None:
    async with proxy_in_front_of(continue_streams=False) as house:
        house.decoder.fail_at["decode"] = all_here(EVENTS[0], *EVENTS[1:], DONE, b"data: {")
        await house.post(stream=True)
        assert len(await legs(house, 'leg="decode",outcome="failed"')) == 1


async def test_all_at_once_to_a_client_that_takes_nothing() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.fail_at["decode"] = all_here(EVENTS[0], *EVENTS[1:], DONE)
        call = connected(house, stream=True)
        call.block()
        await call.first_byte.wait()
        await turns()
        assert not call.is_whole
        call.unblock()
        assert (await call.answer()).text() == TEXT
