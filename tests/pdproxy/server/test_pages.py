"""What operators look at: status, metrics, readiness, models, and the log line."""

from __future__ import annotations

import json
import logging

import pytest

from pdproxy import __version__
from pdproxy.telemetry.log import Facts
from tests.fakes.fake_engine import FakeEngine, FakeReply
from tests.fakes.proxy_harness import proxy_in_front_of, until


async def test_health_ready_models() -> None:
    async with proxy_in_front_of() as house:
        assert (await house.get("/health")).json() == {"status": "ok"}
        assert (await house.get("/ready")).json() == {"status": "ready"}
        models = (await house.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]


async def test_models_are_told_as_the_engines_tell_them() -> None:
    prefiller, decoder = FakeEngine("prefill"), FakeEngine("decode")
    prefiller.max_model_len, decoder.max_model_len = 400, 300
    cards = [{"id": "tiny", "root": "/models/tiny"}, {"id": "org/sql", "parent": "tiny", "max_model_len": 200}]
    answer = FakeReply(200, [json.dumps({"object": "list", "data": cards}).encode()])
    prefiller.fail_at["/v1/models"] = decoder.fail_at["/v1/models"] = answer
    async with proxy_in_front_of([prefiller], [decoder]) as house:
        adapter, tiny = (await house.get("/v1/models")).json()["data"]
        created = tiny.pop("created")
        assert adapter == {
            "id": "org/sql",
            "object": "model",
            "created": created,
            "owned_by": "pdproxy",
            "parent": "tiny",
            "max_model_len": 200,
        }
        assert tiny == {
            "id": "tiny",
            "object": "model",
            "owned_by": "pdproxy",
            "root": "/models/tiny",
            "max_model_len": 300,
        }
        assert (await house.get("/v1/models/org/sql")).json() == adapter
        missing = await house.get("/v1/models/other")
        assert missing.status == 404
        assert missing.json()["error"] == {
            "message": "the model 'other' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }


async def test_the_root_says_what_it_is_and_where_to_go() -> None:
    async with proxy_in_front_of() as house:
        told = (await house.get("/")).json()
        assert (told["name"], told["version"], told["status_page"]) == ("pdproxy", __version__, "/ui")
        assert {"POST /v1/chat/completions", "GET /v1/models", "GET /v1/models/{name}", "GET /ready", "GET /ui"} <= set(
            told["routes"]
        )
        for path in {route.partition(" ")[2] for route in told["routes"] if route.startswith("GET")}:
            if "{" not in path and path != "/ui/events":
                allowed = (404,) if path == "/version" else (200, 403)  # the built-in engine tells no version
                assert (await house.get(path)).status in allowed, path


async def test_status() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=8)]) as house:
        await house.post()
        await house.post(prompt=3)
        house.prefiller.hang_at.add("prefill")
        call = house.call(prompt=[1] * 32)
        await house.prefiller.reached("prefill")
        status = (await house.get("/status")).json()
        assert (status["ready"], status["draining"]) == (True, False)
        decoder = status["fleet"][1]
        assert (decoder["name"], decoder["state"], decoder["epoch"]) == ("decode-0", "ready", "epoch-of-decode")
        assert (decoder["capacity"], decoder["held"], decoder["free"], decoder["queue"]) == (8, 2, 6, 0)
        ledger = status["ledger"]["decode-0"]
        assert ledger["held"] == ledger["granted"] - ledger["returned"] == 2
        [flight] = status["in_flight"]
        assert (flight["phase"], flight["custody"], flight["num_pages"]) == ("prefill", "filling", 2)
        assert status["totals"] == {"done": 1, "refused": 1}
        refused, done = status["recent"]
        assert (refused["status"], refused["outcome"]) == (400, "refused")
        assert (done["status"], done["path"], done["reason"], done["attempts"]) == (200, "disaggregated", "fits", 1)
        assert {"tokenize_s", "slot_wait_s", "prefill_s", "kv_wait_s", "first_byte_s", "decode_s"} <= done.keys()
        call.leave()
        await call.done()


async def test_recent_keeps_fifty() -> None:
    async with proxy_in_front_of() as house:
        for number in range(52):
            await house.post(headers={"x-request-id": f"r{number}"}, max_tokens=1)
        recent = (await house.get("/status")).json()["recent"]
        assert [recent[0]["request_id"], recent[-1]["request_id"], len(recent)] == ["r51", "r2", 50]


async def test_metrics() -> None:
    async with proxy_in_front_of() as house:
        await house.post()
        await house.post(n=2)
        page = (await house.get("/metrics")).body.decode()
        for text in (
            'pdproxy_requests_total{outcome="done",path="disaggregated",reason="fits"} 1.0',
            'pdproxy_requests_total{outcome="done",path="local",reason="several_answers"} 1.0',
            'pdproxy_phase_seconds_count{phase="kv_wait"} 1.0',
            'pdproxy_slots_capacity{instance="decode-0"} 64.0',
            'pdproxy_slots_held{instance="decode-0"} 0.0',
            'pdproxy_legs_total{instance="prefill-0",leg="prefill",outcome="ok"}',
            'pdproxy_instance_ready{instance="decode-0",role="decode"} 1.0',
            'pdproxy_kv_signals_total{verdict="taken"}',
            "pdproxy_kv_expected 0.0",
        ):
            assert text in page
        granted = [
            row for row in page.splitlines() if row.startswith('pdproxy_slots_granted_total{instance="decode-0"}')
        ]
        assert granted[0].split()[-1] == page.split('pdproxy_slots_returned_total{instance="decode-0"} ')[1].split()[0]


async def test_a_page_with_another_requests_kv_is_worth_an_alert() -> None:
    async with proxy_in_front_of(probe_interval_s=0.01) as house:
        name = 'pdproxy_instance_wrong_tags_total{instance="decode-0",role="decode"}'
        assert f"{name} 0.0" in (await house.get("/metrics")).body.decode()
        house.decoder.num_wrong_tags = 2
        await until(lambda: house.proxy.pool.instances[1].known_facts.num_wrong_tags == 2)
        assert f"{name} 2.0" in (await house.get("/metrics")).body.decode()


async def test_metrics_before_every_engine_has_answered() -> None:
    decoder = FakeEngine("decode")
    decoder.freeze()
    async with proxy_in_front_of(decoders=[decoder], wait=False) as house:
        assert house.proxy.pool.instances[1].facts is None
        page = await house.get("/metrics")
        decoder.thaw()
        await house.is_ready()
        assert page.status == 200
        assert 'pdproxy_instance_wrong_tags_total{instance="decode-0",role="decode"} 0.0' in page.body.decode()


async def test_one_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    async with proxy_in_front_of() as house:
        with caplog.at_level(logging.INFO, logger="pdproxy.requests"):
            await house.post(headers={"x-request-id": "mine"})
        [record] = [record for record in caplog.records if record.name == "pdproxy.requests"]
        text = record.getMessage()
        assert text.startswith("request_id=mine ")
        for name in ("outcome=done", "status=200", "prefill_ms=", "kv_wait_ms=", "total_ms="):
            assert name in text


def test_a_clients_text_cannot_forge_the_log() -> None:
    assert str(Facts({"model": 'a" outcome=done\nrequest_id=x', "n": 1, "total_s": 0.5})) == (
        'model="a\\" outcome=done\\nrequest_id=x" n=1 total_ms=500.0'
    )
