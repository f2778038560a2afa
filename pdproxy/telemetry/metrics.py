"""Metrics are for Prometheus; they have a registry of their own so that several proxies can live in one process.

Every name is documented in ``docs/metrics.md``, and a test checks that both have the same names.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdproxy import __version__
from pdproxy.admission.admission import AdmissionStatistics
from pdproxy.admission.retry_budget import RetryStatistics
from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.fleet.pool import Pool
from pdproxy.kv_signals.board import KvBoard
from pdproxy.telemetry.attempt_record import AttemptRecord
from pdproxy.telemetry.figures import Elsewhere, added
from pdproxy.telemetry.fleet import FleetMetrics
from pdproxy.telemetry.key_usage import KeyUsage
from pdproxy.telemetry.log import num_dropped
from pdproxy.telemetry.model_metrics import ModelMetrics
from pdproxy.telemetry.record import RequestRecord
from pdproxy.telemetry.series import Counts, Durations
from transfer.memory_budget import MemoryBudget

PART = "metrics"
"""The name of the page's part of the figures of other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Sources names the parts of the proxy whose numbers are read whenever the page is asked for."""

    pool: Pool
    board: KvBoard
    reaper: Callable[[], Mapping[str, int]]
    """The method `Reaper.statistics`."""
    num_in_flight: Callable[[], int]
    retries: Callable[[], RetryStatistics]
    """The method `RetryBudget.statistics`."""
    num_continued: Callable[[], int]
    """Returns the number of streams that another decoder was asked to go on with."""
    num_malformed: Callable[[], int]
    """Returns the number of messages on the signal socket that were no signals."""
    descriptors: DescriptorBudget
    memory: MemoryBudget


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
            registry.register(_Fronts(self._elsewhere))
            registry.register(_Slots(sources.pool))
            registry.register(FleetMetrics(sources.pool))
        registry.register(_Requests(sources))
        registry.register(_Signals(sources))
        registry.register(_Log())
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


class _Fronts(Collector):
    """_Fronts shows the processes that carry the traffic, where there are any."""

    def __init__(self, elsewhere: Elsewhere) -> None:
        self._elsewhere = elsewhere

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("pdproxy_workers", "Processes that carry the traffic, by state", labels=["state"])
        states = Counter(str(worker["state"]) for worker in self._elsewhere.workers())
        for state in ("starting", "serving", "leaving"):
            family.add_metric([state], float(states[state]))
        yield family
        yield _counter("pdproxy_workers_lost", "Such processes that ended and were replaced", self._elsewhere.num_lost)
        replica = self._elsewhere.replica()
        if replica is not None:
            yield GaugeMetricFamily("pdproxy_replica_leads", "1 where this replica leads", float(replica["leads"]))
            age_s = replica["store_answered_s"]
            yield GaugeMetricFamily(
                "pdproxy_store_silent_seconds",
                "Seconds since the store has answered who leads",
                math.nan if age_s is None else float(age_s),
            )


