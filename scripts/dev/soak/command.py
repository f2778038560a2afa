"""The module is the soak's command line: it takes options, and gives a table and a JSON file; the exit status is 0 only
where nothing was found."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from pdproxy.config.options import FLEET, Json, Seed, option
from pdproxy.launch.logs import FileLog
from pdproxy.launch.supervisor import Supervisor
from scripts.dev.common.outcome import exit_status, seed_of, show
from scripts.dev.common.store_servers import StoreKind
from scripts.dev.common.work_folder import work_folder
from scripts.dev.soak.pressure import (
    PressureFindings,
    make_pressure_report,
    make_pressure_table,
    press,
    pressure_problems,
)
from scripts.dev.soak.replica_run import soak_replicas
from scripts.dev.soak.report import is_clean, make_report, make_table, problems
from scripts.dev.soak.run import Findings, ReplicaFindings, SoakOptions, soak
from transfer.command_line.commands import Command
from transfer.command_line.json_file import write_json

app = typer.Typer(add_completion=False, rich_markup_mode=None)
GRACE_S = 5.0
LOGS = "Folder for the logs of all processes [default: a temporary one, kept where a fault is found]"


@app.command(cls=Command)
def main(
    minutes: Annotated[
        float, option("MINUTES", "Length of the load, warming up included", group="The soak", min=0.1)
    ] = 10.0,
    seed: Seed = None,
    clients: Annotated[int, option("N", "Number of clients at once", min=1)] = 200,
    kill_proxy_every: Annotated[
        float, option("SECONDS", "Mean time after which the proxy is killed with -9; 0 for never", min=0)
    ] = 60.0,
    pressure: Annotated[
        bool, option(None, "Instead: use up the proxy's descriptors, memory, event loop and log", "--pressure")
    ] = False,
    proxies: Annotated[int, option("N", "Number of replicas of the proxy, which agree through --store", min=1)] = 1,
    store: Annotated[
        StoreKind | None, option("KIND", "Store that 2 replicas or more agree through: redis or etcd [default: redis]")
    ] = None,
    prefillers: Annotated[int, option("N", "Number of prefillers", group=FLEET, min=1)] = 3,
    decoders: Annotated[int, option("N", "Number of decoders; the first has a tiny PD buffer", min=1)] = 3,
    model: Annotated[Path | None, option("FOLDER", "Model folder [default: a tiny random model]")] = None,
    json_file: Json = None,
    log_dir: Annotated[Path | None, option("FOLDER", LOGS)] = None,
) -> None:
    """Run built-in engines and the proxy on this machine, with many clients, and inflict every fault there is.

    Clients leave in the middle, engines are killed, frozen and restarted, the proxy is killed, KV signals are lost,
    delayed, doubled and reordered. At the end every request must have had a right answer or a typed error, unless the
    proxy was killed under it; nothing may be held; and no decoder may ever have let an attempt wait for pages that the
    proxy had promised to it.

    With --proxies N: N replicas of the proxy and a real store. Processes of replicas are killed and frozen, the store
    is restarted, with its data and without, and connections between all of them break or fall silent, one way or both.
    Whoever has a replica and engines that are well must then get an answer, or be told in time when to come again. At
    the end all replicas must agree who leads. --kill-proxy-every means nothing there.

    With --pressure: ordinary clients, first alone and then beside clients and engines that use up whatever can run out.
    They must not notice, no engine that is well may be judged down, and afterwards everything must be as it was.
    """
    if pressure:
        raise typer.Exit(_press(minutes * 60, seed_of(seed), json_file))
    if store is not None and proxies < 2:
        raise typer.BadParameter("a store is for two replicas or more: give --proxies N", param_hint="--store")
    options = SoakOptions(
        duration_s=minutes * 60,
        seed=seed_of(seed),
        num_prefillers=prefillers,
        num_decoders=decoders,
        num_clients=clients,
        kill_proxy_every_s=kill_proxy_every,
        model=model,
    )
    console = Console(stderr=True)
    console.print(f"seed {options.seed}", highlight=False)
    with work_folder("pdproxy-soak-") as work_dir:
        logs = log_dir or work_dir / "logs"
        findings = Findings(options)
        if proxies > 1:
            findings.replicas = ReplicaFindings(proxies, store or StoreKind.REDIS)
        status = exit_status(_supervise(findings, work_dir, logs, console), console, httpx.HTTPError)
        is_found = _tell(findings, is_complete=status == 0, json_file=json_file, console=console)
        if log_dir is None and is_found:
            kept = Path(tempfile.mkdtemp(prefix="pdproxy-soak-logs-"))
            shutil.copytree(logs, kept, dirs_exist_ok=True)
            console.print(f"logs are in {kept}", highlight=False)
    raise typer.Exit(status or int(is_found))


def _press(duration_s: float, seed: int, json_file: Path | None) -> int:
    """Puts a proxy under pressure, and prints and writes what was found. Returns the exit status."""
    console = Console(stderr=True)
    console.print(f"seed {seed}", highlight=False)
    findings = PressureFindings(seed)

    async def run(work_dir: Path) -> None:
        with FileLog(work_dir / "logs", ()) as log:
            async with Supervisor(log, grace_s=GRACE_S) as supervisor:
                await supervisor.while_all_live(press(supervisor, findings, work_dir, duration_s))

    with work_folder("pdproxy-pressure-") as folder:
        status = exit_status(run(folder), console, httpx.HTTPError)
    write_json(json_file, make_pressure_report(findings))
    make_pressure_table(findings).print_to(console)
    wrong = pressure_problems(findings)
    show(console, wrong, style="red")
    return status or int(bool(wrong))


async def _supervise(findings: Findings, work_dir: Path, logs: Path, console: Console) -> None:
    with FileLog(logs, ()) as log:
        async with Supervisor(log, grace_s=GRACE_S) as supervisor:
            if findings.replicas is None:
                await soak(supervisor, findings, work_dir, console)
            else:
                await soak_replicas(supervisor, findings, work_dir, logs, console)


def _tell(findings: Findings, *, is_complete: bool, json_file: Path | None, console: Console) -> bool:
    """Prints and writes the report. Returns True when something is wrong."""
    report = make_report(findings, is_complete=is_complete)
    write_json(json_file, report)
    make_table(report).print_to(console)
    show(console, problems(report), style="red")
    return not is_clean(report)
