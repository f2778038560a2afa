"""The module is the soak itself: learn the answers, warm up, look, storm, heal, look again."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from pdproxy.launch.supervisor import Supervisor
from pdproxy.launch.tiny_model import make_tiny_model
from pdproxy.loadtest.stopping import beside
from scripts.dev.common.store_servers import StoreKind
from scripts.dev.common.vitals import Vitals, read_vitals
from scripts.dev.soak.clients import Clients
from scripts.dev.soak.counters import Counters
from scripts.dev.soak.faults import Faults
from scripts.dev.soak.leak_check import LeakCheck, look, until_clear
from scripts.dev.soak.plan import ENGINE_LEASE_S, REQUEST_TIMEOUT_S, Plan, make_plan, measure_page
from scripts.dev.soak.questions import learn, make_questions
from scripts.dev.soak.relay import SignalRelay
from scripts.dev.soak.replica_faults import ReplicaFaults
from scripts.dev.soak.soak_cluster import SoakCluster
from scripts.dev.soak.witness import Witness

WARM_UP_SHARE, MAX_WARM_UP_S = 0.15, 30.0
SETTLE_TIMEOUT_S = REQUEST_TIMEOUT_S + ENGINE_LEASE_S + 5.0
"""The most seconds until all that is held is free again when the last client has gone: no deadline of the cluster is
longer."""
CALM_S = 6.0
"""The seconds for kept-alive connections to be closed on both sides."""
SAMPLE_S = 2.0
TICK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """SoakOptions holds, field for field, the options in `scripts.dev.soak.command`."""

    duration_s: float
    seed: int
    num_prefillers: int
    num_decoders: int
    num_clients: int
    kill_proxy_every_s: float = 0.0
    """The mean time in seconds until the proxy is killed; with 0 it is never killed."""
    model: Path | None = None


@dataclass(slots=True)
class ReplicaFindings:
    """ReplicaFindings is what a soak of several replicas has found besides the rest.

    Mutable state: what is known so far; None for what has not been looked at.
    """

    num_replicas: int
    store: StoreKind
    faults: ReplicaFaults | None = None
    disagreements: list[str] | None = None
    left_behind: list[str] | None = None
    alarms: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Findings:
    """Findings is what a soak has found.

    Mutable state: what is known so far; None for what has not been looked at.
    """

    options: SoakOptions
    replicas: ReplicaFindings | None = None
    """Holds what was found of replicas; None where there is one proxy."""
    counters: Counters = field(default_factory=Counters)
    faults: Faults | None = None
    witness: Witness | None = None
    signals: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    num_overslept: int = 0
    before: Vitals | None = None
    after: Vitals | None = None
    """Holds the proxy's vitals at the end. Where the proxy was killed, they are of another process than `before`: they
    show what it has leaked since its start."""
    samples: list[tuple[float, Vitals]] = field(default_factory=list)
    """Holds the proxy's vitals by seconds since the storm began."""
    leaks: LeakCheck | None = None
    most_lag_s: float = 0.0
    """Holds by how many seconds the soak's own event loop was late, at most. It plays the clients and the relays: where
    that is seconds, requests take long to leave it, and with replicas leaders lose their lead over it."""
    num_unserved: int | None = None
    """Counts the questions not answered rightly after everything was well again; None until they were asked."""


async def soak(supervisor: Supervisor, findings: Findings, work_dir: Path, console: Console) -> None:
    """Runs the soak; `findings` are filled in as they come. Raises `LaunchError` where something cannot even be
    started."""
    options = findings.options
    model = options.model or await make_tiny_model(supervisor, work_dir / "tiny-model", console)
    plan = make_plan(
        model,
        num_prefillers=options.num_prefillers,
        num_decoders=options.num_decoders,
        seed=options.seed,
        page_bytes=measure_page(model),
    )
    cluster = SoakCluster(supervisor, plan)
    findings.crashes = cluster.crashes
    console.print("starting the engines")
    await cluster.start_engines()
    dice = random.Random(f"{options.seed} questions")
    questions = [question async for question in learn(plan.engines[-1].url, make_questions(dice))]
    console.print(f"{len(questions)} questions, their answers learnt; starting the proxy")
    async with _relaying(plan, options.seed) as relay:
        findings.signals = relay.fates
        await cluster.start_proxy()
        clients = Clients(plan.url, questions, options.num_clients, options.seed, findings.counters, cluster.outages)
        findings.witness = Witness(plan, cluster.outages)
        async with beside(clients.run(), findings.witness.run(), watch_lag(findings)):
            await _run_phases(findings, cluster, clients, relay, console)


async def _run_phases(
    findings: Findings, cluster: SoakCluster, clients: Clients, relay: SignalRelay, console: Console
) -> None:
    duration_s = findings.options.duration_s
    warm_up_s = min(duration_s * WARM_UP_SHARE, MAX_WARM_UP_S)
    console.print(f"warming up for {warm_up_s:.0f} s")
    clients.admit()
    await asyncio.sleep(warm_up_s)
    await clients.send_home()
    await until_clear(cluster.plan, SETTLE_TIMEOUT_S)
    findings.before = await _idle_vitals(cluster)

    console.print(f"storming for {duration_s - warm_up_s:.0f} s")
    await _storm(findings, cluster, clients, relay, duration_s - warm_up_s)

    console.print("healing and settling")
    await cluster.heal()
    await clients.send_home()
    findings.leaks = await until_clear(cluster.plan, SETTLE_TIMEOUT_S)
    findings.num_unserved = await clients.everything_once()
    await clients.send_home()
    findings.leaks = await until_clear(cluster.plan, SETTLE_TIMEOUT_S)
    findings.after = await _idle_vitals(cluster)
    cluster.note_crashes()
    findings.num_overslept = cluster.num_overslept


async def _storm(
    findings: Findings, cluster: SoakCluster, clients: Clients, relay: SignalRelay, duration_s: float
) -> None:
    options = findings.options
    faults = Faults(cluster, options.seed, kill_proxy_every_s=options.kill_proxy_every_s)
    findings.faults = faults
    clients.is_unruly = relay.is_faulty = True
    clients.admit()
    async with beside(faults.run(), _sample(findings, cluster)):
        await asyncio.sleep(duration_s)
    clients.is_unruly = relay.is_faulty = False


async def watch_lag(findings: Findings) -> None:
    """Notes how late this process itself is, until it is cancelled."""
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        findings.most_lag_s = max(findings.most_lag_s, time.monotonic() - due)


async def _sample(findings: Findings, cluster: SoakCluster) -> None:
    started = time.monotonic()
    while True:
        await asyncio.sleep(SAMPLE_S)
        cluster.note_crashes()
        # While the proxy is dead there is nothing to sample. No task switch comes between its answer and the reading.
        if (status := await cluster.proxy_status()) is not None and not cluster.outages.is_down:
            vitals = read_vitals(cluster.proxy_pid, status["tasks"])
            findings.samples.append((round(time.monotonic() - started, 1), vitals))


async def _idle_vitals(cluster: SoakCluster) -> Vitals:
    await asyncio.sleep(CALM_S)
    leaks = await look(cluster.plan)
    return read_vitals(cluster.proxy_pid, leaks.num_tasks)


@asynccontextmanager
async def _relaying(plan: Plan, seed: int) -> AsyncIterator[SignalRelay]:
    relay = SignalRelay(plan.relay_port, plan.signal_port, random.Random(f"{seed} signals"))
    try:
        async with beside(relay.run()):
            yield relay
    finally:
        relay.close()
