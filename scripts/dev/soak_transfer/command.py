"""The soak's command line: options go in, figures and a JSON file come out. The exit status is 0 only where nothing was
found."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console

from pdproxy.config.options import FLEET, Json, Seed, option
from scripts.dev.bench_transfer.machine import set_ucx
from scripts.dev.common.outcome import exit_status, interruptible, seed_of, show
from scripts.dev.soak_transfer.plan import SoakOptions
from scripts.dev.soak_transfer.report import make_lines, make_report
from scripts.dev.soak_transfer.run import Findings, soak
from transfer.command_line.commands import Command
from transfer.command_line.json_file import write_json

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=Command)
def main(
    minutes: Annotated[
        float, option("MINUTES", "Length of the load, warming up included", group="The soak", min=0.05)
    ] = 10.0,
    seed: Seed = None,
    prefillers: Annotated[int, option("N", "Number of senders, each with its own agent", group=FLEET, min=1)] = 16,
    processes: Annotated[int, option("N", "Number of processes that the senders are divided over", min=1)] = 4,
    pages: Annotated[int, option("N", "Pages of the decoder's buffer", min=2)] = 64,
    at_once: Annotated[int, option("N", "Attempts of one sender at once", min=1)] = 3,
    json_file: Json = None,
) -> None:
    """Have many prefillers push, without admission, to one decoder whose buffer is never large enough.

    Attempts are given up, cancelled, forgotten, and their writers killed. Every byte that is read is checked; nobody
    may be overtaken or left waiting, nothing may stand still or grow, and in the end every page must be free.
    """
    options = SoakOptions(
        duration_s=minutes * 60,
        seed=seed_of(seed),
        num_prefillers=prefillers,
        num_processes=min(processes, prefillers),
        num_pages=pages,
        num_at_once=at_once,
    )
    set_ucx(os.environ, has_gpu=False)
    console = Console(stderr=True)
    console.print(f"seed {options.seed}", highlight=False)
    findings = Findings(options)
    status = exit_status(_supervise(findings, console), console)
    report = make_report(findings, is_complete=status == 0)
    write_json(json_file, report)
    show(console, make_lines(report))
    show(console, report["problems"], style="red")
    raise typer.Exit(status or int(bool(report["problems"])))


async def _supervise(findings: Findings, console: Console) -> None:
    with interruptible():
        await soak(findings, lambda text: console.print(text, highlight=False))
