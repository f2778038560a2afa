"""The module starts vLLM with pdproxy's own connector."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pdproxy.launch.errors import PreflightError
from pdproxy.launch.kinds import vllm
from pdproxy.launch.kinds.base import EnginePlan, Seat, Trait, ports_of, table
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions
from pdproxy.launch.preflight import PortUse

_REPOSITORY = Path(__file__).parents[3]
"""The folder that holds `transfer`: a checkout, or a Python's own packages."""


class VllmTransfer:
    """VllmTransfer is the kind in which prefillers push KV into the PD buffer beside a decoder's vLLM."""

    device = "cuda"
    timeout_s = 600.0

    def modules(self, options: FleetOptions) -> Sequence[str]:
        return "vllm", "nixl"

    def num_devices(self, args: Sequence[str]) -> int:
        return vllm.num_devices(args)

    def plan(self, options: FleetOptions, seat: Seat, machine: Machine) -> EnginePlan:
        args = vllm.args(options, seat.role)
        if vllm.dp_size(args) > 1:
            raise PreflightError("--data-parallel-size has to be 1 with vllm_transfer: start more instances instead")
        before = 0 if seat.role == "prefill" else options.num_prefillers
        kv_port = options.kv_port + before + seat.index
        extra: dict[str, object] = {"host": options.host, "kv_port": kv_port}
        uses = [PortUse(kv_port, f"{seat.name}'s connector", "--kv-port")]
        if seat.role == "decode":
            extra["layer_by_layer"] = False  # else vLLM decodes without whole CUDA graphs
            extra["receiver_port"] = options.receiver_port + seat.index
            uses.append(PortUse(options.receiver_port + seat.index, f"{seat.name}'s receiver", "--receiver-port"))
            if options.pd_buffer_size is not None:
                extra["pd_buffer_size"] = options.pd_buffer_size
        connector = {
            "kv_connector": "PdproxyConnector",
            "kv_connector_module_path": "transfer.connectors.vllm",
            vllm.EXTRA: extra,
        }
        return EnginePlan(
            seat=seat,
            program=vllm.program(options, seat, vllm.command(options, seat, connector), machine, _paths(machine)),
            ports=ports_of(seat, options, *uses),
            traits=(*vllm.traits(args), *_page_size(options, args)),
            tables=(table(seat, options, kv_port=kv_port),),
        )

    def proxy_options(self, options: FleetOptions) -> tuple[str, ...]:
        return ()


def _page_size(options: FleetOptions, args: Sequence[str]) -> tuple[Trait, ...]:
    """Returns no trait where all engines get a ``chunk_size``: blocks may have unlike sizes then."""
    return () if "chunk_size" in vllm.extra(options) else (vllm.block_size(args),)


def _paths(machine: Machine) -> dict[str, str]:
    """Returns the variable by which vLLM's Python finds `transfer`, where this is a checkout. A Python's own packages
    are not shown to another Python: it is to have pdproxy itself then."""
    if not (_REPOSITORY / "pyproject.toml").is_file():
        return {}
    known = machine.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(_REPOSITORY), known)))}
