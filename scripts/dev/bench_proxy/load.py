"""The module runs the clients of one target in one round, as a process. It says when it is ready, begins when told to,
says when it is done and stays until it is told to go, so that what is measured lies exactly between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scripts.dev.bench_proxy.plan import BESIDE_PAUSE_S, Scenario
from scripts.dev.common.child import end_process
from scripts.dev.common.errors import BenchError

LINE_BYTES = 1 << 26
MARK = b"mark\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Reach is what the clients talk to: a proxy at `port`, or the engines themselves where there is a
    `decode_port`."""

    port: int
    decode_port: int = 0
    prompts: Path | None = None
    """Holds a file of the prompts that are sent beside streams, where any are."""


class Told(msgspec.Struct):
    """Told is what the clients say of a round. Times are in tenths of a µs unless named otherwise."""

    requests: int
    beside: int
    """Counts the prompts that were sent beside these requests, and answered."""
    errors: int
    complaint: str
    """The message of the first error."""
    tokens: int
    wall_ns: int
    first_tokens: list[int]
    transits: list[int]
    """Holds the times from the engine's writing of a token to its being read, one for each token."""


_told = msgspec.json.Decoder(Told)


class Clients:
    """Clients is the process of the clients; `clients_of` makes it."""

    def __init__(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        self._process = process
        self._timeout_s = timeout_s

    @property
    def pid(self) -> int:
        return self._process.pid

    async def until(self, word: str, at_mark: Callable[[], None] | None = None) -> None:
        """Waits until the clients say `word`. `at_mark` is called each time another part is over. Raises `BenchError`
        where something else is said, or nothing in time."""
        while (line := await self._line(word)) != f"{word}\n".encode():
            if at_mark is None or line != MARK:
                raise BenchError(f"the clients said {line[:100]!r} instead of {word!r}")
            at_mark()

    async def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        await self._process.stdin.drain()

    async def tell(self) -> Told:
        try:
            return _told.decode(await self._line("what was timed"))
        except msgspec.DecodeError as error:
            raise BenchError(f"the clients are not understood: {error}") from None

    async def _line(self, what: str) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchError(f"waited {self._timeout_s:g} s for the clients: {what}") from None
        if not line:
            assert self._process.stderr is not None
            raise BenchError((await self._process.stderr.read()).decode(errors="replace").strip() or "the clients died")
        return line


@contextlib.asynccontextmanager
async def clients_of(program: Path, scenario: Scenario, reach: Reach, timeout_s: float) -> AsyncIterator[Clients]:
    """Starts the clients, and yields them; they are gone when the block ends. Each of their steps may take
    `timeout_s`."""
    process = await asyncio.create_subprocess_exec(
        str(program),
        *_words(scenario, reach),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
        start_new_session=True,
    )
    try:
        yield Clients(process, timeout_s)
    finally:
        await asyncio.shield(end_process(process))


def _words(scenario: Scenario, reach: Reach) -> list[str]:
    options = {
        "port": reach.port,
        "decode_port": reach.decode_port,
        "clients": scenario.clients,
        "requests": scenario.requests,
        "warmup": scenario.warmup,
        "tokens": scenario.tokens,
        "stream": int(scenario.is_stream),
        "chat": int(scenario.is_chat),
        "prompt_bytes": scenario.prompt_bytes,
        "models": scenario.num_models,
        "headers": scenario.num_headers,
        "stay": int(scenario.is_standing),
        "slow": int(scenario.is_slow),
        "spread_ms": round(scenario.spread_s * 1e3),
        "hold": int(scenario.is_held),
        "marks": scenario.num_marks,
        "beside": scenario.num_beside,
        "beside_pause_ms": round(BESIDE_PAUSE_S * 1e3),
        "beside_file": reach.prompts or "",
    }
    return [f"{name}={value}" for name, value in options.items()]
