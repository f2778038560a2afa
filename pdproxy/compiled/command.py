"""The module is the command line of ``python -m pdproxy.compiled`` and of ``scripts/compile``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pdproxy.compiled.build import BuildError, compile_in_place, compile_into
from pdproxy.compiled.build import remove as remove_from
from pdproxy.compiled.stamp import PACKAGE
from pdproxy.config.options import option
from transfer.command_line.commands import Command, one_line_errors

MODULES = "The compiled modules"

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=Command)
def main(
    into: Annotated[Path | None, option("FOLDER", "Empty folder for a copy to compile instead", group=MODULES)] = None,
    remove: Annotated[bool, option(None, "Take the compiled modules away again", "--remove")] = False,
) -> None:
    """Compile the proxy's hot modules into C extensions, beside their sources. It takes a minute or two."""
    if remove and into is not None:
        raise typer.BadParameter("--into and --remove do not go together")
    with one_line_errors("pdproxy", BuildError, OSError):
        typer.echo(_take_away() if remove else _compile(into))


def _take_away() -> str:
    return f"{remove_from()} extensions taken away from {PACKAGE}"


def _compile(into: Path | None) -> str:
    began = time.monotonic()
    num_files = compile_in_place() if into is None else compile_into(into)
    where = PACKAGE if into is None else into / PACKAGE.name
    return f"{num_files} extensions in {where}, in {time.monotonic() - began:.0f} s"
