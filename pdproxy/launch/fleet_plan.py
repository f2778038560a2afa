"""The module plans what runs where: every engine with its ports, its part of the machine and its command line, and the
proxy's.

It plans a fleet that options describe, in which all engines of a role are alike. `file_plan` plans a fleet that a file
describes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdproxy.config import settings as config
from pdproxy.config.settings import Settings
from pdproxy.config.values import Role
from pdproxy.errors import ConfigError
from pdproxy.launch.errors import PreflightError
from pdproxy.launch.flags import flag
from pdproxy.launch.kinds import KINDS
from pdproxy.launch.kinds.base import EnginePlan, Seat
from pdproxy.launch.machine import Machine, environment
from pdproxy.launch.options import EVERYWHERE, FleetOptions
from pdproxy.launch.preflight import PortUse, is_builtin_device
from pdproxy.launch.process import Program

CONFIG = "serve.toml"
PROXY = "proxy"
NOUNS = ("prefiller", "decoder")
ENGINES_PER_CORE = 2
"""The number of engines which start on one core in the time in which a single one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs is what there has to be before an engine can be started."""

    model: Path | None
    """Holds the folder of the model; None means the tiny model's."""
    python: Path | None
    """Holds the interpreter that has `modules`; None means this one."""
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """FleetPlan is everything that is to be started, in the order in which it is."""

    engines: tuple[EnginePlan, ...]
    needs: tuple[Needs, ...]
    """Holds the needs of each engine, in the engines' order."""
    proxy: Program
    ports: tuple[PortUse, ...]
    host: str
    """Holds the host of the ports that have none of their own."""
    url: str
    """Holds the proxy's address, as this machine reaches it."""
    files: Mapping[str, str]
    """Holds the texts of the files, by their names in `folder`."""
    folder: Path
    tiny_model: Path | None
    """Holds the folder of the tiny model, which is made before anything is started, unless it is there; None means that
    no tiny model is wanted."""
    timeout_s: float
    """Holds the seconds in which all should be ready, where the user does not say it."""
    drain_s: float = 0.0
    """Holds the seconds that the proxy gives to requests under way once it is asked to end."""

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of what is started."""
        return *(engine.seat.name for engine in self.engines), PROXY

    @property
    def instances(self) -> tuple[str, ...]:
        """Returns the engines that are started, by the names that the proxy has for them."""
        return tuple(str(table["name"]) for engine in self.engines for table in engine.tables)

    @property
    def what(self) -> str:
        """Returns what is started, in a few words."""
        counts = {role: sum(engine.seat.role == role for engine in self.engines) for role in ("prefill", "decode")}
        parts = [f"{number} {noun}{'s' * (number != 1)}" for noun, number in zip(NOUNS, counts.values(), strict=True)]
        return f"{', '.join(parts)} and the proxy"


def plan_fleet(options: FleetOptions, machine: Machine) -> FleetPlan:
    """Returns the plan of a fleet. It starts nothing and looks at nothing. Raises `PreflightError`."""
    if options.host in EVERYWHERE:
        raise PreflightError(
            f"--host {options.host} is no address at which engines find one another; to have the proxy alone listen "
            f'everywhere, give --proxy-args "--host {options.host}" instead'
        )
    _check_port(options)
    kind = KINDS[options.engine]
    engines = tuple(kind.plan(options, seat, machine) for seat in _seats(options, machine))
    files = {name: text for engine in engines for name, text in engine.files.items()}
    needs = Needs(model=options.model, python=options.python, modules=tuple(kind.modules(options)))
    return FleetPlan(
        engines=engines,
        needs=(needs,) * len(engines),
        proxy=_proxy(options, machine),
        ports=(
            PortUse(options.port, "proxy", "--port"),
            *(port for engine in engines for port in engine.ports),
            PortUse(options.notify_port, "KV signals", "--notify-port"),
        ),
        host=options.host,
        url=options.url,
        files={**files, CONFIG: _toml([table for engine in engines for table in engine.tables])},
        folder=options.folder,
        tiny_model=options.tiny_model if options.model is None else None,
        timeout_s=kind.timeout_s * patience(len(engines), machine),
        drain_s=drain_s(_settings(options.proxy_args)),
    )


def _check_port(options: FleetOptions) -> None:
    """Raises `PreflightError` where the proxy's further options move it to a port at which nobody would look for it."""
    port = flag(options.proxy_args, "--port")
    if port is not None and port != str(options.port):
        raise PreflightError(
            f"--proxy-args: --port {port} is not where this launch looks for the proxy, which is port {options.port}; "
            "leave it out there; pdproxy up has a --port of its own"
        )


