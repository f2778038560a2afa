"""PathByLoad guesses whether one instance would be sooner to answer alone than a prefiller and a decoder. No I/O.

**A decoder alone.** It goes by what both have to read, and by how fast they were of late (`fleet.pace`). A decoder that
reads a prompt holds up the answers that it writes. So what this costs is the request's own wait there, and the time for
its prompt once more for each leg under way: there is less waiting in all, or the pair serves it. A prefiller is behind
only while as much as the prompt itself waits there, or at last half as much: an idle one gets every prompt, so that its
speed is measured again. Between the two thresholds a model stays on the way that its last request took.

**A prefiller alone**, while no decoder has room for the answer. The wait is until there is room for it and for those
who wait behind it: what the decoders lack, at the speed at which their answers gave memory back of late. A prefiller
that writes an answer reads prompts more slowly as long as it does. So only one with next to nothing to read does it,
and half of its KV cache stays free for prompts. Its context must be as long as the decoders': it would cut off, or
refuse, what they write.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from pdproxy.admission.grant import Forecast
from pdproxy.admission.line import Demand
from pdproxy.fleet.instance import Instance

ENTER_FACTOR = 2.0
"""The least wait by way of the prefiller, in times of what the prompt costs at the decoder, at which decoders begin to
read prompts themselves."""
LEAVE_FACTOR = 1.25
"""The same at which they go on with it. Below, prefillers read prompts again."""
LEAST_GAIN_S = 0.1
"""Seconds that a request must gain. For less, no other answers at the decoder are held up."""
FREE_SHARE = 0.5
"""The share of a prefiller's KV cache that answers leave free there."""
MAX_MODELS = 1024
"""The most models whose way is remembered. Where engines tell no model names, clients may ask for any name."""


class PathByLoad:
    """PathByLoad advises one way or the other for each demand. Implements `grant.Forecaster`.

    Where the speed of a decoder is not known, it is taken to read as fast as the prefiller; its first answer tells.

    Mutable state: the models whose decoders read prompts themselves at the moment, and those whose prefillers write
    answers, each with the longest ago first.
    """

    def __init__(self) -> None:
        self._reading: dict[str | None, None] = {}
        self._writing: dict[str | None, None] = {}

    def foresee(self, demand: Demand, owner: Instance, peer: Instance, now: float) -> Forecast | None:
        """Returns the forecast for `demand`; None where the prefiller's speed is not known. `now` is in seconds, on the
        clock of the two instances."""
        prefiller, decoder = (owner, peer) if peer.is_writer else (peer, owner)
        num_tokens, ours, theirs = demand.num_tokens, prefiller.pace, decoder.pace
        tokens_per_s = None if ours is None or theirs is None else ours.tokens_per_s(now)
        if tokens_per_s is None or theirs is None or not num_tokens:
            return None
        pair_s = (prefiller.queued_tokens + num_tokens) / tokens_per_s + (theirs.handoff_s(now) or 0.0)
        read_s = num_tokens / (theirs.tokens_per_s(now) or tokens_per_s)
        alone_s = read_s * (1.0 + decoder.queued_tokens / num_tokens)
        cost_s = alone_s + read_s * decoder.num_legs
        factor, share = (LEAVE_FACTOR, 0.5) if demand.model in self._reading else (ENTER_FACTOR, 1.0)
        is_behind = prefiller.queued_tokens >= share * num_tokens
        if is_behind and pair_s >= factor * cost_s and pair_s - alone_s >= LEAST_GAIN_S:
            _note(self._reading, demand.model)
            return Forecast(alone_s, True)
        self._reading.pop(demand.model, None)
        return Forecast(pair_s, False)

    def relieve(
        self,
        demand: Demand,
        num_behind: int,
        readers: Sequence[Instance],
        writers: Sequence[Instance],
        now: float,
    ) -> tuple[Instance, Forecast] | None:
        """Returns the prefiller that should answer `demand` alone, because the decoders have room for it and those who
        wait behind it only much later, with the forecast; None where there is none, or too little is known. `now` is as
        in `foresee`."""
        wait_s = _wait_s(demand, num_behind, writers, now)
        factor, share = (LEAVE_FACTOR, 1.0) if demand.model in self._writing else (ENTER_FACTOR, 0.0)
        best: tuple[float, Instance] | None = None
        max_len = max(map(_max_len, writers))
        for one in readers:
            tokens_per_s = None if one.pace is None else one.pace.tokens_per_s(now)
            if not tokens_per_s or one.queued_tokens > share * demand.num_tokens or _max_len(one) < max_len:
                continue
            if one.residency.used + demand.room.tokens > (1.0 - FREE_SHARE) * (one.residency.capacity or 0):
                continue
            alone_s = (one.queued_tokens + demand.num_tokens) / tokens_per_s
            if best is None or alone_s < best[0]:
                best = alone_s, one
        if best is None or wait_s < max(factor * best[0], LEAST_GAIN_S):
            self._writing.pop(demand.model, None)
            return None
        _note(self._writing, demand.model)
        return best[1], Forecast(best[0], True)


def _max_len(one: Instance) -> float:
    """Returns the most tokens of a prompt and its answer there; infinite where nobody knows."""
    return inf if one.facts is None or one.facts.max_model_len is None else one.facts.max_model_len


def _wait_s(demand: Demand, num_behind: int, decoders: Sequence[Instance], now: float) -> float:
    """Returns the seconds until a decoder has room for the answer, and has the KV and a first token; and until all of
    them together have room for as many more as wait behind it. It is 0 where too little is known."""
    tokens_per_s, first_s = 0.0, inf
    for one in decoders:
        pace, residency = one.pace, one.residency
        rate = 0.0 if pace is None else pace.freed_per_s(now)
        if pace is not None and rate > 0.0:
            tokens_per_s += rate
            lacks = max(0.0, residency.used + demand.room.tokens - residency.limit)
            first_s = min(first_s, lacks / rate + (pace.handoff_s(now) or 0.0))
    return first_s + num_behind * demand.room.tokens / tokens_per_s if tokens_per_s else 0.0


def _note(models: dict[str | None, None], model: str | None) -> None:
    if model not in models:
        if len(models) >= MAX_MODELS:
            del models[next(iter(models))]
        models[model] = None
