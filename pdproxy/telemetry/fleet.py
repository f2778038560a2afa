"""FleetMetrics shows metrics of the instances that are in the fleet when the page is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdproxy.admission.residency import Residency
from pdproxy.fleet.breaker import BreakerState
from pdproxy.fleet.instance import Health, Instance
from pdproxy.fleet.pool import Pool
from pdproxy.kv_events.index import Trust

RoleChangeCounts = Mapping[tuple[str, str, str], int]
"""The numbers of changes of role that have ended, by the new role, by whom and the outcome."""

_LABELS = ["instance", "role"]
_GAUGES: tuple[tuple[str, str, Callable[[Instance], float]], ...] = (
    ("pdproxy_instance_ready", "Whether it works", lambda instance: instance.is_ready),
    ("pdproxy_instance_routable", "Whether it gets new attempts", lambda instance: instance.is_routable),
    ("pdproxy_instance_draining", "Whether it is kept from new attempts", lambda instance: instance.is_draining),
    ("pdproxy_instance_weight", "How much of a full share it gets", lambda instance: instance.weight),
    ("pdproxy_instance_legs", "HTTP calls to it under way", lambda instance: instance.num_legs),
    ("pdproxy_instance_queued_tokens", "Prompt tokens not prefilled yet", lambda instance: instance.queued_tokens),
)
_MEASURED: tuple[tuple[str, str, Callable[[Instance], float | None]], ...] = (
    ("pdproxy_instance_read_tokens_per_second", "How fast it reads prompts, lately", lambda one: one.read_tokens_per_s),
    ("pdproxy_instance_handoff_seconds", "From a prefill to its first token, lately", lambda one: one.handoff_s),
)
_OF_WRITERS: tuple[tuple[str, str, Callable[[Residency], float | None]], ...] = (
    ("pdproxy_resident_tokens", "Tokens in use or promised in its KV cache", lambda residency: residency.used),
    ("pdproxy_resident_capacity", "Tokens that its KV cache has room for", lambda residency: residency.capacity),
    ("pdproxy_resident_shared_tokens", "Tokens in memory that answers share", lambda residency: residency.shared),
    ("pdproxy_resident_foreign_tokens", "Tokens in use that are not ours", lambda residency: residency.foreign),
)


class FleetMetrics(Collector):
    """FleetMetrics shows one series per instance of `pool`; those that are leaving it are not among them."""

    def __init__(self, pool: Pool, role_changes: Callable[[], RoleChangeCounts]) -> None:
        self._pool = pool
        self._role_changes = role_changes

    def collect(self) -> Iterator[Metric]:
        instances = self._pool.instances
        for name, text, read in _GAUGES:
            family = GaugeMetricFamily(name, text, labels=_LABELS)
            for instance in instances:
                family.add_metric([instance.name, instance.role], float(read(instance)))
            yield family
        for name, text, measured in _MEASURED:
            family = GaugeMetricFamily(name, text, labels=_LABELS)
            for instance in instances:
                if (speed := measured(instance)) is not None:
                    family.add_metric([instance.name, instance.role], speed)
            yield family
        for name, text, tell in _OF_WRITERS:
            family = GaugeMetricFamily(name, text, labels=["instance"])
            for instance in instances:
                if instance.is_writer and (value := tell(instance.residency)) is not None:
                    family.add_metric([instance.name], float(value))
            yield family
        yield from _caches(instances)
        state = GaugeMetricFamily("pdproxy_instance_state", "1 for the state it is in", labels=[*_LABELS, "state"])
        for instance in instances:
            for health in Health:
                state.add_metric([instance.name, instance.role, health.value], float(instance.health is health))
        yield state
        wrong = CounterMetricFamily(
            "pdproxy_instance_wrong_tags", "Attempts that found another attempt's KV in their pages", labels=_LABELS
        )
        for instance in instances:
            facts = instance.facts  # None of one that has never answered
            wrong.add_metric([instance.name, instance.role], float(facts.num_wrong_tags) if facts is not None else 0.0)
        yield wrong
        ready = GaugeMetricFamily("pdproxy_revision_ready", "Ready instances of it", labels=["role", "revision"])
        counts = Counter((one.role, one.revision.label) for one in instances if one.is_ready)
        for of, number in counts.items():
            ready.add_metric(of, float(number))
        yield ready
        leaving = GaugeMetricFamily("pdproxy_instances_leaving", "Removed instances with work under way")
        leaving.add_metric([], float(len(self._pool.leaving)))
        yield leaving
        changes = CounterMetricFamily(
            "pdproxy_role_changes", "Changes of role that have ended", labels=["role", "by", "outcome"]
        )
        for (role, origin, phase), number in self._role_changes().items():
            changes.add_metric([role, origin, phase], float(number))
        yield changes
        yield from _breakers(instances)


def _caches(instances: Iterable[Instance]) -> Iterator[Metric]:
    """Yields what is known of the prefix caches, of instances that publish KV events."""
    followed = {one: one.kv_events.index for one in instances if one.kv_events is not None}
    trust = GaugeMetricFamily("pdproxy_kv_index_state", "1 for the state it is in", labels=[*_LABELS, "state"])
    blocks = GaugeMetricFamily("pdproxy_kv_index_blocks", "Blocks known to be cached there", labels=_LABELS)
    events = CounterMetricFamily("pdproxy_kv_events", "KV events taken in", labels=_LABELS)
    gaps = CounterMetricFamily("pdproxy_kv_event_gaps", "Times that KV events were missing", labels=_LABELS)
    drops = CounterMetricFamily("pdproxy_kv_index_drops", "Times that all was forgotten", labels=_LABELS)
    for one, index in followed.items():
        labels = [one.name, one.role]
        for state in Trust:
            trust.add_metric([*labels, state.value], float(index.trust is state))
        blocks.add_metric(labels, float(index.num_blocks))
        events.add_metric(labels, float(index.num_events))
        gaps.add_metric(labels, float(index.num_gaps))
        drops.add_metric(labels, float(index.num_drops))
    yield from (trust, blocks, events, gaps, drops) if followed else ()


def _breakers(instances: Iterable[Instance]) -> Iterator[Metric]:
    labels = ["instance", "leg"]
    state = GaugeMetricFamily("pdproxy_breaker_state", "1 for the state it is in", labels=[*labels, "state"])
    opened = CounterMetricFamily("pdproxy_breaker_opened", "Times it opened", labels=labels)
    for instance in instances:
        statistics = instance.breaker.statistics()
        for one in BreakerState:
            state.add_metric([instance.name, statistics.leg, one.value], float(statistics.state is one))
        opened.add_metric([instance.name, statistics.leg], float(statistics.num_opened))
    yield from (state, opened)
