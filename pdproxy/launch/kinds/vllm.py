"""The module starts vLLM's OpenAI server, whatever carries its KV; `vllm_nixl`, `lmcache` and `mooncake` share it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from pdproxy.config.values import Role
from pdproxy.launch.errors import PreflightError
from pdproxy.launch.flags import flag, number, refuse
from pdproxy.launch.kinds.base import HOST_OWNED, Seat, Trait, environment_of, same_args
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions
from pdproxy.launch.process import Program

OWNED = {
    **HOST_OWNED,
    "--model": "choose it with --model",
    "--kv-transfer-config": "give what is to be added with the launcher's own --kv-transfer-config",
}
CONNECTOR_OWNED = ("kv_connector", "kv_connector_module_path", "kv_role")
EXTRA = "kv_connector_extra_config"
KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
SERVER = "vllm.entrypoints.openai.api_server"


def program(
    options: FleetOptions, seat: Seat, command: tuple[str, ...], machine: Machine, fixed: Mapping[str, str]
) -> Program:
    """Returns the program of one engine. `fixed` is the part of the environment that belongs to the plan. Raises
    `PreflightError`."""
    refuse(options.engine_args, OWNED, "--engine-args")
    refuse(options.side(seat.role).args, OWNED, options.args_option(seat.role))
    env = environment_of(seat, options, defaults=_defaults(seat, options), fixed=fixed, machine=machine)
    return Program(name=seat.name, command=command, ready_url=f"{seat.url(options)}/health", env=env)


def command(
    options: FleetOptions, seat: Seat, connector: Mapping[str, object], *, is_paged: bool = True
) -> tuple[str, ...]:
    """Returns the engine's command line. `is_paged` means that vLLM's own blocks travel, so that the launch's chunk
    size is theirs."""
    return (
        *(str(options.python or sys.executable), "-m", SERVER),
        *("--model", str(options.model_path), "--served-model-name", options.model_name),
        *("--host", options.host, "--port", str(seat.port(options))),
        *("--kv-transfer-config", json.dumps(_transfer(options, seat, connector))),
        *args(options, seat.role, is_paged=is_paged),
    )


def args(options: FleetOptions, role: Role, *, is_paged: bool = True) -> tuple[str, ...]:
    """Returns the options that do not tell one instance of a role from another."""
    block = ("--block-size", str(options.chunk_size)) if is_paged and options.chunk_size is not None else ()
    dtype = ("--dtype", options.dtype) if options.dtype is not None else ()
    return (*block, *dtype, *options.args(role))


def traits(words: Sequence[str]) -> tuple[Trait, ...]:
    """Returns the traits that hold for the KV of every connector."""
    return (
        same_args("--dtype", flag(words, "--dtype") or "auto", "give it to both with --dtype"),
        same_args("--kv-cache-dtype", kv_cache_dtype(words) or "auto", "give it to both in --engine-args"),
    )


def block_size(words: Sequence[str]) -> Trait:
    return same_args("--block-size", flag(words, "--block-size"), "give it to both with --chunk-size")


def kv_cache_dtype(words: Sequence[str]) -> str | None:
    dtype = flag(words, "--kv-cache-dtype")
    return None if dtype == "auto" else dtype


def tp_size(words: Sequence[str]) -> int:
    return number(words, "--tensor-parallel-size", "-tp")


def dp_size(words: Sequence[str]) -> int:
    return number(words, "--data-parallel-size", "-dp")


def num_devices(words: Sequence[str]) -> int:
    return tp_size(words) * dp_size(words) * number(words, "--pipeline-parallel-size", "-pp")


def extra(options: FleetOptions) -> dict[str, object]:
    """Returns the connector's own options, as the user gives them. Raises `PreflightError`."""
    members = options.kv_transfer_config.get(EXTRA, {})
    if not isinstance(members, dict):
        raise PreflightError(f"--kv-transfer-config: {EXTRA} is an object, not {members!r}")
    return members


def _transfer(options: FleetOptions, seat: Seat, connector: Mapping[str, object]) -> dict[str, object]:
    """Returns vLLM's ``--kv-transfer-config``: the kind's own, with what the user adds. Raises `PreflightError`."""
    for name in CONNECTOR_OWNED:
        if name in options.kv_transfer_config:
            raise PreflightError(f"--kv-transfer-config: {name} follows from --engine and the role; leave it out")
    buffer = {"kv_buffer_device": "cpu"} if seat.device == "cpu" else {}
    fixed = {name: value for name, value in connector.items() if name != EXTRA}
    whole = {**fixed, "kv_role": KV_ROLES[seat.role], **buffer}
    own = connector.get(EXTRA, {})
    assert isinstance(own, dict)
    merged = {**own, **extra(options)}
    return {**whole, **options.kv_transfer_config, **({EXTRA: merged} if merged else {})}


def _defaults(seat: Seat, options: FleetOptions) -> dict[str, str]:
    """Returns the variable that binds each rank to cores of its own: without a GPU, vLLM would bind every instance to
    the same cores."""
    width = num_devices(options.args(seat.role))
    if seat.device != "cpu" or len(seat.cores) < width:
        return {}
    share = len(seat.cores) // width
    parts = (seat.cores[rank * share : (rank + 1) * share] for rank in range(width))
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}
