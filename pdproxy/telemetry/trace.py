"""Tracing handles the trace headers of a request from its beginning, by which the engines' own spans join its trace."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Protocol

from pdproxy.errors import ConfigError
from pdproxy.telemetry.observer import RequestObserver
from pdproxy.telemetry.record import RequestRecord

log = logging.getLogger(__name__)

HEADERS = ("traceparent", "tracestate")
"""The headers of W3C Trace Context."""


class Tracing(RequestObserver, Protocol):
    """Tracing is told of every client request, before anything is done about it and at its end. It is stopped with the
    proxy."""

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns the trace headers that go with every leg, made of the client's `headers` (names in lower case)."""

    async def aclose(self) -> None: ...


class PassTraceOn:
    """PassTraceOn implements `Tracing` where the proxy has no spans of its own: the client's trace goes on to the
    engines."""

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> dict[str, str]:
        if "traceparent" not in headers and "tracestate" not in headers:
            return {}
        return {name: headers[name] for name in HEADERS if name in headers}

    def request_finished(self, record: RequestRecord) -> None:
        """Does nothing, because no span was begun."""

    async def aclose(self) -> None:
        """Does nothing, because nothing is held."""


def make_tracing(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> Tracing:
    """Returns what makes spans for the collector at `endpoint`, or for the one that OpenTelemetry's own variables name;
    else a `PassTraceOn`.

    Raises `ConfigError` where `endpoint` is no URL, or is given and OpenTelemetry is not installed.
    """
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint: {endpoint!r} is no address of a collector; give http://host:port")
    if endpoint is None and not _asks_for_spans(environment):
        return PassTraceOn()
    try:
        from pdproxy.telemetry.otel import make_spans
    except ModuleNotFoundError:
        if endpoint is not None:
            raise ConfigError("otlp_endpoint: there is no OpenTelemetry; pip install 'pdproxy[otel]'") from None
        log.warning("OTEL_* variables ask for spans, and there is no OpenTelemetry; pip install 'pdproxy[otel]'")
        return PassTraceOn()
    return make_spans(endpoint)


def _asks_for_spans(environment: Mapping[str, str]) -> bool:
    """Tells whether OpenTelemetry's own environment variables ask for spans, as its specification defines them."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_elsewhere = environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return not is_off and not is_elsewhere and any(environment.get(name) for name in names)
