"""The module conducts a whole load test: it starts a cluster where one is wanted, makes one run or a sweep of them, and
writes down what was measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from pdproxy.launch.logs import FileLog
from pdproxy.launch.supervisor import Supervisor
from pdproxy.loadtest.bar import Bar
from pdproxy.loadtest.driver import run
from pdproxy.loadtest.errors import LoadTestError
from pdproxy.loadtest.fault_schedule import Fault
from pdproxy.loadtest.faults import check_faults, inflict
from pdproxy.loadtest.local_cluster import ClusterOptions, LocalCluster, plan_cluster
from pdproxy.loadtest.record import Run
from pdproxy.loadtest.report.files import write_all
from pdproxy.loadtest.report.sides import SUFFIX, Side
from pdproxy.loadtest.report.words import late_words, milliseconds
from pdproxy.loadtest.report.words import rate as per_s
from pdproxy.loadtest.slo import Slo
from pdproxy.loadtest.stopping import Stop, Stopped, stoppable, unless_stopped
from pdproxy.loadtest.sweep import Search, Step, check_target, sweep
from pdproxy.loadtest.target import Target, first_model
from pdproxy.loadtest.workload import Open, Workload

GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan holds everything that was asked for."""

    workload: Workload
    target: Callable[..., Target]
    """Makes the target from its `url` and `model`."""
    url: str | None
    """Holds the address of the target; None means the cluster's address."""
    model: str | None
    """Holds the model's name as the target calls it; None means the first model which the target has."""
    api_key: str | None
    slo: Slo
    slo_words: str
    search: Search | None
    """Holds the search for the highest rate; if it is not None, the test makes runs at many rates instead of one."""
    cluster: ClusterOptions | None
    faults: tuple[Fault, ...]
    label: str
    folder: Path
    """Holds the folder in which everything is written."""
    late_limit_s: float


@dataclass(slots=True)
class Outcome:
    """Outcome holds what came of a test.

    Mutable state: the runs so far, so that there is something to tell however the test ends; the `signum` that stopped
    it; whether the sweep came to its end without a rate that met the target.
    """

    side: Side
    signum: int | None = None
    has_met_none: bool = False


async def conduct(plan: Plan, outcome: Outcome, console: Console) -> None:
    """Runs the test and fills `outcome`. Raises `LoadTestError`, `LaunchError`, or a group with them in it. What can be
    known to be wrong is raised before anything starts."""
    _check_folder(plan.folder)
    if plan.search is not None:
        check_target(plan.slo)
    if any(plan.folder.glob(f"*{SUFFIX}")):
        raise LoadTestError(f"{plan.folder} has runs in it already, and these would be taken for one of them")
    if plan.cluster is None:
        if plan.faults:
            raise LoadTestError("faults can only be done to a cluster of this command's own: give --cluster")
        assert plan.url is not None
        with stoppable() as stop:
            await _ask(plan, plan.url, None, outcome, stop, console)
        return
    fleet = plan_cluster(plan.cluster, plan.workload.seed)
    with FileLog(plan.folder / "logs", fleet.names) as log:
        async with Supervisor(log, grace_s=GRACE_S) as supervisor:
            cluster = LocalCluster(supervisor, fleet)
            check_faults(plan.faults, cluster.names)
            with console.status(f"starting {fleet.what}"):
                await cluster.open(console)
            with stoppable(afterwards=lambda signum: supervisor.kill()) as stop:
                await _ask(plan, cluster.url, cluster, outcome, stop, console)
            for words in cluster.crashed.values():
                console.print(words, style="red", markup=False, highlight=False)


