"""The module describes what the figures were measured on: without it they say nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.dev.bench_proxy.cores import Cores
from scripts.dev.bench_proxy.targets import Peer

PACKAGES = ("uvicorn", "uvloop", "httptools", "msgspec")
_ASK = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def describe(peers: Sequence[Peer] = (), *, is_compiled: bool = False) -> dict[str, Any]:
    """Returns what is known of the machine. Its cores are those that this process may use."""
    versions = {name: _version(name) for name in PACKAGES} | {peer.name: version_of(peer) for peer in peers}
    cores = Cores.here()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "compiled": is_compiled,
        "proxy_core": cores.proxy,
        "helper_core": cores.helpers,
        "packages": {name: version for name, version in versions.items() if version is not None},
    }


def cpu_model(cpuinfo: str) -> str:
    """Returns the model, for instance ``AMD EPYC …``, or the architecture where the kernel names no model."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.machine())


def version_of(peer: Peer) -> str | None:
    """Returns the peer's version as the Python says it that runs the peer's command; None where the command is no
    script or tells no version."""
    first, _, _ = Path(peer.command).read_bytes().partition(b"\n")
    if not first.startswith(b"#!"):
        return None
    asked = subprocess.run([*first[2:].decode().split(), "-c", _ASK, peer.name], capture_output=True, text=True)
    return asked.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
