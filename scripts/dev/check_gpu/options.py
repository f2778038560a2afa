"""The command line of `scripts/check_gpu`. It takes typer, which the command looks for before it imports this."""

from __future__ import annotations

from typing import Annotated

import typer

from pdproxy.config.options import Json, Seed, option
from scripts.dev.check_gpu import command
from transfer.command_line.commands import Command

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=Command)
def check(
    device: Annotated[
        str, option("DEVICE", "Device: cuda, cuda:N, or cpu to check this command itself", group="What is checked")
    ] = "cuda",
    only: Annotated[list[str] | None, option("STEP", "Step to run, and no other; repeatable")] = None,
    seed: Seed = None,
    json_file: Json = None,
) -> None:
    """Check whether the KV transfer keeps its promises on this machine's GPU.

    Each step passes, fails or is skipped. Exit status 1: one failed. Exit status 2: nothing could be checked.
    """
    raise typer.Exit(command.check(device, only or [], seed, json_file))
