"""The benchmark's command line: options in; a table, a JSON file and a picture out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pdproxy.config.options import Json, Seed, option
from scripts.dev.bench_transfer.busy import busy_lines, measure_busy
from scripts.dev.bench_transfer.machine import describe, set_ucx
from scripts.dev.bench_transfer.plan import FULL, QUICK
from scripts.dev.bench_transfer.plot import plot
from scripts.dev.bench_transfer.report import Findings, make_lines, make_report, make_table, shortfalls
from scripts.dev.bench_transfer.run import devices, measure
from scripts.dev.common.errors import BenchError
from scripts.dev.common.outcome import NO_MATPLOTLIB, can_plot, exit_status, interruptible, seed_of, show
from transfer.command_line.commands import Command
from transfer.command_line.json_file import console_beside, write_json
from transfer.errors import TransferError

app = typer.Typer(add_completion=False, rich_markup_mode=None)
DEADLINE_S = 900.0


@app.command(cls=Command)
def main(
    quick: Annotated[
        bool, option(None, "Half a minute instead of five: not to be quoted", "--quick", group="What is measured")
    ] = False,
    rounds: Annotated[int | None, option("N", "Rounds per case [default: 5; 2 with --quick]", min=1)] = None,
    seed: Seed = None,
    deadline_s: Annotated[float, option("SECONDS", "Longest time for the whole run", min=10.0)] = DEADLINE_S,
    conversation: Annotated[
        bool, option(None, "Instead: count what the turns of a chat send; not with --plot", "--conversation")
    ] = False,
    busy: Annotated[
        bool, option(None, "Instead: time pushes beside a busy Python thread; not with --plot", "--busy")
    ] = False,
    json_file: Json = None,
    plot_file: Annotated[Path | None, option("FILE", "Picture of the figures (.png, .svg, .pdf)", "--plot")] = None,
) -> None:
    """Measure how fast pages travel between processes on this machine, beside bare NIXL and a plain torch copy.

    It measures host memory, and device memory where there is a CUDA GPU. UCX reads its settings from the environment
    (UCX_TLS, UCX_NET_DEVICES); what is not set there is set for loopback.
    """
    if plot_file is not None and (conversation or busy):
        raise typer.BadParameter("--conversation and --busy are not drawn", param_hint="--plot")
    if conversation and busy:
        raise typer.BadParameter("one at a time: --conversation or --busy", param_hint="--busy")
    if plot_file is not None and not can_plot():
        raise typer.BadParameter(NO_MATPLOTLIB, param_hint="--plot")
    plan = QUICK if quick else FULL
    findings = Findings(
        plan=replace(plan, rounds=rounds or plan.rounds),
        seed=seed_of(seed),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe(),
        ucx=set_ucx(os.environ, has_gpu=len(devices()) > 1),
    )
    console = Console(stderr=True)
    if conversation:
        raise typer.Exit(_run_conversation(findings, deadline_s, json_file, console))
    if busy:
        work = measure_busy(rounds or (5 if quick else 20), deadline_s)
        raise typer.Exit(_run_alone("busy", work, busy_lines, findings, deadline_s, json_file, console))
    console.print(f"seed {findings.seed}, {findings.plan.rounds} rounds", highlight=False)
    status = exit_status(_within(_measured(findings, deadline_s, console), deadline_s), console, TransferError)
    report = make_report(findings, is_complete=status == 0)
    write_json(json_file, report)
    if plot_file is not None and report["rows"]:
        plot(report, plot_file)
    _show(report, console_beside(json_file))
    raise typer.Exit(status)


def _run_conversation(findings: Findings, deadline_s: float, json_file: Path | None, console: Console) -> int:
    """Returns the exit status of the conversation."""
    # Engines need transformers, which takes seconds to load: only a run that needs engines waits for it.
    from scripts.dev.bench_transfer.conversation import conversation_lines, measure_conversation

    work = measure_conversation(findings.seed)
    return _run_alone("conversation", work, conversation_lines, findings, deadline_s, json_file, console)


def _run_alone(
    name: str,
    work: Coroutine[Any, Any, dict[str, Any]],
    lines: Callable[[dict[str, Any]], list[str]],
    findings: Findings,
    deadline_s: float,
    json_file: Path | None,
    console: Console,
) -> int:
    """Returns the exit status of a measurement that is no part of the others. There is nothing to tell of half of
    it."""
    found: dict[str, Any] = {}

    async def measured() -> None:
        found.update(await work)

    console.print(f"seed {findings.seed}", highlight=False)
    status = exit_status(_within(measured(), deadline_s), console, TransferError)
    if status == 0:
        report = {"date": findings.date, "seed": findings.seed, "machine": findings.machine, name: found}
        write_json(json_file, report)
        show(console_beside(json_file), lines(found))
    return status


def _show(report: dict[str, Any], console: Console) -> None:
    make_table(report).print_to(console)
    show(console, make_lines(report))
    show(console, [f"short: {line}" for line in shortfalls(report)], style="yellow")


async def _measured(findings: Findings, deadline_s: float, console: Console) -> None:
    with console.status("starting") as status:
        tell = status.update if console.is_terminal else console.print
        await measure(findings, deadline_s, tell)


async def _within(work: Coroutine[Any, Any, None], deadline_s: float) -> None:
    """Runs the work until a signal stops it. Raises `BenchError` where it is not done in time."""
    try:
        with interruptible():
            async with asyncio.timeout(deadline_s):
                await work
    except TimeoutError:
        raise BenchError(f"not done within {deadline_s:g} s") from None