class _Slots(Collector):
    """_Slots shows the ledgers of the instances that own pages: ``granted - returned = held``, always."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        by_name = {instance.name: pages for instance in self._pool.instances if (pages := instance.pages) is not None}
        yield from _gauges(by_name)
        yield _occupied(by_name)
        yield from _counters(by_name)
        freed = self._pool.admission.kernel.freed
        yield _counters_by("pdproxy_slots_freed", "Leases given back, by evidence", "evidence", freed.items())
        yield _waiting(self._pool)


def _gauges(by_name: dict[str, AdmissionStatistics]) -> Iterator[Metric]:
    for name, text, field in (
        ("pdproxy_slots_capacity", "Pages of a decoder's PD buffer", "capacity"),
        ("pdproxy_slots_held", "Pages held by leases", "held"),
        ("pdproxy_slots_leases", "Leases that hold pages", "num_leases"),
        ("pdproxy_slots_orphaned", "Pages whose request is over and that are not known to be free", "orphaned"),
        ("pdproxy_slots_overdue", "Leases of such pages that should have ended by themselves by now", "num_overdue"),
        ("pdproxy_slots_foreign", "Pages in use, by the engine's own word, that no lease explains", "foreign"),
        ("pdproxy_slots_drain_pages_per_second", "How fast pages come back, as measured", "drain_pages_per_s"),
        ("pdproxy_queue_requests", "Requests that wait for pages", "num_waiting"),
        ("pdproxy_queue_pages", "Pages that are waited for", "waiting_pages"),
    ):
        family = GaugeMetricFamily(name, text, labels=["instance"])
        for decoder, statistics in by_name.items():
            value = getattr(statistics, field)
            family.add_metric([decoder], float("inf") if value is None else float(value))
        yield family


def _occupied(by_name: dict[str, AdmissionStatistics]) -> Metric:
    """Returns the pages in use at those engines that tell them."""
    family = GaugeMetricFamily("pdproxy_slots_occupied", "Pages in use, by the engine's own word", labels=["instance"])
    for owner, statistics in by_name.items():
        if statistics.occupied is not None:
            family.add_metric([owner], float(statistics.occupied))
    return family


def _waiting(pool: Pool) -> Metric:
    """Returns the number of all requests that wait, by model, whichever instance they will be bound to."""
    family = GaugeMetricFamily("pdproxy_line_requests", "Requests in line for pages, by model", labels=["model"])
    kernel = pool.admission.kernel
    known = dict.fromkeys(pool.models(), 0)
    for model, num in (known | {model or "": kernel.waiting(model)[0] for model in kernel.waiting_models()}).items():
        family.add_metric([model], float(num))
    return family


def _counters(by_name: dict[str, AdmissionStatistics]) -> Iterator[Metric]:
    for name, text, field in (
        ("pdproxy_slots_granted", "Pages granted so far", "granted_total"),
        ("pdproxy_slots_returned", "Pages given back so far", "returned_total"),
        ("pdproxy_queue_overtakes", "Times a smaller request passed a waiting larger one", "num_overtakes"),
        ("pdproxy_queue_passes", "Times a more urgent request passed one that had waited longer", "num_passes"),
        ("pdproxy_queue_full", "Requests refused by a full queue", "num_queue_full"),
        ("pdproxy_queue_timeouts", "Requests that waited too long", "num_queue_timeouts"),
        ("pdproxy_queue_abandoned", "Requests that left while they waited", "num_abandoned"),
    ):
        family = CounterMetricFamily(name, text, labels=["instance"])
        for decoder, statistics in by_name.items():
            family.add_metric([decoder], float(getattr(statistics, field)))
        yield family


class _Requests(Collector):
    """_Requests shows the requests under way, and what the reaper has to do with those that are over."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        yield _gauge("pdproxy_requests_in_flight", "Requests under way", self._sources.num_in_flight())
        retries = self._sources.retries()
        yield _gauge("pdproxy_retry_budget", "Retries that the traffic bears now", retries.num_available)
        yield _counter("pdproxy_retries_refused", "Retries that it did not bear", retries.num_refused)
        yield _counter("pdproxy_streams_continued", "Streams taken over", self._sources.num_continued())
        memory = self._sources.memory
        yield _gauge("pdproxy_memory_budget_bytes", "Most bytes of requests and answers held", memory.limit_bytes)
        yield _gauge("pdproxy_memory_used_bytes", "Bytes of requests and answers held", memory.num_bytes)
        yield _counter("pdproxy_memory_refused", "Times the budget had no room for more", memory.num_refused)
        outcomes = dict(self._sources.reaper())
        yield _gauge("pdproxy_reaper_open", "Attempts whose pages are not known to be free", outcomes.pop("open"))
        descriptors = self._sources.descriptors
        refused = {"request": descriptors.num_refused, "connection": descriptors.num_turned_away}
        yield _counters_by(
            "pdproxy_descriptors_refused", "Clients refused for want of descriptors", "what", refused.items()
        )
        faults = dict(descriptors.local_errors)
        yield _counters_by("pdproxy_local_errors", "Sockets that this machine could not make", "kind", faults.items())
        yield _counters_by("pdproxy_reaper_attempts", "What became of orphaned attempts", "outcome", outcomes.items())


class _Signals(Collector):
    """_Signals shows what was heard about KV, and which signals nobody expected."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        statistics = self._sources.board.statistics()
        yield _gauge("pdproxy_kv_expected", "Attempts whose KV is expected or unread", statistics.num_open)
        yield _gauge("pdproxy_kv_waiting", "Requests that wait for KV-ready", statistics.num_waiting)
        yield _counter("pdproxy_kv_lost", "Attempts whose decoder has gone", statistics.num_lost)
        names = ("taken", "duplicates", "unexpected", "stale", "foreign_ranks", "senseless")
        verdicts = {name: int(getattr(statistics, f"num_{name}")) for name in names}
        verdicts["malformed"] = self._sources.num_malformed()
        yield _counters_by("pdproxy_kv_signals", "Signals about KV", "verdict", verdicts.items())


class _Log(Collector):
    def collect(self) -> Iterator[Metric]:
        yield _counter("pdproxy_log_records_dropped", "Log records that stderr did not take", num_dropped())


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _counters_by(name: str, text: str, label: str, values: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values:
        family.add_metric([value], float(count))
    return family
