"""Time and tries: whose limit ends what, what a retry may cost, and who goes first."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pdproxy.orchestrator import disaggregated as pairing
from tests.fakes.fake_engine import BROKEN, WORDS, FakeEngine
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

pytestmark = pytest.mark.usefixtures("both_ways")

TEXT = "".join(WORDS)


async def legs_that_timed_out(house: Harness) -> list[str]:
    page = (await house.get("/metrics")).body.decode()
    return [line for line in page.splitlines() if line.startswith("pdproxy_legs_total") and "timed_out" in line]


@pytest.mark.parametrize(
    ("headers", "body"),
    [({}, {"timeout": 0.05}), ({"x-request-timeout": "50ms"}, {}), ({"x-request-timeout": "0.05s"}, {"timeout": 90})],
)
@pytest.mark.parametrize(("role", "point"), [("prefill", "prefill"), ("decode", "first")])
async def test_clients_own_limit_ends_every_phase(
    role: str, point: str, headers: dict[str, str], body: dict[str, Any]
) -> None:
    async with proxy_in_front_of() as house:
        hanging = house.prefiller if role == "prefill" else house.decoder
        hanging.hang_at.add(point)
        answer = await house.post(headers=headers, **body)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert "0.05 s" in answer.error["message"]
        assert hanging.closed == ["/v1/completions"]
        assert "timeout" not in house.prefiller.generations()[0].body
        assert await legs_that_timed_out(house) == [], "an impatient client is no engine's fault"


async def test_clients_own_limit_ends_the_wait_for_pages() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4)]) as house:
        lease = await Held(house.proxy.pool.of_role("decode")[0], 4).wait()
        answer = await house.post(timeout=0.05)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        lease.release()


async def test_clients_limit_cannot_lengthen_the_operators() -> None:
    async with proxy_in_front_of(request_timeout_s=0.05, canary=False) as house:
        house.prefiller.hang_at.add("prefill")
        answer = await house.post(timeout=1000)
        assert answer.status == 504
        assert "0.05 s" in answer.error["message"]


async def test_engine_is_told_how_long_the_attempt_may_take() -> None:
    async with proxy_in_front_of() as house:
        await house.post(timeout=5)
        await house.post()
        timeouts = [call.body["kv_transfer_params"]["timeout_s"] for call in house.prefiller.generations()]
        assert 0 < timeouts[0] <= 5.0 < timeouts[1]


async def test_bad_limit_names_the_header() -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(headers={"x-request-timeout": "soon"})
        assert (answer.status, answer.error["param"]) == (400, "x-request-timeout")
        answer = await house.post(timeout=-1)
        assert (answer.status, answer.error["param"]) == (400, "timeout")


async def test_retry_has_only_what_is_left() -> None:
    prefillers = [FakeEngine("prefill"), FakeEngine("prefill")]
    async with proxy_in_front_of(prefillers, prefill_timeout_s=0.5) as house:
        for prefiller in prefillers:
            prefiller.hang_at.add("prefill")
        started = time.monotonic()
        answer = await house.post(timeout=0.6)
        assert answer.status == 504
        assert 0.6 <= time.monotonic() - started < 1.0, "neither one try's limit, nor two"
        timeouts = [
            call.body["kv_transfer_params"]["timeout_s"] for engine in prefillers for call in engine.generations()
        ]
        assert len(timeouts) == 2
        assert min(timeouts) <= 0.1


@pytest.mark.parametrize(("role", "point"), [("prefill", "prefill"), ("decode", "decode"), ("decode", "first")])
async def test_silent_engine_is_left_for_another(role: str, point: str) -> None:
    prefillers, decoders = ([FakeEngine(role), FakeEngine(role)] for role in ("prefill", "decode"))
    async with proxy_in_front_of(prefillers, decoders, prefill_timeout_s=0.05, first_byte_timeout_s=0.05) as house:
        (prefillers if role == "prefill" else decoders)[0].hang_at.add(point)
        for _ in range(2):
            assert (await house.post(stream=True)).text() == TEXT
        [line] = await legs_that_timed_out(house)
        assert f'instance="{role}-0",leg="{role}"' in line


async def test_client_that_takes_nothing_is_no_engines_fault() -> None:
    async with proxy_in_front_of(idle_timeout_s=0.05) as house:
        call = house.call(stream=True)
        call.block()
        await call.done()
        assert house.decoder.closed == ["/v1/completions"]
        assert await legs_that_timed_out(house) == []


# ── a prefill that is not wanted any more ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("signals", ["failed", "released"])
async def test_prefill_ends_as_soon_as_the_decoder_cannot_have_the_kv(
    signals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairing, "REPLY_S", 0.0)
    async with proxy_in_front_of(retries=0) as house:
        house.decoder.signals = signals
        house.prefiller.hang_at.add("prefill_done")
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "kv_transfer_failed")
        assert house.prefiller.closed == ["/v1/completions"]


@pytest.mark.parametrize("how", ["it is another process", "it is down"])
async def test_kv_that_the_decoder_will_never_have_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """During the prefill that takes another process in its place: to be down for a moment proves nothing."""
    monkeypatch.setattr(pairing, "REPLY_S", 0.0)
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of(decoders=decoders) as house:
        is_another = how == "it is another process"
        for decoder in decoders:
            decoder.signals = "ready" if is_another else "lost"
        if is_another:
            house.prefiller.hang_at.add("prefill")
        call = house.call()
        await house.prefiller.reached("prefill" if is_another else "prefill_done")
        [(at, held)] = [(i, one) for i, one in enumerate(house.proxy.pool.of_role("decode")) if one.held]
        house.prefiller.hang_at.clear()
        if is_another:
            decoders[at].restart()
            held.suspected.set()
        else:
            await until(lambda: house.proxy.board.statistics().num_waiting == 1)
            decoders[1 - at].signals = "ready"
            house.client_of(decoders[at]).is_up = False
            held.suspect("nobody listens", is_lost=True)
        answer = await call.answer()
        assert answer.json()["choices"][0]["text"] == TEXT
        assert is_another or answer.headers["x-pdproxy-decoder"] != held.name
        house.client_of(decoders[at]).is_up = True


async def test_who_waits_when_a_decoder_goes_down_goes_elsewhere() -> None:
    decoders = [FakeEngine("decode", num_pages=4), FakeEngine("decode", num_pages=4)]
    async with proxy_in_front_of(decoders=decoders) as house:
        one, other = house.proxy.pool.of_role("decode")
        leases = [await Held(one, 4).wait(), await Held(other, 4).wait()]
        call = house.call()
        await until(lambda: house.admission.num_waiting == 1)
        house.client_of(decoders[0]).is_up = False
        one.suspect("nobody listens", is_lost=True)
        for lease in leases:
            lease.release()
        answer = await call.answer()
        assert (answer.status, answer.headers["x-pdproxy-decoder"]) == (200, other.name)


# ── how many retries ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_retries_are_a_share_of_the_traffic() -> None:
    async with proxy_in_front_of(retries=5, retry_share=0.6, retry_min_per_s=0.0, breaker_faults=1000) as house:
        house.prefiller.fail_at["prefill"] = BROKEN
        for _ in range(8):
            assert (await house.post()).status == 502
        calls = house.prefiller.generations()
        assert len(calls) == 8 + 4, "0.6 of a retry for each request, less a little that fades"
        attempts = {call.body["kv_transfer_params"]["attempt"] for call in calls}
        assert len(attempts) == len(calls)
        page = (await house.get("/metrics")).body.decode()
        assert "pdproxy_retries_total 4.0" in page
        refused = next(line for line in page.splitlines() if line.startswith("pdproxy_retries_refused_total "))
        assert float(refused.split()[1]) == 8.0


# ── who goes first ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_more_urgent_goes_first() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=4)], max_priority=5) as house:
        decoder = house.proxy.pool.of_role("decode")[0]
        admission, lease = decoder.admission, await Held(decoder, 4).wait()
        calls = []
        for number, (headers, body) in enumerate([({}, {}), ({"x-pdproxy-priority": "3"}, {}), ({}, {"priority": 9})]):
            calls.append(house.call(headers={"x-request-id": str(number)} | headers, prompt=[1] * 64, **body))
            await until(lambda: admission.num_waiting == len(calls))
        lease.release()
        for call in calls:
            assert (await call.answer()).status == 200
        prefilled = house.prefiller.generations()
        assert [call.headers["x-request-id"] for call in prefilled] == ["2", "1", "0"]
        assert all("priority" not in call.body for call in prefilled)


async def test_bad_priority_names_it() -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(priority="high")
        assert (answer.status, answer.error["param"]) == (400, "priority")
