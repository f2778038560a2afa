"""The module starts vLLM with its NixlConnector."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.launch.kinds import vllm
from pdproxy.launch.kinds.base import EnginePlan, Seat, ports_of, ranks, table
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions
from pdproxy.launch.preflight import PortUse

LEASE = "kv_lease_duration"


class VllmNixl:
    """VllmNixl is the kind in which decoders fetch the KV; they meet prefillers at their side channels, a port for each
    data-parallel rank."""

    device = "cuda"
    timeout_s = 600.0

    def modules(self, options: FleetOptions) -> Sequence[str]:
        return "vllm", "nixl"

    def num_devices(self, args: Sequence[str]) -> int:
        return vllm.num_devices(args)

    def plan(self, options: FleetOptions, seat: Seat, machine: Machine) -> EnginePlan:
        args = vllm.args(options, seat.role)
        num_ranks = vllm.dp_size(args)
        side = _side_channel(options, seat)
        fixed = {"VLLM_NIXL_SIDE_CHANNEL_HOST": options.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
        command = vllm.command(options, seat, {"kv_connector": "NixlConnector"})
        uses = (
            PortUse(side + rank, f"{seat.name}'s NIXL side channel", "--side-channel-port") for rank in range(num_ranks)
        )
        return EnginePlan(
            seat=seat,
            program=vllm.program(options, seat, command, machine, fixed),
            ports=ports_of(seat, options, *uses),
            traits=(*vllm.traits(args), vllm.block_size(args)),
            tables=ranks(table(seat, options), num_ranks),
        )

    def proxy_options(self, options: FleetOptions) -> tuple[str, ...]:
        lease = vllm.extra(options).get(LEASE)
        return () if lease is None else ("--engine-lease-s", str(lease))


def _side_channel(options: FleetOptions, seat: Seat) -> int:
    """Returns the first port of an engine's side channels. Decoders' ports come behind those of all prefillers."""
    num_ranks = {role: vllm.dp_size(options.args(role)) for role in ("prefill", "decode")}
    before = 0 if seat.role == "prefill" else options.num_prefillers * num_ranks["prefill"]
    return options.side_channel_port + before + seat.index * num_ranks[seat.role]
