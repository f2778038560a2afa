"""The module starts SGLang's server in its two disaggregation modes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pdproxy.config.values import Role
from pdproxy.launch.flags import flag, number, refuse
from pdproxy.launch.kinds.base import HOST_OWNED, EnginePlan, Seat, environment_of, ports_of, ranks, same_args, table
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions
from pdproxy.launch.preflight import PortUse
from pdproxy.launch.process import Program

BACKEND = "--disaggregation-transfer-backend"
OWNED = {
    **HOST_OWNED,
    "--model": "choose it with --model",
    "--model-path": "choose it with --model",
    "--disaggregation-mode": "it follows from --prefillers and --decoders",
    "--disaggregation-bootstrap-port": "choose it with --bootstrap-port",
    "--dist-init-addr": "choose it with --dist-port",
    "--nccl-init-addr": "choose it with --dist-port",
    "--device": "choose it with --device",
}
DIST_PORTS = 8
"""The number of ports from one instance to the next. With data-parallel attention SGLang takes those behind the first
one too."""
NUM_DERIVED_PORTS = 6


class Sglang:
    """Sglang is the kind in which the two sides meet at the prefillers' bootstrap servers."""

    device = "cuda"
    timeout_s = 600.0

    def modules(self, options: FleetOptions) -> Sequence[str]:
        backends = {_backend(_args(options, role)) for role in ("prefill", "decode")}
        return "sglang", *sorted(backends & {"nixl", "mooncake"})

    def num_devices(self, args: Sequence[str]) -> int:
        """Returns the number of devices. Data-parallel attention divides the ranks there are; other data parallelism
        multiplies them."""
        copies = 1 if "--enable-dp-attention" in args else _dp_size(args)
        pipeline = number(args, "--pp-size", "--pipeline-parallel-size")
        return number(args, "--tp-size", "--tensor-parallel-size", "--tp") * pipeline * copies

    def plan(self, options: FleetOptions, seat: Seat, machine: Machine) -> EnginePlan:
        refuse(options.engine_args, OWNED, "--engine-args")
        refuse(options.side(seat.role).args, OWNED, options.args_option(seat.role))
        args = _args(options, seat.role)
        bootstrap = options.bootstrap_port + seat.index if seat.role == "prefill" else None
        return EnginePlan(
            seat=seat,
            program=Program(
                name=seat.name,
                command=_command(options, seat, bootstrap),
                ready_url=f"{seat.url(options)}/health",
                env=environment_of(seat, options, defaults={}, fixed={}, machine=machine),
            ),
            ports=ports_of(seat, options, *_ports(options, seat, bootstrap)),
            traits=(
                same_args("--dtype", flag(args, "--dtype") or "auto", "give it to both with --dtype"),
                same_args("--kv-cache-dtype", flag(args, "--kv-cache-dtype") or "auto", "give it in --engine-args"),
                same_args("--page-size", flag(args, "--page-size"), "give it to both with --chunk-size"),
                same_args(BACKEND, _backend(args), "give it to both in --engine-args"),
            ),
            tables=ranks(table(seat, options, bootstrap_port=bootstrap), _dp_size(args)),
        )

    def proxy_options(self, options: FleetOptions) -> tuple[str, ...]:
        return ()


def _command(options: FleetOptions, seat: Seat, bootstrap: int | None) -> tuple[str, ...]:
    return (
        *(str(options.python or sys.executable), "-m", "sglang.launch_server"),
        *("--model-path", str(options.model_path), "--served-model-name", options.model_name),
        *("--host", options.host, "--port", str(seat.port(options)), "--device", seat.device),
        *("--disaggregation-mode", seat.role),
        *(() if bootstrap is None else ("--disaggregation-bootstrap-port", str(bootstrap))),
        *("--dist-init-addr", f"{options.host}:{_dist_port(options, seat)}"),
        *_args(options, seat.role),
    )


def _args(options: FleetOptions, role: Role) -> tuple[str, ...]:
    """Returns the options that do not tell one instance of a role from another."""
    page = ("--page-size", str(options.chunk_size)) if options.chunk_size is not None else ()
    dtype = ("--dtype", options.dtype) if options.dtype is not None else ()
    return (BACKEND, "nixl", *page, *dtype, *options.args(role))


def _backend(words: Sequence[str]) -> str:
    return (flag(words, BACKEND) or "nixl").removesuffix("_tcp")


def _dp_size(words: Sequence[str]) -> int:
    return number(words, "--dp-size", "--data-parallel-size", "--dp")


def _dist_port(options: FleetOptions, seat: Seat) -> int:
    return options.dist_port + DIST_PORTS * seat.ordinal


def _ports(options: FleetOptions, seat: Seat, bootstrap: int | None) -> list[PortUse]:
    num_dist = 1 + (NUM_DERIVED_PORTS if "--enable-dp-attention" in options.args(seat.role) else 0)
    first = _dist_port(options, seat)
    uses = [PortUse(first + step, f"{seat.name}'s ranks", "--dist-port") for step in range(num_dist)]
    if bootstrap is not None:
        uses.append(PortUse(bootstrap, f"{seat.name}'s bootstrap server", "--bootstrap-port"))
    return uses
