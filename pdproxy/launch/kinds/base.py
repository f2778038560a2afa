"""The module says what the launcher has to know of a kind of engine. Kinds are plain functions of the options and start
nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdproxy.config.values import Role
from pdproxy.launch.machine import Machine, environment
from pdproxy.launch.options import FleetOptions, authority
from pdproxy.launch.preflight import Buffer, PortUse
from pdproxy.launch.process import Program

HASH_SEED = "PYTHONHASHSEED"
HOST_OWNED = {
    "--host": "choose it with --host (in a file: url)",
    "--port": "choose it with --prefill-port, --decode-port (in a file: url)",
    "--served-model-name": "choose it with --served-model-name (in a file: model)",
    "--config": "give what is in the file in --engine-args",
}
"""The options of every kind of engine that its user must not give, each with the way to choose its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Seat is one instance, and what it has of the machine."""

    role: Role
    index: int
    """Holds the number of the instance among those of its role."""
    ordinal: int
    """Holds the number of the instance among all; prefillers come first."""
    device: str
    name: str
    gpus: tuple[str, ...] = ()
    """Holds the GPUs that the instance has to itself; it is empty where none were chosen."""
    cores: tuple[int, ...] = ()

    def port(self, options: FleetOptions) -> int:
        return (options.prefill_port if self.role == "prefill" else options.decode_port) + self.index

    def url(self, options: FleetOptions) -> str:
        return f"http://{authority(options.host, self.port(options))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """Trait is what prefillers and decoders must have alike, so that one can read what the other writes."""

    what: str
    value: str
    source: str
    """Holds the options in which the sides may differ, one for each side."""
    remedy: str
    """Holds the way to choose the value for both sides at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """EnginePlan is one engine as it is to be started."""

    seat: Seat
    program: Program
    ports: tuple[PortUse, ...]
    traits: tuple[Trait, ...]
    """Holds the traits, which are the same ones, in the same order, for every engine of a kind."""
    tables: tuple[Mapping[str, object], ...]
    """Holds what the proxy is told of the engine: ``[[instances]]``."""
    buffer: Buffer | None = None
    """Holds the engine's PD buffer."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Holds the files that the engine reads, by name in the launch's folder."""


class Kind(Protocol):
    """Kind says how a kind of engine is started."""

    @property
    def device(self) -> str:
        """Returns where the engine computes when the options do not say it."""

    @property
    def timeout_s(self) -> float:
        """Returns the seconds in which the engine usually is ready."""

    def modules(self, options: FleetOptions) -> Sequence[str]:
        """Returns the modules which the engine's interpreter must have."""

    def num_devices(self, args: Sequence[str]) -> int:
        """Returns how many devices an instance with these options computes on."""

    def plan(self, options: FleetOptions, seat: Seat, machine: Machine) -> EnginePlan:
        """Returns the plan of one engine. Raises `PreflightError`."""

    def proxy_options(self, options: FleetOptions) -> tuple[str, ...]:
        """Returns what `pdproxy serve` is told besides where the engines are. Raises `PreflightError`."""


def ports_of(seat: Seat, options: FleetOptions, *more: PortUse) -> tuple[PortUse, ...]:
    """Returns the engine's HTTP port and those that the kind has besides."""
    return PortUse(seat.port(options), seat.name, f"--{seat.role}-port"), *more


def environment_of(
    seat: Seat,
    options: FleetOptions,
    *,
    defaults: Mapping[str, str],
    fixed: Mapping[str, str],
    machine: Machine,
) -> dict[str, str]:
    """Returns the engine's environment. What the user has set goes before `defaults`; the launch's own plan, in
    `fixed`, goes before everything."""
    chosen = {name: value for name, value in defaults.items() if name not in machine.environ}
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(seat.gpus)} if seat.gpus else {}
    return {**environment(seat.device, machine), **chosen, **options.side(seat.role).env, **gpus, **fixed}


def table(seat: Seat, options: FleetOptions, **more: object) -> dict[str, object]:
    """Returns one instance as the proxy is told of it, and leaves out what is None."""
    known = {
        "name": seat.name,
        "role": seat.role,
        "url": seat.url(options),
        "engine": options.engine,
        "model": options.model_name,
        **more,
    }
    return {name: value for name, value in known.items() if value is not None}


def ranks(whole: Mapping[str, object], num_ranks: int) -> tuple[Mapping[str, object], ...]:
    """Returns one instance for each data-parallel rank; a single rank has the instance itself."""
    if num_ranks == 1:
        return (whole,)
    return tuple(
        {**whole, "name": f"{whole['name']}-rank-{rank}", "data_parallel_rank": rank} for rank in range(num_ranks)
    )


def same_args(what: str, value: str | None, remedy: str) -> Trait:
    """Returns a trait that is an option of the engine."""
    return Trait(what=what, value=value or "the engine's own", source="--prefill-args, --decode-args", remedy=remedy)
