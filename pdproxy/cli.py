"""The module is the command line. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pdproxy import __version__
from pdproxy.compiled.stamp import StaleError, is_compiled
from transfer.errors import TransferError

app = typer.Typer(
    name="pdproxy",
    help="One OpenAI-compatible address in front of prefillers and decoders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"pdproxy {__version__}{', compiled' if _is_compiled() else ''}")
        raise typer.Exit


def _is_compiled() -> bool:
    """Tells whether the code is compiled. If it cannot be run as its sources say, this prints why and exits with status
    2."""
    try:
        return is_compiled()
    except StaleError as error:
        again = f"{sys.executable} -m pdproxy.compiled"
        typer.echo(f"pdproxy: {error}; compile again ({again}), or take them away ({again} --remove)", err=True)
        raise typer.Exit(2) from None


@app.callback()
def _commands(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Tell it, and whether it is compiled."),
    ] = False,
) -> None:
    """Runs before any command: only code that stands there is run."""
    _is_compiled()


class Untouched(TyperCommand):
    """Untouched is a command whose arguments are read by a command line of its own, ``--`` and ``--help`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return args


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Prints an error that a user can put right in one line on stderr, and exits with status 2."""
    try:
        yield
    except TransferError as error:
        typer.echo(f"pdproxy: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def pages(
    pd_buffer_size: Annotated[str, typer.Option(help="The decoder's PD buffer on each rank: 2GiB, 512MB, or bytes.")],
    model: Annotated[str | None, typer.Option(help="A model's folder, or its config.json.")] = None,
    chunk_size: Annotated[int, typer.Option(help="Tokens of one page.")] = 256,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of the decoder.")] = 1,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (the model's own), bfloat16, fp8, …")] = "auto",
    cache: Annotated[str, typer.Option(help="What the engine keeps of MLA: latent or expanded.")] = "latent",
    num_layers: Annotated[int | None, typer.Option(help="By hand: layers of the model.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="By hand: KV heads of the model.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="By hand: elements of a head.")] = None,
    dtype: Annotated[str | None, typer.Option(help="By hand: the model's dtype.")] = None,
    bytes_per_token: Annotated[int | None, typer.Option(help="By hand: KV of a token on one rank; no model.")] = None,
    bytes_per_sequence: Annotated[int | None, typer.Option(help="By hand: states of a sequence on one rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How many pages, and how long a prompt, a decoder's PD buffer holds. All numbers are for one rank."""
    # Said once by transformers where there is no torch, which is as it should be here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from rich.console import Console

    from pdproxy.fleet.capacity import CapacityReport
    from transfer.geometry import GeometryError, capacity, kv_geometry, load_config, parse_size

    with one_line_errors():
        buffer_bytes = parse_size(pd_buffer_size)
        if model is None and bytes_per_token is None:
            raise GeometryError("there is nothing to count: give --model, or --bytes-per-token by hand")
        geometry = kv_geometry(
            {} if bytes_per_token is not None or model is None else load_config(model),
            tp_size=tp,
            kv_cache_dtype=kv_cache_dtype,
            cache=cache,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            bytes_per_token=bytes_per_token,
            bytes_per_sequence=bytes_per_sequence,
        )
        report = CapacityReport(geometry, capacity(geometry, buffer_bytes, chunk_size), buffer_bytes, tp)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        report.print_to(Console())


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write them. Files that are there already stay as they are.")],
) -> None:
    """Make a fleet's two keys: fleet.key for prefillers and decoders, attempt.key for decoders and the proxy.

    Only their owner can read the files. Copy each to where it is needed, and name it there with --fleet-key-file and
    --attempt-key-file.
    """
    from transfer.trust import ATTEMPT_KEY_FILE, FLEET_KEY_FILE, write_key

    with one_line_errors():
        for name in (FLEET_KEY_FILE, ATTEMPT_KEY_FILE):
            is_new = write_key(folder / name)
            typer.echo(f"{folder / name}: {'written' if is_new else 'was there already'}")


@app.command(cls=Untouched)
def serve(context: typer.Context) -> None:
    """Serve. Options come from flags, PDPROXY_* environment and --config FILE; `pdproxy serve --help` lists them."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from pdproxy.config import settings as config
    from pdproxy.errors import ConfigError

    try:
        settings = config.load(context.args)
        from pdproxy.assemble import assemble
        from pdproxy.serve import Server
        from pdproxy.telemetry.log import configure

        configure(settings.log_level, settings.log_format)
        Server(assemble(settings)).run()
    except ConfigError as error:
        typer.echo(f"pdproxy: {error}", err=True)
        raise typer.Exit(2) from None


@app.command(cls=Untouched)
def up(context: typer.Context) -> None:
    """Start engines and a proxy in front of them here, until Ctrl-C; `pdproxy up --help` lists the options."""
    # Until the supervisor takes over there is nothing to stop, and a Ctrl-C needs no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from pdproxy.launch.command import app as launcher

    launcher(context.args, prog_name="pdproxy up")


@app.command(cls=Untouched)
def loadtest(context: typer.Context) -> None:
    """Ask an OpenAI-compatible address at a rate, and see how it does; `pdproxy loadtest --help` lists the commands."""
    # Until a run takes over there is nothing to stop, and a Ctrl-C needs no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pdproxy.loadtest.command import app as load_test

    load_test(context.args, prog_name="pdproxy loadtest")


@app.command(cls=Untouched)
def simulate(context: typer.Context) -> None:
    """Try a fleet that is not there: the proxy's own code under simulated time; `pdproxy simulate --help` tells all."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from pdproxy.simulate.command import app as simulation

    simulation(context.args, prog_name="pdproxy simulate")


def main() -> None:
    """Runs the command line; it is the entry point of the `pdproxy` script."""
    app()
