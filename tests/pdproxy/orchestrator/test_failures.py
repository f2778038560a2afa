"""Each way in which things go wrong and what the client gets; the harness checks that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from inspect import isfunction
from typing import Any

import pytest

from pdproxy.admission.admission import Admission
from pdproxy.engines.http.base import EngineBroken, EngineUnreachable
from pdproxy.errors import NeverFits
from tests.fakes.fake_engine import BROKEN, FakeEngine, FakeReply, error_reply
from tests.fakes.proxy_harness import Answer, proxy_in_front_of, until

pytestmark = pytest.mark.usefixtures("both_ways")

CHAT = "/v1/chat/completions"


def attempts_of(engine: FakeEngine) -> list[str]:
    return [call.body["kv_transfer_params"]["attempt"] for call in engine.generations()]


# ── the request itself ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", b"[]", 400, None),
        ("/v1/completions", b'{"prompt": "\xff"}', 400, None),
        ("/v1/completions", b"{}", 400, "prompt"),
        ("/v1/completions", b'{"prompt": 3}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": "a", "n": "two"}', 400, "n"),
        (CHAT, b'{"messages": [{"role": 3}]}', 400, "messages[0].role"),
        ("/v1/completions", b'{"prompt": "a", "model": "nobody"}', 404, "model"),
        ("/v1/completions", b'{"prompt": "' + b"a" * 2000 + b'"}', 413, None),
    ],
)
async def test_what_cannot_be_served_names_its_field(path: str, body: bytes, status: int, param: str | None) -> None:
    async with proxy_in_front_of(max_body_bytes=1000) as house:
        answer = await house.call_raw(path, body).answer()
        assert (answer.status, answer.error["param"]) == (status, param)
        assert answer.headers["x-request-id"].startswith("req-")
        assert house.prefiller.generations() == []


async def test_body_over_the_limit_is_known_from_its_length() -> None:
    async with proxy_in_front_of(max_body_bytes=1000) as house:
        answer = await house.call_raw("/v1/completions", b"{}", {"content-length": "1001"}).answer()
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_body_that_never_ends() -> None:
    async with proxy_in_front_of(body_timeout_s=0.01) as house:
        call = house.call_raw("/v1/completions", None)
        answer = await call.answer()
        assert (answer.status, answer.error["code"]) == (408, "body_timeout")


async def test_client_that_leaves_before_its_body_is_there() -> None:
    async with proxy_in_front_of() as house:
        call = house.call_raw("/v1/completions", None)
        call.leave()
        await call.done()
        assert not call.is_started


async def test_unknown_routes_and_methods_are_error_objects_too() -> None:
    async with proxy_in_front_of() as house:
        missing = await house.get("/v1/nothing")
        assert (missing.status, missing.error["code"]) == (404, "not_found")
        wrong = await house.get("/v1/completions")
        assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"


async def test_prompt_longer_than_the_context() -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(prompt=[1] * 4096)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "4096 tokens" in answer.error["message"]


async def test_prompt_larger_than_the_buffer_is_refused_where_configured() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4)], oversized="refuse") as house:
        answer = await house.post(prompt=[1] * 65)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "5 pages" in answer.error["message"]
        assert "has 4" in answer.error["message"]


# ── room and readiness ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_full_queue_and_long_wait() -> None:
    decoder = FakeEngine("decode", num_pages=4)
    async with proxy_in_front_of(decoders=[decoder], max_queue=1, slot_timeout_s=0.05) as house:
        house.prefiller.hang_at.add("prefill")
        first = house.call(prompt=[1] * 64)
        await house.prefiller.reached("prefill")
        waiting = house.call()
        admission = house.proxy.pool.of_role("decode")[0].admission
        await until(lambda: admission.num_waiting > 0)
        full = await house.post()
        assert (full.status, full.error["code"]) == (429, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        late = await waiting.answer()
        assert (late.status, late.error["code"]) == (503, "queue_timeout")
        assert int(late.headers["retry-after"]) >= 1
        first.leave()
        await first.done()


async def test_nobody_is_ready() -> None:
    async with proxy_in_front_of(when_no_prefiller="refuse") as house:
        house.proxy.pool.instances[0].lost("switched off")
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (503, "no_ready_instance")
        assert (await house.get("/ready")).status == 503


# ── what an engine says ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("point", ["prefill", "decode"])
async def test_an_engines_4xx_reaches_the_client_unchanged(point: str) -> None:
    async with proxy_in_front_of() as house:
        engine = house.prefiller if point == "prefill" else house.decoder
        engine.fail_at[point] = error_reply(422, "temperature must be below 2")
        answer = await house.post()
        assert answer.status == 422
        assert answer.error == {
            "message": "temperature must be below 2",
            "type": "some_error",
            "param": None,
            "code": "from_engine",
        }
        assert len(engine.generations()) == 1, "a 4xx is never retried"
        assert all(instance.is_ready for instance in house.proxy.pool.instances)


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_engine_without_another_is_passed_on(status: int) -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.fail_at["prefill"] = error_reply(status, "busy", retry_after="7")
        answer = await house.post()
        assert (answer.status, answer.headers["retry-after"]) == (status, "7")
        assert answer.error["message"] == "busy"
        assert len(house.prefiller.generations()) == 1
        assert all(instance.is_ready for instance in house.proxy.pool.instances)


async def test_busy_engine_with_another_is_not_seen_by_the_client() -> None:
    prefillers = [FakeEngine("prefill"), FakeEngine("prefill")]
    async with proxy_in_front_of(prefillers) as house:
        prefillers[0].fail_at["prefill"] = error_reply(503, "busy")
        for _ in range(2):
            assert (await house.post()).status == 200
        assert len(prefillers[1].generations()) == 2


FAULTS = [error_reply(500, "secret stack trace"), BROKEN, EngineUnreachable("refused")]


@pytest.mark.parametrize("fault", FAULTS, ids=["500", "reset", "refused"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_failed_leg_with_retries_used_up(leg: str, fault: FakeReply | Exception) -> None:
    async with proxy_in_front_of() as house:
        engine = house.prefiller if leg == "prefill" else house.decoder
        engine.fail_at[leg] = fault
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")
        assert f"{leg} leg" in answer.error["message"]
        assert f"{leg}-0" in answer.error["message"]
        assert "secret" not in answer.body.decode()
        attempts = attempts_of(house.prefiller)
        assert len(set(attempts)) == len(attempts), "every attempt has a fresh id"
        if not isinstance(fault, EngineUnreachable):
            assert len(engine.generations()) == 2


@pytest.mark.parametrize("fault", FAULTS, ids=["500", "reset", "refused"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_failed_leg_is_tried_elsewhere(leg: str, fault: FakeReply | Exception, stream: bool) -> None:
    prefillers = [FakeEngine("prefill"), FakeEngine("prefill")]
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of(prefillers, decoders) as house:
        (prefillers if leg == "prefill" else decoders)[0].fail_at[leg] = fault
        for _ in range(2):
            assert (await house.post(stream=stream)).status == 200
        attempts = [attempt for engine in prefillers for attempt in attempts_of(engine)]
        assert len(set(attempts)) == len(attempts) > 2


NO_SUCH_CODE = [
    [b"502 Bad Gateway"],
    [b'{"error": {"code": 502}}'],
    [b'{"error": {"code": "kv_', BROKEN],
    [b" " * 70_000, "endless"],
]


@pytest.mark.parametrize("body", NO_SUCH_CODE, ids=["text", "number", "broken", "endless"])
async def test_502_that_does_not_say_what_became_of_the_kv(body: list[bytes | Exception | str]) -> None:
    """Then it is the prefiller's own fault, and nothing that it may go on to say is waited for."""
    async with proxy_in_front_of(retries=0, breaker_faults=1) as house:
        house.prefiller.hang_at.add("endless")
        house.prefiller.fail_at["prefill"] = FakeReply(502, body)
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")
        prefiller, decoder = house.proxy.pool.instances
        assert not prefiller.is_routable
        assert not decoder.is_suspected


