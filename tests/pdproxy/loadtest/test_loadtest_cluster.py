"""A cluster of its own: how it is planned, and that its instances can be killed, frozen and started again."""

from __future__ import annotations

import asyncio
import io
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pdproxy.launch.fleet_plan import FleetPlan, Needs
from pdproxy.launch.kinds.base import EnginePlan, Seat
from pdproxy.launch.ports import HOST, free_range
from pdproxy.launch.process import Program
from pdproxy.launch.supervisor import Supervisor
from pdproxy.loadtest import conduct as conducting
from pdproxy.loadtest.arrivals import Pace
from pdproxy.loadtest.conduct import Outcome, Plan, conduct
from pdproxy.loadtest.errors import LoadTestError
from pdproxy.loadtest.fault_schedule import FaultError
from pdproxy.loadtest.faults import parse_faults
from pdproxy.loadtest.lengths import Fixed, Independent
from pdproxy.loadtest.local_cluster import ClusterOptions, LocalCluster, plan_cluster
from pdproxy.loadtest.report.sides import Side, read_sides
from pdproxy.loadtest.slo import Slo
from pdproxy.loadtest.target import Target
from pdproxy.loadtest.workload import Open, Workload

STANDIN = Path(__file__).parents[2] / "helpers" / "standin_instance.py"
QUIET = Console(file=io.StringIO())
NAMES = ("prefill-0", "decode-0")


# ── plans ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def word_after(plan: FleetPlan, index: int, option: str) -> str:
    words = plan.engines[index].program.command
    return words[words.index(option) + 1]


def test_prefillers_and_decoders(tmp_path: Path) -> None:
    plan = plan_cluster(ClusterOptions(what="2:1", work_dir=tmp_path, engine_args=("--max-num-seqs", "9")), seed=1)
    assert plan.names == ("prefill-0", "prefill-1", "decode-0", "proxy")
    assert [word_after(plan, index, "--role") for index in range(3)] == ["prefill", "prefill", "decode"]
    assert word_after(plan, 1, "--max-num-seqs") == "9"
    ports = [port.port for port in plan.ports]
    assert len(set(ports)) == len(ports) == 6
    assert plan.tiny_model is not None


def test_engines_that_do_both_halves(tmp_path: Path) -> None:
    """The proxy has somebody for each half, though no prompt is ever long enough to be divided."""
    plan = plan_cluster(ClusterOptions(what="0:2", work_dir=tmp_path, proxy_args=("--max-queue", "7")), seed=1)
    assert plan.names == ("prefill-0", "decode-0", "decode-1", "proxy")
    words = plan.proxy.command
    assert int(words[words.index("--min-prompt-tokens") + 1]) > 1 << 30
    assert words[-2:] == ("--max-queue", "7")


@pytest.mark.parametrize("what", ["1", "1:0", "x:1", "nothing.toml", ""])
def test_what_is_no_cluster(what: str) -> None:
    with pytest.raises(LoadTestError, match="give PREFILLERS:DECODERS"):
        plan_cluster(ClusterOptions(what=what), seed=1)


def test_ports_are_free_all_of_them_in_a_row() -> None:
    ports = free_range(5, random.Random("x"))
    with closing(socket.create_server((HOST, ports[3]))):
        assert free_range(5, random.Random("x")) != ports
    assert free_range(5, random.Random("x")) == ports


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def fake_plan(folder: Path) -> FleetPlan:
    """Processes that are quick to start."""
    base = free_range(3, random.Random(str(folder))).start
    urls = [f"http://{HOST}:{base + index}" for index in range(3)]
    programs = [
        Program(name=name, command=(sys.executable, str(STANDIN), str(base + index)), ready_url=f"{urls[index]}/health")
        for index, name in enumerate(NAMES)
    ]
    engines = tuple(
        EnginePlan(
            seat=Seat(role="decode", index=0, ordinal=0, device="cpu", name=name),
            program=program,
            ports=(),
            traits=(),
            tables=({"name": name},),
        )
        for name, program in zip(NAMES, programs, strict=True)
    )
    return FleetPlan(
        engines=engines,
        needs=(Needs(model=None, python=None, modules=()),) * 2,
        proxy=Program(
            name="proxy",
            command=(sys.executable, str(STANDIN), str(base + 2), *NAMES),
            ready_url=f"{urls[2]}/ready",
        ),
        ports=(),
        host=HOST,
        url=urls[2],
        files={"told.txt": "before anybody starts"},
        folder=folder / "fleet",
        tiny_model=None,
        timeout_s=30.0,
        drain_s=1.0,
    )


