"""The processes of one soak, owned by one `async with`: none of them is left, whatever happens inside."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import IO

from scripts.dev.bench_transfer.peer import LINE_BYTES
from scripts.dev.bench_transfer.processes import BenchError, Child
from transfer.agents.nixl import EXIT_OVERSLEPT

AWAKE_S = 1.0
"""The time, in seconds, in which a process that goes on has found out that it overslept."""


class SoakChild(Child):
    """A `SoakChild` is a process that may be killed on purpose."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        super().__init__(name, process, errors)
        self._own = process

    async def kill(self) -> None:
        """Kills the process with SIGKILL, by its id."""
        with contextlib.suppress(ProcessLookupError):
            self._own.kill()
        await self.end()

    async def stand_still(self, seconds: float) -> bool:
        """Stops the process for `seconds`, by its id. Returns whether it lives on: one that slept in the middle of a
        write has to end itself when it wakes. Raises `BenchError` where it has ended otherwise."""
        with contextlib.suppress(ProcessLookupError):
            self._own.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                self._own.send_signal(signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AWAKE_S):
                await self._own.wait()
        if self._own.returncode not in (None, EXIT_OVERSLEPT):
            raise BenchError(
                f"{self.name} ended with status {self._own.returncode} when it went on: {self._last_words()}"
            )
        return self._own.returncode is None


class Nursery:
    """A `Nursery` owns processes. Mutable state: `_living`, those that were started and not ended."""

    def __init__(self) -> None:
        self._living: set[SoakChild] = set()

    async def start(self, module: str, *arguments: object) -> SoakChild:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 — the child's as long as it lives
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"scripts.dev.soak_transfer.{module}", *map(str, arguments)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=LINE_BYTES,
            start_new_session=True,  # a Ctrl-C is for the parent, which ends the others in its own time
        )
        child = SoakChild(f"{module} {process.pid}", process, errors)
        self._living.add(child)
        return child

    async def kill(self, child: SoakChild) -> None:
        await child.kill()
        self._living.discard(child)

    async def end_all(self) -> None:
        await asyncio.gather(*(child.end() for child in self._living))
        self._living.clear()


@contextlib.asynccontextmanager
async def nursery() -> AsyncIterator[Nursery]:
    children = Nursery()
    try:
        yield children
    finally:
        await asyncio.shield(children.end_all())
