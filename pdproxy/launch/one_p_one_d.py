"""One prefiller, one decoder and the proxy in front of them, with the built-in engines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pdproxy.launch.errors import Interrupted, LaunchError, describe
from pdproxy.launch.logs import FileLog, TerminalLog
from pdproxy.launch.preflight import PortUse, check_buffer, check_model, check_modules, check_ports
from pdproxy.launch.process import Program
from pdproxy.launch.supervisor import Supervisor

ENGINE_MODULES = ("torch", "nixl", "transformers", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePOneD:
    """What can be chosen. Field for field the options in `pdproxy.launch.command`, which documents them."""

    model: Path | None
    work_dir: Path
    host: str
    port: int
    prefill_port: int
    decode_port: int
    receiver_port: int
    notify_port: int
    pd_buffer_size: str
    chunk_size: int
    device: str
    timeout_s: float
    log_dir: Path | None
    is_once: bool

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def tiny_model(self) -> Path:
        """Where the tiny model is made when no model is named."""
        return self.work_dir / "tiny-model"

    def ports(self) -> list[PortUse]:
        return [
            PortUse(self.port, "proxy", "--port"),
            PortUse(self.prefill_port, "prefiller", "--prefill-port"),
            PortUse(self.decode_port, "decoder", "--decode-port"),
            PortUse(self.receiver_port, "decoder's receiver", "--receiver-port"),
            PortUse(self.notify_port, "KV signals", "--notify-port"),
        ]


async def launch(options: OnePOneD, command: Sequence[str], console: Console) -> int:
    """Start all three, run `command` once they are ready, and serve until stopped; return the exit status.

    `command` finds the proxy's address in ``PDPROXY_URL``. With `is_once` its status ends the launch; otherwise only a
    failure of it does. Raises `LaunchError`; nothing is left running in any case.
    """
    check_modules(ENGINE_MODULES, "engine")
    if options.model is not None:
        check_model(options.model)
    check_ports(options.host, options.ports())
    log = (
        FileLog(options.log_dir, ("prefill", "decode", "proxy"))
        if options.log_dir is not None
        else TerminalLog(console)
    )
    is_ready = False
    try:
        with log:
            async with Supervisor(log) as supervisor:
                model = options.model or await make_tiny_model(supervisor, options.tiny_model, console)
                check_buffer(model, options.pd_buffer_size, options.chunk_size)
                await _start(supervisor, options, model, console)
                is_ready = True
                status = await _run_command(supervisor, command, options.url) if command else 0
                if status == 0 and not options.is_once:
                    console.print(f"serving on [bold]{options.url}/v1[/bold] until Ctrl-C")
                    await supervisor.until_one_dies()
                return status
    except Interrupted as stop:
        console.print(str(stop))
        return 0 if is_ready and not options.is_once else 128 + stop.signum


async def make_tiny_model(supervisor: Supervisor, folder: Path, console: Console) -> Path:
    """A small random model in `folder`, unless one is there; moved into place only when complete."""
    if (folder / "config.json").is_file():
        return folder
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = (sys.executable, "-m", "transfer.engine.tiny", "--out", str(part), "--seed", "0")
    program = Program(name="tiny", command=command, env=environment("cpu"))
    try:
        with console.status(f"making a tiny random model in {folder}"):
            process = await supervisor.run(program)
        if process.status:
            raise LaunchError("\n  ".join([f"making the tiny model {describe(process.status)}:", *process.tail]))
        # Fails where another launch was faster, which is as good.
        with suppress(OSError):
            part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    check_model(folder)
    console.print(f"made a tiny random model in {folder}", highlight=False)
    return folder


async def _start(supervisor: Supervisor, options: OnePOneD, model: Path, console: Console) -> None:
    supervisor.spawn(*engines(options, model))
    supervisor.spawn(proxy(options, model))

    def on_ready(name: str, seconds: float) -> None:
        console.print(f"{name} is ready after {seconds:.1f} s", highlight=False)

    with console.status("starting the prefiller, the decoder and the proxy"):
        await supervisor.until_ready(options.timeout_s, on_ready)


async def _run_command(supervisor: Supervisor, command: Sequence[str], url: str) -> int:
    env = {**environment("cpu"), "PDPROXY_URL": url}
    process = await supervisor.run(Program(name="command", command=tuple(command), env=env, is_captured=False))
    assert process.status is not None
    return process.status if process.status >= 0 else 128 - process.status


def engines(options: OnePOneD, model: Path) -> tuple[Program, Program]:
    """The prefiller and the decoder."""
    both = ("--model", str(model), "--host", options.host, "--device", options.device)
    chunks = ("--chunk-size", str(options.chunk_size))
    buffer = ("--receiver-port", str(options.receiver_port), "--pd-buffer-size", options.pd_buffer_size)

    def engine(role: str, port: int, *more: str) -> Program:
        head = (sys.executable, "-m", "transfer.engine", "--role", role, "--port", str(port))
        url = f"http://{options.host}:{port}/health"
        return Program(
            name=role, command=(*head, *both, *chunks, *more), ready_url=url, env=environment(options.device)
        )

    return engine("prefill", options.prefill_port), engine("decode", options.decode_port, *buffer)


def proxy(options: OnePOneD, model: Path) -> Program:
    """Ready only once a request would succeed, which takes both engines."""
    command = (
        *(sys.executable, "-m", "pdproxy", "serve"),
        *("--prefill", f"http://{options.host}:{options.prefill_port}"),
        *("--decode", f"http://{options.host}:{options.decode_port}"),
        *("--model", str(model), "--host", options.host, "--port", str(options.port)),
        *("--proxy-host", options.host, "--proxy-port", str(options.notify_port)),
        *("--pd-buffer-size", options.pd_buffer_size, "--chunk-size", str(options.chunk_size)),
    )
    return Program(name="proxy", command=command, ready_url=f"{options.url}/ready", env=environment("cpu"))


def environment(device: str) -> dict[str, str]:
    """Defaults for processes that share one machine; what the user has set stays as it is."""
    cores = len(os.sched_getaffinity(0))
    defaults = {
        # Two engines compute at the same time at most, and the proxy needs a core as well.
        "OMP_NUM_THREADS": "2" if cores >= 6 else "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "UCX_NET_DEVICES": "lo",
        # Loopback must not go through an HTTP proxy.
        "NO_PROXY": "localhost,127.0.0.1,::1",
    }
    if device == "cpu":
        # With a GPU this would take away the transports that reach its memory.
        defaults["UCX_TLS"] = "tcp,sm,self"
    return {name: value for name, value in defaults.items() if name not in os.environ}
