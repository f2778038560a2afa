"""Spans writes OpenTelemetry spans: one per request, one below it per phase of each attempt.

The module is imported only where spans are wanted. They are written when the request is over, from its record. So
tracing adds to a request's way only one span begun at its start, whose id goes to the engines.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdproxy import __version__
from pdproxy.telemetry.record import Outcome, RequestRecord, Step

FLUSH_S = 5.0
"""Seconds that the last spans have at shutdown to reach the collector."""

_ATTRIBUTES = {
    "request_id": "pdproxy.request_id",
    "outcome": "pdproxy.outcome",
    "reason": "pdproxy.reason",
    "path": "pdproxy.request.path",
    "attempts": "pdproxy.attempts",
    "prefiller": "pdproxy.prefiller",
    "decoder": "pdproxy.decoder",
    "num_pages": "pdproxy.kv.pages",
    "num_kv_bytes": "pdproxy.kv.bytes",
    "num_prompt_tokens": "gen_ai.usage.input_tokens",
    "model": "gen_ai.request.model",
    "status": "http.response.status_code",
    "endpoint": "url.path",
    "error": "error.type",
}
"""The names that a record's facts have on a span."""


class Spans:
    """Spans makes the spans of requests. Implements `Tracing`. Mutable state: the spans of the requests
    under way."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pdproxy", __version__)
        self._w3c = TraceContextTextMapPropagator()
        self._open: dict[RequestRecord, Span] = {}

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> dict[str, str]:
        """Begins the request's span, below the client's span where it sent one. Returns the headers that put the
        engines' spans below it."""
        span = self._tracer.start_span(
            f"POST {record.endpoint}",
            context=self._w3c.extract(headers),
            kind=SpanKind.SERVER,
            start_time=_ns(record, record.started),
        )
        self._open[record] = span
        passed: dict[str, str] = {}
        self._w3c.inject(passed, set_span_in_context(span))
        return passed

    def request_finished(self, record: RequestRecord) -> None:
        span = self._open.pop(record, None)
        if span is None:
            return
        if span.is_recording():
            for step in record.steps():
                self._write(record, step, span)
            facts = record.facts()
            span.set_attribute("http.request.method", "POST")
            span.set_attributes({name: facts[fact] for fact, name in _ATTRIBUTES.items() if fact in facts})
            if record.outcome in (Outcome.FAILED, Outcome.SHUTDOWN):
                span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(_ns(record, record.started + record.total_s))

    def _write(self, record: RequestRecord, step: Step, parent: Span) -> None:
        span = self._tracer.start_span(
            step.name, context=set_span_in_context(parent), start_time=_ns(record, step.started)
        )
        attempt = step.attempt
        if attempt is not None:
            about = {"attempt": attempt.id, "prefiller": attempt.prefiller, "decoder": attempt.decoder}
            span.set_attributes({f"pdproxy.{name}": value for name, value in about.items() if value is not None})
        span.end(_ns(record, step.started + step.seconds))

    async def aclose(self) -> None:
        """Sends the spans that are left. It waits at most `FLUSH_S` for a collector that does not answer; the thread
        that sends them ends with the process."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop ended before the spans were sent
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, daemon=True, name="otel-shutdown").start()
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await done.wait()


def make_spans(endpoint: str | None) -> Spans:
    """Returns spans that go to the OTLP collector at `endpoint`; None: where OpenTelemetry's own environment variables
    say.

    Sampling, headers, batch sizes and resource come from that environment either way.
    """
    resource = Resource.create()
    if "OTEL_SERVICE_NAME" not in os.environ and str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "pdproxy"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(make_exporter(endpoint)))
    return Spans(provider)


def make_exporter(endpoint: str | None) -> SpanExporter:
    """Returns an exporter for OTLP over HTTP. An `endpoint` without a path is a collector's base address."""
    if endpoint is None:
        return OTLPSpanExporter()
    has_path = urlsplit(endpoint).path not in ("", "/")
    return OTLPSpanExporter(endpoint=endpoint if has_path else f"{endpoint.rstrip('/')}/v1/traces")


def _ns(record: RequestRecord, moment: float) -> int:
    """Returns a moment on the record's clock as OpenTelemetry has it: nanoseconds since 1970."""
    return int((record.started_at + moment - record.started) * 1e9)