def patience(num_engines: int, machine: Machine) -> int:
    """Returns how many times longer than one engine `num_engines` take to start, when they have to share the cores."""
    return math.ceil(max(1, num_engines) / (ENGINES_PER_CORE * len(machine.cores)))


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
        index = ordinal if role == "prefill" else ordinal - options.num_prefillers
        yield Seat(
            role=role,
            index=index,
            ordinal=ordinal,
            device=device,
            name=f"{role}-{index}",
            gpus=gpus[ordinal],
            cores=machine.cores[first : first + num_cores],
        )


def _device(options: FleetOptions) -> str:
    """Returns ``cpu``, ``cuda``, or for the built-in engine alone ``cuda:N``. Raises `PreflightError`."""
    device = options.device or ("cuda" if options.devices else KINDS[options.engine].device)
    if options.engine != "builtin" and device not in ("cpu", "cuda"):
        raise PreflightError(
            f"--device {device} is neither cpu nor cuda; which GPU an engine gets is said by --devices"
        )
    if options.engine == "builtin" and not is_builtin_device(device):
        raise PreflightError(f"--device {device} is neither cpu nor cuda nor cuda:N")
    if options.devices and device != "cuda":
        raise PreflightError(f"--devices names GPUs, and --device is {device}; leave one of them out")
    return device


def _gpus(options: FleetOptions, device: str, roles: Sequence[Role], machine: Machine) -> list[tuple[str, ...]]:
    """Returns the GPUs of each engine, in order. Raises `PreflightError` where there are too few."""
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
    """Returns the proxy's program. It is ready only once a request would succeed, which takes the engines."""
    command = (
        *(sys.executable, "-m", "pdproxy", "serve", "--config", str(options.folder / CONFIG)),
        *no_grace(_settings(options.proxy_args)),
        *("--model", str(options.model_path), "--host", options.host, "--port", str(options.port)),
        *("--proxy-host", options.host, "--proxy-port", str(options.notify_port)),
        *KINDS[options.engine].proxy_options(options),
        *options.proxy_args,
    )
    return Program(name=PROXY, command=command, ready_url=f"{options.url}/ready", env=environment("cpu", machine))


def no_grace(settings: Settings) -> tuple[str, ...]:
    """Returns the flags with which a proxy does not wait for load balancers when it is asked to end: whoever ends a
    launch ends the engines too. There are none where the user has said how long it waits."""
    return () if "drain_grace_s" in settings.model_fields_set else ("--drain-grace-s", "0")


def drain_s(settings: Settings) -> float:
    """Returns the seconds that a launch's proxy may take from SIGTERM on until it has ended what is under way."""
    return settings.drain_timeout_s + (0.0 if no_grace(settings) else settings.drain_grace_s)


def _settings(proxy_args: Sequence[str]) -> Settings:
    """Returns the proxy's settings. Raises `PreflightError` for options that the proxy would not take."""
    try:
        return config.load(proxy_args)
    except ConfigError as error:
        raise PreflightError(f"--proxy-args: {error}") from None


def _toml(tables: Sequence[Mapping[str, object]]) -> str:
    """Returns the tables as TOML. It writes the values as JSON: for values like these both have the same form, but for
    characters that JSON would escape in its own way."""
    lines = ["# The engines of one launch, for pdproxy serve --config."]
    for table in tables:
        lines += ["", "[[instances]]"]
        lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"
