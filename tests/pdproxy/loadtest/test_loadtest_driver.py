"""Asking: when it is due in an open loop, when the answer is there in a closed one; and records of whatever happens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pdproxy.engines.http.httpx_client import HttpxClient
from pdproxy.loadtest.arrivals import Pace
from pdproxy.loadtest.corpus import Scale
from pdproxy.loadtest.driver import run
from pdproxy.loadtest.errors import TargetError
from pdproxy.loadtest.event_log import EventLog
from pdproxy.loadtest.lengths import Fixed, Independent
from pdproxy.loadtest.live import Progress
from pdproxy.loadtest.record import Record, Run
from pdproxy.loadtest.stopping import Stopped
from pdproxy.loadtest.target import Target, first_model
from pdproxy.loadtest.watch import TIMEOUT_S
from pdproxy.loadtest.workload import Aborts, Closed, Conversations, Departure, Open, Workload
from tests.fakes.stub_openai import StubOpenAI, Visit, stub_openai

FAST = Open(pace=Pace(rate=500), process="constant")
USUAL = Workload(seed=1, pace=FAST, sizes=Independent(Fixed(12), Fixed(3)), num_requests=8)
PLAIN = Scale()


def target_at(stub: StubOpenAI, **changes: Any) -> Target:
    return Target(url=stub.url, model="tiny", **changes)


async def load(
    script: Callable[[Visit], Awaitable[None]] = Visit.answer,
    *,
    target: dict[str, Any] | None = None,
    pages: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Run, StubOpenAI]:
    async with stub_openai(script, **(pages or {})) as stub:
        ran = await run(replace(USUAL, **changes), target_at(stub, **(target or {})), scale=PLAIN)
    return ran, stub


async def only_record(script: Callable[[Visit], Awaitable[None]], **changes: Any) -> Record:
    ran, _ = await load(script, **{"num_requests": 1, **changes})
    (record,) = ran.records
    return record


# ── when ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_open_loop_asks_whatever_became_of_the_others() -> None:
    """Nobody is answered before everybody has asked."""
    all_here = asyncio.Event()

    async def hold(visit: Visit) -> None:
        if len(stub.visits) == 8:
            all_here.set()
        await all_here.wait()
        await visit.answer()

    async with asyncio.timeout(10), stub_openai(hold) as stub:
        ran = await run(USUAL, target_at(stub), scale=PLAIN)
    assert all(record.is_ok for record in ran.records)
    assert [record.index for record in ran.records] == list(range(8))
    assert not ran.head.is_interrupted


async def test_latency_counts_from_when_it_was_due() -> None:
    """The whole generator stands still: what was due meanwhile has waited."""

    async def stop_everything(visit: Visit) -> None:
        if len(stub.visits) == 1:
            stand_still(0.12)
        await visit.answer()

    slower = replace(USUAL, pace=Open(pace=Pace(rate=100), process="constant"))
    async with stub_openai(stop_everything) as stub:
        ran = await run(slower, target_at(stub), scale=PLAIN)
    latest = max(ran.records, key=lambda record: record.lateness_s)
    assert latest.lateness_s > 0.08
    assert latest.ttft_s is not None
    assert latest.ttft_s > latest.lateness_s
    assert ran.health.late_max_s == latest.lateness_s
    assert not ran.health.is_trusted


def stand_still(seconds: float) -> None:
    """The event loop of server and generator alike does nothing."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        pass


async def test_a_closed_loop_has_so_many_under_way() -> None:
    num_now = most = 0

    async def count(visit: Visit) -> None:
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        await asyncio.sleep(0)
        num_now -= 1
        await visit.answer()

    ran, _ = await load(count, pace=Closed(num_clients=3), num_requests=30)
    assert most <= 3
    assert len(ran.records) == 30
    assert all(record.is_ok for record in ran.records)


async def test_a_closed_loop_ends_with_the_time() -> None:
    ran, _ = await load(pace=Closed(num_clients=2, think_s=0.005), num_requests=None, duration_s=0.2)
    assert len(ran.records) > 5
    assert max(record.due_s for record in ran.records) < 0.2


