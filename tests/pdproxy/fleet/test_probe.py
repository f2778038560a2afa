"""When an instance is ready, when it no longer is, and what a restart means."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from pdproxy.aio.loop_lag import TICK_S
from pdproxy.config.instances import InstanceSettings
from pdproxy.engines.http.base import EngineBroken
from pdproxy.engines.recognise import LOOKS
from pdproxy.fleet.instance import Health
from pdproxy.fleet.probe import ExpectedBuffer
from tests.fakes.fake_engine import BROKEN, FakeEngine, FakeReply, error_reply
from tests.fakes.fleet import make_instance, settings
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until


async def look(house: Harness, number: int = 0) -> None:
    await house.proxy.probe.look(house.proxy.pool.instances[number])


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


async def until_ready(house: Harness) -> None:
    """Looks as often as it takes, in vain at most ten times."""
    for _ in range(10):
        for number in range(len(health(house))):
            await look(house, number)
        if house.proxy.pool.is_ready:
            return
    pytest.fail(repr(house.proxy.pool.instances))


def health(house: Harness) -> list[Health]:
    return [instance.health for instance in house.proxy.pool.instances]


async def test_ready_after_a_canary_and_the_canary_does_not_count() -> None:
    async with proxy_in_front_of() as house:
        assert house.proxy.pool.is_ready
        assert house.proxy.recent.facts() == []
        assert house.held == 0


async def test_not_ready_while_no_canary_goes_through() -> None:
    prefiller = FakeEngine("prefill")
    prefiller.fail_at["prefill"] = error_reply(500, "broken")
    async with proxy_in_front_of([prefiller], wait=False) as house:
        await look(house)
        await look(house, 1)
        assert health(house) == [Health.ALIVE, Health.ALIVE]
        assert "canary" in house.proxy.pool.instances[1].why
        assert (await house.get("/ready")).status == 503
        prefiller.fail_at.clear()
        await look(house)
        assert health(house) == [Health.READY, Health.READY]


async def test_without_canary_an_answer_is_enough() -> None:
    async with proxy_in_front_of(canary=False) as house:
        assert house.prefiller.calls == []


async def test_an_instance_that_cannot_be_reached_is_down_at_once() -> None:
    async with proxy_in_front_of() as house:
        client = house.client_of(house.prefiller)
        client.is_up = False
        await look(house)
        assert health(house) == [Health.DOWN, Health.READY]
        client.is_up = True
        await look(house)
        assert health(house) == [Health.DOWN, Health.READY], "one answer is no recovery"
        await look(house)
        assert health(house) == [Health.READY, Health.READY]


async def test_a_late_answer_is_forgiven_a_few_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_in_front_of(probe_misses=3) as house:

        async def late(path: str, *, timeout_s: float) -> tuple[int, bytes]:
            raise EngineBroken("too late")

        monkeypatch.setattr(house.client_of(house.prefiller), "get", late)
        for _ in range(2):
            await look(house)
            assert health(house)[0] is Health.READY
        await look(house)
        assert health(house)[0] is Health.DOWN


async def test_a_look_during_which_the_proxy_stood_still_tells_nothing_and_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with proxy_in_front_of(probe_misses=1, probe_timeout_s=1.0, probe_interval_s=60.0) as house:
        client, instance = house.client_of(house.prefiller), house.proxy.pool.instances[0]
        stalls_s, found, usual = [0.9, 0.3, 0.0], [], client.get

        async def late(path: str, *, timeout_s: float) -> tuple[int, bytes]:
            found.append(instance.health)
            if not stalls_s:
                return await usual(path, timeout_s=timeout_s)
            stand_still(TICK_S + stalls_s.pop(0))
            raise EngineBroken("no answer within 1 s")

        monkeypatch.setattr(client, "get", late)
        instance.suspected.set()
        await until(lambda: len(found) > 3)  # by itself, long before its time: nobody else has it looked at
        assert found[:4] == [Health.READY, Health.READY, Health.READY, Health.DOWN]


async def test_restarted_decoder_is_proven_anew_and_resized() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.epoch = "second"
        house.decoder.num_pages = 5
        house.prefiller.fail_at["prefill"] = BROKEN
        await look(house, 1)
        assert health(house) == [Health.READY, Health.ALIVE]
        house.prefiller.fail_at.clear()
        await look(house, 1)
        assert health(house) == [Health.READY, Health.READY]
        assert (await house.get("/status")).json()["fleet"][1]["capacity"] == 5
        assert (await house.post()).status == 200


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [("role", "prefill", "says it is for prefill"), ("num_pages", 0, "0 pages"), ("num_ranks", 0, "0 receivers")],
)
async def test_decoder_that_is_none(attribute: str, value: object, says: str) -> None:
    async with proxy_in_front_of() as house:
        setattr(house.decoder, attribute, value)
        await look(house, 1)
        instance = house.proxy.pool.instances[1]
        assert instance.health is Health.DOWN
        assert says in instance.why


async def test_receivers_elsewhere_than_configured() -> None:
    decoder = InstanceSettings(name="d", role="decode", url="http://d0:1", receiver_ports=(7300,))
    instances = (InstanceSettings(name="p", role="prefill", url="http://p0:1"), decoder)
    async with proxy_in_front_of(instances=instances) as house:
        house.decoder.port = 7301
        house.decoder.epoch = "second"
        await look(house, 1)
        assert "receivers listen on (7301,), and (7300,) are configured" in house.proxy.pool.instances[1].why


async def test_a_buffer_other_than_configured_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with proxy_in_front_of() as house:
        other = ExpectedBuffer(pages=7, page_bytes=999, chunk_size=16)
        house.proxy.probe._expected = (other, ExpectedBuffer(pages=99, page_bytes=1024, chunk_size=16))
        house.decoder.epoch = "second"
        with caplog.at_level(logging.WARNING):
            await look(house, 1)
        assert "decode-0 says 64 pages; the options make it 99" in caplog.text
        assert "bytes per page" not in caplog.text, "it has the page size of one that may be"
        assert house.proxy.pool.is_ready, "its own word counts"


async def test_what_was_proven_stays_proven_while_its_process_lives() -> None:
    """A busy engine that was out of reach for a moment need not find room for another canary."""
    async with proxy_in_front_of() as house:
        house.proxy.pool.instances[0].lost("for a moment")
        house.prefiller.fail_at["prefill"] = error_reply(503, "busy")
        await look(house)
        await look(house)
        assert health(house) == [Health.READY, Health.READY]


async def test_an_unwell_engine_is_given_as_many_looks_as_a_silent_one() -> None:
    async with proxy_in_front_of(probe_misses=2) as house:
        house.prefiller.fail_at["/health"] = error_reply(503, "loading")
        await look(house)
        assert health(house)[0] is Health.READY
        await look(house)
        assert health(house)[0] is Health.DOWN
        assert "/health is HTTP 503" in house.proxy.pool.instances[0].why


async def test_a_canary_that_hangs_is_ended_and_keeps_nobody_else_from_getting_ready() -> None:
    prefillers, decoders = [FakeEngine("prefill") for _ in range(2)], [FakeEngine("decode") for _ in range(2)]
    prefillers[0].hang_at.add("prefill")
    async with proxy_in_front_of(prefillers, decoders, wait=False, canary_timeout_s=0.2) as house:
        await until(lambda: house.proxy.pool.is_ready)
        await until(lambda: "it took too long" in house.proxy.pool.instances[0].why)
        assert not house.proxy.pool.instances[0].is_ready
        prefillers[0].hang_at.clear()
        await house.is_ready()


async def test_a_canary_proves_nothing_of_a_process_that_came_later() -> None:
    async with proxy_in_front_of(wait=False) as house:
        house.decoder.hang_at.add("decode")
        await house.decoder.reached("decode")
        house.decoder.epoch = "second"
        looking = asyncio.ensure_future(look(house, 1))
        await until(lambda: house.proxy.pool.instances[1].epoch == "second")
        house.decoder.let_go("decode")
        await looking
        assert health(house) == [Health.READY, Health.ALIVE]
        await look(house, 1)
        assert health(house) == [Health.READY, Health.READY]


# ── who does not fit ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_at_start_up_nobody_is_ready_whose_only_counterpart_cuts_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with proxy_in_front_of([FakeEngine("prefill")], [FakeEngine("decode", chunk_size=32)], wait=False) as house:
        for _ in range(2):
            await look(house)
            await look(house, 1)
        assert health(house) == [Health.ALIVE, Health.ALIVE]
        assert house.proxy.pool.instances[1].why == (
            "it waits for a prefiller of its revision; it does not fit prefill-0: its chunk_size is 32, "
            "prefill-0's is 16"
        )
        assert caplog.text.count("decode-0 is kept back: it waits for a prefiller") == 1, "said once"
        assert house.prefiller.bodies("/v1/completions") == [], "no canary was wasted on it"


async def test_the_pair_that_fits_works_and_the_odd_one_is_kept_back() -> None:
    decoders = [FakeEngine("decode", chunk_size=32), FakeEngine("decode")]
    async with proxy_in_front_of(decoders=decoders, wait=False) as house:
        for number in (0, 1, 2, 0, 1):
            await look(house, number)
        assert health(house) == [Health.READY, Health.ALIVE, Health.READY]
        assert "chunk_size" in house.proxy.pool.instances[1].why
        decoders[0].chunk_size = 16
        decoders[0].epoch = "restarted by its operator"
        await look(house, 1)
        assert health(house) == [Health.READY] * 3


async def test_the_first_pair_of_a_new_revision_serves_beside_the_old_one() -> None:
    """Its prefiller alone gets nothing and harms nobody."""
    new_prefiller, new_decoder = FakeEngine("prefill"), FakeEngine("decode")
    prefillers, decoders = [FakeEngine("prefill"), new_prefiller], [FakeEngine("decode"), new_decoder]
    new_prefiller.dtype = "bfloat16"
    async with proxy_in_front_of(prefillers, decoders, wait=False, slow_start_s=0.0) as house:
        for number in (0, 1, 2, 3, 0, 1):
            await look(house, number)
        assert health(house) == [Health.READY, Health.ALIVE, Health.READY, Health.READY]
        told = house.proxy.pool.status()
        assert told[1]["why"].startswith("it waits for a decoder of its revision; it does not fit decode-")
        assert [one["counterparts"] for one in told] == [2, 0, 1, 1]
        assert len({one["revision"] for one in told}) == 2
        for _ in range(4):
            assert (await house.post()).headers["x-pdproxy-prefiller"] == "prefill-0"
        assert new_prefiller.bodies("/v1/completions") == []
        new_decoder.dtype, new_decoder.epoch = "bfloat16", "upgraded"
        for number in (3, 1):
            await look(house, number)
        assert health(house) == [Health.READY] * 4
        pairs = [(await house.post()).headers for _ in range(8)]
        assert {(one["x-pdproxy-prefiller"], one["x-pdproxy-decoder"]) for one in pairs} == {
            ("prefill-0", "decode-0"),
            ("prefill-1", "decode-1"),
        }


async def test_a_named_revision_counts_though_the_engines_tell_nothing() -> None:
    prefillers, decoders = [FakeEngine("prefill") for _ in range(2)], [FakeEngine("decode") for _ in range(2)]
    for engine in (prefillers[1], decoders[1]):
        engine.revision = "v2"
    async with proxy_in_front_of(prefillers, decoders) as house:
        assert [one["revision"] == "v2" for one in house.proxy.pool.status()] == [False, True, False, True]
        pairs = [(await house.post()).headers for _ in range(8)]
        assert {(one["x-pdproxy-prefiller"][-1], one["x-pdproxy-decoder"][-1]) for one in pairs} == {
            ("0", "0"),
            ("1", "1"),
        }


async def test_one_of_another_model_is_no_misfit() -> None:
    """Which model a request is for decides who may serve it."""
    prefillers, decoders = [FakeEngine("prefill") for _ in range(2)], [FakeEngine("decode") for _ in range(2)]
    for engine in (prefillers[1], decoders[1]):
        engine.model, engine.chunk_size = "other", 32
    async with proxy_in_front_of(prefillers, decoders) as house:
        assert house.proxy.pool.is_ready
        assert (await house.post(model="other")).headers["x-pdproxy-decoder"] == "decode-1"


# ── who comes and goes ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_who_joins_is_looked_at_and_who_leaves_is_no_more() -> None:
    async with proxy_in_front_of() as house:
        pool, tasks = house.proxy.pool, len(asyncio.all_tasks())
        client = house.client_of(house.decoder)
        pool.take_out("decode-0")
        await until(lambda: pool.let_go() != [])
        await until(lambda: len(asyncio.all_tasks()) < tasks)
        house.decoder.calls.clear()
        pool.add(make_instance(settings("decode-1", url="http://d0:1"), client=client))
        await until(lambda: pool.is_ready)
        assert house.decoder.calls[0].path == "/health"


NOT_THERE = FakeReply(404, [b'{"detail":"Not Found"}'])


@pytest.mark.parametrize(
    ("kind", "told", "says"),
    [
        (
            "builtin",
            {"/version": b'{"version":"0.32.0"}', "/metrics": b'vllm:num_requests_running{engine="0"} 0.0\n'},
            '/kv_buffer is HTTP 404: this is vLLM 0.32.0, and builtin is configured; say engine = "'
            'vllm_nixl" (or vllm_transfer or lmcache or mooncake, as its connector is)',
        ),
        ("builtin", {"/server_info": b'{"model_path":"m","version":"0.5.23"}'}, "this is SGLang 0.5.23, and builtin"),
        ("builtin", {"/get_model_info": b'{"model_path":"m"}'}, 'say engine = "sglang"'),
        ("builtin", {"/version": b"42", "/metrics": b"python_info 1"}, "/kv_buffer is HTTP 404"),
    ],
)
async def test_an_engine_of_another_kind_is_told_what_it_is(kind: str, told: dict[str, bytes], says: str) -> None:
    engine = FakeEngine("prefill")
    engine.fail_at |= dict.fromkeys(("/kv_buffer", *LOOKS), NOT_THERE)
    engine.fail_at |= {path: FakeReply(200, [body]) for path, body in told.items()}
    async with proxy_in_front_of([engine], wait=False, when_no_prefiller="refuse") as house:
        for _ in range(4):
            await look(house)
            engine.calls, calls = [], engine.calls
        (why, state) = house.proxy.pool.instances[0].why, health(house)[0]
        assert says in why
        assert state is Health.DOWN
        assert [call.path for call in calls] == ["/health", "/kv_buffer"], "it is asked about its kind once"
        ready = await house.get("/ready")
        assert ready.status == 503
        assert why in ready.error["message"]
        engine.fail_at.clear()
        await until_ready(house)


async def test_another_kind_is_told_of_one_that_started_late(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine("prefill")
    engine.fail_at |= dict.fromkeys(("/kv_buffer", *LOOKS), NOT_THERE)
    engine.fail_at["/server_info"] = FakeReply(200, [b'{"model_path":"m"}'])
    async with proxy_in_front_of([engine], wait=False) as house:
        instance = house.proxy.pool.instances[0]
        client = house.client_of(engine)
        client.is_up = False
        await look(house)
        caplog.clear()
        client.is_up = True
        for _ in range(3):
            await look(house)
        # The proxy's own look may come at the same time as one of these.
        [told] = {record.getMessage() for record in caplog.records if record.levelno == logging.WARNING}
        assert told == f"prefill-0 is down: {instance.why}"
        assert "this is SGLang" in told
        engine.fail_at.clear()
        await until_ready(house)


async def test_an_engine_that_wants_a_key(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine("prefill")
    engine.fail_at["/v1/models"] = error_reply(401, "Unauthorized")
    async with proxy_in_front_of([engine], wait=False) as house:
        for _ in range(3):
            await look(house)
        assert (
            "/v1/models is HTTP 401: the key that --engine-api-key gives it is missing or wrong"
            in house.proxy.pool.instances[0].why
        )
        assert "prefill-0 is down" in caplog.text
        engine.fail_at.clear()
        await until_ready(house)


async def test_an_engine_that_is_still_starting_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with proxy_in_front_of(wait=False) as house:
        client = house.client_of(house.prefiller)
        client.is_up = False
        await look(house)
        assert "prefill-0 does not answer yet: it cannot be reached" in caplog.text
        client.is_up = True
        await until_ready(house)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        client.is_up = False
        await look(house)
        assert [record.getMessage()[:17] for record in caplog.records if record.levelno == logging.WARNING] == [
            "prefill-0 is down"
        ]
        client.is_up = True
        await until_ready(house)