@asynccontextmanager
async def open_cluster(folder: Path) -> AsyncIterator[tuple[LocalCluster, Supervisor]]:
    async with Supervisor(lambda name, line: None, grace_s=2.0) as supervisor:
        cluster = LocalCluster(supervisor, fake_plan(folder))
        await cluster.open(QUIET)
        yield cluster, supervisor


async def until(change: int, supervisor: Supervisor, name: str) -> None:
    """The kernel says that it has been stopped, or goes on."""
    pid = next(one.pid for one in supervisor.processes if one.name == name)
    async with asyncio.timeout(10):
        await asyncio.to_thread(os.waitid, os.P_PID, pid, change | os.WNOWAIT)


async def test_instances_die_come_back_and_stand_still(tmp_path: Path) -> None:
    async with open_cluster(tmp_path) as (cluster, supervisor):
        assert cluster.names == list(NAMES)
        assert (tmp_path / "fleet" / "told.txt").read_text() == "before anybody starts"
        cluster.freeze("prefill-0")
        await until(os.WSTOPPED, supervisor, "prefill-0")
        cluster.thaw("prefill-0")
        await until(os.WCONTINUED, supervisor, "prefill-0")

        cluster.kill("decode-0")
        await cluster.until_gone("decode-0")
        cluster.thaw("decode-0")  # nobody is there any more, and nobody else is meant
        cluster.start("decode-0")
        await cluster.until_healthy("decode-0", 30.0)
        cluster.terminate("decode-0")
        await cluster.until_gone("decode-0")
        assert len(supervisor.processes) == 4
        assert cluster.crashed == {}
        supervisor.processes[0].kill()
        await cluster.until_gone("prefill-0")
        assert cluster.crashed == {"prefill-0": "prefill-0 was killed by SIGKILL"}
    assert all(process.status is not None for process in supervisor.processes)


# ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_of(folder: Path, faults: str, **fields: Any) -> Plan:
    usual: dict[str, Any] = {
        "workload": Workload(
            seed=1,
            pace=Open(pace=Pace(rate=40.0), process="constant"),
            sizes=Independent(Fixed(12), Fixed(3)),
            duration_s=1.0,
        ),
        "target": lambda url, model: Target(url=url, model=model),
        "url": None,
        "model": None,
        "api_key": None,
        "slo": Slo.parse("ttft:p50<5"),
        "slo_words": "ttft:p50<5",
        "search": None,
        "cluster": ClusterOptions(what="1:1"),
        "faults": parse_faults(faults),
        "label": "standin",
        "folder": folder / "out",
        "late_limit_s": 10.0,
    }
    return Plan(**usual | fields)


@pytest.fixture
def cluster_of_standins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(conducting, "plan_cluster", lambda options, seed: fake_plan(tmp_path))


@pytest.mark.usefixtures("cluster_of_standins")
async def test_what_is_done_to_a_cluster_is_in_its_report(tmp_path: Path) -> None:
    outcome = Outcome(Side("standin", ()))
    plan = plan_of(tmp_path, "0.2 kill decode-0; 0.3 start decode-0; 0.4 freeze prefill-0 for 0.2")
    await conduct(plan, outcome, QUIET)
    (run,) = outcome.side.runs
    (side,) = read_sides([str(tmp_path / "out")])
    assert side.runs == outcome.side.runs
    told = [(event.what, event.whom) for event in run.events]
    assert told[:2] == [("kill", "decode-0"), ("start", "decode-0")]
    assert ("freeze", "prefill-0") in told
    assert ("thaw", "prefill-0") in told
    assert run.head.target == fake_plan(tmp_path).url  # these ports are free again
    assert run.head.model == "standin"
    assert run.head.settings["house"] == "1:1"
    assert run.head.settings["faults"] == "0.2 kill decode-0; 0.3 start decode-0; 0.4 freeze prefill-0 for 0.2"
    assert len(run.records) == 40
    assert all(record.is_ok for record in run.records)
    assert run.moments[-1].states == dict.fromkeys(NAMES, "ready")
    assert "kill decode-0" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "logs" / "decode-0.log").exists()


@pytest.mark.usefixtures("cluster_of_standins")
async def test_faults_for_nobody_are_refused_before_anything_starts(tmp_path: Path) -> None:
    outcome = Outcome(Side("standin", ()))
    with pytest.raises(FaultError, match="there is no decode-7"):
        await conduct(plan_of(tmp_path, "0.2 kill decode-7"), outcome, QUIET)
    with pytest.raises(LoadTestError, match="faults can only be done to a cluster"):
        await conduct(plan_of(tmp_path, "0.2 kill decode-0", cluster=None, url="http://x"), outcome, QUIET)
    assert outcome.side.runs == ()
