"""The module describes what the figures were measured on: without it they say nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdproxy.compiled.stamp import SUFFIX
from scripts.dev.bench_proxy.cores import Cores
from scripts.dev.bench_proxy.targets import Peer
from scripts.dev.common.machine import facts, version_of

PACKAGES = ("uvicorn", "uvloop", "httptools", "msgspec")
_ASK = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
_ASK_PYTHON = (
    "import importlib.machinery, platform; print(importlib.machinery.EXTENSION_SUFFIXES[0], platform.python_version())"
)
START_S = 30.0
"""The most seconds that another Python takes to say what it is."""


def describe(
    peers: Sequence[Peer] = (), other_versions: Mapping[str, str] | None = None, *, is_compiled: bool = False
) -> dict[str, Any]:
    """Returns what is known of the machine, and `other_versions` by name. Its cores are those that this process may
    use."""
    versions = {name: version_of(name) for name in PACKAGES} | {peer.name: version_of_peer(peer) for peer in peers}
    versions |= other_versions or {}
    cores = Cores.here()
    return {
        **facts(),
        "compiled": is_compiled,
        "proxy_core": cores.proxy,
        "helper_core": cores.helpers,
        "packages": {name: version for name, version in versions.items() if version is not None},
    }


def version_of_peer(peer: Peer) -> str | None:
    """Returns the peer's version as the Python says it that runs the peer's command; None where the command is no
    script or tells no version."""
    first, _, _ = Path(peer.command).read_bytes().partition(b"\n")
    if not first.startswith(b"#!"):
        return None
    asked = subprocess.run([*first[2:].decode().split(), "-c", _ASK, peer.name], capture_output=True, text=True)
    return asked.stdout.strip() or None


def version_of_python(command: str) -> str:
    """Returns the version of another Python. Raises `ValueError` where it cannot be run, or could not load what was
    made for the Python that runs this."""
    try:
        asked = subprocess.run([command, "-I", "-c", _ASK_PYTHON], capture_output=True, text=True, timeout=START_S)
        suffix, version = asked.stdout.split()
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise ValueError(f"{command} cannot be run as a Python") from None
    if suffix != SUFFIX:
        raise ValueError(f"{command} is Python {version}, which cannot load the libraries of {sys.executable}")
    return version
