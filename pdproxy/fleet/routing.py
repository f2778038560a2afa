"""Whose turn it is. Prefiller and decoder are chosen independently of each other; both take turns among equals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import Pool


@dataclass(frozen=True, slots=True)
class Route:
    """Who serves an attempt."""

    prefiller: Instance
    decoder: Instance


class TakingTurns:
    """The least loaded instance; among equally loaded ones, the next in turn.

    Mutable state: `_turn`, which only counts up.
    """

    def __init__(self, load: Callable[[Instance], float]) -> None:
        self._load = load
        self._turn = 0

    def pick(self, candidates: Sequence[Instance]) -> Instance:
        """One of `candidates`, of which there is at least one."""
        least = min(self._load(instance) for instance in candidates)
        equals = [instance for instance in candidates if self._load(instance) == least]
        self._turn += 1
        return equals[(self._turn - 1) % len(equals)]


def legs_under_way(instance: Instance) -> float:
    return float(instance.num_legs)


def share_of_pages(instance: Instance) -> float:
    """How much of a decoder's buffer is held; everybody who waits counts as a whole one."""
    admission = instance.admission
    return admission.held / instance.known_facts.num_pages + admission.num_waiting


class Router:
    """Picks a `Route` among those who are ready."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._prefillers = TakingTurns(legs_under_way)
        self._decoders = TakingTurns(share_of_pages)

    def check(self, model: str | None) -> None:
        """Raises `NotReady`, `ModelNotFound` where a pick would."""
        self._pool.ready("prefill", model)
        self._pool.ready("decode", model)

    def pick(self, model: str | None, avoid: frozenset[str]) -> Route:
        """`avoid` names instances that have failed this request; one of them is asked again only where nobody else is.

        Raises `NotReady`, `ModelNotFound`.
        """
        prefillers = self._pool.ready("prefill", model)
        decoders = self._pool.ready("decode", model)
        return Route(self._prefillers.pick(_without(prefillers, avoid)), self._decoders.pick(_without(decoders, avoid)))

    def has_other(self, name: str, model: str | None, avoid: frozenset[str]) -> bool:
        """Could an instance of the same role that is not in `avoid` take over from `name`?"""
        roles = [instance.role for instance in self._pool.instances if instance.name == name]
        return any(
            instance.is_ready and instance.serves(model) and instance.name not in avoid
            for role in roles
            for instance in self._pool.of_role(role)
        )


def _without(candidates: list[Instance], avoid: frozenset[str]) -> list[Instance]:
    return [instance for instance in candidates if instance.name not in avoid] or candidates
