"""What runs where: every engine with its ports, its part of the machine and its command line, and the proxy's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdproxy.config import Role
from pdproxy.launch.errors import PreflightError
from pdproxy.launch.kinds import KINDS
from pdproxy.launch.kinds.base import EnginePlan, Seat
from pdproxy.launch.machine import Machine, environment
from pdproxy.launch.options import FleetOptions
from pdproxy.launch.preflight import PortUse
from pdproxy.launch.process import Program

CONFIG = "serve.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Everything that is to be started, in the order in which it is."""

    engines: tuple[EnginePlan, ...]
    proxy: Program
    ports: tuple[PortUse, ...]
    files: Mapping[str, str]
    """By name in the launch's folder."""


def plan_fleet(options: FleetOptions, machine: Machine) -> FleetPlan:
    """Starts nothing and looks at nothing. Raises `PreflightError`."""
    kind = KINDS[options.engine]
    engines = tuple(kind.plan(options, seat, machine) for seat in _seats(options, machine))
    files = {name: text for engine in engines for name, text in engine.files.items()}
    return FleetPlan(
        engines=engines,
        proxy=_proxy(options, machine),
        ports=(
            PortUse(options.port, "proxy", "--port"),
            *(port for engine in engines for port in engine.ports),
            PortUse(options.notify_port, "KV signals", "--notify-port"),
        ),
        files={**files, CONFIG: _toml(options, [table for engine in engines for table in engine.tables])},
    )


def _seats(options: FleetOptions, machine: Machine) -> Iterator[Seat]:
    device = _device(options)
    prefillers: list[Role] = ["prefill"] * options.num_prefillers
    decoders: list[Role] = ["decode"] * options.num_decoders
    roles = prefillers + decoders
    gpus = _gpus(options, device, roles, machine)
    num_cores = max(1, len(machine.cores) // len(roles))
    for ordinal, role in enumerate(roles):
        # With more engines than cores they have to share.
        first = ordinal * num_cores % len(machine.cores)
        yield Seat(
            role=role,
            index=ordinal if role == "prefill" else ordinal - options.num_prefillers,
            ordinal=ordinal,
            device=device,
            gpus=gpus[ordinal],
            cores=machine.cores[first : first + num_cores],
        )


def _device(options: FleetOptions) -> str:
    """``cpu``, ``cuda``, or for the built-in engine alone ``cuda:N``. Raises `PreflightError`."""
    device = options.device or ("cuda" if options.devices else KINDS[options.engine].device)
    if options.engine != "builtin" and device not in ("cpu", "cuda"):
        raise PreflightError(
            f"--device {device} is neither cpu nor cuda; which GPU an engine gets is said by --devices"
        )
    if options.devices and device != "cuda":
        raise PreflightError(f"--devices names GPUs, and --device is {device}; leave one of them out")
    return device


def _gpus(options: FleetOptions, device: str, roles: Sequence[Role], machine: Machine) -> list[tuple[str, ...]]:
    """Each engine's own, in order. Raises `PreflightError` where there are too few."""
    is_shared = options.engine == "builtin" and not options.devices
    if device == "cpu" or is_shared:
        return [()] * len(roles)
    kind = KINDS[options.engine]
    counts = [kind.num_devices(options.args(role)) for role in roles]
    there = options.devices or machine.gpus
    if len(there) < sum(counts):
        raise PreflightError(
            f"--devices: the engines need {sum(counts)} GPUs and there are {len(there)}; name as many (one of them "
            "more than once where engines are to share it), start fewer engines, or give --device cpu"
        )
    return [there[sum(counts[:index]) : sum(counts[: index + 1])] for index in range(len(roles))]


def _proxy(options: FleetOptions, machine: Machine) -> Program:
    """Ready only once a request would succeed, which takes the engines."""
    command = (
        *(sys.executable, "-m", "pdproxy", "serve", "--config", str(options.folder / CONFIG)),
        *("--model", str(options.model_path), "--host", options.host, "--port", str(options.port)),
        *("--proxy-host", options.host, "--proxy-port", str(options.notify_port)),
        *KINDS[options.engine].proxy_options(options),
        *options.proxy_args,
    )
    return Program(name="proxy", command=command, ready_url=f"{options.url}/ready", env=environment("cpu", machine))


def _toml(options: FleetOptions, tables: Sequence[Mapping[str, object]]) -> str:
    """What is TOML of these values is JSON as well, but for characters that JSON would escape in its own way."""
    lines = ["# The engines of one launch, for pdproxy serve --config."]
    for table in tables:
        lines += ["", "[[instances]]"]
        lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"
