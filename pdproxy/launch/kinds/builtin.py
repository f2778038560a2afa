"""The module starts the built-in engine: `python -m transfer.engine`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pdproxy.config.values import Role
from pdproxy.launch.flags import flag, number, refuse
from pdproxy.launch.kinds.base import (
    HOST_OWNED,
    EnginePlan,
    Seat,
    environment_of,
    ports_of,
    same_args,
    table,
)
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions, authority
from pdproxy.launch.preflight import Buffer, PortUse
from pdproxy.launch.process import Program

CHUNK_SIZE = 256
PD_BUFFER_SIZE = "64MiB"
OWNED = {
    **HOST_OWNED,
    "--role": "it follows from --prefillers and --decoders",
    "--model": "choose it with --model",
    "--receiver-port": "choose it with --receiver-port",
    "--pd-buffer-size": "choose it with --pd-buffer-size",
    "--device": "choose it with --device",
}


class Builtin:
    """Builtin is the kind of the built-in engine, which runs on torch and transformers and needs no GPU."""

    device = "cpu"
    timeout_s = 180.0

    def modules(self, options: FleetOptions) -> Sequence[str]:
        return "transfer", "torch", "nixl", "transformers", "safetensors"

    def num_devices(self, args: Sequence[str]) -> int:
        return 1

    def plan(self, options: FleetOptions, seat: Seat, machine: Machine) -> EnginePlan:
        refuse(options.engine_args, OWNED, "--engine-args")
        refuse(options.side(seat.role).args, OWNED, options.args_option(seat.role))
        command = self._command(options, seat)
        is_decoder = seat.role == "decode"
        receivers = [self._receiver_port(options, seat)] if is_decoder else []
        buffer = Buffer(
            size=_buffer_size(options),
            chunk_size=_chunk_size(command),
            tp_size=_tp_size(command),
            kv_cache_dtype=_dtype(command),
        )
        more_ports = [PortUse(port, f"{seat.name}'s receiver", "--receiver-port") for port in receivers]
        return EnginePlan(
            seat=seat,
            program=Program(
                name=seat.name,
                command=command,
                ready_url=f"{seat.url(options)}/health",
                env=environment_of(seat, options, defaults=_signals(options, seat), fixed={}, machine=machine),
            ),
            ports=ports_of(seat, options, *more_ports),
            traits=(
                same_args("--dtype", _dtype(command) or "auto", "give it to both with --dtype"),
                same_args("--chunk-size", str(_chunk_size(command)), "give it to both with --chunk-size"),
            ),
            tables=(table(seat, options, receiver_ports=receivers or None),),
            buffer=buffer if is_decoder else None,
        )

    def proxy_options(self, options: FleetOptions) -> tuple[str, ...]:
        args = self._args(options, "decode")
        dtype = _dtype(args)
        return (
            *("--pd-buffer-size", _buffer_size(options), "--chunk-size", str(_chunk_size(args))),
            *(("--kv-cache-dtype", dtype) if dtype else ()),
            *(("--tp-size", str(_tp_size(args))) if _tp_size(args) > 1 else ()),
        )

    def _command(self, options: FleetOptions, seat: Seat) -> tuple[str, ...]:
        buffer = (
            *("--receiver-port", str(self._receiver_port(options, seat))),
            *("--pd-buffer-size", _buffer_size(options)),
        )
        return (
            *(str(options.python or sys.executable), "-m", "transfer.engine"),
            *("--role", seat.role, "--port", str(seat.port(options))),
            *("--model", str(options.model_path), "--served-model-name", options.model_name),
            *("--host", options.host, "--device", seat.device),
            *(buffer if seat.role == "decode" else ()),
            *self._args(options, seat.role),
        )

    def _receiver_port(self, options: FleetOptions, seat: Seat) -> int:
        """Returns the port of a decoder's receiver, whose ranks share it."""
        return options.receiver_port + seat.index

    def _args(self, options: FleetOptions, role: Role) -> tuple[str, ...]:
        dtype = ("--dtype", options.dtype) if options.dtype else ()
        return (
            "--chunk-size",
            str(CHUNK_SIZE if options.chunk_size is None else options.chunk_size),
            *dtype,
            *options.args(role),
        )


def _signals(options: FleetOptions, seat: Seat) -> dict[str, str]:
    """Lets a decoder signal to the proxy of a file, which may listen on an address that is not the decoder's."""
    if seat.role != "decode" or options.notify_host is None:
        return {}
    host, port = options.notify_host, options.notify_port
    return {"PDENGINE_NOTIFY_HOSTS": authority(host, port) if port else f"[{host}]" if ":" in host else host}


def _chunk_size(words: Sequence[str]) -> int:
    return number(words, "--chunk-size")


def _tp_size(words: Sequence[str]) -> int:
    return number(words, "--tensor-parallel-size")


def _dtype(words: Sequence[str]) -> str | None:
    dtype = flag(words, "--dtype")
    return None if dtype == "auto" else dtype


def _buffer_size(options: FleetOptions) -> str:
    return options.pd_buffer_size or PD_BUFFER_SIZE
