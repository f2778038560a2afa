"""FleetMetrics shows metrics of the instances that are in the fleet when the page is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdproxy.fleet.breaker import BreakerState
from pdproxy.fleet.instance import Health, Instance
from pdproxy.fleet.pool import Pool

_LABELS = ["instance", "role"]
_GAUGES: tuple[tuple[str, str, Callable[[Instance], float]], ...] = (
    ("pdproxy_instance_ready", "Whether it works", lambda instance: instance.is_ready),
    ("pdproxy_instance_routable", "Whether it gets new attempts", lambda instance: instance.is_routable),
    ("pdproxy_instance_draining", "Whether it is kept from new attempts", lambda instance: instance.is_draining),
    ("pdproxy_instance_weight", "How much of a full share it gets", lambda instance: instance.weight),
    ("pdproxy_instance_legs", "HTTP calls to it under way", lambda instance: instance.num_legs),
    ("pdproxy_instance_queued_tokens", "Prompt tokens not prefilled yet", lambda instance: instance.queued_tokens),
)


class FleetMetrics(Collector):
    """FleetMetrics shows one series per instance of `pool`; those that are leaving it are not among them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        instances = self._pool.instances
        for name, text, read in _GAUGES:
            family = GaugeMetricFamily(name, text, labels=_LABELS)
            for instance in instances:
                family.add_metric([instance.name, instance.role], float(read(instance)))
            yield family
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
        leaving = GaugeMetricFamily("pdproxy_instances_leaving", "Removed instances with work under way")
        leaving.add_metric([], float(len(self._pool.leaving)))
        yield leaving
        yield from _breakers(instances)


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
