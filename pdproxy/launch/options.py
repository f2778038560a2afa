"""The module holds what can be chosen about a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from pdproxy.config.options import FLEET, Decoders, EngineArgs, Prefillers, ProxyArgs, WorkDir, option
from pdproxy.config.values import Engine, Role
from pdproxy.launch.restarts import NEVER, RestartPolicy

ENGINES, PORTS, RUN = "The engines", "Addresses and ports", "The launch"
TIMEOUT = "Time until all must be ready [default: builtin 180, others 600]"
BUFFER = "Size of a decoder's PD buffer on each rank [default: builtin 64MiB, lmcache 2GiB]"

WORK_DIR = Path(".demo")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """RunOptions is what can be chosen about a launch, whatever it starts."""

    timeout_s: Annotated[float | None, option("SECONDS", TIMEOUT, "--timeout", min=1, group=RUN)] = None
    is_once: Annotated[bool, option(None, "Stop everything when COMMAND has ended", "--once")] = False
    work_dir: WorkDir = WORK_DIR
    log_dir: Annotated[Path | None, option("FOLDER", "Folder for log files [default: the terminal]")] = None
    restarts: RestartPolicy = NEVER

    @property
    def tiny_model(self) -> Path:
        return self.work_dir / "tiny-model"


EVERYWHERE = frozenset({"0.0.0.0", "::", "*"})
"""The addresses which a server can listen on, but at which no client can reach it."""


def authority(host: str, port: int) -> str:
    """Returns host and port as URLs have them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Side is what only the prefillers, or only the decoders, are given."""

    args: tuple[str, ...] = ()
    """Holds further options of the engine."""
    env: Mapping[str, str] = field(default_factory=dict)
    lmcache: Mapping[str, object] = field(default_factory=dict)
    """Holds LMCache's own configuration, as far as the launch does not say otherwise."""
    args_option: str | None = None
    """Holds the option by which `args` were given; None means the option of this side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions(RunOptions):
    """FleetOptions are the options of ``pdproxy up``. None means that the engine's own default holds.

    A port is that of the first instance; those of the others count up from there.
    """

    engine: Annotated[Engine, option(None, "Kind of the engines", group=FLEET)] = "builtin"
    num_prefillers: Prefillers = 1
    num_decoders: Decoders = 1
    model: Annotated[Path | None, option("FOLDER", "Model folder [default: builtin has a tiny random model]")] = None
    served_model_name: Annotated[str | None, option("NAME", "Name of the model [default: the folder's name]")] = None
    pd_buffer_size: Annotated[str | None, option("SIZE", BUFFER, group=ENGINES)] = None
    chunk_size: Annotated[int | None, option("N", "Tokens per page [default: builtin, lmcache 256]", min=1)] = None
    dtype: Annotated[str | None, option("DTYPE", "Dtype of weights and KV on both sides [default: the model's]")] = None
    python: Annotated[Path | None, option("PATH", "Python of the engines' environment [default: this one]")] = None
    device: Annotated[str | None, option("DEVICE", "Device of the engines: cpu or cuda, builtin also cuda:N")] = None
    devices: tuple[str, ...] = ()
    engine_args: EngineArgs = ()
    proxy_args: ProxyArgs = ()
    host: Annotated[str, option("HOST", "Address on which everything listens", group=PORTS)] = "127.0.0.1"
    port: Annotated[int, option("PORT", "Port of the proxy")] = 9100
    prefill_port: Annotated[int, option("PORT", "Port of the first prefiller; all such ports count up")] = 7100
    decode_port: Annotated[int, option("PORT", "Port of the first decoder")] = 7200
    receiver_port: Annotated[
        int, option("PORT", "Port of the first decoder for KV (builtin, vllm_transfer; lmcache: init)")
    ] = 7300
    alloc_port: Annotated[int, option("PORT", "Port at which the first decoder hands out pages (lmcache)")] = 7400
    notify_port: Annotated[int, option("PORT", "Port of the proxy for KV signals")] = 7500
    notify_host: str | None = None
    """Holds the host at which the engines reach the proxy for KV signals; None means `host`."""
    side_channel_port: Annotated[int, option("PORT", "Port of the first NIXL side channel (vllm_nixl)")] = 5600
    bootstrap_port: Annotated[int, option("PORT", "Port of the first bootstrap server (sglang, mooncake)")] = 8998
    kv_port: Annotated[int, option("PORT", "Port of the first connector (vllm_transfer)")] = 5700
    dist_port: Annotated[int, option("PORT", "Port at which the first engine's ranks meet (sglang)")] = 25000
    prefill: Side = Side()
    decode: Side = Side()
    kv_transfer_config: Mapping[str, object] = field(default_factory=dict)

    @property
    def run(self) -> RunOptions:
        return RunOptions(**{one.name: getattr(self, one.name) for one in fields(RunOptions)})

    @property
    def url(self) -> str:
        return f"http://{authority(self.host, self.port)}"

    @property
    def folder(self) -> Path:
        """Returns the folder in which this launch writes the files that its processes read."""
        return self.work_dir / f"fleet-{self.port}"

    @property
    def model_path(self) -> Path:
        return self.model or self.tiny_model

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path.resolve().name

    def side(self, role: Role) -> Side:
        return self.prefill if role == "prefill" else self.decode

    def args_option(self, role: Role) -> str:
        """Returns the option to name where something is wrong with what only these engines were given."""
        return self.side(role).args_option or f"--{role}-args"

    def args(self, role: Role) -> tuple[str, ...]:
        """Returns further options of the engines of one role; if two of them say the same thing, engines take the
        last."""
        return (*self.engine_args, *self.side(role).args)
