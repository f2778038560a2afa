"""OpenTelemetry: one span per request, one below it per phase; off, and its SDK not imported, unless asked for."""

from __future__ import annotations

import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pdproxy.errors import ConfigError
from pdproxy.telemetry.record import RequestRecord
from pdproxy.telemetry.trace import PassTraceOn, make_tracing
from tests.fakes.fail_once import fail_once
from tests.fakes.proxy_harness import proxy_in_front_of

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs pip install 'pdproxy[otel]'")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pdproxy.telemetry import otel

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
PHASES = ["receive", "tokenize", "slot_wait", "prefill", "kv_wait", "first_byte", "decode"]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where a proxy with `ON` sends its spans; they are there when it has stopped."""
    memory = InMemorySpanExporter()
    monkeypatch.setattr(otel, "make_exporter", lambda endpoint: memory)
    return memory


ON: dict[str, Any] = {"otlp_endpoint": "http://collector:4318"}


def by_kind(exporter: InMemorySpanExporter) -> tuple[list[ReadableSpan], list[ReadableSpan]]:
    """Requests and phases, each in order of time."""
    spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    return [s for s in spans if s.kind is SpanKind.SERVER], [s for s in spans if s.kind is not SpanKind.SERVER]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_one_span_per_request_with_its_phases(exporter: InMemorySpanExporter) -> None:
    async with proxy_in_front_of(**ON) as house:
        answer = await house.post(headers={"x-request-id": "mine"})
    [request], phases = by_kind(exporter)
    assert request.name == "POST /v1/completions"
    assert request.parent is None
    assert request.resource.attributes["service.name"] == "pdproxy"
    told = attributes(request)
    assert told["pdproxy.request_id"] == "mine"
    assert (told["pdproxy.request.path"], told["pdproxy.outcome"]) == ("disaggregated", "done")
    assert (told["pdproxy.prefiller"], told["pdproxy.decoder"]) == ("prefill-0", "decode-0")
    assert (told["http.response.status_code"], told["gen_ai.request.model"]) == (200, "tiny")
    assert request.status.status_code is StatusCode.UNSET
    assert {phase.name for phase in phases} == set(PHASES)
    for phase in phases:
        assert phase.parent is not None
        assert phase.parent.span_id == request.context.span_id
        assert phase.context.trace_id == request.context.trace_id
    in_attempt = [attributes(phase) for phase in phases if phase.name not in ("receive", "tokenize")]
    assert {told["pdproxy.attempt"] for told in in_attempt} == {answer.headers["x-pdproxy-attempt"]}


async def test_phases_lie_within_their_request_and_follow_each_other(exporter: InMemorySpanExporter) -> None:
    async with proxy_in_front_of(**ON) as house:
        await house.post()
    [request], phases = by_kind(exporter)
    slack_ns = 2_000_000
    at = (request.start_time or 0) - slack_ns
    for phase in sorted(phases, key=lambda phase: PHASES.index(phase.name)):
        assert phase.start_time is not None
        assert phase.end_time is not None
        assert at - slack_ns <= phase.start_time <= phase.end_time
        at = phase.end_time
    assert request.end_time is not None
    assert at <= request.end_time + slack_ns


async def test_every_attempt_has_its_phases(exporter: InMemorySpanExporter) -> None:
    async with proxy_in_front_of(**ON) as house:
        fail_once(house.prefiller, "prefill")
        assert (await house.post()).status == 200
    [request], phases = by_kind(exporter)
    assert attributes(request)["pdproxy.attempts"] == 2
    attempts = [attributes(phase)["pdproxy.attempt"] for phase in phases if phase.name == "prefill"]
    assert len(set(attempts)) == 2


async def test_the_clients_trace_goes_through_us_to_the_engines(exporter: InMemorySpanExporter) -> None:
    async with proxy_in_front_of(**ON) as house:
        await house.post(headers={"traceparent": TRACEPARENT, "tracestate": "vendor=1"})
        seen = [engine.generations()[0].headers for engine in (house.prefiller, house.decoder)]
    [request], _ = by_kind(exporter)
    assert request.parent is not None
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    for headers in seen:
        assert headers["traceparent"] == f"00-{TRACE}-{request.context.span_id:016x}-01"
        assert headers["tracestate"] == "vendor=1"


async def test_a_trace_that_is_not_sampled_goes_on_unsampled(exporter: InMemorySpanExporter) -> None:
    async with proxy_in_front_of(**ON) as house:
        await house.post(headers={"traceparent": TRACEPARENT[:-2] + "00"})
        headers = house.decoder.generations()[0].headers
    assert not exporter.get_finished_spans()
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-00", headers["traceparent"])


async def test_how_a_request_ended(exporter: InMemorySpanExporter) -> None:
    async with proxy_in_front_of(**ON, api_keys=("secret",), retries=0) as house:
        mine = {"x-api-key": "secret"}
        assert (await house.post()).status == 401
        house.prefiller.hang_at.add("prefill")
        call = house.call(headers=mine)
        await house.prefiller.reached("prefill")
        call.leave()
        await call.done()
        house.prefiller.hang_at.clear()
        fail_once(house.prefiller, "prefill")
        assert (await house.post(headers=mine)).status == 502
    requests, _ = by_kind(exporter)
    assert [attributes(request)["pdproxy.outcome"] for request in requests] == ["refused", "client_gone", "failed"]
    assert [attributes(request).get("error.type") for request in requests] == ["invalid_api_key", None, "leg_failed"]
    assert [request.status.status_code is StatusCode.ERROR for request in requests] == [False, False, True]


async def test_canaries_leave_no_spans(exporter: InMemorySpanExporter) -> None:
    async with proxy_in_front_of(**ON):
        pass
    assert not exporter.get_finished_spans()


# ── switched off ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_without_spans_the_clients_trace_goes_on_as_it_is() -> None:
    async with proxy_in_front_of() as house:
        await house.post(headers={"traceparent": TRACEPARENT, "tracestate": "vendor=1"})
        await house.post()
        first, second = (call.headers for call in house.decoder.generations())
    assert (first["traceparent"], first["tracestate"]) == (TRACEPARENT, "vendor=1")
    assert "traceparent" not in second


@pytest.mark.parametrize("sent", [{}, {"traceparent": TRACEPARENT}, {"tracestate": "vendor=1"}])
def test_each_header_of_a_trace_goes_on_by_itself(sent: dict[str, str]) -> None:
    record = RequestRecord("r1", "/v1/completions")
    assert PassTraceOn().begin(record, {"accept": "*/*", **sent}) == sent


def test_the_sdk_is_not_imported_unless_asked_for() -> None:
    code = """
