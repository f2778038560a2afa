"""`pdproxy up` as a process whose own words are read; its programs' are on the same stderr."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 100.0


@asynccontextmanager
async def launched(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """It is killed in the end, and what nobody has read of it is printed."""
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "200"}, cwd=ROOT
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        _, rest = await process.communicate()
        print(rest.decode())


async def read_until(process: asyncio.subprocess.Process, words: str, seen: list[str]) -> str:
    """The next line of the launcher itself, not of one of its programs, that begins so; all lines go to `seen`."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        while not seen or not seen[-1].startswith(words):
            line = await process.stderr.readline()
            assert line, "".join(seen)
            seen.append(line.decode())
    return seen[-1]
