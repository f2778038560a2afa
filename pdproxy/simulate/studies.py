"""Questions that take several simulations: what does one policy cost against another, where is the knee, how many
instances does a target need. Each is asked of the same seeded traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from pdproxy.config.options import RoutingPolicy
from pdproxy.config.settings import DecodePolicy
from pdproxy.loadtest.slo import Objective, Slo
from pdproxy.loadtest.sweep import Search
from pdproxy.simulate.errors import SimulationError
from pdproxy.simulate.plan import Plan, decode_capacity, prefill_capacity, rate_for
from pdproxy.simulate.simulation import Result, simulate

Told = Callable[[str, Result], object]
"""Is told of every simulation: what it was, what came of it."""

PREFILL_POLICIES: tuple[str, ...] = get_args(RoutingPolicy)
DECODE_POLICIES: tuple[str, ...] = get_args(DecodePolicy)
TOLERANCE = 0.05
"""A knee is found to this share of its rate."""
UNLOADED = 0.1
"""Of what the fleet can do: where nobody waits for anybody."""
WORSE = 2.0
"""Without a target, the knee is where latencies are so many times those of the unloaded fleet."""
MAX_STEPS = 64
"""Of a search for a size."""
STEP_SHARE = 0.06
"""Of one side's instances that a step of that search adds or takes away; one at least."""


def _nobody(_: str, __: Result) -> None:
    """Is told."""


# ── policies ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Pair:
    """The policies of both roles."""

    prefill: str
    decode: str

    def __str__(self) -> str:
        return self.prefill if self.prefill == self.decode else f"{self.prefill}/{self.decode}"


def read_pairs(text: str) -> list[Pair]:
    """``round_robin,power_of_two/least_slots``: one name for both roles, or one for each; ``all`` is every name that
    suits both. Raises `SimulationError`."""
    if text.strip() == "all":
        return [Pair(name, name) for name in PREFILL_POLICIES if name in DECODE_POLICIES]
    pairs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        prefill, _, decode = part.partition("/")
        pair = Pair(prefill, decode or prefill)
        if pair.prefill not in PREFILL_POLICIES or pair.decode not in DECODE_POLICIES:
            raise SimulationError(
                f"policies: {part!r} is none; there are {', '.join(PREFILL_POLICIES)}, all but least_queued_tokens "
                "for decoders as well: NAME, or PREFILL/DECODE"
            )
        pairs.append(pair)
    if not pairs:
        raise SimulationError("policies: none is named")
    return pairs


def compare(plan: Plan, pairs: Sequence[Pair], tell: Told = _nobody) -> list[tuple[Pair, Result]]:
    """The same traffic under each of them."""
    found = []
    for pair in pairs:
        chosen = {"prefill_policy": pair.prefill, "decode_policy": pair.decode}
        result = simulate(replace(plan, settings=plan.settings.model_copy(update=chosen)))
        tell(str(pair), result)
        found.append((pair, result))
    return found


# ── the knee ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Knee:
    """`rate` is the highest that was seen to meet `slo`; None where none did. `results` by rate."""

    slo: Slo
    rate: float | None
    results: list[Result]


def find_knee(plan: Plan, tell: Told = _nobody) -> Knee:
    """Rates are doubled until the target is missed, and bisected from there. Without a target, one is taken from the
    unloaded fleet."""
    lowest = rate_for(UNLOADED, plan.prefillers, plan.decoders, plan.speed, plan.traffic)
    results: list[Result] = []

    def is_met(rate: float, slo: Slo) -> bool:
        result = simulate(_at(plan, rate, slo))
        tell(f"{rate:.4g}/s", result)
        results.append(result)
        return not result.figures.broken()

    slo = plan.slo
    if not slo.objectives:
        unloaded = simulate(_at(plan, lowest, Slo()))
        tell(f"{lowest:.4g}/s", unloaded)
        slo = _slo_from(unloaded)
    search = Search(4 * lowest, precision=TOLERANCE)
    while (rate := search.next_rate()) is not None:
        search.found(rate, is_met=is_met(rate, slo))
    return Knee(slo, search.best, sorted(results, key=lambda result: result.plan.traffic.rate))


def _at(plan: Plan, rate: float, slo: Slo) -> Plan:
    return replace(plan, traffic=replace(plan.traffic, rate=rate), slo=slo)


def _slo_from(unloaded: Result) -> Slo:
    objectives = []
    for metric in ("ttft", "tpot"):
        value = unloaded.figures.latencies[metric].percentile(95.0)
        if value is not None and 0.0 < value < math.inf:
            objectives.append(Objective(metric, 95.0, float(f"{WORSE * value:.3g}")))
    return Slo(tuple(objectives))


# ── the size ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Size:
    """The fewest instances that were seen to meet the target; `result` is None where none were."""

    result: Result | None
    tried: list[Result]


def find_size(plan: Plan, tell: Told = _nobody) -> Size:
    """For the plan's traffic and target. From as many as could just do the work, whichever side the broken objective is
    owed to grows; what is met in the end is made smaller again, one side after the other, as long as it is met.

    Raises `SimulationError` without a target.
    """
    if not plan.slo.objectives:
        raise SimulationError("slo: needed, to know what is enough")
    rate, tried = plan.traffic.rate, dict[tuple[int, int], Result]()

    def run(size: tuple[int, int]) -> Result:
        if size not in tried:
            tried[size] = result = simulate(replace(plan, prefillers=size[0], decoders=size[1]))
            tell(result.plan.name, result)
        return tried[size]

    size = (
        math.ceil(rate / prefill_capacity(plan.speed, plan.traffic)),
        math.ceil(rate / decode_capacity(plan.speed, plan.traffic)),
    )
    for _ in range(MAX_STEPS):
        result = run(size)
        if not result.figures.broken():
            break
        size = _grown(size, _short_side(result))
    else:
        return Size(None, list(tried.values()))
    for smaller in _ways_down():
        while (tried_size := smaller(size)) != size and not run(tried_size).figures.broken():
            size = tried_size
    return Size(run(size), list(tried.values()))


def _short_side(result: Result) -> int:
    """0 prefillers, 1 decoders: what the first broken objective is owed to."""
    metric = result.figures.broken()[0].metric
    phases = result.figures.phases
    if metric == "tpot":
        return 1
    means = {name: phases[name].mean_s or 0.0 for name in phases}
    waits = means["slot_wait"] + means["kv_wait"] + means["first_byte"]
    if metric == "ttft" and means["prefill"] > 0.0:
        return int(waits > means["prefill"])
    use = result.use
    return int((use["decoders_busy"]["mean"] or 0.0) * _fullness(result) > (use["prefillers_busy"]["mean"] or 0.0))


def _fullness(result: Result) -> float:
    return float(result.use["mean_batch"]) / result.plan.speed.max_batch


def _grown(size: tuple[int, int], side: int) -> tuple[int, int]:
    by = _step(size[side])
    return (size[0] + by, size[1]) if side == 0 else (size[0], size[1] + by)


def _ways_down() -> Iterator[Callable[[tuple[int, int]], tuple[int, int]]]:
    yield lambda now: (max(1, now[0] - _step(now[0])), now[1])
    yield lambda now: (now[0], max(1, now[1] - _step(now[1])))
    yield lambda now: (max(1, now[0] - 1), now[1])
    yield lambda now: (now[0], max(1, now[1] - 1))


def _step(num: int) -> int:
    return max(1, int(num * STEP_SHARE))
