"""Sockets by which the processes of one vLLM find each other: in a folder that nobody else can enter, and which is gone
as soon as they have met."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

from transfer.errors import TransferError


def listen_privately(kind: socket.SocketKind, num_peers: int) -> tuple[socket.socket, str]:
    """Returns a socket that listens, and its path. Raises `TransferError` where the path would be too long, or cannot
    be made."""
    try:
        folder = tempfile.mkdtemp(prefix="pdproxy-")
    except OSError as error:
        raise TransferError(f"no folder for a socket can be made ({error}); set TMPDIR to one that can") from None
    path = os.path.join(folder, "s")
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(path)
        listener.listen(num_peers)
    except OSError as error:
        listener.close()
        remove(path)
        raise TransferError(f"{path} cannot be a socket ({error}); set TMPDIR to a folder with a short path") from None
    return listener, path


def remove(path: str) -> None:
    """Removes the path of a socket, and its folder. What is connected stays so. Idempotent."""
    with contextlib.suppress(OSError):
        Path(path).unlink()
    with contextlib.suppress(OSError):
        Path(path).parent.rmdir()
