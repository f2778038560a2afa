"""The module says what a soak of several replicas starts besides its engines: a store, and each replica with relays in
front of it and of the store."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from pdproxy.launch.machine import environment
from pdproxy.launch.ports import HOST, free_ports
from pdproxy.launch.process import Program
from scripts.dev.common.store_servers import StoreKind, store_server
from scripts.dev.soak.plan import CHUNK_SIZE, PROXY_OPTIONS, REQUEST_TIMEOUT_S, Plan

STORE = "store"
TERM_S = 6.0
"""The proxies' ``--term-s``, so short that minutes see many terms."""
REFUSAL_LIMIT_S = REQUEST_TIMEOUT_S + 2.0
"""The seconds in which a request is refused that nobody admits: a term until there is a leader, and its time in line,
but never more than a request's own limit."""
REPLICA_CLIENT_TIMEOUT_S = REQUEST_TIMEOUT_S + 2 * TERM_S + 5.0
"""The seconds after which a client of a replica counts as hung, which may have been frozen for two terms."""
PROXY_PROGRAM = "PDPROXY_SOAK_PROXY"
"""The variable that may name a module to be run in place of ``pdproxy``: one with a fault planted, to see it found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """ReplicaPlan is one replica. It listens for others at `link_port`, which they reach at `advertised_port`, and it
    reaches the store at `store_port`."""

    name: str
    port: int
    link_port: int
    advertised_port: int
    store_port: int
    num_workers: int
    signal_port: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """FleetPlan is everything that is started. `work_dir` is where the store and the replicas put their files."""

    engines: Plan
    replicas: tuple[ReplicaPlan, ...]
    store: StoreKind
    store_server: Path
    store_ports: tuple[int, int]
    work_dir: Path

    def seen_by(self, replica: ReplicaPlan) -> Plan:
        """Returns the plan with this replica as its proxy."""
        return replace(self.engines, port=replica.port)

    def replica(self, name: str) -> ReplicaPlan:
        return next(one for one in self.replicas if one.name == name)

    @property
    def store_dir(self) -> Path:
        return self.work_dir / STORE

    def temporary(self, replica: ReplicaPlan) -> Path:
        """Returns the folder that this replica has for temporary files."""
        return self.work_dir / f"{replica.name}-tmp"

    @property
    def ports(self) -> list[int]:
        """Returns all ports but those of the relays and the engines."""
        return [*self.store_ports, *(port for one in self.replicas for port in (one.port, one.link_port))]


def make_fleet_plan(engines: Plan, *, num_replicas: int, store: StoreKind, seed: int, work_dir: Path) -> FleetPlan:
    """Returns a plan with ports that are free when they are chosen. The first replica has two fronts, and takes KV
    signals at a port of its own; the others have one front. Raises `PreflightError` and `NotToBeHadError`."""
    used = {engines.port, engines.signal_port, engines.relay_port}
    used |= {port for one in engines.engines for port in (one.port, one.receiver_port)}
    candidates = free_ports(3 + 5 * num_replicas + len(used), random.Random(f"{seed} replicas"))
    ports = iter([port for port in candidates if port not in used])
    replicas = [
        ReplicaPlan(
            name=f"proxy-{number}",
            port=next(ports),
            link_port=next(ports),
            advertised_port=next(ports),
            store_port=next(ports),
            num_workers=1 if number else 2,
            signal_port=0 if number else next(ports),
        )
        for number in range(num_replicas)
    ]
    return FleetPlan(
        engines=engines,
        replicas=tuple(replicas),
        store=store,
        store_server=store_server(store),
        store_ports=(next(ports), next(ports)),
        work_dir=work_dir,
    )


def store_program(plan: FleetPlan) -> Program:
    """Returns the store's program. It writes before it answers, so that kill −9 costs no data, but does not wait for
    the disk, which on a shared machine may take longer than a leader has time."""
    port, peer_port = plan.store_ports
    command = [str(plan.store_server)]
    if plan.store == "etcd":
        client, peer = f"http://{HOST}:{port}", f"http://{HOST}:{peer_port}"
        command += ["--name", "only", "--data-dir", str(plan.store_dir), "--logger", "zap"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        # The shortest lease is three halves of the election time-out, and must not be longer than a third of a term.
        command += ["--initial-cluster", f"only={peer}", "--heartbeat-interval", "20", "--election-timeout", "200"]
        command += ["--unsafe-no-fsync"]
    else:
        command += ["--bind", HOST, "--port", str(port), "--dir", str(plan.store_dir), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "no"]
    return Program(name=STORE, command=tuple(command))


def replica_program(plan: FleetPlan, replica: ReplicaPlan) -> Program:
    """Returns a replica's program: its parent, which starts its fronts."""
    urls = {role: ",".join(e.url for e in plan.engines.engines if e.role == role) for role in ("prefill", "decode")}
    flags = [*("--prefill", urls["prefill"]), *("--decode", urls["decode"]), *("--model", str(plan.engines.model))]
    flags += [*("--port", str(replica.port)), *("--chunk-size", str(CHUNK_SIZE)), *PROXY_OPTIONS]
    flags += [*("--coordinator", f"{plan.store}://{HOST}:{replica.store_port}"), *("--term-s", f"{TERM_S:g}")]
    flags += [*("--replica-host", HOST), *("--replica-port", str(replica.link_port))]
    flags += [*("--replica-advertise", f"{HOST}:{replica.advertised_port}"), *("--log-level", "info")]
    flags += [*("--workers", str(replica.num_workers)), *("--proxy-port", str(replica.signal_port))]
    return Program(
        name=replica.name,
        command=(sys.executable, "-m", os.environ.get(PROXY_PROGRAM, "pdproxy"), "serve", *flags),
        ready_url=f"{replica.url}/ready",
        env={**environment("cpu"), "TMPDIR": str(plan.temporary(replica)), "PYTHONFAULTHANDLER": "1"},
        grace_s=10.0,
    )