async def test_a_closed_loop_does_not_hammer_at_a_closed_door() -> None:
    async def refuse(visit: Visit) -> None:
        await visit.json(b"busy", 503)

    ran, _ = await load(refuse, pace=Closed(num_clients=3), num_requests=None, duration_s=0.2)
    assert [record.error for record in ran.records] == ["http_503"] * 3


async def test_connections_that_are_not_kept_alive_fail_nobody() -> None:
    async def answer_and_hang_up(visit: Visit) -> None:
        await visit.answer()
        raise ConnectionResetError

    ran, stub = await load(answer_and_hang_up, pace=Open(pace=Pace(rate=50), process="constant"))
    assert [record.error for record in ran.records] == [""] * 8
    assert len(stub.visits) == 8


async def test_the_warm_up_is_marked() -> None:
    ran, _ = await load(pace=Open(pace=Pace(rate=100), process="constant"), warmup_s=0.035)
    assert [record.is_warmup for record in ran.records] == [True] * 4 + [False] * 4
    assert len(ran.measured) == 4


# ── what ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_sent() -> None:
    _, stub = await load(stream_share=0.5, num_requests=20)
    bodies = [visit.body for visit in stub.visits]
    assert {len(body["prompt"].split()) for body in bodies} == {12}
    assert {body["max_tokens"] for body in bodies} == {3}
    assert {body["stream"] for body in bodies} == {True, False}
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies if body["stream"])
    assert all(body["temperature"] == 0 and body["ignore_eos"] is True and body["model"] == "tiny" for body in bodies)
    assert {visit.path for visit in stub.visits} == {"/v1/completions"}


async def test_a_chat() -> None:
    _, stub = await load(target={"endpoint": "chat", "extra": {}, "wants_usage": False})
    assert stub.visits[0].path == "/v1/chat/completions"
    assert stub.visits[0].body.keys() == {"model", "messages", "max_tokens", "stream"}
    (message,) = stub.visits[0].body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 12


async def test_token_ids() -> None:
    _, stub = await load(target={"token_ids": range(5, 50)})
    prompt = stub.visits[0].body["prompt"]
    assert len(prompt) == 12
    assert set(prompt) <= set(range(5, 50))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_conversation_goes_on_with_what_was_answered(endpoint: str) -> None:
    talk = Conversations(turns=Fixed(3), message=Fixed(4), think_s=0.02)
    ran, stub = await load(num_requests=3, conversations=talk, target={"endpoint": endpoint})
    if endpoint == "chat":
        said = [[message["content"] for message in visit.body["messages"]] for visit in stub.visits]
        assert [len(messages) for messages in said] == [1, 3, 5]
        assert said[2][:3] == said[1]
        assert said[1][1] == "w w w "
    else:
        prompts = [visit.body["prompt"] for visit in stub.visits]
        assert prompts[1].startswith(prompts[0] + "w w w  ")
        assert prompts[2].startswith(prompts[1] + "w w w  ")
    assert [record.turn for record in ran.records] == [0, 1, 2]
    assert {record.conversation for record in ran.records} == {0}
    assert all(later.due_s >= sooner.done_s for sooner, later in pairwise(ran.records))
    assert [record.prompt_tokens_asked for record in ran.records] == [12, 19, 26]


async def test_a_conversation_ends_with_an_answer_that_is_none() -> None:
    async def refuse(visit: Visit) -> None:
        await visit.json({"error": {"message": "full", "code": "queue_full"}}, 503)

    ran, stub = await load(refuse, num_requests=3, conversations=Conversations(turns=Fixed(3)))
    assert len(stub.visits) == 1
    assert [record.error for record in ran.records] == ["queue_full"]


async def test_a_conversation_cannot_be_had_with_ids() -> None:
    with pytest.raises(TargetError, match="words"):
        await load(conversations=Conversations(turns=Fixed(2)), target={"token_ids": range(9)})


