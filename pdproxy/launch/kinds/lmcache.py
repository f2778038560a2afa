"""The module starts vLLM with LMCache, which pushes KV into the decoders' PD buffers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pdproxy.config.values import Role
from pdproxy.launch.errors import PreflightError
from pdproxy.launch.flags import flag
from pdproxy.launch.kinds import vllm
from pdproxy.launch.kinds.base import HASH_SEED, EnginePlan, Seat, Trait, ports_of, same_args, table
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions
from pdproxy.launch.preflight import Buffer, PortUse
from transfer.errors import GeometryError
from transfer.geometry import parse_size

CHUNK_SIZE = 256
PD_BUFFER_SIZE = "2GiB"
ALGORITHM = "pre_caching_hash_algorithm"
SKIPPED = "skip_last_n_tokens"
CONFIG_FILE = "LMCACHE_CONFIG_FILE"
PREFIX_CACHING = "--enable-prefix-caching"
DEFAULTS: dict[str, object] = {"local_cpu": False, "max_local_cpu_size": 0, "save_unfull_chunk": True}
"""The options with which a prompt's KV goes to the decoder once, in full, and nowhere else."""


class LMCache:
    """LMCache does what the published examples for one machine do. It also counts the ports and checks that the two
    sides agree."""

    device = "cuda"
    timeout_s = 600.0

    def modules(self, options: FleetOptions) -> Sequence[str]:
        return "vllm", "lmcache", "nixl"

    def num_devices(self, args: Sequence[str]) -> int:
        return vllm.num_devices(args)

    def plan(self, options: FleetOptions, seat: Seat, machine: Machine) -> EnginePlan:
        args = vllm.args(options, seat.role, is_paged=False)
        config = _config(options, seat)
        _refuse_environment(config, options, seat.role, machine)
        path = options.folder / f"{seat.name}.yaml"
        seed = _hash_seed(options, seat.role, machine)
        extra = {"discard_partial_chunks": False, "lmcache_rpc_port": seat.name, **_last_token(options, seat.role)}
        connector = {"kv_connector": "LMCacheConnectorV1", vllm.EXTRA: extra}
        if vllm.dp_size(args) > 1:
            raise PreflightError(
                "--data-parallel-size: LMCache takes KV in for one data-parallel rank; start more decoders instead"
            )
        server, words = _split(vllm.command(options, seat, connector, is_paged=False))
        command = (*server, *_caching(options, seat.role), *words)
        fixed = {CONFIG_FILE: str(path.absolute()), HASH_SEED: seed}
        return EnginePlan(
            seat=seat,
            program=vllm.program(options, seat, command, machine, fixed),
            ports=ports_of(seat, options, *_ports(options, seat)),
            traits=(
                *vllm.traits(args),
                same_args("--tensor-parallel-size", str(vllm.tp_size(args)), "give it to both in --engine-args"),
                *_traits(config, seed),
            ),
            tables=(_table(options, seat),),
            buffer=_buffer(options, seat.role),
            files={path.name: "".join(f"{name}: {json.dumps(value, default=str)}\n" for name, value in config.items())},
        )

    def proxy_options(self, options: FleetOptions) -> tuple[str, ...]:
        buffer = _buffer(options, "decode")
        return (
            *("--first-token", _first_token(options)),
            *("--pd-buffer-size", buffer.size, "--chunk-size", str(buffer.chunk_size)),
            *("--tp-size", str(buffer.tp_size)),
            *(("--kv-cache-dtype", buffer.kv_cache_dtype) if buffer.kv_cache_dtype else ()),
        )


def _first_token(options: FleetOptions) -> str:
    """Returns the proxy's option of this name."""
    return flag(options.proxy_args, "--first-token") or "auto"


def _last_token(options: FleetOptions, role: Role) -> Mapping[str, object]:
    """Returns the connector option that tells decoders how many of the last tokens they do not look for. It must fit
    what the proxy has prefilled. Raises `PreflightError` where the user says something else."""
    first_token = _first_token(options)
    skipped = 0 if first_token == "decoder" else 1
    if (given := vllm.extra(options).get(SKIPPED, skipped)) != skipped:
        raise PreflightError(
            f"--kv-transfer-config: {SKIPPED} is {given} there, and with --first-token {first_token} the proxy counts "
            f"on {skipped}; leave it out, and choose --first-token in --proxy-args"
        )
    return {SKIPPED: skipped} if role == "decode" and skipped else {}


