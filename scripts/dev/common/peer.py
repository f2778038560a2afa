"""The module is the child's side of `scripts.dev.common.child`: a process that answers commands.

It reads commands from standard input, one JSON list per line, and answers each with one JSON object per line. It ends
when its input does, and after the seconds it was given whatever happens: nobody has to clean up behind it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.dev.common.child import LINE_BYTES


class Peer:
    """A `Peer` has the commands of every role."""

    def __init__(self, device: str) -> None:
        self.device = device

    async def cpu(self) -> float:
        """Returns the CPU seconds used so far, all threads, user and system."""
        return time.process_time()

    async def close(self) -> None:
        """Lets go of everything."""


async def serve(peer: Peer, answers: Any) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        name, *arguments = json.loads(line)
        try:
            answer = {"value": await getattr(peer, name)(*arguments)}
        except Exception as error:  # border: the parent decides what it means
            answer = {"error": f"{name}: {type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    await peer.close()


def event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns what uvicorn gives an engine: uvloop's loop, where that is installed, else None."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def run(make: Callable[[], Peer], lifetime_s: str) -> None:
    """Answers commands on standard input until it ends, or for `lifetime_s` seconds: nobody has to clean up behind a
    child."""
    signal.alarm(int(float(lifetime_s)))
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX reports a dead peer on standard output
    with asyncio.Runner(loop_factory=event_loop()) as runner:
        runner.run(_serve(make, answers))


async def _serve(make: Callable[[], Peer], answers: Any) -> None:
    await serve(make(), answers)
