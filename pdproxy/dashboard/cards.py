"""A card is what the page shows of one instance: much less than ``/status``, because all of them are read each
second."""

from __future__ import annotations

from typing import Any

from pdproxy.fleet.breaker import BreakerState
from pdproxy.fleet.instance import Health, Instance
from pdproxy.fleet.pool import Pool

_CLOSED = BreakerState.CLOSED


def cards(pool: Pool) -> dict[str, dict[str, Any]]:
    """Returns a card for each instance, by a key that stays the same as long as the instance is what it is. A name may
    be in use again while an instance of that name is leaving."""
    fleet = {f"{one.role}/{one.name}": card(one) for one in pool.instances}
    leaving = {f"leaving/{one.name}/{one.epoch}": card(one) | {"word": "leaving"} for one in pool.leaving}
    return fleet | leaving


def card(instance: Instance) -> dict[str, Any]:
    """Returns what the page shows of one instance. What changes by itself as time passes is left out, or told roughly;
    what is not known is left out."""
    told: dict[str, Any] = {
        "name": instance.name,
        "role": instance.role,
        "url": instance.url,
        "engine": instance.adapter.name,
        "word": word(instance),
        "state": instance.health.value,
        "why": instance.why,
        "routable": instance.is_routable,
        "draining": instance.is_draining,
        "breaker": instance.breaker.state.value,
        "weight": round(instance.weight, 1),
        "models": sorted(instance.models),
        "requests": instance.num_attempts,
        "legs": instance.num_legs,
        "queued_tokens": instance.queued_tokens,
    }
    if instance.epoch is not None:
        told["epoch"] = instance.epoch
    pages = instance.pages
    if pages is not None:
        told["capacity"] = instance.capacity
        told["held"] = pages.held
        told["queue"] = pages.num_waiting
        told["queued_pages"] = pages.waiting_pages
        told["foreign"] = pages.foreign
        told["orphaned"] = pages.orphaned
        told["awaits"] = sorted({lease.awaits for lease in instance.account.orphans}) if instance.account else []
        if pages.occupied is not None:
            told["occupied"] = pages.occupied
    if instance.is_writer and instance.residency.capacity is not None:
        told["cache_tokens"] = instance.residency.capacity
        told["resident_tokens"] = instance.residency.used
    return told


def word(instance: Instance) -> str:
    """Returns one word for the instance's state: the worst that can be said of it."""
    if instance.health is not Health.READY:
        return instance.health.value
    if instance.is_draining:
        return "draining"
    if instance.breaker.state is not _CLOSED:
        return "breaker " + instance.breaker.state.value.replace("_", " ")
    return "ready"
