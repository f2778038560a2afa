"""The module is the command line. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from pdproxy import CHOICE, __version__
from pdproxy.config.options import Json, argument, option
from transfer.command_line.commands import Command, Group, SettingsCommand, Untouched, one_line_errors
from transfer.errors import TransferError
from transfer.without_torch import leave_torch_out

VERSION = "Show the version, and whether it is compiled, and if not, why"
DECODER, BY_HAND = "The decoder and its model", "By hand, instead of what the model's configuration says"

app = typer.Typer(
    name="pdproxy",
    cls=Group,
    rich_markup_mode=None,
    help="One OpenAI-compatible address in front of prefillers and decoders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        is_plain = CHOICE.why_plain is not None
        typer.echo(f"pdproxy {__version__}, {f'plain Python: {CHOICE.why_plain}' if is_plain else 'compiled'}")
        raise typer.Exit


@app.callback()
def _commands(
    _: Annotated[bool, option(None, VERSION, "--version", group="Help", callback=_tell_version, is_eager=True)] = False,
) -> None:
    """Runs before any command, and says where compiled modules are not of use."""
    if CHOICE.is_stale:
        again = f"{sys.executable} -m pdproxy.compiled"
        told = f"pdproxy: {CHOICE.why_plain}, and so the sources run, slower"
        typer.echo(f"{told}; compile again ({again}), or take them away ({again} --remove)", err=True)


class Serve(SettingsCommand):
    """Serve is ``pdproxy serve``, whose options are the settings."""

    def settings_rows(self) -> Iterable[tuple[str, tuple[str, str]]]:
        from pdproxy.config.help import rows

        return rows()


@app.command(cls=Serve)
def serve(context: typer.Context) -> None:
    """Serve an OpenAI-compatible address in front of a fleet.

    An option is a flag, an environment variable (--max-queue is PDPROXY_MAX_QUEUE), or a key of the --config file
    (max_queue). A flag beats the environment, the environment beats the file, and the file beats the default.
    """
    from pdproxy.config import settings as config
    from pdproxy.errors import ConfigError

    with one_line_errors("pdproxy", ConfigError):
        settings = config.load(context.args)
        from pdproxy.assemble import assemble
        from pdproxy.fronts.workers import WorkersServer
        from pdproxy.serve import Server
        from pdproxy.telemetry.log import configure

        log = configure(settings.log_level, settings.log_format)
        for told in config.unknown_variables(os.environ):
            logging.getLogger("pdproxy").warning(told)
        try:
            if settings.coordinator is not None:
                from pdproxy.fronts.replica import Replica, ReplicaServer

                ReplicaServer(Replica(settings), settings.workers).run()
            elif settings.workers == 1:
                Server(assemble(settings)).run()
            else:
                WorkersServer(assemble(settings), settings.workers).run()
        finally:
            log.flush()  # before the line that tells of an error


class Check(Command):
    """Check is ``pdproxy check``, which takes all options of ``pdproxy serve`` besides its own."""

    def help_rows(self, ctx: Any) -> Iterator[tuple[str, tuple[str, str]]]:
        from pdproxy.config.help import rows

        yield from super().help_rows(ctx)
        yield from rows()


@app.command(cls=Check, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    context: typer.Context,
    url: Annotated[
        str | None, option("URL", "Check the fleet of the proxy that runs at this address", group="The check")
    ] = None,
    max_pairs: Annotated[int, option("N", "Pairs up to which all are tried; of more, each instance once", min=1)] = 64,
    time_limit_s: Annotated[float, option("SECONDS", "Longest time for all", min=1)] = 120.0,
    key_file: Annotated[Path | None, option("FILE", "File with a client's key, for --url")] = None,
    json_file: Json = None,
) -> None:
    """Find out what is wrong with a fleet.

    Takes the options, environment and file of pdproxy serve. Every engine is asked what it is, and pairs serve one
    small request each. The exit status is 0 where nothing is wrong, 1 where something is, and 2 where that could not
    be found out.
    """
    from pdproxy.errors import ConfigError
    from pdproxy.inspection import check_command
    from pdproxy.inspection.running_proxy import AskFailed

    with one_line_errors("pdproxy", ConfigError, AskFailed, TransferError, OSError):
        status = check_command.check(
            context.args,
            own_flags=[flag for one in context.command.params for flag in one.opts],
            url=url,
            max_pairs=max_pairs,
            limit_s=time_limit_s,
            key_file=key_file,
            json_file=json_file,
        )
    raise typer.Exit(status)


@app.command(cls=Command)
def status(
    url: Annotated[str, option("URL", "Address of the proxy", group="The proxy")] = "http://127.0.0.1:9100",
    follow: Annotated[bool, option(None, "Look again and again, until Ctrl-C", "--follow")] = False,
    interval_s: Annotated[float, option("SECONDS", "Time between two looks of --follow", min=0.1)] = 2.0,
    json_file: Json = None,
) -> None:
    """Show the fleet of a running proxy.

    Instances with health, pages and queue, the requests in flight, and the proxy's processes or replicas, as its
    /status page has them. With --json the page goes through as it is.
    """
    import asyncio

    from pdproxy.inspection import status_command
    from pdproxy.inspection.running_proxy import AskFailed

    with one_line_errors("pdproxy", AskFailed, OSError), suppress(KeyboardInterrupt):
        asyncio.run(status_command.show(url, json_file, follow_s=interval_s if follow else None))


ELSEWHERE = {
    "up": ("pdproxy.launch.command", "Start engines and a proxy in front of them on this machine."),
    "loadtest": ("pdproxy.loadtest.command", "Measure an OpenAI-compatible address under load."),
    "simulate": ("pdproxy.simulate.command", "Simulate a fleet that is not there, with the proxy's own code."),
}
"""The commands with a command line of their own: its module, and what it does."""


def _run(context: typer.Context) -> None:
    """Runs the command line of its own that a command has."""
    name = context.command.name or ""
    if name != "simulate":  # until the others take over there is nothing to stop, and a Ctrl-C needs no traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import_module(ELSEWHERE[name][0]).app(context.args, prog_name=f"pdproxy {name}")


for name, (_, text) in ELSEWHERE.items():
    app.command(name, cls=Untouched, help=text)(_run)


@app.command(cls=Command)
def pages(
    pd_buffer_size: Annotated[str, option("SIZE", "Size of the PD buffer on each rank: 2GiB, 512MB", group=DECODER)],
    model: Annotated[str | None, option("PATH", "Folder of the model, or its config.json")] = None,
    chunk_size: Annotated[int, option("N", "Tokens per page")] = 256,
    tp: Annotated[int, option("N", "Tensor-parallel ranks of the decoder")] = 1,
    kv_cache_dtype: Annotated[str, option("DTYPE", "Dtype of the KV cache: auto (the model's own), fp8, …")] = "auto",
    cache: Annotated[str, option("KIND", "Form in which the engine keeps MLA: latent or expanded")] = "latent",
    num_layers: Annotated[int | None, option("N", "Layers of the model", group=BY_HAND)] = None,
    num_kv_heads: Annotated[int | None, option("N", "KV heads of the model")] = None,
    head_dim: Annotated[int | None, option("N", "Elements of a head")] = None,
    dtype: Annotated[str | None, option("DTYPE", "Dtype of the model")] = None,
    bytes_per_token: Annotated[int | None, option("BYTES", "KV of a token on one rank, without a model")] = None,
    bytes_per_sequence: Annotated[int | None, option("BYTES", "States of a sequence on one rank")] = None,
    json_file: Json = None,
) -> None:
    """Count the pages that a decoder's PD buffer holds.

    The longest prompt that fits is told as well. All numbers are for one rank.
    """
    from rich.console import Console

    from pdproxy.fleet.capacity import CapacityReport
    from transfer.command_line.json_file import STDOUT, write_json
    from transfer.geometry import GeometryError, capacity, kv_geometry, load_config, parse_size, unknown_type

    with one_line_errors("pdproxy", TransferError, OSError):
        buffer_bytes = parse_size(pd_buffer_size)
        if model is None and bytes_per_token is None:
            raise GeometryError("there is nothing to count: give --model, or --bytes-per-token by hand")
        config = {} if bytes_per_token is not None or model is None else load_config(model)
        geometry = kv_geometry(
            config,
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
        report = CapacityReport(
            geometry, capacity(geometry, buffer_bytes, chunk_size), buffer_bytes, tp, unknown_type(config)
        )
        write_json(json_file, report.as_json())
    if json_file != STDOUT:
        report.print_to(Console())


@app.command(cls=Command)
def keys(
    folder: Annotated[Path, argument("FOLDER", "Folder for both; files that are there already stay", "The keys")],
) -> None:
    """Make the two keys of a fleet.

    fleet.key is for prefillers and decoders, attempt.key for decoders and the proxy. Only their owner can read the
    files. Copy each to where it is needed, and name it there with --fleet-key-file and --attempt-key-file.
    """
    from transfer.trust import ATTEMPT_KEY_FILE, FLEET_KEY_FILE, write_key

    with one_line_errors("pdproxy", TransferError):
        for name in (FLEET_KEY_FILE, ATTEMPT_KEY_FILE):
            is_new = write_key(folder / name)
            typer.echo(f"{folder / name}: {'written' if is_new else 'was there already'}")


def main() -> None:
    """Runs the command line; it is the entry point of the `pdproxy` script."""
    leave_torch_out()
    app()
