"""The module holds what can be chosen about a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdproxy.config.settings import Engine, Role
from pdproxy.launch.restarts import NEVER, RestartPolicy

WORK_DIR = Path(".demo")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """RunOptions is what can be chosen about a launch, whatever it starts."""

    work_dir: Path = WORK_DIR
    """Holds the folder in which the tiny model is made when no model is named."""
    timeout_s: float | None = None
    log_dir: Path | None = None
    is_once: bool = False
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
class FleetOptions:
    """FleetOptions holds, field for field, the options in `pdproxy.launch.command`, which documents them. None means
    that the engine's own default holds.

    A port is that of the first instance; those of the others count up from there.
    """

    engine: Engine = "builtin"
    num_prefillers: int = 1
    num_decoders: int = 1
    model: Path | None = None
    served_model_name: str | None = None
    work_dir: Path = WORK_DIR
    host: str = "127.0.0.1"
    port: int = 9100
    prefill_port: int = 7100
    decode_port: int = 7200
    receiver_port: int = 7300
    alloc_port: int = 7400
    notify_port: int = 7500
    notify_host: str | None = None
    """Holds the host at which the engines reach the proxy for KV signals; None means `host`."""
    side_channel_port: int = 5600
    bootstrap_port: int = 8998
    dist_port: int = 25000
    pd_buffer_size: str | None = None
    chunk_size: int | None = None
    dtype: str | None = None
    python: Path | None = None
    device: str | None = None
    devices: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    prefill: Side = Side()
    decode: Side = Side()
    proxy_args: tuple[str, ...] = ()
    kv_transfer_config: Mapping[str, object] = field(default_factory=dict)
    timeout_s: float | None = None
    log_dir: Path | None = None
    is_once: bool = False
    restarts: RestartPolicy = NEVER

    @property
    def run(self) -> RunOptions:
        return RunOptions(
            work_dir=self.work_dir,
            timeout_s=self.timeout_s,
            log_dir=self.log_dir,
            is_once=self.is_once,
            restarts=self.restarts,
        )

    @property
    def url(self) -> str:
        return f"http://{authority(self.host, self.port)}"

    @property
    def folder(self) -> Path:
        """Returns the folder in which this launch writes the files that its processes read."""
        return self.work_dir / f"fleet-{self.port}"

    @property
    def model_path(self) -> Path:
        return self.model or self.run.tiny_model

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
