"""The module is the soak of several replicas: learn the answers, warm up, storm, heal, look, ask everything once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rich.console import Console

from pdproxy.launch.supervisor import Supervisor
from pdproxy.launch.tiny_model import make_tiny_model
from pdproxy.loadtest.stopping import beside
from scripts.dev.soak.clients import Clients
from scripts.dev.soak.faults import Faults
from scripts.dev.soak.leak_check import LeakCheck, until_clear
from scripts.dev.soak.outages import Excuses, Outages
from scripts.dev.soak.plan import make_plan, measure_page
from scripts.dev.soak.questions import learn, make_questions
from scripts.dev.soak.replica_cluster import ReplicaCluster
from scripts.dev.soak.replica_faults import ReplicaFaults
from scripts.dev.soak.replica_plan import (
    REFUSAL_LIMIT_S,
    REPLICA_CLIENT_TIMEOUT_S,
    TERM_S,
    FleetPlan,
    make_fleet_plan,
)
from scripts.dev.soak.run import (
    MAX_WARM_UP_S,
    SETTLE_TIMEOUT_S,
    TICK_S,
    WARM_UP_SHARE,
    Findings,
    ReplicaFindings,
    watch_lag,
)
from scripts.dev.soak.witness import Pace, Witness

ENGINE_PAUSE_S = 30.0
"""The most seconds between two faults of one role's engines: most of the time all engines are well, so that an error
speaks against the replicas."""
AGREE_TIMEOUT_S = 4 * TERM_S
LOOK_INTERVAL_S = 0.5
ALARMS = ("Traceback (most recent call last)", "IntegrityError", "ended with a bug")
"""The words that no log of a replica has in it where there is no bug."""


async def soak_replicas(
    supervisor: Supervisor,
    findings: Findings,
    work_dir: Path,
    logs: Path,
    console: Console,
) -> None:
    """Runs the soak; `findings` are filled in as they come. Raises `LaunchError` where something cannot even be
    started."""
    options, found = findings.options, findings.replicas
    assert found is not None
    model = options.model or await make_tiny_model(supervisor, work_dir / "tiny-model", console)
    engines = make_plan(
        model,
        num_prefillers=options.num_prefillers,
        num_decoders=options.num_decoders,
        seed=options.seed,
        page_bytes=measure_page(model),
    )
    plan = make_fleet_plan(
        engines, num_replicas=found.num_replicas, store=found.store, seed=options.seed, work_dir=work_dir
    )
    cluster = ReplicaCluster(supervisor, plan)
    findings.crashes = cluster.crashes
    console.print("starting the engines")
    await cluster.start_engines()
    dice = random.Random(f"{options.seed} questions")
    questions = [question async for question in learn(engines.engines[-1].url, make_questions(dice))]
    console.print(f"{len(questions)} questions, their answers learnt; starting {found.store} and the replicas")
    async with cluster.relaying():
        await cluster.start_fleet()
        ill, pace = Outages(), Pace(engines)
        crowds = [
            Clients(
                one.url,
                questions,
                max(1, options.num_clients // found.num_replicas),
                options.seed + number,
                findings.counters,
                cluster.lost[one.name],
                excuses=Excuses(cluster.unwell[one.name], ill),
                slow=Excuses(*pace.outages),
                limit_s=REPLICA_CLIENT_TIMEOUT_S,
                refusal_limit_s=REFUSAL_LIMIT_S,
            )
            for number, one in enumerate(plan.replicas)
        ]
        # A replica that is killed is no excuse for those who wait for pages: others lead on, and know what is held.
        findings.witness = Witness(engines, Outages())
        async with AsyncExitStack() as stack:
            for one in crowds:
                await stack.enter_async_context(beside(one.run()))
            async with beside(findings.witness.run(), watch_lag(findings)):
                await _run_phases(findings, found, cluster, crowds, ill, pace, console)
        found.left_behind = await cluster.end_fleet()
        found.alarms = _alarms(plan, logs)


async def _run_phases(
    findings: Findings,
    found: ReplicaFindings,
    cluster: ReplicaCluster,
    crowds: list[Clients],
    ill: Outages,
    pace: Pace,
    console: Console,
) -> None:
    duration_s = findings.options.duration_s
    warm_up_s = min(duration_s * WARM_UP_SHARE, MAX_WARM_UP_S)
    console.print(f"warming up for {warm_up_s:.0f} s")
    async with _admitted(crowds, pace):
        await asyncio.sleep(warm_up_s)
    console.print(f"storming for {duration_s - warm_up_s:.0f} s")
    seed = findings.options.seed
    findings.faults = Faults(cluster, seed, max_pause_s=ENGINE_PAUSE_S, unwell=ill)
    found.faults = faults = ReplicaFaults(cluster, seed)
    for one in crowds:
        one.is_unruly = True
    async with _admitted(crowds, pace):
        async with beside(findings.faults.run(), faults.run(), faults.watch_leader(), _note_crashes(cluster)):
            await asyncio.sleep(duration_s - warm_up_s)
        for one in crowds:
            one.is_unruly = False
        console.print("healing and settling")
        faults.note("healing")
        await cluster.heal()
        ill.end()
    found.disagreements = await _until_agreed(cluster)
    findings.leaks = await _until_clear(cluster)
    findings.num_unserved = sum([await one.everything_once() for one in crowds])
    for one in crowds:
        await one.send_home()
    findings.leaks = await _until_clear(cluster)
    found.disagreements += await cluster.disagreements()
    cluster.note_crashes()
    findings.num_overslept = cluster.num_overslept


@asynccontextmanager
async def _admitted(crowds: list[Clients], pace: Pace) -> AsyncIterator[None]:
    """Lets all clients ask while the block lasts, and watches the engines' pace; at its end waits until each client has
    its answer."""
    async with beside(pace.run()):
        for one in crowds:
            one.admit()
        yield
        await asyncio.gather(*(one.send_home() for one in crowds))


async def _note_crashes(cluster: ReplicaCluster) -> None:
    """Notes crashes until it is cancelled."""
    while True:
        await asyncio.sleep(TICK_S)
        cluster.note_crashes()


async def _until_agreed(cluster: ReplicaCluster) -> list[str]:
    """Returns in what replicas do not agree, as soon as they do, or at the end of `AGREE_TIMEOUT_S`."""
    deadline = time.monotonic() + AGREE_TIMEOUT_S
    # HTTP offers nothing to wait on, so it is asked again.
    while (wrong := await cluster.disagreements()) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_INTERVAL_S)
    return wrong


async def _until_clear(cluster: ReplicaCluster) -> LeakCheck:
    return await until_clear(cluster.fleet.seen_by(cluster.fleet.replicas[0]), SETTLE_TIMEOUT_S)


def _alarms(plan: FleetPlan, logs: Path) -> list[str]:
    """Returns the lines of replicas' logs that only a bug writes."""
    return [
        f"{one.name}: {line}"
        for one in plan.replicas
        for path in logs.glob(f"{one.name}*")
        for line in path.read_text(errors="replace").splitlines()
        if any(alarm in line for alarm in ALARMS)
    ]
