"""The module plays clients of a proxy, and an operator, who use up what there is: descriptors, memory, the loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

HELD_BODIES, HELD_BODY_BYTES = 30, 15 << 20
HELD_STREAMS = 60
SILENT_CONNECTIONS = 60
CRUMBS_BYTES = 200_000
HOLD_S = 5.0
"""The seconds for which a body or a stream is held before its client leaves."""
HARMS = ("long_event", "comments", "empty_events", "crumbs", "endless_head", "endless")


class Attackers:
    """`Attackers` attack the proxy at `port`, whose process is `pid`. `statuses` counts how they were answered, by what
    they did.
    """

    def __init__(self, port: int, pid: int, seed: int) -> None:
        self.statuses: dict[str, Counter[str]] = {}
        self._port = port
        self._pid = pid
        self._seed = seed

    async def run(self) -> None:
        """Attacks until it is cancelled."""
        kinds: list[tuple[str, int, Callable[[], Coroutine[Any, Any, str]]]] = [
            ("hold a stream", HELD_STREAMS, self._hold_stream),
            ("hold a body", HELD_BODIES, self._hold_body),
            ("send a body in crumbs", 1, self._send_crumbs),
            ("say nothing", SILENT_CONNECTIONS, self._say_nothing),
            ("read nothing", 4, self._read_nothing),
            *((harm, 1, self._provoker(harm)) for harm in HARMS),
            ("send signals", 1, self._send_signals),
        ]
        async with asyncio.TaskGroup() as tasks:
            for name, count, attack in kinds:
                for number in range(count):
                    dice = random.Random(f"{self._seed} {name} {number}")
                    tasks.create_task(self._again_and_again(name, attack, dice))

    async def _again_and_again(
        self, name: str, attack: Callable[[], Coroutine[Any, Any, str]], dice: random.Random
    ) -> None:
        outcomes = self.statuses.setdefault(name, Counter())
        await asyncio.sleep(dice.random() * HOLD_S)
        while True:
            try:
                outcomes[await attack()] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                outcomes[type(error).__name__] += 1
            await asyncio.sleep(dice.uniform(0.1, 1.0))

    async def _hold_stream(self) -> str:
        async with self._asked("slow", model="well") as (reader, _):
            status = await _status(reader)
            if status == "200":
                await asyncio.sleep(HOLD_S)
            return status

    def _provoker(self, harm: str) -> Callable[[], Coroutine[Any, Any, str]]:
        async def provoke() -> str:
            async with self._asked(harm, stream=harm != "endless") as (reader, _):
                status = await _status(reader)
                while await reader.read(1 << 20):
                    pass
                return status

        return provoke

    async def _read_nothing(self) -> str:
        async with self._asked("flood", model="well"):
            await asyncio.sleep(HOLD_S)
        return "left"

    async def _say_nothing(self) -> str:
        async with self._connection():
            await asyncio.sleep(HOLD_S)
        return "left"

    async def _hold_body(self) -> str:
        """Sends a large body but for its last byte, and leaves after a while, unless it is answered before that."""
        async with self._connection() as (reader, writer):
            writer.write(_head(HELD_BODY_BYTES))
            sending = asyncio.create_task(_pour(writer, HELD_BODY_BYTES - 1))
            try:
                async with asyncio.timeout(HOLD_S):
                    return await _status(reader)
            except TimeoutError:
                return "left"
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _send_crumbs(self) -> str:
        async with self._connection() as (_, writer):
            writer.write(_head(CRUMBS_BYTES))
            for _ in range(CRUMBS_BYTES // 2 - 1):
                writer.write(b"  ")
                await writer.drain()
                await asyncio.sleep(0)
        return "left"

    async def _send_signals(self) -> str:
        for number in (signal.SIGUSR1, signal.SIGHUP):
            os.kill(self._pid, number)
            await asyncio.sleep(1.0)
        return "sent"

    @contextlib.asynccontextmanager
    async def _asked(
        self, harm: str, *, model: str = "hostile", stream: bool = True
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Returns a context manager for a connection on which a request was sent."""
        asked = {"model": model, "prompt": f"{harm} please", "max_tokens": 100_000, "stream": stream}
        body = json.dumps(asked).encode()
        async with self._connection() as (reader, writer):
            writer.write(_head(len(body)) + body)
            yield reader, writer

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Returns a context manager for a connection, which is cut at its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


def _head(num_bytes: int) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", "connection: close"]
    return "\r\n".join([*lines, f"content-length: {num_bytes}", "", ""]).encode()


async def _status(reader: asyncio.StreamReader) -> str:
    """Returns the status of the answer whose head comes next."""
    head = await reader.readuntil(b"\r\n\r\n")
    return head.split(b" ", 2)[1].decode("latin-1")


async def _pour(writer: asyncio.StreamWriter, num_bytes: int) -> None:
    piece = b" " * (256 * 1024)
    while num_bytes > 0:
        writer.write(piece[:num_bytes])
        num_bytes -= len(piece)
        await writer.drain()
        await asyncio.sleep(0)
