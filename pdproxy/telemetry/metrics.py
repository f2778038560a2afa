"""Prometheus metrics, with a registry of their own so that several proxies can live in one process."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdproxy.admission.base import AdmissionStatistics
from pdproxy.fleet.pool import Pool
from pdproxy.signals.board import KvBoard
from pdproxy.telemetry.record import RequestRecord

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """Implements `Observer`; `render` is the ``/metrics`` page. Slots and signals are read when it is asked for."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, pool: Pool, board: KvBoard) -> None:
        self._registry = CollectorRegistry()
        self._phase_s = Histogram(
            "pdproxy_phase_seconds",
            "Where requests spend their time",
            ["phase"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._request_s = Histogram(
            "pdproxy_request_seconds",
            "Whole requests",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._requests = Counter(
            "pdproxy_requests",
            "Finished requests",
            ["path", "reason", "outcome"],
            registry=self._registry,
        )
        self._attempts = Counter("pdproxy_retries", "Attempts beyond a request's first", registry=self._registry)
        self._legs = Counter(
            "pdproxy_legs", "HTTP calls to engines", ["leg", "instance", "outcome"], registry=self._registry
        )
        self._registry.register(_Slots(pool))
        self._registry.register(_Signals(board))

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        self._legs.labels(leg, instance, outcome).inc()

    def request_finished(self, record: RequestRecord) -> None:
        if not record.is_counted:
            return
        self._requests.labels(record.path, record.reason or "none", record.outcome).inc()
        self._request_s.labels(record.path).observe(record.total_s)
        for phase, seconds in record.phase_seconds().items():
            self._phase_s.labels(phase).observe(seconds)
        if record.num_attempts > 1:
            self._attempts.inc(record.num_attempts - 1)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Slots(Collector):
    """The decoders' ledgers: ``granted - returned = held``, always."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        by_name = {
            instance.name: instance.admission.statistics()
            for instance in self._pool.of_role("decode")
            if instance.has_admission
        }
        yield from _gauges(by_name)
        yield from _counters(by_name)
        ready = GaugeMetricFamily("pdproxy_instance_ready", "Whether it gets requests", labels=["instance", "role"])
        for instance in self._pool.instances:
            ready.add_metric([instance.name, instance.role], float(instance.is_ready))
        yield ready


def _gauges(by_name: dict[str, AdmissionStatistics]) -> Iterator[Metric]:
    for name, text, field in (
        ("pdproxy_slots_capacity", "Pages of a decoder's PD buffer", "capacity"),
        ("pdproxy_slots_held", "Pages held by leases", "held"),
        ("pdproxy_queue_requests", "Requests that wait for pages", "num_waiting"),
        ("pdproxy_queue_pages", "Pages that are waited for", "waiting_pages"),
    ):
        family = GaugeMetricFamily(name, text, labels=["decoder"])
        for decoder, statistics in by_name.items():
            value = getattr(statistics, field)
            family.add_metric([decoder], float("inf") if value is None else float(value))
        yield family


def _counters(by_name: dict[str, AdmissionStatistics]) -> Iterator[Metric]:
    for name, text, field in (
        ("pdproxy_slots_granted", "Pages granted so far", "granted_total"),
        ("pdproxy_slots_returned", "Pages given back so far", "returned_total"),
        ("pdproxy_queue_overtakes", "Times a smaller request passed a waiting larger one", "num_overtakes"),
        ("pdproxy_queue_full", "Requests refused by a full queue", "num_queue_full"),
        ("pdproxy_queue_timeouts", "Requests that waited too long", "num_queue_timeouts"),
    ):
        family = CounterMetricFamily(name, text, labels=["decoder"])
        for decoder, statistics in by_name.items():
            family.add_metric([decoder], float(getattr(statistics, field)))
        yield family


class _Signals(Collector):
    """What was heard about KV, and what nobody expected."""

    def __init__(self, board: KvBoard) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        statistics = self._board.statistics()
        open_attempts = GaugeMetricFamily("pdproxy_kv_expected", "Attempts whose KV is expected or unread")
        open_attempts.add_metric([], float(statistics.num_open))
        yield open_attempts
        family = CounterMetricFamily("pdproxy_kv_signals", "Signals about KV", labels=["verdict"])
        for verdict in ("taken", "duplicates", "unexpected", "stale", "foreign_ranks", "senseless"):
            family.add_metric([verdict], float(getattr(statistics, f"num_{verdict}")))
        yield family
