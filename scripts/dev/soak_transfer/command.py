"""The soak's command line: options go in, figures and a JSON file come out. The exit status is 0 only where nothing was
found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scripts.dev.bench_transfer.machine import set_ucx
from scripts.dev.common.outcome import exit_status, interruptible, seed_of, show, write_json
from scripts.dev.soak_transfer.plan import SoakOptions
from scripts.dev.soak_transfer.report import make_lines, make_report
from scripts.dev.soak_transfer.run import Findings, soak

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="of load, warming up included")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="of everything that is left to chance [default: a new one]")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to write what was found")] = None,
    prefillers: Annotated[int, typer.Option(min=1, help="senders, each with its own agent")] = 16,
    processes: Annotated[int, typer.Option(min=1, help="that they are divided over")] = 4,
    pages: Annotated[int, typer.Option(min=2, help="of the decoder's buffer")] = 64,
    at_once: Annotated[int, typer.Option(min=1, help="attempts of one sender")] = 3,
) -> None:
    """Many prefillers push to one decoder whose buffer is never large enough, and nobody admits them.

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
