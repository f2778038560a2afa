"""Two real processes over real NIXL: what arrives, and what is left when one of them is killed or frozen."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
NUM_PAGES = 32
PAGE_BYTES = 1 << 20
WRITER_TIMEOUT_S = 1.5
START_LIMIT_S = 60.0
LIMIT_S = 15.0


class Child:
    """A process of `tests.helpers.transfer_process`, spoken to line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, role: str) -> Child:
        quiet = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,sm,self", "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "WARN"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.helpers.transfer_process",
            role,
            cwd=ROOT,
            env={**os.environ, **quiet},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(process)

    async def ask(self, *command: Any, limit_s: float = LIMIT_S) -> Any:
        await self.say(*command)
        return await self.answer(limit_s)

    async def say(self, *command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        await self._process.stdin.drain()

    async def answer(self, limit_s: float = LIMIT_S) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(limit_s):
            line = await self._process.stdout.readline()
        assert line, "the process has died"
        return json.loads(line)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def close(self) -> None:
        """Ask it to end by itself, which it must do."""
        await self.ask("close")
        async with asyncio.timeout(LIMIT_S):
            assert await self._process.wait() == 0


class Pair:
    def __init__(self, sender: Child, receiver: Child, endpoint: list[Any]) -> None:
        self.sender = sender
        self.receiver = receiver
        self._endpoint = endpoint

    async def open(self, attempt: str, num_pages: int, timeout_s: float = 20.0) -> None:
        assert await self.sender.ask("open", *self._endpoint, attempt, num_pages, timeout_s) is None

    async def push(self, attempt: str, pages: list[int]) -> None:
        """Send these pages and have them read; what arrives is what was sent."""
        await self.open(attempt, len(pages))
        await self.sender.ask("fill", attempt, pages)
        assert (await self.sender.ask("finish", attempt))[0] == len(pages) * PAGE_BYTES
        assert await self.receiver.ask("read", attempt) == await self.sender.ask("checksum", pages)

    async def cpu_share(self, seconds: float) -> list[float]:
        """Cores used by sender and receiver while they are left alone."""
        used = await asyncio.gather(self.sender.ask("idle", seconds), self.receiver.ask("idle", seconds))
        return [each / seconds for each in used]

    async def close(self) -> None:
        await self.sender.close()
        await self.receiver.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    sender, receiver = await asyncio.gather(Child.start("sender"), Child.start("receiver"))
    try:
        await sender.ask("start", limit_s=START_LIMIT_S)
        yield Pair(sender, receiver, await receiver.ask("start", limit_s=START_LIMIT_S))
    finally:
        await sender.kill()
        await receiver.kill()


async def test_bytes_arrive_and_nothing_runs_hot(pair: Pair) -> None:
    for attempt, pages in (("a", list(range(NUM_PAGES))), ("b", [5, 3, 30])):
        await pair.push(attempt, pages)
    assert await pair.receiver.ask("num_free") == NUM_PAGES
    assert max(await pair.cpu_share(3.0)) < 0.01, "idle"

    await pair.open("c", 3)
    assert max(await pair.cpu_share(1.0)) < 0.03, "an attempt is open, nothing is written: heartbeats are all there is"
    assert await pair.receiver.ask("num_free") == NUM_PAGES - 3
    await pair.close()


async def test_the_receiver_is_killed_in_mid_write(pair: Pair) -> None:
    """Two writes are under way (the receiver is stopped first, so that they stay so) and a third push is waiting."""
    for attempt in ("a", "b", "c"):
        await pair.open(attempt, 8)
    pair.receiver.signal(signal.SIGSTOP)
    await pair.sender.ask("fill", "a", list(range(8)))
    await pair.sender.ask("fill", "b", list(range(8, 16)))
    await asyncio.sleep(0.1)
    await pair.receiver.kill()
    for attempt in ("a", "b", "c"):
        reason, seconds = await pair.sender.ask("finish", attempt)
        assert "attempt" in str(reason)
        assert seconds < WRITER_TIMEOUT_S
        assert await pair.sender.ask("ended", attempt) is None, "the local pages are nobody's any more"
    await pair.sender.close()


async def test_the_sender_is_killed_half_way(pair: Pair) -> None:
    await pair.open("a", 8)
    await pair.open("b", 4)
    await pair.sender.ask("fill", "a", [0, 1, 2])
    assert await pair.receiver.ask("num_free") == NUM_PAGES - 12
    await pair.sender.kill()
    seconds = await pair.receiver.ask("free_pages", NUM_PAGES, 5 * WRITER_TIMEOUT_S)
    assert 0.5 * WRITER_TIMEOUT_S < seconds < 3 * WRITER_TIMEOUT_S
    await pair.receiver.close()


async def test_one_of_them_is_frozen(pair: Pair) -> None:
    await _freeze_the_receiver(pair)
    await pair.push("b", [7, 8])
    await _freeze_the_sender(pair)
    await pair.push("d", [4])
    assert await pair.receiver.ask("num_free") == NUM_PAGES
    await pair.close()


async def _freeze_the_receiver(pair: Pair) -> None:
    """The push ends by its deadline although its write does not; when the receiver goes on, its pages come back."""
    await pair.open("a", 8, 1.0)
    pair.receiver.signal(signal.SIGSTOP)
    await pair.sender.ask("fill", "a", list(range(8)))
    reason, seconds = await pair.sender.ask("finish", "a")
    assert "attempt a" in str(reason)
    assert seconds < 1.5
    await asyncio.sleep(WRITER_TIMEOUT_S)
    pair.receiver.signal(signal.SIGCONT)
    assert await pair.receiver.ask("free_pages", NUM_PAGES, LIMIT_S) < 2 * WRITER_TIMEOUT_S
    assert await pair.sender.ask("ended", "a") is None


async def _freeze_the_sender(pair: Pair) -> None:
    """Its pages are used again; when it goes on it must not write by what it was once told."""
    await pair.open("c", NUM_PAGES)
    pair.sender.signal(signal.SIGSTOP)
    assert await pair.receiver.ask("free_pages", NUM_PAGES, LIMIT_S) < 3 * WRITER_TIMEOUT_S
    await pair.sender.say("fill", "c", list(range(NUM_PAGES)))
    await pair.sender.say("finish", "c")
    pair.sender.signal(signal.SIGCONT)
    assert await pair.sender.answer() is None
    reason, _ = await pair.sender.answer()
    assert "attempt c" in str(reason)
