"""The module answers questions that take several simulations: what does one policy cost against another, where is the
knee, how many instances does a target need. Each is asked of the same seeded traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from pdproxy.config.settings import Settings
from pdproxy.config.values import DecodePolicy, RoutingPolicy
from pdproxy.loadtest.slo import Objective, Slo
from pdproxy.loadtest.sweep import Search
from pdproxy.simulate.errors import SimulationError
from pdproxy.simulate.plan import Plan, decode_capacity, prefill_capacity, rate_for
from pdproxy.simulate.simulation import Result, simulate

Told = Callable[[str, Result], object]
"""A function that is told of every simulation: a label for it, and its result."""

UNSIMULATED = frozenset({"cache_aware"})
"""The policies that go by KV events, which simulated engines do not publish."""
PREFILL_POLICIES: tuple[str, ...] = tuple(name for name in get_args(RoutingPolicy) if name not in UNSIMULATED)
DECODE_POLICIES: tuple[str, ...] = tuple(name for name in get_args(DecodePolicy) if name not in UNSIMULATED)
TOLERANCE = 0.05
"""The share of a knee's rate to which the search finds it."""
UNLOADED = 0.1
"""The share of what the fleet can do at which no request waits for another."""
WORSE = 2.0
"""The factor above the latencies of the unloaded fleet at which, without a target, the knee is."""
MAX_STEPS = 64
"""The most steps of a search for a size."""
STEP_SHARE = 0.06
"""The share of one side's instances that a step of the search for a size adds or takes away; a step is one instance at
least."""


def _nobody(_: str, __: Result) -> None:
    """Does nothing: it stands for a `tell` that was not passed."""


# ── policies ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Pair:
    """Pair is the policies of both roles."""

    prefill: str
    decode: str

    def __str__(self) -> str:
        return self.prefill if self.prefill == self.decode else f"{self.prefill}/{self.decode}"


def read_pairs(text: str) -> list[Pair]:
    """Returns the pairs of a text like ``round_robin,power_of_two/least_slots``: one name for both roles, or one for
    each; ``all`` is every name that suits both. Raises `SimulationError`."""
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
    """Returns the result of the same traffic under each pair."""
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
    """Knee is what a search for the highest rate found. `rate` is the highest that was seen to meet `slo`; None where
    none did. `results` are in the order of their rates.

    `unloaded` is the result by which a target was made because none was given; None where one was. `is_bound` tells
    that no rate missed the target, so that the knee lies above `rate`.
    """

    slo: Slo
    rate: float | None
    results: list[Result]
    unloaded: Result | None = None
    is_bound: bool = False

    @property
    def target(self) -> str:
        """Returns the target in words: where it comes from, if nobody gave it."""
        if self.unloaded is None:
            return str(self.slo)
        at = f"{self.unloaded.plan.traffic.rate:.3g} requests/s, {UNLOADED:.0%} of what it can do at most"
        return f"{self.slo} (no --slo was given: {WORSE:g} times the p95 of the unloaded fleet, at {at})"


def find_knee(plan: Plan, tell: Told = _nobody) -> Knee:
    """Returns the knee. Rates are doubled until the target is missed, and bisected from there. Without a target, one is
    made from the unloaded fleet's latencies. Raises `SimulationError` where these are not known."""
    lowest = rate_for(UNLOADED, plan.prefillers, plan.decoders, plan.speed, plan.traffic)
    results: list[Result] = []

    def is_met(rate: float, slo: Slo) -> bool:
        result = simulate(_at(plan, rate, slo))
        tell(f"{rate:.4g}/s", result)
        results.append(result)
        return not result.figures.broken()

    slo, unloaded = plan.slo, None
    if not slo.objectives:
        unloaded = simulate(_at(plan, lowest, Slo()))
        tell(f"{lowest:.4g}/s", unloaded)
        slo = _slo_from(unloaded)
    search = Search(4 * lowest, precision=TOLERANCE)
    while (rate := search.next_rate()) is not None:
        search.found(rate, is_met=is_met(rate, slo))
    by_rate = sorted(results, key=lambda result: result.plan.traffic.rate)
    return Knee(slo, search.best, by_rate, unloaded, is_bound=search.broken is None)


def _at(plan: Plan, rate: float, slo: Slo) -> Plan:
    return replace(plan, traffic=replace(plan.traffic, rate=rate), slo=slo)


def _slo_from(unloaded: Result) -> Slo:
    objectives = []
    for metric in ("ttft", "tpot"):
        value = unloaded.figures.latencies[metric].percentile(95.0)
        if value is not None and 0.0 < value < math.inf:
            objectives.append(Objective(metric, 95.0, float(f"{WORSE * value:.3g}")))
    if not objectives:
        raise SimulationError("slo: needed, because the unloaded fleet answered nothing by which to choose one")
    return Slo(tuple(objectives))


# ── the size ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Size:
    """Size is the fewest instances that were seen to meet the target; `result` is None where none were."""

    result: Result | None
    tried: list[Result]


def find_size(plan: Plan, tell: Told = _nobody) -> Size:
    """Returns the size for the plan's traffic and target. The search starts with as many instances as could just do the
    work. While an objective is broken, the side that breaks it grows. When the target is met, each side is made smaller
    again, one after the other, as long as the target stays met.

    Neither side is made smaller than could just do the work: with few requests its line has no time to grow. Only where
    prompts share something, which saves prefillers work, or clients wait for answers, is nothing known beforehand.

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
    is_closed, is_shared = plan.traffic.clients > 0, plan.traffic.num_groups > 0
    least = (1 if is_closed or is_shared else size[0], 1 if is_closed else size[1])
    for _ in range(MAX_STEPS):
        result = run(size)
        if not result.figures.broken():
            break
        size = _grown(size, _short_side(result))
    else:
        return Size(None, list(tried.values()))
    for smaller in _ways_down(least):
        while (tried_size := smaller(size)) != size and not run(tried_size).figures.broken():
            size = tried_size
    return Size(run(size), list(tried.values()))


def _short_side(result: Result) -> int:
    """Returns the side that breaks the first broken objective: 0 for prefillers, 1 for decoders."""
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


def _ways_down(least: tuple[int, int]) -> Iterator[Callable[[tuple[int, int]], tuple[int, int]]]:
    yield lambda now: (max(least[0], now[0] - _step(now[0])), now[1])
    yield lambda now: (now[0], max(least[1], now[1] - _step(now[1])))
    yield lambda now: (max(least[0], now[0] - 1), now[1])
    yield lambda now: (now[0], max(least[1], now[1] - 1))


def _step(num: int) -> int:
    return max(1, int(num * STEP_SHARE))


# ── roles ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def compare_roles(plan: Plan, tell: Told = _nobody) -> list[tuple[str, Result]]:
    """Returns the results of the same traffic under every split of the plan's instances that stays as it is, and last
    under the role controller, which begins with the plan's own split. Raises `SimulationError`."""
    if plan.proxies > 1 or plan.faults:
        raise SimulationError("roles: they change behind one proxy, and nothing happens to anybody meanwhile")
    total, found = plan.prefillers + plan.decoders, []
    for prefillers in range(1, total):
        result = simulate(replace(plan, prefillers=prefillers, decoders=total - prefillers, settings=_led(plan, False)))
        tell("fixed", result)
        found.append((result.plan.name, result))
    result = simulate(replace(plan, settings=_led(plan, True)))
    tell("controller", result)
    return [*found, (f"controller, from {plan.name}", result)]


def _led(plan: Plan, is_led: bool) -> Settings:
    return plan.settings.model_copy(update={"role_controller": is_led})
