"""Whose turn it is: the routing policies by load, and every policy by its name in the configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdproxy.errors import ConfigError
from pdproxy.fleet.affinity import PrefixAffinity, SessionAffinity
from pdproxy.fleet.base import Candidate, Policy, RoutingHints, RoutingPolicy
from pdproxy.fleet.turns import Ramp, Turns

Load = Callable[[Candidate], float]


def no_load(candidate: Candidate) -> float:
    """All are equal, so that only turns count."""
    return 0.0


def share_of_slots(candidate: Candidate) -> float:
    """Pages held or waited for, of those there are. A prefiller has no pages: its legs stand for them."""
    if candidate.capacity < 1:
        return float(candidate.num_legs)
    return (candidate.held + candidate.queued_pages) / candidate.capacity


def queued_tokens(candidate: Candidate) -> float:
    return float(candidate.queued_tokens)


def legs_under_way(candidate: Candidate) -> int:
    return candidate.num_legs


class LeastLoaded:
    """The least loaded instance, equals by turns. Implements `base.Policy`."""

    def __init__(self, load: Load, rng: random.Random) -> None:
        self._load = load
        self._ramp = Ramp()
        self._turns = Turns(rng)

    def pick(self, candidates: Sequence[Candidate], hints: RoutingHints) -> Candidate:
        loads = [(self._load(candidate), candidate) for candidate in self._ramp.taking_part(candidates)]
        least = min(load for load, _ in loads)
        picked = self._turns.take([candidate for load, candidate in loads if load == least])
        self._ramp.spend(picked)
        return picked


class PowerOfTwo:
    """The less loaded of two drawn at random: as good as looking at all where what is known of load is a little old,
    because not everybody who knows the same runs to the same one. Implements `base.Policy`."""

    def __init__(self, load: Load, rng: random.Random) -> None:
        self._load = load
        self._rng = rng
        self._ramp = Ramp()

    def pick(self, candidates: Sequence[Candidate], hints: RoutingHints) -> Candidate:
        taking_part = self._ramp.taking_part(candidates)
        drawn = self._rng.sample(taking_part, min(2, len(taking_part)))
        picked = min(drawn, key=self._load)
        self._ramp.spend(picked)
        return picked


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """What the policies need besides their name; each takes what is its own."""

    rng: random.Random
    fallback: RoutingPolicy = "least_slots"
    """How an affinity policy routes what has nothing to be tied by."""
    chunk_size: int = 256
    prefix_chunks: int = 2
    load_factor: float = 1.25


def _session_affinity(options: PolicyOptions) -> Policy:
    return SessionAffinity(_fallback(options))


def _prefix_affinity(options: PolicyOptions) -> Policy:
    return PrefixAffinity(
        _fallback(options),
        chunk_size=options.chunk_size,
        num_chunks=options.prefix_chunks,
        load_factor=options.load_factor,
        load=legs_under_way,
    )


POLICIES: Mapping[str, Callable[[PolicyOptions], Policy]] = {
    "round_robin": lambda options: LeastLoaded(no_load, options.rng),
    "least_slots": lambda options: LeastLoaded(share_of_slots, options.rng),
    "least_queued_tokens": lambda options: LeastLoaded(queued_tokens, options.rng),
    "power_of_two": lambda options: PowerOfTwo(share_of_slots, options.rng),
    "session_affinity": _session_affinity,
    "prefix_affinity": _prefix_affinity,
}
AFFINITIES: frozenset[RoutingPolicy] = frozenset({"session_affinity", "prefix_affinity"})


def make_policy(name: str, options: PolicyOptions) -> Policy:
    """A new policy by its name, with a memory of its own. Raises `ConfigError` naming what there is."""
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError(f"there is no routing policy {name!r}; there are {', '.join(POLICIES)}")
    return make(options)


def _fallback(options: PolicyOptions) -> Policy:
    if options.fallback in AFFINITIES:
        raise ConfigError(f"the fallback of an affinity policy cannot be {options.fallback!r}, which needs one itself")
    return make_policy(options.fallback, options)
