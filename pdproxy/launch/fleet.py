"""The module starts prefillers, decoders and the proxy in front of them: they are checked, started, and stopped
together."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pdproxy.launch.agreement import check_agreement, check_all_agree
from pdproxy.launch.canaries import served_models, until_served
from pdproxy.launch.errors import Interrupted, PreflightError
from pdproxy.launch.file_plan import plan_file
from pdproxy.launch.fleet_plan import FleetPlan, plan_fleet
from pdproxy.launch.keys import with_fresh_keys
from pdproxy.launch.logs import FileLog, TerminalLog, doing
from pdproxy.launch.machine import Machine, environment
from pdproxy.launch.options import FleetOptions, RunOptions
from pdproxy.launch.preflight import (
    check_buffer,
    check_cuda,
    check_memory,
    check_model,
    check_modules,
    check_ports,
    config_of,
    memory_bytes,
    tiny_config_of,
)
from pdproxy.launch.process import Program
from pdproxy.launch.supervisor import Supervisor
from pdproxy.launch.tiny_model import make_tiny_model

CHECKING = "checking the machine, its ports and the model"
CANARIES_S = 30.0
"""The least seconds that the canaries have, however late the proxy was: a canary takes a moment."""
AFTER_DRAIN_S = 10.0
"""The seconds that the proxy may take to end, beyond the time that it gives to requests under way."""


async def launch(options: FleetOptions, command: Sequence[str], console: Console) -> int:
    """Starts all, runs `command` once they are ready, and serves until stopped; returns the exit status.

    `command` finds the proxy's address in ``PDPROXY_URL``. With `is_once` its status ends the launch; otherwise only a
    failure of it does. Raises `LaunchError`; nothing is left running in any case.
    """
    return await start(check(options, console.print), options.run, command, console)


async def launch_file(
    path: Path,
    run: RunOptions,
    command: Sequence[str],
    console: Console,
    *,
    python: Path | None = None,
    proxy_args: Sequence[str] = (),
) -> int:
    """Does the same as `launch` for a fleet that a file describes."""
    plan = plan_file(path, run, Machine.here(), python=python, proxy_args=proxy_args)
    console.print(CHECKING)
    return await start(check_file(plan, path), run, command, console)


async def start(plan: FleetPlan, run: RunOptions, command: Sequence[str], console: Console) -> int:
    """Starts a plan that has been checked, as `launch` says; returns the exit status."""
    check_command(command)
    write_files(plan.folder, plan.files)
    log = FileLog(run.log_dir, plan.names) if run.log_dir is not None else TerminalLog(console, plan.names)
    is_ready = False
    try:
        with log:
            async with Supervisor(log, restarts=run.restarts, notice=console.print) as supervisor:
                await make_model(supervisor, plan, console)
                await _until_ready(supervisor, plan, run.timeout_s or plan.timeout_s, console)
                is_ready = True
                status = await _run_command(supervisor, command, plan.url) if command else 0
                if status == 0 and not run.is_once:
                    await _greet(plan, console)
                    await supervisor.until_one_dies()
                return status
    except Interrupted as stop:
        console.print(str(stop))
        return 0 if is_ready and not run.is_once else 128 + stop.signum


def check(options: FleetOptions, say: Callable[[str], None] = lambda text: None) -> FleetPlan:
    """Returns the plan of these options, after it has checked what can be known before anything runs. `say` is told
    when it begins with what takes a moment. Raises `PreflightError`."""
    if options.model is None and options.engine != "builtin":
        raise PreflightError(f"--engine {options.engine} needs a model folder; name one with --model")
    plan = plan_fleet(options, Machine.here())
    check_agreement(plan.engines)
    say(CHECKING)
    check_needs(plan)
    return with_fresh_keys(plan, os.environ)


def check_file(plan: FleetPlan, path: Path) -> FleetPlan:
    """Checks the plan of a file in the same way, and returns it. Raises `PreflightError`."""
    try:
        check_all_agree(plan.engines)
        check_needs(plan)
    except PreflightError as error:
        raise PreflightError(f"{path}: {error}") from None
    return plan


def check_needs(plan: FleetPlan) -> None:
    """Checks models, buffers, ports and interpreters, whoever has chosen them. Raises `PreflightError`."""
    models = {needs.model for needs in plan.needs if needs.model is not None}
    for model in models:
        check_model(model)
    on_host = [one.buffer for one in plan.engines if one.buffer is not None and one.seat.device == "cpu"]
    check_memory(on_host, memory_bytes())
    check_ports(plan.host, plan.ports)
    for python, modules in {(needs.python, needs.modules) for needs in plan.needs}:
        check_modules(modules, python)
    pairs = zip(plan.engines, plan.needs, strict=True)
    for python in {needs.python for one, needs in pairs if one.seat.device != "cpu" and "torch" in needs.modules}:
        check_cuda(python)
    if any(engine.buffer is not None for engine in plan.engines):
        for model in models:  # the last, because it takes seconds
            check_buffers(plan, config_of(model), model)


def check_buffers(plan: FleetPlan, config: object, model: Path | None = None) -> None:
    """Checks the buffers of the engines that want this model, whose config it is; None means the model that is made for
    them. Raises `PreflightError`."""
    pairs = zip(plan.engines, plan.needs, strict=True)
    for buffer in {one.buffer for one, needs in pairs if one.buffer is not None and needs.model == model}:
        check_buffer(
            config, buffer.size, buffer.chunk_size, tp_size=buffer.tp_size, kv_cache_dtype=buffer.kv_cache_dtype
        )


async def make_model(supervisor: Supervisor, plan: FleetPlan, console: Console) -> None:
    """Makes the tiny model, where the plan wants it. Raises `LaunchError`."""
    if plan.tiny_model is not None:
        check_buffers(plan, tiny_config_of(await make_tiny_model(supervisor, plan.tiny_model, console)))


def check_command(command: Sequence[str]) -> None:
    """Raises `PreflightError` if there is no such program to run once all are ready."""
    if command and shutil.which(command[0]) is None:
        raise PreflightError(f"there is no program {command[0]}, which is to be run once all are ready")


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the files that the processes read when they start. Raises `PreflightError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PreflightError(f"{folder} cannot be written: {error.strerror}; choose another with --work-dir") from None


async def _until_ready(supervisor: Supervisor, plan: FleetPlan, timeout_s: float, console: Console) -> None:
    """Starts every process, and waits until each answers and a request has gone through every engine."""
    deadline = time.monotonic() + timeout_s
    supervisor.spawn(*(engine.program for engine in plan.engines))
    supervisor.spawn(replace(plan.proxy, grace_s=plan.drain_s + AFTER_DRAIN_S))

    def on_ready(name: str, seconds: float) -> None:
        console.print(f"{name} is ready after {seconds:.1f} s")

    with doing(console, f"starting {plan.what}"):
        await supervisor.until_ready(timeout_s, on_ready)
    with doing(console, "waiting until a request has gone through each of them"):
        left_s = max(CANARIES_S, deadline - time.monotonic())
        fleet = await supervisor.while_all_live(until_served(plan.url, plan.instances, left_s))
    for one in fleet:
        if not one.is_ready:
            console.print(f"{one.name} is not ready: {one.why}; it gets requests once it is")


async def _greet(plan: FleetPlan, console: Console) -> None:
    """Says where the fleet is, which model it serves, and how to ask it at once."""
    models, is_locked = await served_models(plan.url)
    told = {str(table["model"]) for engine in plan.engines for table in engine.tables if "model" in table}
    models = models or sorted(told)
    key = " -H 'authorization: Bearer KEY'" if is_locked else ""
    body = json.dumps({"model": models[0] if models else "MODEL", "prompt": "Once upon a time", "max_tokens": 32})
    ask = f"curl {plan.url}/v1/completions -H 'content-type: application/json'{key} -d {shlex.quote(body)}"
    console.print(Text.assemble("serving on ", (f"{plan.url}/v1", "bold"), " until Ctrl-C"))
    for what, value in (("model", ", ".join(models)), ("status page", f"{plan.url}/ui"), ("to try it", ask)):
        if value:
            console.print(f"  {what:<11}  {value}")


async def _run_command(supervisor: Supervisor, command: Sequence[str], url: str) -> int:
    env = {**environment("cpu"), "PDPROXY_URL": url}
    process = await supervisor.run(Program(name="command", command=tuple(command), env=env, is_captured=False))
    assert process.status is not None
    return process.status if process.status >= 0 else 128 - process.status