# ── what comes of it ────────────────────────────────────────────────────────────────────────────────────────────────

HEADERS = {
    "x_pdproxy_path": "disaggregated",
    "x_pdproxy_prefiller": "prefill-0",
    "x_pdproxy_decoder": "decode-0",
    "server_timing": "slot_wait;dur=1.0, prefill;dur=20.0, kv_wait;dur=3.0, first_byte;dur=2.0, decode;dur=0.0",
}


async def test_the_record_of_a_stream() -> None:
    async def answer(visit: Visit) -> None:
        await visit.stream("a", **HEADERS)
        await visit.say("b", "length")
        await visit.end()

    record = await only_record(answer, sizes=Independent(Fixed(12), Fixed(2)))
    assert record.is_ok
    assert record.first_byte_s is not None
    assert record.first_token_s is not None
    assert record.last_token_s is not None
    assert record.due_s <= record.sent_s <= record.first_byte_s <= record.done_s
    assert record.sent_s <= record.first_token_s <= record.last_token_s <= record.done_s
    assert (record.status, record.finish_reason, record.num_chunks, record.answer_tokens) == (200, "length", 2, 2)
    assert (record.path, record.prefiller, record.decoder) == ("disaggregated", "prefill-0", "decode-0")
    assert record.phases["prefill"] == 0.02
    assert record.phases["decode"] == pytest.approx(record.done_s - record.first_byte_s)


async def test_the_record_of_an_answer_in_one_piece() -> None:
    ran, _ = await load(stream_share=0)
    for record in ran.records:
        assert record.is_ok
        assert not record.is_stream
        assert record.first_token_s is None
        assert (record.prompt_tokens, record.answer_tokens, record.num_chunks) == (1, 3, 0)
    streams, _ = await load()
    assert {record.answer_digest for record in ran.records} == {record.answer_digest for record in streams.records}


async def _cut(visit: Visit) -> None:
    await visit.stream("a")
    await visit.cut()


async def _error_event(visit: Visit) -> None:
    await visit.stream("a")
    await visit.event({"error": {"message": "lost", "code": "kv_transfer_failed"}})
    await visit.event(b"[DONE]")
    await visit.cut()


async def _short(visit: Visit) -> None:
    await visit.stream("a")
    await visit.say("", "length")
    await visit.end(num_tokens=1)


async def _hang_up(visit: Visit) -> None:
    raise ConnectionResetError


async def _hang_up_in_the_middle(visit: Visit) -> None:
    await visit.stream("a")
    raise ConnectionResetError


async def _busy(visit: Visit) -> None:
    await visit.json(b"busy", 503)


