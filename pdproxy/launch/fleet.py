"""Prefillers, decoders and the proxy in front of them: checked, started, and stopped together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from pdproxy.launch.agreement import check_agreement
from pdproxy.launch.errors import Interrupted, PreflightError
from pdproxy.launch.fleet_plan import FleetPlan, plan_fleet
from pdproxy.launch.kinds import KINDS
from pdproxy.launch.logs import FileLog, TerminalLog
from pdproxy.launch.machine import Machine, environment
from pdproxy.launch.options import FleetOptions
from pdproxy.launch.preflight import check_buffer, check_model, check_modules, check_ports
from pdproxy.launch.process import Program
from pdproxy.launch.supervisor import Supervisor
from pdproxy.launch.tiny_model import make_tiny_model


async def launch(options: FleetOptions, command: Sequence[str], console: Console) -> int:
    """Start all, run `command` once they are ready, and serve until stopped; return the exit status.

    `command` finds the proxy's address in ``PDPROXY_URL``. With `is_once` its status ends the launch; otherwise only a
    failure of it does. Raises `LaunchError`; nothing is left running in any case.
    """
    plan = check(options)
    names = [engine.seat.name for engine in plan.engines] + ["proxy"]
    log = FileLog(options.log_dir, names) if options.log_dir is not None else TerminalLog(console, max(map(len, names)))
    is_ready = False
    try:
        with log:
            async with Supervisor(log) as supervisor:
                if options.model is None:
                    check_buffers(plan, await make_tiny_model(supervisor, options.tiny_model, console))
                write_files(options.folder, plan.files)
                await _start(supervisor, options, plan, console)
                is_ready = True
                status = await _run_command(supervisor, command, options.url) if command else 0
                if status == 0 and not options.is_once:
                    console.print(f"serving on [bold]{options.url}/v1[/bold] until Ctrl-C")
                    await supervisor.until_one_dies()
                return status
    except Interrupted as stop:
        console.print(str(stop))
        return 0 if is_ready and not options.is_once else 128 + stop.signum


def check(options: FleetOptions) -> FleetPlan:
    """What can be known before anything runs. Raises `PreflightError`."""
    if options.model is None and options.engine != "builtin":
        raise PreflightError(f"--engine {options.engine} needs a model folder; name one with --model")
    if options.model is not None:
        check_model(options.model)
    plan = plan_fleet(options, Machine.here())
    check_agreement(plan.engines)
    if options.model is not None:
        check_buffers(plan, options.model)
    check_ports(options.host, plan.ports)
    check_modules(KINDS[options.engine].modules(options), options.python)
    return plan


def check_buffers(plan: FleetPlan, model: Path) -> None:
    """Those of one role are alike."""
    for buffer in {engine.buffer for engine in plan.engines if engine.buffer is not None}:
        check_buffer(
            model, buffer.size, buffer.chunk_size, tp_size=buffer.tp_size, kv_cache_dtype=buffer.kv_cache_dtype
        )


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """What the processes read when they start."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


async def _start(supervisor: Supervisor, options: FleetOptions, plan: FleetPlan, console: Console) -> None:
    supervisor.spawn(*(engine.program for engine in plan.engines))
    supervisor.spawn(plan.proxy)

    def on_ready(name: str, seconds: float) -> None:
        console.print(f"{name} is ready after {seconds:.1f} s", highlight=False)

    with console.status(f"starting {options.num_prefillers} prefillers, {options.num_decoders} decoders and the proxy"):
        await supervisor.until_ready(options.timeout_s or KINDS[options.engine].timeout_s, on_ready)


async def _run_command(supervisor: Supervisor, command: Sequence[str], url: str) -> int:
    env = {**environment("cpu"), "PDPROXY_URL": url}
    process = await supervisor.run(Program(name="command", command=tuple(command), env=env, is_captured=False))
    assert process.status is not None
    return process.status if process.status >= 0 else 128 - process.status
