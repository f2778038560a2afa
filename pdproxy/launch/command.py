"""The module is the command line of ``pdproxy up``: it takes options, and gives an exit status."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from pdproxy.config.settings import Engine
from pdproxy.launch.errors import LaunchError, PreflightError
from pdproxy.launch.fleet import launch, launch_file
from pdproxy.launch.lmcache_file import read_lmcache_file
from pdproxy.launch.logs import terminal
from pdproxy.launch.options import FleetOptions, RunOptions, Side
from pdproxy.launch.restarts import NEVER, ON_FAILURE_LIMIT, RestartPolicy

app = typer.Typer(add_completion=False, rich_markup_mode=None)

WITH_FILE = frozenset(
    {"file", "python", "proxy_args", "work_dir", "timeout", "log_dir", "once", "restart", "restart_limit"}
)
"""The options which may stand beside a file, because a file does not say them."""
LMCACHE_YAML = "lmcache: YAML with options of LMCache's own for the {}; ports and roles are the launcher's"


class WithCommand(TyperCommand):
    """WithCommand keeps what comes behind ``--``: it is another program's command line, and is found in the context's
    `obj`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.obj = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@app.command(cls=WithCommand, context_settings={"help_option_names": ["-h", "--help"]})
def up(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="the fleet, as pdproxy serve --config takes it: instances with launch are started here, the others "
            "are where their url says; without, the options below say what there is",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="the kind of engine")] = "builtin",
    prefillers: Annotated[int, typer.Option(min=1, help="how many prefillers")] = 1,
    decoders: Annotated[int, typer.Option(min=1, help="how many decoders")] = 1,
    model: Annotated[
        Path | None, typer.Option(help="model folder [default: builtin has a tiny random model, made once]")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="its name in the API [default: the folder's]")] = None,
    python: Annotated[
        Path | None, typer.Option(help="Python of the environment the engines are installed in [default: this one]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="where the engines compute: cpu or cuda, builtin also cuda:N")
    ] = None,
    devices: Annotated[
        str, typer.Option(help="GPUs, as 0,1,…: shared out to the prefillers, then to the decoders")
    ] = "",
    dtype: Annotated[str | None, typer.Option(help="of weights and KV, on both sides [default: the model's]")] = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="tokens per page: vLLM's --block-size, SGLang's --page-size; builtin and lmcache: 256 unless said",
        ),
    ] = None,
    pd_buffer_size: Annotated[
        str | None, typer.Option(help="builtin, lmcache: a decoder's PD buffer on each rank [default: 64MiB, 2GiB]")
    ] = None,
    engine_args: Annotated[
        list[str] | None, typer.Option(help='further options of all engines, as "--max-model-len 2048"; repeatable')
    ] = None,
    prefill_args: Annotated[
        list[str] | None, typer.Option(help="further options of the prefillers; repeatable")
    ] = None,
    decode_args: Annotated[list[str] | None, typer.Option(help="further options of the decoders; repeatable")] = None,
    prefill_env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the prefillers; repeatable")] = None,
    decode_env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the decoders; repeatable")] = None,
    kv_transfer_config: Annotated[
        str, typer.Option(help="vllm_nixl, lmcache, mooncake: JSON object whose members are added to vLLM's own")
    ] = "{}",
    prefill_config: Annotated[Path | None, typer.Option(help=LMCACHE_YAML.format("prefillers"))] = None,
    decode_config: Annotated[Path | None, typer.Option(help=LMCACHE_YAML.format("decoders"))] = None,
    proxy_args: Annotated[list[str] | None, typer.Option(help="further options of pdproxy serve; repeatable")] = None,
    work_dir: Annotated[
        Path, typer.Option(help="where the tiny model is kept, and in fleet-PORT/ what the processes are configured by")
    ] = Path(".demo"),
    host: Annotated[str, typer.Option(help="address everything listens on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the proxy's port")] = 9100,
    prefill_port: Annotated[int, typer.Option(help="the first prefiller's port; all such ports count up")] = 7100,
    decode_port: Annotated[int, typer.Option(help="the first decoder's port")] = 7200,
    receiver_port: Annotated[
        int, typer.Option(help="builtin, lmcache: where the first decoder takes KV reservations (LMCache: init)")
    ] = 7300,
    alloc_port: Annotated[int, typer.Option(help="lmcache: where the first decoder hands out pages")] = 7400,
    notify_port: Annotated[int, typer.Option(help="where the proxy takes KV signals")] = 7500,
    side_channel_port: Annotated[
        int, typer.Option(help="vllm_nixl: the first prefiller's NIXL side channel; the decoders' follow")
    ] = 5600,
    bootstrap_port: Annotated[
        int, typer.Option(help="sglang, mooncake: the first prefiller's bootstrap server")
    ] = 8998,
    dist_port: Annotated[
        int, typer.Option(help="sglang: where the first engine's ranks meet; eight more for each engine")
    ] = 25000,
    timeout: Annotated[
        float | None, typer.Option(min=1, help="seconds until all must be ready [default: builtin 180, others 600]")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="logs into files there [default: the terminal]")] = None,
    restart: Annotated[
        Literal["never", "on-failure"],
        typer.Option(
            help="what becomes of a process that fails once all were ready: everything ends with it (never), or it is "
            "started again, after 1 s, 2 s, 4 s, …"
        ),
    ] = "never",
    restart_limit: Annotated[
        int, typer.Option(min=1, help="on-failure: so often in a row; a minute without a failure begins a new row")
    ] = ON_FAILURE_LIMIT,
    once: Annotated[bool, typer.Option("--once", help="stop everything when the command has ended")] = False,
) -> None:
    """Start prefillers, decoders and the proxy in front of them on this machine, until Ctrl-C.

    What both sides must have alike, ports, GPUs and sizes are checked before anything is started. COMMAND is run once
    a request has gone through every engine; it finds the proxy in PDPROXY_URL. Whatever ends this process, its children
    end too.
    """
    console = terminal()
    command: list[str] = context.obj or []
    restarts = RestartPolicy(limit=restart_limit) if restart == "on-failure" else NEVER
    try:
        if file is not None:
            refuse_beside_a_file(context, file)
            run = RunOptions(work_dir=work_dir, timeout_s=timeout, log_dir=log_dir, is_once=once, restarts=restarts)
            more = words("--proxy-args", proxy_args or ())
            raise typer.Exit(asyncio.run(launch_file(file, run, command, console, python=python, proxy_args=more)))
        options = FleetOptions(
            engine=engine,
            num_prefillers=prefillers,
            num_decoders=decoders,
            model=model,
            served_model_name=served_model_name,
            work_dir=work_dir,
            host=host,
            port=port,
            prefill_port=prefill_port,
            decode_port=decode_port,
            receiver_port=receiver_port,
            alloc_port=alloc_port,
            notify_port=notify_port,
            side_channel_port=side_channel_port,
            bootstrap_port=bootstrap_port,
            dist_port=dist_port,
            pd_buffer_size=pd_buffer_size,
            chunk_size=chunk_size,
            dtype=dtype,
            python=python,
            device=device,
            devices=tuple(part.strip() for part in devices.split(",") if part.strip()),
            engine_args=words("--engine-args", engine_args or ()),
            prefill=Side(
                args=words("--prefill-args", prefill_args or ()),
                env=variables("--prefill-env", prefill_env or ()),
                lmcache=lmcache("--prefill-config", prefill_config, engine),
            ),
            decode=Side(
                args=words("--decode-args", decode_args or ()),
                env=variables("--decode-env", decode_env or ()),
                lmcache=lmcache("--decode-config", decode_config, engine),
            ),
            proxy_args=words("--proxy-args", proxy_args or ()),
            kv_transfer_config=json_object("--kv-transfer-config", kv_transfer_config),
            timeout_s=timeout,
            log_dir=log_dir,
            is_once=once,
            restarts=restarts,
        )
        raise typer.Exit(asyncio.run(launch(options, command, console)))
    except LaunchError as error:
        console.print(f"launch: {error}", style="red")
        raise typer.Exit(1) from None


def refuse_beside_a_file(context: typer.Context, file: Path) -> None:
    """Raises `PreflightError` if an option says which engines there are: the file says it already."""
    for name in sorted(context.params.keys() - WITH_FILE):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise PreflightError(f"--{name.replace('_', '-')}: {file} says which engines there are; say it there")


def words(option: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Splits the texts into words as a shell would. Raises `PreflightError`."""
    try:
        return tuple(word for text in texts for word in shlex.split(text))
    except ValueError as error:
        raise PreflightError(f"{option}: {error}") from None


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