import sys
from pdproxy.assemble import assemble
from pdproxy.config.settings import Settings
assemble(Settings(prefill=("http://p:1",), decode=("http://d:1",)))
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
async def test_switched_on_by_the_environment(
    environment: dict[str, str], is_on: bool, exporter: InMemorySpanExporter
) -> None:
    tracing = make_tracing(None, environment)
    assert isinstance(tracing, otel.Spans) is is_on
    await tracing.aclose()


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", ""])
def test_what_is_no_collector(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_endpoint: .* is no address of a collector"):
        make_tracing(endpoint)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pdproxy.telemetry.otel", None)
    with pytest.raises(ConfigError, match=r"otlp_endpoint: .*pip install 'pdproxy\[otel\]'"):
        make_tracing("http://c:4318")
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
    assert isinstance(make_tracing(None, environment), PassTraceOn)
    assert "there is no OpenTelemetry" in caplog.text


# ── on the wire ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Collector(http.server.ThreadingHTTPServer):
    """An OTLP collector that remembers what it got."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Reception)
        self.got: list[tuple[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Reception(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_spans_reach_a_collector_before_the_proxy_ends(collector: Collector, path: str) -> None:
    async with proxy_in_front_of(otlp_endpoint=collector.url + path) as house:
        await house.post(headers={"x-request-id": "mine-and-only-mine"})
    [(called, body)] = collector.got
    assert called == "/v1/traces"
    assert b"mine-and-only-mine" in body
    assert b"slot_wait" in body


async def test_a_collector_that_does_not_answer_does_not_hold_the_proxy_up(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    class Silent(InMemorySpanExporter):
        def shutdown(self) -> None:
            is_over.wait(10)

    monkeypatch.setattr(otel, "make_exporter", lambda endpoint: Silent())
    monkeypatch.setattr(otel, "FLUSH_S", 0.05)
    async with proxy_in_front_of(**ON) as house:
        assert (await house.post()).status == 200
    is_over.set()
