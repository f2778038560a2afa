"""LoadIndex finds whose turn it is among the least loaded candidates, without looking at all the others.

Candidates of equal load stand in one tier, ordered there by the round of their last pick. A pick costs the same however
many candidates there are. A change of one candidate's load also costs the same, apart from a heap of the loads that
there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Generic

from pdproxy.fleet.routing.candidate import C, Load
from pdproxy.fleet.routing.rotation import NOBODY, Rotation


class _Standing(Generic[C]):
    """_Standing is one candidate's tier, its round there, and its place among those of that round."""

    __slots__ = ("candidate", "load", "place", "round")

    def __init__(self, candidate: C) -> None:
        self.candidate = candidate
        self.load = 0.0
        self.round = 0
        self.place = 0


class LoadIndex(Generic[C]):
    """LoadIndex orders `candidates` by `load`, and equals by `turns`, which other indexes may share.

    Mutable state: every candidate's standing; the tiers, by load, of those that are not resting; their loads as a heap,
    in which empty tiers stay until they come up; those whose load has changed since the last look, in the order in
    which it did: where objects lie in memory must not decide which candidate comes first in a tier.
    """

    def __init__(self, candidates: Sequence[C], load: Load, turns: Rotation) -> None:
        self._load = load
        self._turns = turns
        self._standings = {candidate.name: _Standing(candidate) for candidate in candidates}
        self._tiers: dict[float, dict[int, list[_Standing[C]]]] = {}
        self._loads: list[float] = []
        self._resting = NOBODY
        self._touched: dict[C, None] = {}
        for standing in self._standings.values():
            self._look_at(standing)
            self._enter(standing)

    def watch(self) -> None:
        """Has the candidates tell of changes of their load from now on."""
        for standing in self._standings.values():
            standing.candidate.watch(self._touched)

    def unwatch(self) -> None:
        """Has the candidates tell of no more changes, because the index is not used any more."""
        for standing in self._standings.values():
            standing.candidate.unwatch(self._touched)

    def rest(self, names: frozenset[str]) -> None:
        """Keeps the candidates of these names from being picked, until the next call. There must be others."""
        if names == self._resting:
            return
        before, self._resting = self._resting, names
        for name in sorted(names - before):  # the same order in every process
            self._leave(self._standings[name])
        for name in sorted(before - names):
            self._enter(self._standings[name])

    def take(self) -> C:
        """Picks the least loaded candidate. Among several, it is one that was last picked in the earliest round, or
        never."""
        if self._touched:
            self._look_again()
        turns = self._turns
        while True:
            tier = self._least_tier()
            earliest = min(tier)
            waiting = tier[earliest]
            standing = waiting[turns.draw(len(waiting))]
            candidate = standing.candidate
            if turns.last(candidate.name) == earliest:
                turns.took(candidate.name, tier)
                self._touched[candidate] = None
                return candidate
            self._move(standing)  # it was picked elsewhere meanwhile

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_again(self) -> None:
        standings, resting = self._standings, self._resting
        for candidate in self._touched:
            name = candidate.name
            if resting and name in resting:
                self._look_at(standings[name])
            else:
                self._move(standings[name])
        self._touched.clear()

    def _look_at(self, standing: _Standing[C]) -> None:
        standing.load = self._load(standing.candidate)
        standing.round = self._turns.last(standing.candidate.name)

    # ── tiers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _least_tier(self) -> dict[int, list[_Standing[C]]]:
        tiers, loads = self._tiers, self._loads
        while not (tier := tiers[loads[0]]):
            del tiers[heappop(loads)]
        return tier

    def _move(self, standing: _Standing[C]) -> None:
        """Moves a candidate to where it belongs now, unless it is there."""
        candidate = standing.candidate
        load, last = self._load(candidate), self._turns.last(candidate.name)
        if load != standing.load or last != standing.round:
            self._leave(standing)
            standing.load, standing.round = load, last
            self._enter(standing)

    def _enter(self, standing: _Standing[C]) -> None:
        tier = self._tiers.get(standing.load)
        if tier is None:
            tier = self._tiers[standing.load] = {}
            self._add_load(standing.load)
        waiting = tier.setdefault(standing.round, [])
        standing.place = len(waiting)
        waiting.append(standing)

    def _leave(self, standing: _Standing[C]) -> None:
        tier = self._tiers[standing.load]
        waiting = tier[standing.round]
        last = waiting.pop()
        if last is not standing:
            waiting[standing.place] = last
            last.place = standing.place
        elif not waiting:
            del tier[standing.round]

    def _add_load(self, load: float) -> None:
        heappush(self._loads, load)
        if len(self._loads) > 2 * len(self._standings) + 16:
            self._tiers = {each: tier for each, tier in self._tiers.items() if tier or each == load}
            self._loads = list(self._tiers)
            heapify(self._loads)
