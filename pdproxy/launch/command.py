"""The module is the command line of ``pdproxy up``: it takes options, and gives an exit status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pdproxy.config import settings as config
from pdproxy.config.options import FLEET, argument, option, words
from pdproxy.errors import ConfigError
from pdproxy.launch.errors import LaunchError, PreflightError
from pdproxy.launch.fleet import launch, launch_file
from pdproxy.launch.lmcache_file import read_lmcache_file
from pdproxy.launch.logs import terminal
from pdproxy.launch.options import ENGINES, RUN, FleetOptions, Side
from pdproxy.launch.restarts import NEVER, ON_FAILURE_LIMIT, RestartPolicy
from transfer.command_line.commands import Command, takes

app = typer.Typer(add_completion=False, rich_markup_mode=None)

WITH_FILE = frozenset(
    {"file", "python", "proxy_args", "workers", "work_dir", "timeout_s", "log_dir", "is_once"}
    | {"restart", "restart_limit"}
)
"""The options which may stand beside a file, because a file does not say them."""
FILE = (
    "TOML file of the fleet, as for pdproxy serve --config: instances with launch are started here, the others are "
    "where their url says; without a file, the options below describe the fleet"
)
RESTART = (
    "What follows when a process fails once all were ready: everything ends (never), or the process is started again "
    "after 1 s, 2 s, 4 s, … (on-failure)"
)


class WithCommand(Command):
    """WithCommand keeps what comes behind ``--``: it is another program's command line, and is found in the context's
    `obj`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.obj = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@app.command(cls=WithCommand)
@takes(options=FleetOptions)
def up(
    context: typer.Context,
    file: Annotated[Path | None, argument("FILE", FILE, FLEET)] = None,
    *,
    options: FleetOptions,
    restart: Annotated[Literal["never", "on-failure"], option(None, RESTART, group=RUN)] = "never",
    restart_limit: Annotated[
        int, option("N", "Most restarts in a row; a minute without a failure ends it", min=1)
    ] = ON_FAILURE_LIMIT,
    workers: Annotated[str, option("N", "Processes of the proxy that carry the traffic, or auto", group=FLEET)] = "1",
    devices: Annotated[str, option("GPUS", "GPUs, as 0,1,…, given to the prefillers first", group=ENGINES)] = "",
    prefill_args: Annotated[list[str] | None, option("ARGS", "Further options of the prefillers; repeatable")] = None,
    decode_args: Annotated[list[str] | None, option("ARGS", "Further options of the decoders; repeatable")] = None,
    prefill_env: Annotated[list[str] | None, option("NAME=VALUE", "Environment of the prefillers; repeatable")] = None,
    decode_env: Annotated[list[str] | None, option("NAME=VALUE", "Environment of the decoders; repeatable")] = None,
    kv_transfer_config: Annotated[str, option("JSON", "Members for vLLM's own configuration, as an object")] = "{}",
    prefill_config: Annotated[Path | None, option("PATH", "LMCache's own YAML for the prefillers (lmcache)")] = None,
    decode_config: Annotated[Path | None, option("PATH", "LMCache's own YAML for the decoders (lmcache)")] = None,
) -> None:
    """Start prefillers, decoders and the proxy in front of them on this machine, until Ctrl-C.

    What both sides must have alike, ports, GPUs and sizes are checked before anything is started. COMMAND is run once
    a request has gone through every engine; it finds the proxy in PDPROXY_URL. Whatever ends this process, its children
    end too.
    """
    console = terminal()
    command: list[str] = context.obj or []
    try:
        proxy_args = words("--proxy-args", options.proxy_args, PreflightError)
        options = replace(
            options,
            restarts=RestartPolicy(limit=restart_limit) if restart == "on-failure" else NEVER,
            proxy_args=(*_workers(workers), *proxy_args),
        )
        if file is not None:
            refuse_beside_a_file(context, file)
            more: dict[str, Any] = {"python": options.python, "proxy_args": options.proxy_args}
            raise typer.Exit(asyncio.run(launch_file(file, options.run, command, console, **more)))
        options = replace(
            options,
            devices=tuple(part.strip() for part in devices.split(",") if part.strip()),
            engine_args=words("--engine-args", options.engine_args, PreflightError),
            prefill=side("prefill", prefill_args or (), prefill_env or (), prefill_config, options.engine),
            decode=side("decode", decode_args or (), decode_env or (), decode_config, options.engine),
            kv_transfer_config=json_object("--kv-transfer-config", kv_transfer_config),
        )
        raise typer.Exit(asyncio.run(launch(options, command, console)))
    except LaunchError as error:
        console.print(f"launch: {error}", style="red")
        raise typer.Exit(1) from None


def _workers(given: str) -> tuple[str, ...]:
    """Returns the proxy's flags for so many processes. Raises `PreflightError` where it would not take them."""
    flags = () if given == "1" else ("--workers", given)
    try:
        config.load(flags)
    except ConfigError as error:
        raise PreflightError(f"--{error}") from None
    return flags


def refuse_beside_a_file(context: typer.Context, file: Path) -> None:
    """Raises `PreflightError` if an option says which engines there are: the file says it already."""
    for parameter in sorted(context.command.params, key=lambda one: one.name or ""):
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in WITH_FILE and source is not None and source.name == "COMMANDLINE":
            raise PreflightError(f"{parameter.opts[0]}: {file} says which engines there are; say it there")


def side(role: str, args: Sequence[str], env: Sequence[str], config: Path | None, engine: str) -> Side:
    """Returns what the engines of one role are given. Raises `PreflightError`."""
    return Side(
        args=words(f"--{role}-args", args, PreflightError),
        env=variables(f"--{role}-env", env),
        lmcache=lmcache(f"--{role}-config", config, engine),
    )


def variables(option: str, assignments: Sequence[str]) -> Mapping[str, str]:
    """Returns the variables by name, from assignments that are ``NAME=VALUE`` each. Raises `PreflightError`."""
    pairs = [assignment.partition("=") for assignment in assignments]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise PreflightError(f"{option} {name} is not NAME=VALUE")
    return {name: value for name, _, value in pairs}


def json_object(option: str, text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise PreflightError(f"{option} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PreflightError(f"{option} is not a JSON object")
    return value


def lmcache(option: str, path: Path | None, engine: str) -> Mapping[str, object]:
    """Returns the options of an LMCache configuration, or none where no file is named. Raises `PreflightError` for any
    other kind of engine."""
    if path is None:
        return {}
    if engine != "lmcache":
        raise PreflightError(f"{option} is LMCache's, and --engine is {engine}; leave it out")
    return read_lmcache_file(path, option)
