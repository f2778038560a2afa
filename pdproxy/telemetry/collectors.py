"""The module shows the numbers that other parts of the proxy keep on the ``/metrics`` page. Each is read when the page
is asked for.

It has a module of its own because the classes of `prometheus_client` cannot be compiled, and `telemetry.metrics` is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdproxy.admission.admission import AdmissionStatistics
from pdproxy.admission.retry_budget import RetryStatistics
from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.fleet.pool import Pool
from pdproxy.kv_signals.board import KvBoard
from pdproxy.telemetry.figures import Elsewhere
from pdproxy.telemetry.fleet import RoleChangeCounts
from pdproxy.telemetry.log import num_dropped
from transfer.memory_budget import MemoryBudget


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
    role_changes: Callable[[], RoleChangeCounts] = dict
    """Returns how many changes of role have ended."""


class Fronts(Collector):
    """Fronts shows the processes that carry the traffic, where there are any."""

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


class Slots(Collector):
    """Slots shows the ledgers of the instances that own pages: ``granted - returned = held``, always."""

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


class Requests(Collector):
    """Requests shows the requests under way, and what the reaper has to do with those that are over."""

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


class Signals(Collector):
    """Signals shows what was heard about KV, and which signals nobody expected."""

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


class Log(Collector):
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