def _check_folder(folder: Path) -> None:
    """Raises `LoadTestError` if nothing can be written into the folder: what is measured would be lost."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise LoadTestError(f"--out {folder}: nothing can be written into {there}")


async def _ask(
    plan: Plan, url: str, cluster: LocalCluster | None, outcome: Outcome, stop: Stop, console: Console
) -> None:
    try:
        model = plan.model
        if model is None:
            model = await unless_stopped(first_model(url, api_key=plan.api_key), stop.event)
        target = plan.target(url=url, model=model)
        measure = _Measure(plan, target, cluster, outcome, stop, console)
        if plan.search is None:
            await measure(plan.workload)
        else:
            steps = await sweep(plan.search, plan.workload, plan.slo, measure, measure.tell_step)
            outcome.has_met_none = not any(step.is_met for step in steps)
            _tell_end(steps, plan, console)
    except Stopped:
        console.print("stopped before anything was asked")
    finally:
        outcome.signum = stop.signum


class _Measure:
    """_Measure makes one run after another, and writes all of them down after each. So nothing is lost of a sweep that
    is broken off."""

    def __init__(
        self, plan: Plan, target: Target, cluster: LocalCluster | None, outcome: Outcome, stop: Stop, console: Console
    ) -> None:
        self._plan = plan
        self._target = target
        self._cluster = cluster
        self._outcome = outcome
        self._stop = stop
        self._console = console

    async def __call__(self, workload: Workload) -> Run:
        plan = self._plan
        with Bar(self._console, _name(workload, plan.label)) as bar:
            found = await run(
                workload,
                self._target,
                stop=self._stop.event,
                progress=bar.tell,
                alongside=inflict(plan.faults, self._cluster) if self._cluster is not None and plan.faults else None,
                settings={
                    "label": plan.label,
                    "slo": plan.slo_words,
                    "house": None if plan.cluster is None else plan.cluster.what,
                    "faults": "; ".join(map(str, plan.faults)),
                },
                late_limit_s=plan.late_limit_s,
            )
        self._outcome.side = add_run(self._outcome.side, found)
        write_all(plan.folder, self._outcome.side, plan.slo, is_sweep=plan.search is not None)
        if plan.search is not None and not found.health.is_trusted:
            self._tell_late(found)
        return found

    def _tell_late(self, run: Run) -> None:
        sends, reads = milliseconds(run.health.late_p99_s), milliseconds(run.health.lag_p99_s)
        words = f"{per_s(_rate(run))} requests/s: the generator was late: p99 of its sends {sends} ms, reads {reads} ms"
        self._console.print(words, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def tell_step(self, step: Step) -> None:
        found = "; ".join(
            f"{one.objective}: {'met' if one.is_met else 'missed' if one.is_judged else 'not judged'}"
            + ("" if one.value is None else f" with {one.value:.4g}")
            for one in self._plan.slo.judge(step.run.measured, step.run.health)
        )
        late = "" if step.is_known else f"; {late_words(step.run.health)}, every time"
        words = f"{per_s(step.rate)} requests/s: {found}{late}"
        self._console.print(words, highlight=False, markup=False, soft_wrap=True)


def add_run(side: Side, run: Run) -> Side:
    """Returns the side with the run added, in the order of the rates. The run replaces an earlier run of the same rate,
    unless the new one was stopped before its end."""
    others = [one for one in side.runs if _rate(one) != _rate(run)]
    if run.head.is_interrupted and len(others) < len(side.runs):
        return side
    return replace(side, runs=tuple(sorted((*others, run), key=_rate)))


def _rate(run: Run) -> float:
    found = run.head.settings.get("rate")
    return float(found) if isinstance(found, int | float) else 0.0


def _name(workload: Workload, label: str) -> str:
    return f"{label} at {per_s(workload.pace.pace.rate)}/s" if isinstance(workload.pace, Open) else label


def _tell_end(steps: list[Step], plan: Plan, console: Console) -> None:
    """Says why the sweep found no higher rate, where the service is not the reason."""
    assert plan.search is not None
    if any(step.rate == plan.search.broken and not step.is_known for step in steps):
        words = f"{per_s(plan.search.broken)} requests/s was not judged, so that what was found is a lower bound"
        console.print(words, style="yellow", highlight=False)
    if steps and not any(step.is_met for step in steps):
        words = f"no rate met the target, down to {per_s(min(step.rate for step in steps))} requests/s"
        console.print(words, style="yellow", highlight=False)
    elif plan.search.broken is None and steps:
        console.print(f"the target was met at every rate up to {per_s(steps[-1].rate)}", highlight=False)
