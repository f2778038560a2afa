"""The module describes the machine that everything is started on, and the environment that its processes share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine is what there is to be shared out; it is a value, so that plans can be made for any machine."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    """Holds the GPUs as ``CUDA_VISIBLE_DEVICES`` names them."""
    environ: Mapping[str, str]

    @classmethod
    def here(cls) -> Self:
        """Returns this machine, as far as this process may use it."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        nodes = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
        gpus = sorted(nodes, key=int) if visible is None else [gpu for gpu in visible.split(",") if gpu]
        return cls(cores=tuple(sorted(os.sched_getaffinity(0))), gpus=tuple(gpus), environ=os.environ)


def environment(device: str, machine: Machine | None = None) -> dict[str, str]:
    """Returns defaults for processes that share one machine; what the user has set stays as it is."""
    machine = machine or Machine.here()
    defaults = {
        # Two engines compute at the same time at most, and the proxy needs a core as well.
        "OMP_NUM_THREADS": "2" if len(machine.cores) >= 6 else "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "UCX_NET_DEVICES": "lo",
        # Loopback must not go through an HTTP proxy.
        "NO_PROXY": "localhost,127.0.0.1,::1",
    }
    if device == "cpu":
        # With a GPU this would take away the transports that reach its memory.
        defaults["UCX_TLS"] = "tcp,sm,self"
    return {name: value for name, value in defaults.items() if name not in machine.environ}
