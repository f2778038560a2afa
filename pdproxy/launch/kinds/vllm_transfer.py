"""The module starts vLLM with pdproxy's own connector."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from pdproxy.config.values import Role
from pdproxy.launch.errors import PreflightError
from pdproxy.launch.flags import flag
from pdproxy.launch.kinds import vllm
from pdproxy.launch.kinds.base import HASH_SEED, EnginePlan, Seat, Trait, ports_of, same_args, table
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions
from pdproxy.launch.preflight import PortUse

_REPOSITORY = Path(__file__).parents[3]
"""The folder that holds `transfer`: a checkout, or a Python's own packages."""
HASH_ALGORITHM = "--prefix-caching-hash-algo"
OWN_SEED = str(secrets.randbelow(1 << 32))
"""The seed of hashes that are safe only while nobody knows it. vLLM draws one in each process; then no engine finds
another one's blocks by their names, and a decoder is sent what it has."""


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
        seed = _hash_seed(args, options, seat.role, machine)
        fixed = _paths(machine) | ({HASH_SEED: seed} if seed else {})
        return EnginePlan(
            seat=seat,
            program=vllm.program(options, seat, vllm.command(options, seat, connector), machine, fixed),
            ports=ports_of(seat, options, *uses),
            traits=(*vllm.traits(args), *_page_size(options, args), *_names(args, seed)),
            tables=(table(seat, options, kv_port=kv_port),),
        )

    def proxy_options(self, options: FleetOptions) -> tuple[str, ...]:
        return ()


def _page_size(options: FleetOptions, args: Sequence[str]) -> tuple[Trait, ...]:
    """Returns no trait where all engines get a ``chunk_size``: blocks may have unlike sizes then."""
    return () if "chunk_size" in vllm.extra(options) else (vllm.block_size(args),)


def _names(args: Sequence[str], seed: str) -> tuple[Trait, ...]:
    """Returns the traits of which a block's name is made."""
    why = "it makes the names by which a decoder finds what it has"
    return (
        same_args(HASH_ALGORITHM, flag(args, HASH_ALGORITHM), f"{why}; give it to both in --engine-args"),
        Trait(
            what=HASH_SEED,
            value=seed or "vLLM's own",
            source="--prefill-env, --decode-env",
            remedy=f"{why}; set it once, for the launcher",
        ),
    )


def _hash_seed(args: Sequence[str], options: FleetOptions, role: Role, machine: Machine) -> str:
    """Returns the seed of the hashes that name blocks: the one in the side's environment, else the launcher's own. With
    neither, vLLM's own is the same everywhere for cryptographic hashes; for others it is this launch's."""
    if seed := options.side(role).env.get(HASH_SEED) or machine.environ.get(HASH_SEED):
        return seed
    return OWN_SEED if (flag(args, HASH_ALGORITHM) or "").startswith("xxhash") else ""


def _paths(machine: Machine) -> dict[str, str]:
    """Returns the variable by which vLLM's Python finds `transfer`, where this is a checkout. A Python's own packages
    are not shown to another Python: it is to have pdproxy itself then."""
    if not (_REPOSITORY / "pyproject.toml").is_file():
        return {}
    known = machine.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(_REPOSITORY), known)))}
