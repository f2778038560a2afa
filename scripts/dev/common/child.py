"""The module starts child processes that answer commands, one JSON line for another, and sees that none of them is
left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Any

from scripts.dev.common.errors import BenchError

LINE_BYTES = 16 << 20
"""The most bytes of a command. The longest is a list of page indexes."""
ANSWER_TIMEOUT_S = 60.0
GRACE_S = 3.0
AWAKE_S = 1.0
"""The time, in seconds, in which a process that goes on has found out that it slept for too long."""
TAIL_BYTES = 2_000


class Child:
    """A `Child` is a process that answers commands, one at a time."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._errors = errors

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, command: str, *arguments: Any) -> Any:
        """Returns the answer to a command. Raises `BenchError` with what went wrong there, or when no answer comes in
        `ANSWER_TIMEOUT_S`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
            await self._process.stdin.drain()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchError(f"{self.name} did not answer {command!r} within {ANSWER_TIMEOUT_S:.0f} s") from None
        except ConnectionError:
            line = b""
        if not line:
            raise BenchError(f"{self.name} ended during {command!r}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer["value"]

    async def stand_still(self, seconds: float, *, may_end_with: int) -> bool:
        """Stops the process for `seconds`, by its id. Returns whether it lives on: one that slept in the middle of a
        write has to end itself when it wakes, with that status. Raises `BenchError` where it has ended otherwise."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AWAKE_S):
                await self._process.wait()
        status = self._process.returncode
        if status not in (None, may_end_with):
            raise BenchError(f"{self.name} ended with status {status} when it went on: {self._last_words()}")
        return status is None

    async def kill(self) -> None:
        """Kills the process with SIGKILL, by its id."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self.end()

    async def end(self) -> None:
        """Ends the process, by the end of its input. If it does not end then, it is terminated or killed."""
        await end_process(self._process)
        self._errors.close()

    def said(self) -> str:
        """Returns what the process has written so far: UCX's own messages, but no answers to commands."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _last_words(self) -> str:
        return self.said()[-TAIL_BYTES:].strip() or "it said nothing"


class ChildGroup:
    """A `ChildGroup` owns child processes. Mutable state: `_living`, those that were started and not killed."""

    def __init__(self) -> None:
        self._living: set[Child] = set()

    async def start(self, name: str, module: str, *arguments: object) -> Child:
        """Starts `python -m` with this module, which runs a `Peer`, and these arguments."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 — the child's as long as it lives
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *map(str, arguments)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=LINE_BYTES,
            start_new_session=True,  # a Ctrl-C is for the parent, which ends the others in its own time
        )
        child = Child(f"{name} {process.pid}", process, errors)
        self._living.add(child)
        return child

    async def kill(self, child: Child) -> None:
        await child.kill()
        self._living.discard(child)

    async def end_all(self) -> None:
        await asyncio.gather(*(child.end() for child in self._living))
        self._living.clear()


@contextlib.asynccontextmanager
async def child_group() -> AsyncIterator[ChildGroup]:
    """Returns a context manager. However it is left, all its processes are ended together, each by its id."""
    children = ChildGroup()
    try:
        yield children
    finally:
        await asyncio.shield(children.end_all())


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Closes the input of a process, which then ends. One that does not is terminated, and killed at last."""
    if process.stdin is not None:
        process.stdin.close()
    for stop in (None, process.terminate, process.kill):
        if stop is not None:
            with contextlib.suppress(ProcessLookupError):
                stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await process.wait()
            return