def _split(command: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits a command into vLLM's server and what the server is told."""
    start = command.index(vllm.SERVER) + 1
    return command[:start], command[start:]


def _caching(options: FleetOptions, role: Role) -> tuple[str, ...]:
    """Returns the options that switch a decoder's prefix caching off. A decoder that remembers a prompt by itself does
    not take its pages out of the PD buffer, where they stay. Raises `PreflightError` where the user switches it on."""
    if role == "prefill":
        return ()
    if any(word.replace("_", "-") == PREFIX_CACHING for word in options.args(role)):
        raise PreflightError(
            f"{PREFIX_CACHING}: a decoder would leave the pages of prompts that it knows in its PD buffer, for ever; "
            "give it to the prefillers, with --prefill-args"
        )
    return (PREFIX_CACHING.replace("--", "--no-"),)


def _config(options: FleetOptions, seat: Seat) -> dict[str, object]:
    """Returns the content of LMCache's YAML. The user's own options go before the defaults, and what follows from the
    launch goes before both."""
    buffer = _buffer(options, seat.role)
    shared: dict[str, object] = {
        **DEFAULTS,
        **options.side(seat.role).lmcache,
        "chunk_size": buffer.chunk_size,
        "enable_pd": True,
        "transfer_channel": "nixl",
        "pd_role": "sender" if seat.role == "prefill" else "receiver",
        "pd_buffer_size": parse_size(buffer.size),
        "pd_buffer_device": "cpu" if seat.device == "cpu" else "cuda",
    }
    if seat.role == "prefill":
        return {**shared, "pd_proxy_host": options.notify_host or options.host, "pd_proxy_port": options.notify_port}
    init, alloc = _receiver_ports(options, seat)
    return {**shared, "pd_peer_host": options.host, "pd_peer_init_port": init, "pd_peer_alloc_port": alloc}


def _buffer(options: FleetOptions, role: Role) -> Buffer:
    """Returns the PD buffer. LMCache's own configuration may say what the options leave open. Raises `PreflightError`
    where both say different things."""
    args = vllm.args(options, role, is_paged=False)
    config = options.side(role).lmcache
    size = _said(config, "pd_buffer_size", options.pd_buffer_size, role) or PD_BUFFER_SIZE
    chunk_size = _said(config, "chunk_size", options.chunk_size, role) or CHUNK_SIZE
    if not isinstance(chunk_size, int):
        raise PreflightError(f"--{role}-config: chunk_size {chunk_size!r} is not a number of tokens")
    dtype = vllm.kv_cache_dtype(args) or flag(args, "--dtype")
    return Buffer(
        size=str(size),
        chunk_size=chunk_size,
        tp_size=vllm.tp_size(args),
        kv_cache_dtype=None if dtype == "auto" else dtype,
    )


def _said(config: Mapping[str, object], name: str, option: object, role: Role) -> object:
    said = config.get(name)
    if option is None or said is None:
        return said if option is None else option
    if _size(said) != _size(option):
        raise PreflightError(
            f"--{role}-config: {name} is {said} there and {option} in --{name.replace('_', '-')}; give only one of them"
        )
    return option


def _size(value: object) -> int:
    try:
        return parse_size(str(value))
    except GeometryError as error:
        raise PreflightError(str(error)) from error


def _receiver_ports(options: FleetOptions, seat: Seat) -> tuple[list[int], list[int]]:
    """Returns two ports for each rank of a decoder: for the handshake, and for pages."""
    tp_size = vllm.tp_size(options.args("decode"))
    steps = range(seat.index * tp_size, (seat.index + 1) * tp_size)
    return [options.receiver_port + step for step in steps], [options.alloc_port + step for step in steps]


def _ports(options: FleetOptions, seat: Seat) -> list[PortUse]:
    if seat.role == "prefill":
        return []
    init, alloc = _receiver_ports(options, seat)
    return [
        *(PortUse(port, f"{seat.name}'s init port", "--receiver-port") for port in init),
        *(PortUse(port, f"{seat.name}'s alloc port", "--alloc-port") for port in alloc),
    ]


def _table(options: FleetOptions, seat: Seat) -> Mapping[str, object]:
    if seat.role == "prefill":
        return table(seat, options)
    init, alloc = _receiver_ports(options, seat)
    return table(seat, options, receiver_ports=init, alloc_ports=alloc)


def _traits(config: Mapping[str, object], seed: str) -> tuple[Trait, ...]:
    def same_config(name: str, remedy: str) -> Trait:
        value = str(config.get(name, "LMCache's own"))
        return Trait(what=name, value=value, source="--prefill-config, --decode-config", remedy=remedy)

    return (
        same_config("chunk_size", "give it to both with --chunk-size"),
        same_config("pd_buffer_size", "give it to both with --pd-buffer-size"),
        same_config(ALGORITHM, "it makes the keys by which a decoder finds what a prefiller wrote"),
        Trait(
            what=HASH_SEED,
            value=seed,
            source="--prefill-env, --decode-env",
            remedy="it makes the keys by which a decoder finds what a prefiller wrote; set it once, for the launcher",
        ),
    )


def _hash_seed(options: FleetOptions, role: Role, machine: Machine) -> str:
    """Returns the seed of Python's hashes, which must be the same for every process: the one in the side's environment,
    else the launcher's own, else 0. Raises `PreflightError` if it is not a number."""
    seed = options.side(role).env.get(HASH_SEED) or machine.environ.get(HASH_SEED) or "0"
    if not seed.isdecimal():
        raise PreflightError(f"{HASH_SEED} is {seed!r}, another one in each process; set it to a number, or not at all")
    return seed


def _refuse_environment(config: Mapping[str, object], options: FleetOptions, role: Role, machine: Machine) -> None:
    """Raises `PreflightError` if a variable of LMCache's would beat its file: then what was checked would not be what
    runs."""
    env = {**machine.environ, **options.side(role).env}
    for name in config:
        if (variable := f"LMCACHE_{name.upper()}") in env:
            raise PreflightError(f"{variable} is set and would beat the launch's own configuration; unset it")
