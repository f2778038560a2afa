"""An engine and its child processes share one life, and send each other messages over pairs of sockets.

The ranks of an engine and its data plane are such processes. This module imports neither torch nor numpy, because
ranks are forked before there is any thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

LENGTH_BYTES = 4
"""The size, in bytes, of the length that goes before each message."""
ROOT = str(Path(__file__).resolve().parents[1])
"""The folder that this package lies in."""
PR_SET_PDEATHSIG = 1
T = TypeVar("T")


def start(module: str, inherited: Sequence[int] = ()) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts ``python -m MODULE DESCRIPTOR``, which also has the descriptors `inherited`. Returns the process, and the
    other end of its socket `DESCRIPTOR`. Raises `OSError` where it cannot be started."""
    # The package's own folder comes first, not the engine's: a file there may have the name of a library.
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs.fileno(), *inherited],
                process_group=0,  # only this process follows a Ctrl-C
            )
        except OSError:
            ours.close()
            raise
    return process, ours


def end_with_parent() -> None:
    """Ties this process to the thread that started it, and leaves signals that go to all processes to the parent.

    The kernel kills this process when that thread ends, also while this process is stopped. The parent may have ended
    before: the caller compares `os.getppid` with the number that it was told.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def frame(message: object) -> bytes:
    """Returns the message as it travels: its length, and then MessagePack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES) + data


def take_frames(unread: bytearray) -> list[bytes]:
    """Takes the messages that are there completely out of `unread`. Returns each without its length."""
    messages, at = [], 0
    while len(unread) - at >= LENGTH_BYTES:
        end = at + LENGTH_BYTES + int.from_bytes(unread[at : at + LENGTH_BYTES])
        if len(unread) < end:
            break
        messages.append(bytes(unread[at + LENGTH_BYTES : end]))
        at = end
    del unread[:at]
    return messages


async def read_message(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Returns the next message, or None when the other side is gone."""
    try:
        head = await reader.readexactly(LENGTH_BYTES)
        return decoder.decode(await reader.readexactly(int.from_bytes(head)))
    except (asyncio.IncompleteReadError, OSError):
        return None


def write_message(writer: asyncio.StreamWriter, message: object) -> None:
    """Queues a message for the other side."""
    writer.write(frame(message))