@pytest.mark.parametrize(
    ("script", "error", "status"),
    [
        (_cut, "cut", 200),
        (_error_event, "kv_transfer_failed", 200),
        (_short, "short", 200),
        (_hang_up, "broken", 0),
        (_hang_up_in_the_middle, "broken", 200),
        (_busy, "http_503", 503),
    ],
)
@pytest.mark.parametrize("client", ["http1", "httpx"])
async def test_what_goes_wrong(
    script: Callable[[Visit], Awaitable[None]], error: str, status: int, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client == "httpx":
        monkeypatch.setattr("pdproxy.loadtest.target.can_reach", lambda url: False)
        assert isinstance(Target(url="http://127.0.0.1:1", model="m").client(), HttpxClient)
    record = await only_record(script)
    assert (record.error, record.status) == (error, status)
    assert not record.is_ok
    assert record.answer_digest == ""


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        ran = await run(USUAL, Target(url=url, model="tiny"), scale=PLAIN)
        assert {record.error for record in ran.records} == {"refused"}
        with pytest.raises(TargetError, match="does not answer"):
            await run(USUAL, Target(url=url, model="tiny"))


async def test_no_end_in_time() -> None:
    async def hang(visit: Visit) -> None:
        await visit.stream("a")
        await visit.gone()

    ran, _ = await load(hang, num_requests=1, target={"timeout_s": 0.05})
    assert ran.records[0].error == "timeout"
    assert ran.records[0].e2e_s == pytest.approx(0.05, abs=0.04)


# ── clients that leave ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("phase", Departure)
async def test_a_client_that_leaves(phase: Departure) -> None:
    """The server sees the connection close; with two pieces said it would wait for ever."""
    left = asyncio.Event()

    async def wait(visit: Visit) -> None:
        if phase in (Departure.FIRST_TOKEN, Departure.MID_STREAM):
            await visit.stream(*["w"] * (1 if phase is Departure.FIRST_TOKEN else 2))
        await visit.gone()
        left.set()

    async with asyncio.timeout(10), stub_openai(wait) as stub:
        aborts = Aborts(share=1, phases=(phase,))
        ran = await run(replace(USUAL, num_requests=1, aborts=aborts), target_at(stub), scale=PLAIN)
        await left.wait()
    (record,) = ran.records
    assert (record.aborted, record.error) == (phase, "")
    assert record.num_chunks == {Departure.FIRST_TOKEN: 1, Departure.MID_STREAM: 2}.get(phase, 0)
    assert not record.is_ok


async def test_who_was_answered_before_it_wanted_to_leave_has_not_left() -> None:
    async def brief(visit: Visit) -> None:
        await visit.stream("a")
        await visit.say("", "stop")
        await visit.end(num_tokens=1)

    record = await only_record(brief, aborts=Aborts(share=1, phases=(Departure.MID_STREAM,)))
    assert record.is_ok


async def test_who_leaves_by_time_and_has_seen_something_left_then() -> None:
    async def begin(visit: Visit) -> None:
        await visit.stream("a", "b")
        await visit.gone()

    record = await only_record(begin, aborts=Aborts(share=1, phases=(Departure.PREFILL,)))
    assert record.aborted == Departure.MID_STREAM


# ── the run as a whole ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_run_that_is_stopped_keeps_what_it_has() -> None:
    stop = asyncio.Event()

    async def first_only(visit: Visit) -> None:
        if len(stub.visits) < 3:
            await visit.answer()
            return
        stop.set()
        await visit.gone()

    async with asyncio.timeout(10), stub_openai(first_only) as stub:
        workload = replace(USUAL, pace=Closed(num_clients=1), num_requests=100_000)
        ran = await run(workload, target_at(stub), scale=PLAIN, stop=stop)
    assert ran.head.is_interrupted
    assert [record.error for record in ran.records] == ["", "", "interrupted"]


async def test_who_does_not_want_to_wait_for_the_first_answer_has_nothing() -> None:
    """A target that hangs is asked how it counts."""
    stop = asyncio.Event()

    async def hang(visit: Visit) -> None:
        stop.set()
        await visit.gone()

    async with asyncio.timeout(10), stub_openai(hang) as stub:
        with pytest.raises(Stopped):
            await run(USUAL, target_at(stub), stop=stop)
        assert len(stub.visits) == 1


async def test_a_run_that_is_stopped_does_not_wait_for_a_last_look() -> None:
    """Of a target that hangs: else who presses Ctrl-C twice meanwhile would lose all that there is."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def hang(visit: Visit) -> None:
        stopped_at.append(loop.time())
        stop.set()
        await visit.gone()

    stopped_at: list[float] = []
    async with stub_openai(hang, status=Visit.gone) as stub:
        ran = await run(replace(USUAL, num_requests=1), target_at(stub), scale=PLAIN, stop=stop)
    assert loop.time() - stopped_at[0] < TIMEOUT_S / 2
    assert [record.error for record in ran.records] == ["interrupted"]


async def test_what_is_seen_of_a_proxy_meanwhile() -> None:
    trips = [{"phase": "prefill"}, {"phase": "prefill"}, {"outcome": "running"}, {"phase": "done", "orphan": True}]
    status = {
        "fleet": [
            {"name": "prefill-0", "state": "ready", "draining": True},
            {"name": "decode-0", "state": "ready", "capacity": 64, "held": 7, "queue": 2, "more": {}},
        ],
        "in_flight": trips,
    }
    ran, stub = await load(pages={"status": status})
    assert set(stub.looked_at) == {"/status"}
    moment = ran.moments[-1]
    assert (moment.num_open, moment.in_flight, moment.by_phase) == (0, 3, {"prefill": 2, "receive": 1})
    assert (moment.held, moment.capacity, moment.waiting) == ({"decode-0": 7}, {"decode-0": 64}, {"decode-0": 2})
    assert moment.states == {"prefill-0": "draining", "decode-0": "ready"}


async def test_a_stranger_is_asked_for_its_status_once() -> None:
    ran, stub = await load(num_requests=150)
    assert stub.looked_at == ["/status"]
    assert all(moment.in_flight is None for moment in ran.moments)
    assert len(ran.moments) >= 2


async def test_what_goes_on_beside_it() -> None:
    async def beside(events: EventLog) -> None:
        events.note("kill", "decode-0")
        await asyncio.Event().wait()

    async with stub_openai() as stub:
        ran = await run(USUAL, target_at(stub), scale=PLAIN, alongside=beside, settings={"faults": 1})
    (event,) = ran.events
    assert (event.what, event.whom) == ("kill", "decode-0")
    assert 0 <= event.at_s < ran.head.wall_s
    assert ran.head.settings["faults"] == 1
    assert ran.head.settings["rate"] == 500


async def test_its_progress() -> None:
    told: list[Progress] = []
    async with stub_openai() as stub:
        await run(USUAL, target_at(stub), scale=PLAIN, progress=told.append)
    last = told[-1]
    assert (last.num_sent, last.num_ended, last.num_open, last.num_failed) == (8, 8, 0, 0)
    assert last.num_expected == 8
    assert last.ttft_p50_s is not None
    assert last.tokens_per_s > last.ended_per_s > 0


async def test_how_the_target_counts_is_asked() -> None:
    """Three tokens a word, and seven by itself."""

    async def count(visit: Visit) -> None:
        num_words = len(visit.body["prompt"].split())
        if not visit.body["stream"]:
            usage = {"prompt_tokens": 7 + 3 * num_words, "completion_tokens": 1}
            await visit.json({"choices": [{"text": "w", "finish_reason": "length"}], "usage": usage})
            return
        asked.append(num_words)
        await visit.answer()

    asked: list[int] = []
    async with stub_openai(count) as stub:
        ran = await run(replace(USUAL, sizes=Independent(Fixed(307), Fixed(1))), target_at(stub))
    assert asked == [100] * 8
    assert ran.head.settings["tokens_per_word"] == 3
    assert ran.head.settings["prompt_overhead"] == 7
    assert ran.head.settings["is_scale_measured"] is True


async def test_a_target_that_does_not_count() -> None:
    async def tell_nothing(visit: Visit) -> None:
        if visit.body["stream"]:
            await visit.answer()
        else:
            await visit.json({"choices": [{"text": "w", "finish_reason": "length"}]})

    async with stub_openai(tell_nothing) as stub:
        ran = await run(USUAL, target_at(stub))
    assert ran.head.settings["is_scale_measured"] is False
    assert all(record.is_ok for record in ran.records)


async def test_the_same_seed_asks_the_same() -> None:
    async def prompts() -> list[str]:
        _, stub = await load(num_requests=20)
        return sorted(visit.body["prompt"] for visit in stub.visits)

    assert await prompts() == await prompts()


# ── addresses ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x", "http://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(TargetError, match="no address"):
        Target(url=url, model="m")


@pytest.mark.parametrize("url", ["http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/"])
def test_with_or_without_its_version(url: str) -> None:
    assert Target(url=url, model="m").root == "http://x:1"


async def test_the_model_it_serves() -> None:
    async with stub_openai(**{"v1/models": {"data": [{"id": "tiny", "object": "model"}, {"id": "other"}]}}) as stub:
        assert await first_model(stub.url) == "tiny"
    async with stub_openai() as stub:
        with pytest.raises(TargetError, match="models"):
            await first_model(stub.url)
