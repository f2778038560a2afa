"""The module describes what the figures were measured on: without it they say nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.dev.bench_proxy.cores import Cores
from scripts.dev.bench_proxy.targets import Peer
from scripts.dev.common.machine import facts, version_of

PACKAGES = ("uvicorn", "uvloop", "httptools", "msgspec")
_ASK = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


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
    ask = "import platform, sys; print(*sys.version_info[:2], platform.python_version())"
    try:
        told = subprocess.run([command, "-I", "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"{command} cannot be run: {error}") from None
    if tuple(map(int, told[:2])) != sys.version_info[:2]:
        ours = ".".join(map(str, sys.version_info[:2]))
        raise ValueError(f"{command} is Python {told[2]}, and the libraries here are for {ours}")
    return told[2]
