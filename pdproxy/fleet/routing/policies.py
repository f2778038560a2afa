"""The module has the routing policies by load, and every policy by its name in the configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdproxy.errors import ConfigError
from pdproxy.fleet.routing.affinity import PrefixAffinity, SessionAffinity
from pdproxy.fleet.routing.cache_aware import CacheAwareDecode, CacheAwarePrefill
from pdproxy.fleet.routing.candidate import C, Candidate, Load, RoutingHints
from pdproxy.fleet.routing.candidates import CandidateSet, Policy
from pdproxy.fleet.routing.load_index import LoadIndex
from pdproxy.fleet.routing.rotation import NOBODY, Ramp, Rotation


def no_load(candidate: Candidate) -> float:
    """Returns 0 for every candidate, so that only turns count."""
    return 0.0


def share_of_slots(candidate: Candidate) -> float:
    """Returns the pages held as a share of those there are; where slots guard another instance's memory, the number of
    legs."""
    capacity = candidate.capacity
    return candidate.held / capacity if capacity else candidate.num_legs


def fuller_memory(candidate: Candidate) -> float:
    """Returns the share in use of the fuller of an instance's two memories: the one that slots guard, and the KV cache
    in which it writes answers."""
    capacity, resident = candidate.capacity, candidate.resident_share
    return max(candidate.held / capacity, resident) if capacity else resident


def queued_tokens(candidate: Candidate) -> float:
    return candidate.queued_tokens


class LeastLoaded:
    """LeastLoaded picks the least loaded instance; equals take turns. Implements `candidates.Policy`."""

    uses_hints = False
    ties = False

    def __init__(self, load: Load, rng: random.Random) -> None:
        self._load = load
        self._ramp = Ramp()
        self._turns = Rotation(rng)

    def pick(self, lineup: CandidateSet[C], hints: RoutingHints) -> C:
        members = lineup.members
        if len(members) == 1:
            picked = members[0]
            self._turns.took(picked.name, ())
        else:
            ranking = lineup.ranking or self._rank(lineup)
            ranking.rest(_resting(self._ramp, lineup))
            picked = ranking.take()
        self._ramp.spend(picked.name)
        return picked

    def key(self, prompt: Any) -> bytes | None:
        """Returns None: what a prompt says makes no difference."""
        return None

    def home(self, lineup: CandidateSet[C], hints: RoutingHints) -> C | None:
        """Returns None: any instance will do."""
        return None

    def _rank(self, lineup: CandidateSet[C]) -> LoadIndex[C]:
        lineup.ranking = ranking = LoadIndex(lineup.members, self._load, self._turns)
        if lineup.is_lasting and self._load is not no_load:
            ranking.watch()
        return ranking


class PowerOfTwo:
    """PowerOfTwo picks the less loaded of two instances drawn at random. Implements `candidates.Policy`.

    Where the known load is a little old, that is as good as looking at all instances: not every proxy that knows the
    same sends its requests to the same instance.
    """

    uses_hints = False
    ties = False

    def __init__(self, load: Load, rng: random.Random) -> None:
        self._load = load
        self._random = rng.random
        self._ramp = Ramp()

    def pick(self, lineup: CandidateSet[C], hints: RoutingHints) -> C:
        members = lineup.members
        resting = _resting(self._ramp, lineup)
        picked = self._draw(members, resting)
        if len(members) - len(resting) > 1:
            other = picked
            while other is picked:
                other = self._draw(members, resting)
            if self._load(other) < self._load(picked):
                picked = other
        self._ramp.spend(picked.name)
        return picked

    def key(self, prompt: Any) -> bytes | None:
        """Returns None: what a prompt says makes no difference."""
        return None

    def home(self, lineup: CandidateSet[C], hints: RoutingHints) -> C | None:
        """Returns None: any instance will do."""
        return None

    def _draw(self, members: Sequence[C], resting: frozenset[str]) -> C:
        while True:
            drawn = members[int(self._random() * len(members))]
            if not resting or drawn.name not in resting:
                return drawn


def _resting(ramp: Ramp, lineup: CandidateSet[C]) -> frozenset[str]:
    if not lineup.rising:
        return NOBODY
    weights = lineup.weights()
    return ramp.resting(weights, len(lineup.members) - len(weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """PolicyOptions holds what the policies need besides their name; each takes what is its own."""

    rng: random.Random
    fallback: str = "least_slots"
    """The name of the policy by which an affinity policy routes requests that nothing ties to an instance."""
    chunk_size: int = 256
    prefix_chunks: int = 2
    load_factor: float = 1.25
    is_decode: bool = False
    """Tells that decoders are picked."""


def _session_affinity(options: PolicyOptions) -> Policy:
    return SessionAffinity(_fallback(options))


def _prefix_affinity(options: PolicyOptions) -> Policy:
    return PrefixAffinity(
        _fallback(options),
        chunk_size=options.chunk_size,
        num_chunks=options.prefix_chunks,
        load_factor=options.load_factor,
    )


def _cache_aware(options: PolicyOptions) -> Policy:
    fallback = _prefix_affinity(options)
    return CacheAwareDecode(fallback, fuller_memory) if options.is_decode else CacheAwarePrefill(fallback)


POLICIES: Final[Mapping[str, Callable[[PolicyOptions], Policy]]] = {
    "round_robin": lambda options: LeastLoaded(no_load, options.rng),
    "least_slots": lambda options: LeastLoaded(share_of_slots, options.rng),
    "least_resident": lambda options: LeastLoaded(fuller_memory, options.rng),
    "least_queued_tokens": lambda options: LeastLoaded(queued_tokens, options.rng),
    "power_of_two": lambda options: PowerOfTwo(share_of_slots, options.rng),
    "session_affinity": _session_affinity,
    "prefix_affinity": _prefix_affinity,
    "cache_aware": _cache_aware,
}
AFFINITIES: Final[frozenset[str]] = frozenset({"session_affinity", "prefix_affinity", "cache_aware"})


def make_policy(name: str, options: PolicyOptions) -> Policy:
    """Returns a new policy by its name, with a memory of its own. Raises `ConfigError` that names the policies there
    are."""
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError(f"there is no routing policy {name!r}; there are {', '.join(POLICIES)}")
    return make(options)


def _fallback(options: PolicyOptions) -> Policy:
    if options.fallback in AFFINITIES:
        raise ConfigError(f"the fallback of an affinity policy cannot be {options.fallback!r}, which needs one itself")
    return make_policy(options.fallback, options)