@pytest.mark.skipif(not isfunction(Admission.bind_now), reason="a compiled class takes no other method")
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [("/v1/completions", {}, "prompt"), (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, "messages")],
)
async def test_what_never_fits_is_told_by_the_field_that_the_client_has_sent(
    path: str, body: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The admission knows pages, and not what the client has asked."""
    async with proxy_in_front_of() as house:

        def bind_now(demand: object) -> None:
            raise NeverFits(5, 2)

        monkeypatch.setattr(house.proxy.orchestrator._admission, "bind_now", bind_now)
        answer = await house.post(path, **body)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", field)


async def test_no_retries_means_none() -> None:
    async with proxy_in_front_of(retries=0) as house:
        house.prefiller.fail_at["prefill"] = BROKEN
        assert (await house.post()).status == 502
        assert len(house.prefiller.generations()) == 1


async def test_prefiller_that_nobody_reached_leaves_nothing_to_settle() -> None:
    async with proxy_in_front_of(retries=0) as house:
        house.prefiller.fail_at["prefill"] = EngineUnreachable("refused")
        assert (await house.post()).status == 502
        assert house.held == 0
        assert house.decoder.cancelled == []
        await until(lambda: "/health" in [call.path for call in house.prefiller.calls])


async def test_failed_prefill_is_settled_with_the_decoder() -> None:
    async with proxy_in_front_of(retries=0) as house:
        house.prefiller.fail_at["prefill_done"] = BROKEN
        assert (await house.post()).status == 502
        await house.settled()
        assert house.decoder.cancelled == attempts_of(house.prefiller)
        assert house.decoder.pages == {}


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"text": "x", "finish_reason": "length"}]}',
        b'{"choices": [{"text": "x", "finish_reason": null}]}',
        b'{"error": {"message": "no"}, "choices": [{"text": "x", "finish_reason": "stop"}]}',
    ],
)
async def test_prefill_reply_that_is_none(body: bytes) -> None:
    async with proxy_in_front_of(retries=0) as house:
        house.prefiller.fail_at["prefill"] = FakeReply(200, [body])
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")


def sse(*data: object) -> list[bytes | Exception | str]:
    return [b"data: " + (d.encode() if isinstance(d, str) else json.dumps(d).encode()) + b"\n\n" for d in data]


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
EMPTY_END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
ERROR = {"error": {"message": "the KV is gone", "type": "x", "code": 500}}


@pytest.mark.parametrize(
    "events",
    [[ERROR, "[DONE]"], [ROLE, ERROR], [ROLE, EMPTY_END, "[DONE]"], ["[DONE]"], [], [ROLE], ["not json"]],
    ids=["error", "role, error", "empty finish", "done at once", "nothing", "role only", "no json"],
)
async def test_stream_that_is_no_answer_is_a_real_status(events: list[object]) -> None:
    async with proxy_in_front_of(retries=0) as house:
        headers = {"content-type": "text/event-stream"}
        house.decoder.fail_at["decode"] = FakeReply(200, sse(*events), headers)
        answer = await house.post(CHAT, messages=[{"role": "user", "content": "hi"}], stream=True)
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")


async def test_empty_answer_may_be_right_where_the_client_gave_stop_strings() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.events = [bytes(e) for e in sse(ROLE, EMPTY_END, "[DONE]") if isinstance(e, bytes)]
        message = [{"role": "user", "content": "hi"}]
        answer = await house.post(CHAT, messages=message, stream=True, stop=["Once upon"])
        assert answer.status == 200
        assert answer.text() == ""


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"choices": [{"text": "x", "finish_reason": null}]}',
        b'{"choices": [{"text": "", "finish_reason": "stop"}]}',
        b'{"choices": [{"text": "x", "finish_reason": "error"}]}',
        b'{"error": {"message": "no"}}',
        b'{"choices": [{"te',
    ],
)
async def test_whole_answer_that_is_none(body: bytes) -> None:
    async with proxy_in_front_of(retries=0) as house:
        house.decoder.fail_at["decode"] = FakeReply(200, [body])
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")


async def test_decoder_that_does_not_stream() -> None:
    async with proxy_in_front_of(retries=0) as house:
        house.decoder.fail_at["decode"] = FakeReply(200, [b"{}"])
        assert (await house.post(stream=True)).status == 502


# ── the KV ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("signals", ["failed", "released"])
async def test_failed_transfer(signals: str) -> None:
    async with proxy_in_front_of() as house:
        house.decoder.signals = signals
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "kv_transfer_failed")
        assert len(set(attempts_of(house.prefiller))) == 2, "it was tried anew"
        assert house.decoder.generations() == []


async def test_failed_transfer_is_tried_elsewhere() -> None:
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of(decoders=decoders) as house:
        decoders[0].signals = "failed"
        for _ in range(2):
            assert (await house.post()).status == 200


async def test_lost_signal_ends_by_deadline_and_keeps_nothing() -> None:
    async with proxy_in_front_of(kv_timeout_s=0.05) as house:
        house.decoder.signals = "lost"
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        await house.settled()
        assert house.decoder.cancelled == attempts_of(house.prefiller)
        assert house.decoder.generations() == []


async def test_signal_of_one_rank_is_not_enough() -> None:
    decoder = FakeEngine("decode", num_ranks=2)
    async with proxy_in_front_of(decoders=[decoder], kv_timeout_s=0.05) as house:
        say = decoder._say
        decoder._say = lambda what, attempt, rank, num_pages: say(what, attempt, 0, num_pages)  # type: ignore[method-assign]
        answer = await house.post()
        assert answer.status == 504
        assert "1 of 2 ranks" in answer.error["message"]


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("engine", "point", "option"),
    [
        ("prefill", "prefill", "prefill_timeout_s"),
        ("prefill", "prefill_done", "prefill_timeout_s"),
        ("decode", "decode", "first_byte_timeout_s"),
        ("decode", "first", "first_byte_timeout_s"),
        ("prefill", "prefill", "request_timeout_s"),
        ("decode", "first", "request_timeout_s"),
    ],
)
async def test_hanging_engine_ends_by_deadline(engine: str, point: str, option: str) -> None:
    async with proxy_in_front_of() as house:
        house.limit(**{option: 0.05})
        hanging = house.prefiller if engine == "prefill" else house.decoder
        hanging.hang_at.add(point)
        answer = await house.post(stream=True)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert hanging.closed, "the leg was closed at once"


async def test_non_streamed_decode_ends_with_the_request() -> None:
    async with proxy_in_front_of() as house:
        house.limit(request_timeout_s=0.05)
        house.decoder.hang_at.add("first")
        assert (await house.post()).status == 504


# ── after the first byte ────────────────────────────────────────────────────────────────────────────────────────────


def check_ended_by_error(answer: Answer, code: str) -> None:
    assert answer.status == 200
    last = answer.events()[-1]
    assert last["error"]["code"] == code
    assert "[DONE]" not in answer.events()
    assert answer.text().startswith("Once")


@pytest.mark.parametrize("fault", [BROKEN, EngineBroken("eof")])
async def test_decoder_that_dies_in_the_middle(fault: Exception) -> None:
    async with proxy_in_front_of(continue_streams=False) as house:
        house.decoder.fail_at["middle"] = fault
        answer = await house.post(stream=True)
        check_ended_by_error(answer, "leg_failed")
        assert len(house.prefiller.generations()) == 1, "nothing is retried once the client has seen something"
        await until(lambda: "/health" in [call.path for call in house.decoder.calls])


async def test_stream_that_just_ends() -> None:
    """A silently short answer would look like a whole one."""
    async with proxy_in_front_of() as house:
        whole = sse({"choices": [{"index": 0, "text": "Once"}]}, {"choices": [{"index": 0, "text": " upon"}]})
        house.decoder.events = [*(e for e in whole if isinstance(e, bytes)), b'data: {"choices": [{"in']
        check_ended_by_error(await house.post(stream=True), "leg_failed")


async def test_decoder_that_falls_silent() -> None:
    async with proxy_in_front_of(idle_timeout_s=0.05) as house:
        house.decoder.hang_at.add("middle")
        check_ended_by_error(await house.post(stream=True), "deadline_exceeded")


async def test_an_engines_own_error_event_is_passed_on() -> None:
    async with proxy_in_front_of() as house:
        events = sse({"choices": [{"index": 0, "text": "Once"}]}, ERROR, "[DONE]")
        house.decoder.events = [e for e in events if isinstance(e, bytes)]
        answer = await house.post(stream=True)
        assert answer.events()[1] == ERROR
        assert house.proxy.recent.facts()[0]["outcome"] == "failed"


async def test_client_that_takes_nothing() -> None:
    async with proxy_in_front_of(idle_timeout_s=0.05) as house:
        call = house.call(stream=True)
        call.block()
        await call.done()
        assert house.proxy.recent.facts()[0]["outcome"] == "client_gone"
        assert house.decoder.closed == ["/v1/completions"]


# ── clients that leave ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("engine", "point"),
    [("prefill", "prefill"), ("prefill", "prefill_done"), ("decode", "decode"), ("decode", "first")],
)
async def test_client_leaves(engine: str, point: str, stream: bool) -> None:
    """In each phase: the leg is closed, the decoder told to drop the KV, and nothing held."""
    async with proxy_in_front_of() as house:
        hanging = house.prefiller if engine == "prefill" else house.decoder
        house.decoder.consumed_signal = False
        hanging.hang_at.add(point)
        call = house.call(stream=stream)
        await hanging.reached(point)
        call.leave()
        await call.done()
        assert hanging.closed == ["/v1/completions"]
        await house.settled()
        assert house.decoder.cancelled == attempts_of(house.prefiller)
        assert not call.is_started
        assert house.proxy.recent.facts()[0]["outcome"] == "client_gone"


async def test_client_leaves_while_queued() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4)]) as house:
        house.prefiller.hang_at.add("prefill")
        first = house.call(prompt=[1] * 64)
        await house.prefiller.reached("prefill")
        second = house.call(prompt=[1] * 64)
        admission = house.proxy.pool.of_role("decode")[0].admission
        await until(lambda: admission.num_waiting > 0)
        second.leave()
        await second.done()
        assert admission.num_waiting == 0
        assert len(house.prefiller.generations()) == 1, "its prefill was never sent"
        first.leave()
        await first.done()


async def test_client_leaves_while_the_kv_travels() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.signals = "lost"
        call = house.call()
        await house.prefiller.reached("prefill_done")
        await until(lambda: house.proxy.board.statistics().num_waiting > 0)
        call.leave()
        await call.done()
        await house.settled()
        assert house.decoder.cancelled == attempts_of(house.prefiller)
        assert house.decoder.generations() == []


async def test_client_leaves_while_it_is_written_to() -> None:
    """Blocked in send, which a generator's finally would not have survived."""
    async with proxy_in_front_of() as house:
        call = house.call(stream=True)
        call.block()
        await call.first_byte.wait()
        call.leave()
        await call.done()
        assert house.decoder.closed == ["/v1/completions"]


# ── what the reaper does ────────────────────────────────────────────────────────────────────────────────────────────


async def test_slots_wait_for_a_decoder_that_does_not_answer() -> None:
    async with proxy_in_front_of(engine_lease_s=0.1, retries=0) as house:
        house.decoder.signals = "lost"
        house.decoder.answers_cancel = False
        house.prefiller.fail_at["prefill_done"] = BROKEN
        assert (await house.post()).status == 502
        assert house.held == 1, "pages may still be filling"
        [orphan] = [f for f in house.proxy.orchestrator.in_flight() if f.get("orphan")]
        assert orphan["custody"] == "orphaned"
        await house.settled()
        assert house.held == 0
        assert len(house.decoder.cancelled) > 1
        assert house.proxy.reaper.statistics()["expired"] == 1


async def test_slots_come_back_at_once_when_the_decoder_says_so_late() -> None:
    async with proxy_in_front_of(retries=0, probe_timeout_s=0.05) as house:
        house.decoder.hang_at.add("cancel")
        house.prefiller.fail_at["prefill_done"] = BROKEN
        assert (await house.post()).status == 502
        [attempt] = attempts_of(house.prefiller)
        house.decoder.release(attempt, "expired")
        assert house.held == 0


async def test_slots_of_a_restarted_decoder_are_void() -> None:
    async with proxy_in_front_of(retries=0) as house:
        house.decoder.answers_cancel = False
        house.prefiller.fail_at["prefill_done"] = BROKEN
        assert (await house.post()).status == 502
        assert house.held == 1
        house.decoder.epoch = "another"
        house.prefiller.fail_at.clear()
        await house.proxy.probe.look(house.proxy.pool.of_role("decode")[0])
        await house.settled()
        assert house.proxy.reaper.statistics()["void"] == 1


# ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_drain_lets_requests_finish_and_takes_no_new_ones() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.hang_at.add("middle")
        running = house.call(stream=True)
        await house.decoder.reached("middle")
        house.proxy.orchestrator.stop_accepting()
        refused = await house.post()
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        assert (await house.get("/ready")).status == 503
        house.proxy.orchestrator.abort_all()
        check_ended_by_error(await running.answer(), "shutting_down")
        await asyncio.wait_for(house.proxy.orchestrator.idle(), 1)
        assert house.proxy.recent.facts()[0]["outcome"] == "shutdown"


@pytest.mark.parametrize(("engine", "point"), [("prefill", "prefill"), ("decode", "first")])
async def test_aborted_before_the_first_byte_is_a_status(engine: str, point: str) -> None:
    async with proxy_in_front_of() as house:
        hanging = house.prefiller if engine == "prefill" else house.decoder
        hanging.hang_at.add(point)
        call = house.call()
        await hanging.reached(point)
        house.proxy.orchestrator.abort_all()
        answer = await call.answer()
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")


async def test_task_cancelled_from_outside_leaves_nothing() -> None:
    """The server's own last resort."""
    async with proxy_in_front_of() as house:
        house.decoder.hang_at.add("middle")
        call = house.call(stream=True)
        await house.decoder.reached("middle")
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task
        assert house.decoder.closed == ["/v1/completions"]
