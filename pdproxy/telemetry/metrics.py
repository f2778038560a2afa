"""Metrics are for Prometheus; they have a registry of their own so that several proxies can live in one process.

Every name is documented in ``docs/metrics.md``, and a test checks that both have the same names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from pdproxy import __version__
from pdproxy.telemetry.attempt_record import AttemptRecord
from pdproxy.telemetry.collectors import Fronts, Log, Requests, Signals, Slots, Sources
from pdproxy.telemetry.figures import Elsewhere, added
from pdproxy.telemetry.fleet import FleetMetrics
from pdproxy.telemetry.key_usage import KeyUsage
from pdproxy.telemetry.model_metrics import ModelMetrics
from pdproxy.telemetry.record import RequestRecord
from pdproxy.telemetry.series import Counts, Durations

PART: Final = "metrics"
"""The name of the page's part of the figures of other processes."""


class Metrics:
    """Metrics counts what happens. Implements `Observer`; `render` returns the ``/metrics`` page."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self,
        sources: Sources,
        *,
        usage: KeyUsage | None = None,
        elsewhere: Elsewhere | None = None,
        is_front: bool = False,
    ) -> None:
        """Takes the figures of the proxy's other processes, where there are any. `is_front` leaves out what the leader
        tells: of the fleet, and of the process."""
        self._elsewhere = elsewhere or Elsewhere()
        self._phase_s = Durations("pdproxy_phase_seconds", "Where requests spend their time", "phase")
        self._request_s = Durations("pdproxy_request_seconds", "Whole requests", "path")
        self._first_s = Durations("pdproxy_first_token_seconds", "Streams, until their first event", "path")
        self._predicted_s = Durations("pdproxy_path_predicted_seconds", "Predicted, from grant to first event", "path")
        self._actual_s = Durations(
            "pdproxy_path_actual_seconds", "What came of these, from grant to first event", "path"
        )
        self._requests = Counts("pdproxy_requests", "Finished requests", ("path", "reason", "outcome"))
        self._errors = Counts("pdproxy_errors", "Requests not served, by error code", ("code",))
        self._retries = Counts("pdproxy_retries", "Attempts beyond a request's first")
        self._legs = Counts("pdproxy_legs", "HTTP calls to engines", ("leg", "instance", "outcome"))
        self._prompt_tokens = Counts("pdproxy_prompt_tokens", "Tokens of prompts", ("path",))
        self._kv_bytes = Counts("pdproxy_kv_bytes", "Bytes of KV that arrived at decoders")
        self._kv_pages = Counts("pdproxy_kv_pages", "Pages of KV that arrived at decoders")
        self._transfer_s = Durations("pdproxy_kv_transfer_seconds", "KV on its way, as decoders say")
        self._of_models = ModelMetrics(sources.pool)
        self._lag_s = Durations("pdproxy_event_loop_lag_seconds", "How late this process gets to what is due")
        self._registry = registry = CollectorRegistry()
        for counted in (self._phase_s, self._request_s, self._requests, self._errors, self._retries, self._legs):
            registry.register(counted)
        for counted in (
            self._first_s,
            self._predicted_s,
            self._actual_s,
            self._prompt_tokens,
            self._kv_bytes,
            self._kv_pages,
            self._transfer_s,
            self._lag_s,
        ):
            registry.register(counted)
        if not is_front:
            Gauge("pdproxy_build_info", "Always 1", ["version"], registry=registry).labels(__version__).set(1)
            ProcessCollector(registry=registry)
            registry.register(Fronts(self._elsewhere))
            registry.register(Slots(sources.pool))
            registry.register(FleetMetrics(sources.pool, sources.role_changes))
        registry.register(Requests(sources))
        registry.register(Signals(sources))
        registry.register(Log())
        self._of_models.register(registry)
        (usage or KeyUsage()).register(registry)

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        self._legs.add((leg, instance, outcome))

    def request_finished(self, record: RequestRecord) -> None:
        if not record.is_counted:
            return
        path = record.path
        self._requests.add((path, record.reason or "none", record.outcome))
        self._request_s.observe({path: record.total_s})
        self._phase_s.observe({"receive": record.receive_s})
        first_s = None
        for attempt in record.attempts:
            phases = attempt.phase_seconds()
            self._phase_s.observe(phases)
            if attempt.predicted_s is not None and (actual_s := attempt.first_token_s) is not None:
                self._predicted_s.observe({attempt.path: attempt.predicted_s})
                self._actual_s.observe({attempt.path: actual_s})
            if first_s is None and "decode" in phases:
                first_s = attempt.started + attempt.total_seconds() - phases["decode"] - record.started
        first_s = first_s if record.stream else None  # whole answers are streams of the engines only
        if first_s is not None:
            self._first_s.observe({path: first_s})
        self._of_models.request_finished(record, first_s)
        if record.error is not None:
            self._errors.add((record.error,))
        if record.num_attempts > 1:
            self._retries.add(amount=record.num_attempts - 1)
        if record.attempt is not None:
            self._count_kv(record.attempt)

    def _count_kv(self, attempt: AttemptRecord) -> None:
        self._prompt_tokens.add((attempt.path,), attempt.num_prompt_tokens or 0)
        if attempt.num_kv_bytes is not None:
            self._kv_bytes.add(amount=attempt.num_kv_bytes)
            self._kv_pages.add(amount=attempt.num_pages or 0)
            self._transfer_s.observe({"": attempt.transfer_s or 0.0})

    def loop_lagged(self, lag_s: float) -> None:
        """Counts how late the event loop was at one moment, in seconds."""
        self._lag_s.observe({"": lag_s})

    def phase_totals_s(self) -> dict[str, float]:
        """Returns all the seconds that requests have spent so far, by phase."""
        return self._phase_s.totals_s()

    async def look(self) -> bytes:
        """Returns the page, with figures of other processes that are up to date."""
        await self._elsewhere.look()
        return self.render()

    def render(self) -> bytes:
        """Returns the page."""
        if not self._elsewhere.has_any:
            return generate_latest(self._registry)
        families = self._elsewhere.counted(PART, self.counted())
        families = added(families, self._elsewhere.present(PART, self.present()))
        return generate_latest(_Page(families))

    def counted(self) -> dict[str, Any]:
        """Returns the counters and histograms of this process, as figures."""
        return {key: told for key, told in self._families() if told["type"] != "gauge"}

    def present(self) -> dict[str, Any]:
        """Returns the gauges of this process, as figures."""
        return {key: told for key, told in self._families() if told["type"] == "gauge"}

    def _families(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for family in self._registry.collect():
            samples = {
                json.dumps([one.name, list(one.labels.items())]): one.value
                for one in family.samples
                if not one.name.endswith("_created")
            }
            yield family.name, {"type": family.type, "text": family.documentation, "samples": samples}


class _Page:
    """_Page stands for a registry whose metrics are figures."""

    def __init__(self, families: Mapping[str, Any]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        for name, told in self._families.items():
            metric = Metric(name, told["text"], told["type"])
            for key, value in told["samples"].items():
                sample, labels = json.loads(key)
                metric.add_sample(sample, dict(labels), value)
            yield metric
