"""The module starts a fleet of its own to test: engines and the proxy, as processes of this machine to which faults
can be done.

With built-in engines, ``2:1`` means two prefillers and one decoder; ``0:2`` means two engines that do both halves,
behind the same proxy. So one can measure what disaggregation gives and costs with all else alike. Any other fleet is
described by a file, as for ``pdproxy up``.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from rich.console import Console

from pdproxy.config.options import EngineArgs, ProxyArgs, WorkDir, option
from pdproxy.launch.canaries import until_served
from pdproxy.launch.file_plan import plan_file
from pdproxy.launch.fleet import check, check_file, make_model, write_files
from pdproxy.launch.fleet_plan import FleetPlan
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import WORK_DIR, FleetOptions, RunOptions
from pdproxy.launch.ports import HOST, free_range
from pdproxy.launch.process import Program
from pdproxy.launch.process_group import ProcessGroup
from pdproxy.launch.supervisor import Supervisor
from pdproxy.loadtest.errors import LoadTestError

TESTED = "What is tested"
FLEET = (
    "Fleet to start and test here: PREFILLERS:DECODERS of the built-in engine and the proxy, 0:2 for two engines that "
    "do both halves, or a file as for pdproxy up"
)
NICER = ("nice", "-n", "5")
"""The words before a program's command which make it nicer than the generator. So the generator runs in time even where
engines take all cores; it needs little."""
CANARIES_S = 60.0
NEVER_APART = ("--min-prompt-tokens", str(1 << 40))
"""The options which send all prompts to a decoder alone, because no prompt is as long as that. (The proxy wants a
prefiller before it is ready; it has one, which idles, unless an answer is to have one token only.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """ClusterOptions are the local cluster's options of ``pdproxy loadtest run``."""

    what: Annotated[str, option("FLEET", FLEET, "--cluster", "--house")] = ""
    cluster_model: Annotated[
        Path | None,
        option("FOLDER", "Model folder of --cluster [default: a tiny model]", "--cluster-model", "--house-model"),
    ] = None
    work_dir: WorkDir = WORK_DIR
    engine_args: EngineArgs = ()
    proxy_args: ProxyArgs = ()

    @property
    def counts(self) -> tuple[int, int] | None:
        """Returns the numbers of prefillers and decoders, or None for a file. Raises `LoadTestError` where it is
        neither."""
        found = re.fullmatch(r"(\d+):([1-9]\d*)", self.what)
        if found is not None:
            return int(found[1]), int(found[2])
        if Path(self.what).is_file():
            return None
        raise LoadTestError(
            f"--cluster {self.what}: give PREFILLERS:DECODERS, as 1:1, or 0:2 for two that do both halves; or a file "
            "as for pdproxy up"
        )


def plan_cluster(options: ClusterOptions, seed: int) -> FleetPlan:
    """Returns the fleet's plan, on ports that are free just now, unless a file says which. Raises `LaunchError` and
    `LoadTestError`."""
    counts = options.counts
    if counts is None:
        path, run = Path(options.what), RunOptions(work_dir=options.work_dir)
        return check_file(plan_file(path, run, Machine.here(), proxy_args=options.proxy_args), path)
    num_prefillers, num_decoders = max(1, counts[0]), counts[1]
    is_aggregated = counts[0] == 0
    base = free_range(num_prefillers + 2 * num_decoders + 2, random.Random(f"{seed} ports")).start
    return check(
        FleetOptions(
            num_prefillers=num_prefillers,
            num_decoders=num_decoders,
            model=options.cluster_model,
            work_dir=options.work_dir,
            host=HOST,
            port=base,
            notify_port=base + 1,
            prefill_port=base + 2,
            decode_port=base + 2 + num_prefillers,
            receiver_port=base + 2 + num_prefillers + num_decoders,
            engine_args=options.engine_args,
            proxy_args=(*(NEVER_APART if is_aggregated else ()), *options.proxy_args),
        )
    )


class LocalCluster(ProcessGroup):
    """LocalCluster runs engines and a proxy as processes. It implements `FaultTargets`."""

    def __init__(self, supervisor: Supervisor, plan: FleetPlan) -> None:
        super().__init__(supervisor)
        self.plan = plan

    @property
    def names(self) -> list[str]:
        """Returns the names of the engines."""
        return [engine.seat.name for engine in self.plan.engines]

    @property
    def url(self) -> str:
        return self.plan.url

    async def open(self, console: Console) -> None:
        """Starts everything, and returns when a request has gone through each engine. Raises `LaunchError`."""
        plan = self.plan
        await make_model(self._supervisor, plan, console)
        write_files(plan.folder, plan.files)
        self.spawn(*(_nicer(engine.program) for engine in plan.engines))
        self.spawn(_nicer(plan.proxy))
        await self._supervisor.until_ready(plan.timeout_s)
        await self._supervisor.while_all_live(until_served(plan.url, plan.instances, CANARIES_S))

    def start(self, name: str) -> None:
        self.spawn(_nicer(next(engine.program for engine in self.plan.engines if engine.seat.name == name)))


def _nicer(program: Program) -> Program:
    return replace(program, command=(*NICER, *program.command))
