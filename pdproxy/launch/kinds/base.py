"""What the launcher has to know of a kind of engine. Kinds are plain functions of the options and start nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdproxy.config.settings import Role
from pdproxy.launch.machine import Machine, environment
from pdproxy.launch.options import FleetOptions, authority
from pdproxy.launch.preflight import Buffer, PortUse
from pdproxy.launch.process import Program

HOST_OWNED = {
    "--host": "choose it with --host (in a file: url)",
    "--port": "choose it with --prefill-port, --decode-port (in a file: url)",
    "--served-model-name": "choose it with --served-model-name (in a file: model)",
    "--config": "give what is in the file in --engine-args",
}
"""Options of every kind of engine that are not for its user to give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One instance, and what it has of the machine."""

    role: Role
    index: int
    """Among those of its role."""
    ordinal: int
    """Among all; prefillers come first."""
    device: str
    name: str
    gpus: tuple[str, ...] = ()
    """Those that it has to itself; none where nobody chose any."""
    cores: tuple[int, ...] = ()

    def port(self, options: FleetOptions) -> int:
        return (options.prefill_port if self.role == "prefill" else options.decode_port) + self.index

    def url(self, options: FleetOptions) -> str:
        return f"http://{authority(options.host, self.port(options))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """What prefillers and decoders must have alike for one to read what the other writes."""

    what: str
    value: str
    source: str
    """The options, one for each side, in which they may differ."""
    remedy: str
    """How to choose it for both at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One engine as it is to be started."""

    seat: Seat
    program: Program
    ports: tuple[PortUse, ...]
    traits: tuple[Trait, ...]
    """The same ones, in the same order, for every engine of a kind."""
    tables: tuple[Mapping[str, object], ...]
    """What the proxy is told of it: ``[[instances]]``."""
    buffer: Buffer | None = None
    """Its PD buffer."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What it reads, by name in the launch's folder."""


class Kind(Protocol):
    """A kind of engine."""

    @property
    def device(self) -> str:
        """Where it computes when nobody says."""

    @property
    def timeout_s(self) -> float:
        """In which it usually is ready."""

    def modules(self, options: FleetOptions) -> Sequence[str]:
        """What its interpreter must have."""

    def num_devices(self, args: Sequence[str]) -> int:
        """How many an instance with these options computes on."""

    def plan(self, options: FleetOptions, seat: Seat, machine: Machine) -> EnginePlan:
        """Raises `PreflightError`."""

    def proxy_options(self, options: FleetOptions) -> tuple[str, ...]:
        """What `pdproxy serve` is told besides where the engines are. Raises `PreflightError`."""


def ports_of(seat: Seat, options: FleetOptions, *more: PortUse) -> tuple[PortUse, ...]:
    """The HTTP port and those that the kind has besides."""
    return PortUse(seat.port(options), seat.name, f"--{seat.role}-port"), *more


def environment_of(
    seat: Seat,
    options: FleetOptions,
    *,
    defaults: Mapping[str, str],
    fixed: Mapping[str, str],
    machine: Machine,
) -> dict[str, str]:
    """What the user has set goes before `defaults`; the launch's own plan, in `fixed`, before everything."""
    chosen = {name: value for name, value in defaults.items() if name not in machine.environ}
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(seat.gpus)} if seat.gpus else {}
    return {**environment(seat.device, machine), **chosen, **options.side(seat.role).env, **gpus, **fixed}


def table(seat: Seat, options: FleetOptions, **more: object) -> dict[str, object]:
    """One instance as the proxy is told of it; what is None is left out."""
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
    """One instance for each data-parallel rank, where there are several."""
    if num_ranks == 1:
        return (whole,)
    return tuple(
        {**whole, "name": f"{whole['name']}-rank-{rank}", "data_parallel_rank": rank} for rank in range(num_ranks)
    )


def same_args(what: str, value: str | None, remedy: str) -> Trait:
    """A trait that is an option of the engine."""
    return Trait(what=what, value=value or "the engine's own", source="--prefill-args, --decode-args", remedy=remedy)
