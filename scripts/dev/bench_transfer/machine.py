"""The description of the machine that the figures were measured on. Without it they say nothing."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import torch

from scripts.dev.bench_transfer.plan import GB, MIB
from scripts.dev.common.machine import facts, version_of

UCX_DEFAULTS = {"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo"}
"""The settings of UCX that are filled in, because both ends are on this machine. With a GPU, UCX's transports for
device memory are added."""
GPU_TRANSPORTS = ",cuda_copy,cuda_ipc"
PACKAGES = ("torch", "nixl", "numpy", "pyzmq", "uvloop")
COPY_BYTES = 256 * MIB
COPY_ROUNDS = 5


def set_ucx(environment: MutableMapping[str, str], *, has_gpu: bool) -> dict[str, str]:
    """Fills in what the user did not set. Returns every ``UCX_*`` variable that is used."""
    defaults = dict(UCX_DEFAULTS)
    if has_gpu:
        defaults["UCX_TLS"] += GPU_TRANSPORTS
    for name, value in defaults.items():
        environment.setdefault(name, value)
    return {name: value for name, value in sorted(environment.items()) if name.startswith("UCX_")}


def describe() -> dict[str, Any]:
    """Returns what is known of the machine. Cores are those this process may use."""
    return {
        **facts(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **{name: version_of(name) for name in PACKAGES},
    }


def copy_rate(clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the GB/s of a large copy within main memory, on one thread: the median of some."""
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    rates = []
    for _ in range(COPY_ROUNDS):
        started = clock()
        target.copy_(source)
        rates.append(COPY_BYTES / GB / (clock() - started))
    return statistics.median(rates)


def busy_seconds(stat: str | None = None) -> float:
    """Returns the CPU seconds that all cores together were not idle, since the machine was started. `stat` is the text
    of ``/proc/stat``."""
    text = Path("/proc/stat").read_text() if stat is None else stat
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.splitlines()[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
