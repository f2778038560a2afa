"""The processes of one run, owned by one `async with`: none of them is left, whatever happens inside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from scripts.dev.bench_transfer.peer import LINE_BYTES

ANSWER_TIMEOUT_S = 60.0
GRACE_S = 3.0
TAIL_BYTES = 2_000


class BenchError(Exception):
    """A process of the benchmark failed, or did what it should not. The message says which and what."""


class Child:
    """A `Child` is a process that answers commands, one at a time."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._errors = errors

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

    async def end(self) -> None:
        """Ends the process, by the end of its input. If it does not end then, it is terminated or killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        for stop in (None, self._process.terminate, self._process.kill):
            if stop is not None:
                with contextlib.suppress(ProcessLookupError):
                    stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
                break
        self._errors.close()

    def said(self) -> str:
        """Returns what the process has written so far: UCX's own messages, but no answers to commands."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _last_words(self) -> str:
        return self.said()[-TAIL_BYTES:].strip() or "it said nothing"


@dataclass(frozen=True)
class Children:
    receiver: Child
    senders: Sequence[Child]
    copier: Child

    @property
    def all(self) -> list[Child]:
        return [self.receiver, *self.senders, self.copier]


@contextlib.asynccontextmanager
async def children(
    num_senders: int, device: str, lifetime_s: float, *, senders_on: str | None = None
) -> AsyncIterator[Children]:
    """Starts the processes together, and ends them together and by id, however this is left. None lives longer than
    `lifetime_s` seconds.

    Their pages lie on `device`, those of the senders on `senders_on` where that is given.
    """
    started: list[Child] = []
    roles = ["receiver", "copier", *["sender"] * num_senders]
    try:
        for role in roles:
            on = senders_on or device if role == "sender" else device
            started.append(await start_child(role, "scripts.dev.bench_transfer.peer", role, on, str(lifetime_s)))
        await asyncio.gather(*(child.ask("cpu") for child in started))
        receiver, copier, *senders = started
        yield Children(receiver, senders, copier)
    finally:
        await asyncio.shield(asyncio.gather(*(child.end() for child in started)))


async def start_child(name: str, *words: str) -> Child:
    """Starts `python -m` with these words, a module that runs a `Peer`. The caller ends it."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115 — the child's as long as it lives
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        limit=LINE_BYTES,
        start_new_session=True,  # a Ctrl-C is for the parent, which ends the others in its own time
    )
    return Child(f"{name} {process.pid}", process, errors)
