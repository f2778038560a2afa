"""The module makes one run: it goes scenario by scenario, starts all targets anew, and in each round takes every one of
them in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdproxy.launch.logs import FileLog
from pdproxy.launch.supervisor import Supervisor
from scripts.dev.bench_proxy.cores import Cores, on
from scripts.dev.bench_proxy.native import build, copies, copy_of
from scripts.dev.bench_proxy.plan import BESIDE_TOKENS, Scenario
from scripts.dev.bench_proxy.samples import Round, is_disturbed, least_disturbed
from scripts.dev.bench_proxy.stage import Stage
from scripts.dev.bench_proxy.targets import DIRECT, EARLIER, INTERPRETED, OTHER_PYTHON, OURS, WORKERS, Peer, floor_of
from scripts.dev.bench_proxy.texts import Texts, make_texts
from scripts.dev.common.errors import BenchError

GRACE_S = 5.0

Tell = Callable[[str], None]


@dataclass(slots=True)
class Measured:
    """Measured is one scenario; it grows while it is measured."""

    scenario: Scenario
    targets: list[str]
    rounds: list[Round] = field(default_factory=list)
    """Holds the rounds that count, each with a sample of every target."""
    disturbed: list[Round] = field(default_factory=list)
    """Holds the rounds that were thrown away."""
    failures: dict[str, str] = field(default_factory=dict)
    """Holds the targets that cannot be measured in this scenario, and why."""
    is_noisy: bool = False
    """True where there were not enough undisturbed rounds: some of `rounds` are the least disturbed of the others."""


async def measure(
    scenarios: Sequence[Scenario],
    peers: Sequence[Peer],
    *,
    rounds: int,
    spare_rounds: int,
    has_ids: bool,
    is_compiled: bool,
    has_interpreted: bool,
    earlier: Path | None,
    python: str | None,
    num_workers: int,
    logs: Path,
    work: Path,
    found: list[Measured],
    tell: Tell,
) -> None:
    """Measures the scenarios, and fills in `found`. Raises `BenchError`, and `LaunchError` when stopped from
    outside."""
    programs = {name: build(name) for name in ("engine", "client", "floor")}
    packages = _packages(work, tell, is_compiled=is_compiled, has_interpreted=has_interpreted)
    if earlier is not None:
        tell(f"pdproxy of {earlier} is {'compiled' if is_compiled else 'copied'}")
        packages = {**packages, EARLIER: copy_of(earlier, work, is_compiled=is_compiled)}
    if python is not None:
        packages = {**packages, OTHER_PYTHON: packages[OURS]}
    if num_workers > 1:
        packages = {**packages, WORKERS: packages[OURS]}
    cores = Cores.here()
    texts = _texts(scenarios, work, tell)
    for scenario in scenarios:
        floor = [floor_of(programs["floor"])] if _bare(scenario) else []
        others = [] if scenario.is_ours_alone else [*floor, *peers]
        ours = {OURS: packages[OURS]} if scenario.is_ours_alone else packages
        measured = Measured(scenario, [*_bare(scenario), *ours, *(peer.name for peer in others)])
        found.append(measured)
        tell(f"{scenario.name}: {scenario.what}")
        with on(cores.helpers), FileLog(logs / scenario.name, ()) as log:
            async with Supervisor(log, grace_s=GRACE_S) as supervisor:
                stage = Stage(
                    supervisor, scenario, cores, programs, ours, texts, num_workers=num_workers, python=python
                )
                await stage.set(others, has_ids=has_ids)
                for target, why in stage.failures.items():
                    _drop(measured, target, why, tell)
                num_spare = 0 if scenario.num_rounds else spare_rounds
                await take_rounds(stage, measured, scenario.num_rounds or rounds, num_spare, tell)


def _packages(work: Path, tell: Tell, *, is_compiled: bool, has_interpreted: bool) -> Mapping[str, Path]:
    """Returns the folders with pdproxy, by target."""
    if is_compiled:
        tell("pdproxy is compiled, unless that was done with the same sources before")
    made = copies(work, is_compiled=is_compiled)
    ours = {OURS: made.compiled or made.interpreted}
    return ours | ({INTERPRETED: made.interpreted} if has_interpreted else {})


def _texts(scenarios: Sequence[Scenario], work: Path, tell: Tell) -> Texts | None:
    """Returns the texts, or None where no scenario needs them."""
    if not any(scenario.is_counted or scenario.num_beside for scenario in scenarios):
        return None
    tell("training a tokenizer")
    return make_texts(work, BESIDE_TOKENS)


async def take_rounds(stage: Stage, measured: Measured, rounds: int, spare_rounds: int, tell: Tell) -> None:
    """Takes rounds until `rounds` of them are undisturbed. `spare_rounds` are there for those that are thrown away;
    after that, the least disturbed ones have to do."""
    for number in range(rounds + spare_rounds):
        taken = await _one_round(stage, measured, number, tell)
        (measured.disturbed if is_disturbed(taken.values()) else measured.rounds).append(taken)
        tell(f"{stage.scenario.name}: {len(measured.rounds)} of {rounds} rounds, {len(measured.disturbed)} disturbed")
        if len(measured.rounds) == rounds:
            return
    measured.is_noisy = True
    measured.rounds += least_disturbed(measured.disturbed, rounds - len(measured.rounds))


async def _one_round(stage: Stage, measured: Measured, number: int, tell: Tell) -> Round:
    taken = {}
    for target in in_turn(measured.targets, number):
        try:
            taken[target] = sample = await stage.take(target)
            tell(f"{stage.scenario.name}: {target}: {sample}")
        except BenchError as error:
            _drop(measured, target, str(error), tell)
    return {target: sample for target, sample in taken.items() if target in measured.targets}


def _bare(scenario: Scenario) -> list[str]:
    """Returns the bare engines as a target; it is empty where requests wait in the proxy, because there is nothing to
    compare it with, and where pdproxy is measured alone."""
    return [DIRECT] if scenario.slots is None and not scenario.is_ours_alone else []


def in_turn(targets: Sequence[str], number: int) -> list[str]:
    """Returns the targets in turn: each round begins with another one, so that no target always comes after the same
    one."""
    start = number % max(1, len(targets))
    return [*targets[start:], *targets[:start]]


def _drop(measured: Measured, target: str, why: str, tell: Tell) -> None:
    measured.failures[target] = why
    measured.targets.remove(target)
    tell(f"{measured.scenario.name}: without {target}: {why}")
