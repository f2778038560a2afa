"""The benchmark's command line: options in; a table, a JSON file and a picture out."""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pdproxy.bench.errors import BenchError
from pdproxy.bench.machine import describe
from pdproxy.bench.plan import FULL, QUICK, Scenario, pick
from pdproxy.bench.plot import MISSING, can_plot, plot
from pdproxy.bench.report import Findings, make_lines, make_report, make_table, warnings
from pdproxy.bench.run import measure
from pdproxy.bench.targets import OURS, Peer, choose
from pdproxy.launch.errors import Interrupted, LaunchError

app = typer.Typer(add_completion=False, rich_markup_mode=None)
ROUNDS, QUICK_ROUNDS = 5, 1
FILE_WIDTH = 170


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def main(
    peers: Annotated[
        str, typer.Option(help="others to measure, each as NAME or NAME=COMMAND: vllm-router,sglang-router,smg")
    ] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="where to write what was found")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="where to draw it (.png, .svg, .pdf)")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="per scenario [default: 5; 1 with --quick]")] = None,
    scenarios: Annotated[str, typer.Option(help="only these, or those whose names begin so: short,staggered-512")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="two tiny scenarios: does it work at all")] = False,
    ids: Annotated[
        bool,
        typer.Option("--ids/--no-ids", help="engines tell a prompt's token ids where they are asked to, as vLLM does"),
    ] = True,
    log_dir: Annotated[Path | None, typer.Option(help="of all processes [default: a temporary folder]")] = None,
) -> None:
    """What the proxy costs per request and per token and how much later tokens come, beside others of its kind.

    Everything runs on this machine: engines that compute nothing, clients, and one proxy after the other on a core of
    its own. A round in which other processes are busy is thrown away and repeated.
    """
    if plot_file is not None and not can_plot():
        raise typer.BadParameter(MISSING, param_hint="--plot")
    try:
        chosen = pick(QUICK if quick else FULL, _names(scenarios))
        there, missing = choose(_names(peers))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(stderr=True)
    for why in missing:
        console.print(f"skipping {why}", style="bold yellow", markup=False, highlight=False, soft_wrap=True)
    findings = Findings(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe(),
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        has_ids=ids,
        missing=missing,
    )
    _allow_many_sockets()
    with tempfile.TemporaryDirectory(prefix="pdproxy-bench-") as folder:
        status = _run(findings, chosen, there, 0 if quick else findings.rounds, log_dir or Path(folder), console)
    report = make_report(findings, is_complete=status == 0)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    if plot_file is not None and report["rows"]:
        plot(report, plot_file)
    _show(report)
    raise typer.Exit(status or int(_is_failed(report)))


def _is_failed(report: dict[str, Any]) -> bool:
    """Ours was not to be had, went wrong or skipped what it is there for."""
    rows = [row for row in report["rows"] if row["target"] == OURS]
    return any(one["target"] == OURS for one in report["failures"]) or any(
        row["errors"] or row["is_disqualified"] for row in rows
    )


def _allow_many_sockets() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _run(
    findings: Findings, chosen: tuple[Scenario, ...], peers: list[Peer], spare: int, logs: Path, console: Console
) -> int:
    """The exit status: that of a stopped process where it was stopped."""
    work = measure(
        chosen,
        peers,
        rounds=findings.rounds,
        spare_rounds=spare,
        has_ids=findings.has_ids,
        logs=logs,
        found=findings.measured,
        tell=lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
    )
    try:
        asyncio.run(work)
    except Interrupted as stop:
        console.print(str(stop))
        return 128 + stop.signum
    except KeyboardInterrupt:
        return 130
    except (BenchError, LaunchError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def _show(report: dict[str, Any]) -> None:
    console = Console()
    # Into a file, a line is a line.
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    console.print(make_table(report))
    for line in make_lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in warnings(report):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
