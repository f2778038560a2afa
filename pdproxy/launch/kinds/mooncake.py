"""The module starts vLLM with its MooncakeConnector."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.launch.kinds import vllm
from pdproxy.launch.kinds.base import EnginePlan, Seat, ports_of, ranks, table
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions
from pdproxy.launch.preflight import PortUse


class Mooncake:
    """Mooncake is the kind in which prefillers send the KV, and decoders meet them at their bootstrap servers."""

    device = "cuda"
    timeout_s = 600.0

    def modules(self, options: FleetOptions) -> Sequence[str]:
        return "vllm", "mooncake"

    def num_devices(self, args: Sequence[str]) -> int:
        return vllm.num_devices(args)

    def plan(self, options: FleetOptions, seat: Seat, machine: Machine) -> EnginePlan:
        args = vllm.args(options, seat.role)
        bootstrap = options.bootstrap_port + seat.index if seat.role == "prefill" else None
        # Its default, RDMA, is what a machine without GPUs most probably has not either.
        extra = {"mooncake_protocol": "tcp"} if seat.device == "cpu" else {}
        command = vllm.command(options, seat, {"kv_connector": "MooncakeConnector", vllm.EXTRA: extra})
        fixed, uses = {}, []
        if bootstrap is not None:
            fixed = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap)}
            uses = [PortUse(bootstrap, f"{seat.name}'s bootstrap server", "--bootstrap-port")]
        return EnginePlan(
            seat=seat,
            program=vllm.program(options, seat, command, machine, fixed),
            ports=ports_of(seat, options, *uses),
            traits=(*vllm.traits(args), vllm.block_size(args)),
            tables=ranks(table(seat, options, bootstrap_port=bootstrap), vllm.dp_size(args)),
        )

    def proxy_options(self, options: FleetOptions) -> tuple[str, ...]:
        return ()
