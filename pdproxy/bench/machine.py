"""What the figures were measured on: without it they say nothing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pdproxy.bench.cores import Cores

PACKAGES = ("uvicorn", "uvloop", "httptools", "httpx", "vllm-router", "sglang-router", "smg")


def describe() -> dict[str, Any]:
    """Cores are those this process may use."""
    cores = Cores.here()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "proxy_core": cores.proxy,
        "helper_core": cores.helpers,
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def cpu_model(cpuinfo: str) -> str:
    """``AMD EPYC …``; the architecture where the kernel names no model."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
