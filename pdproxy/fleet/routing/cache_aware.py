"""The policies that go by what instances are known to have in their prefix caches.

They count only what is known exactly. Where nobody is known to have anything of a prompt, another policy picks.
"""

from __future__ import annotations

from typing import Any

from pdproxy.fleet.routing.candidate import C, Load, RoutingHints
from pdproxy.fleet.routing.candidates import CandidateSet, Policy

LEAST_WEIGHT = 0.01
"""The weight that counts for an instance of less."""
ALIKE = 0.05
"""The share of its memory by which a decoder may be fuller than the emptiest one, and count as equally loaded."""


class CacheAwarePrefill:
    """CacheAwarePrefill picks the prefiller that would have read the prompt first: the one with the fewest tokens to
    compute, those that are queued there and those of the prompt that are not in its cache. An instance of less than a
    full weight counts as having as much more to do. Implements `candidates.Policy`."""

    uses_hints = True
    ties = False

    def __init__(self, fallback: Policy) -> None:
        self._fallback = fallback

    def pick(self, lineup: CandidateSet[C], hints: RoutingHints) -> C:
        blocks = hints.blocks
        if blocks is None or len(lineup.members) == 1:
            return self._fallback.pick(lineup, hints)
        cached = {one: one.cached_tokens(blocks) or 0 for one in lineup.members}
        if not any(cached.values()):
            return self._fallback.pick(lineup, hints)
        costs = {
            one: (one.queued_tokens + blocks.num_tokens - known) / max(one.weight, LEAST_WEIGHT)
            for one, known in cached.items()
        }
        return _one_of(self._fallback, lineup, costs, min(costs.values()), hints)

    def key(self, prompt: Any) -> bytes | None:
        """Returns what the other policy goes by."""
        return self._fallback.key(prompt)

    def home(self, lineup: CandidateSet[C], hints: RoutingHints) -> C | None:
        """Returns None: any instance will do."""
        return None


class CacheAwareDecode:
    """CacheAwareDecode picks, among the decoders whose `load` is about the least, the one that has most of the prompt
    in its cache. Implements `candidates.Policy`."""

    uses_hints = True
    ties = False

    def __init__(self, fallback: Policy, load: Load) -> None:
        self._fallback = fallback
        self._load = load

    def pick(self, lineup: CandidateSet[C], hints: RoutingHints) -> C:
        blocks = hints.blocks
        if blocks is None or len(lineup.members) == 1:
            return self._fallback.pick(lineup, hints)
        loads = {one: self._load(one) / max(one.weight, LEAST_WEIGHT) for one in lineup.members}
        bound = min(loads.values()) + ALIKE
        lacks = {one: -(one.cached_tokens(blocks) or 0) for one, load in loads.items() if load <= bound}
        most = min(lacks.values())
        return _one_of(self._fallback, lineup, lacks, most, hints) if most else self._fallback.pick(lineup, hints)

    def key(self, prompt: Any) -> bytes | None:
        """Returns what the other policy goes by."""
        return self._fallback.key(prompt)

    def home(self, lineup: CandidateSet[C], hints: RoutingHints) -> C | None:
        """Returns None: any instance will do."""
        return None


def _one_of(
    fallback: Policy, lineup: CandidateSet[C], costs: dict[C, float] | dict[C, int], least: float, hints: RoutingHints
) -> C:
    """Returns the one of the least cost; `fallback` picks where there are several."""
    best = [one for one, cost in costs.items() if cost == least]
    if len(best) == 1:
        return best[0]
    return fallback.pick(lineup if len(best) == len(lineup.members) else CandidateSet(best), hints)
