"""The memory of a proxy that is a process of its own, as the kernel measures it, while too much is asked of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_engine import FakeReply
from tests.fakes.proxy_harness import until
from tests.pdproxy.server.test_serve_process import Proxy, process

MIB = 1 << 20
BUDGET_MIB = 64
CONSTANT_MIB = 32
"""For what is not counted: one read of each socket, and copies that last a moment. Measured: 8 to 20."""
BODY_BYTES = 6 * MIB
NUM_CLIENTS = 16
OPTIONS = ("--memory-budget", f"{BUDGET_MIB}MiB", "--max-body-bytes", "8MiB", "--body-timeout-s", "60")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


def peak_mib(proxy: Proxy) -> int:
    """The most memory that the process has ever had."""
    lines = Path(f"/proc/{proxy.child.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


async def small_requests_are_served(proxy: Proxy) -> None:
    for _ in range(3):
        async with asyncio.timeout(5):
            answer = await proxy.client.post("/v1/completions", json={"model": "tiny", "prompt": "a b"})
        assert answer.status_code == 200


async def num_used(proxy: Proxy) -> int:
    memory = (await proxy.client.get("/status")).json()["memory"]
    assert memory["budget_bytes"] == BUDGET_MIB * MIB
    return int(memory["used_bytes"])


class Sender:
    """A client whose request never ends. Mutable state: its connection, and the status that it was told."""

    def __init__(self) -> None:
        self.status = b""

    async def begin(self, proxy: Proxy, head: str) -> None:
        host, port = proxy.client.base_url.host, proxy.client.base_url.port
        self._reader, self._writer = await asyncio.open_connection(host, port)
        self._writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\n{head}\r\n\r\n".encode())

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def hear(self) -> None:
        self.status = (await self._reader.read(12))[9:12]

    def leave(self) -> None:
        self._writer.transport.abort()


async def test_bodies_that_never_end_take_the_budget_and_no_more(tmp_path: Path) -> None:
    async with process(tmp_path, *OPTIONS) as proxy:
        await small_requests_are_served(proxy)
        before = peak_mib(proxy)
        clients = [Sender() for _ in range(NUM_CLIENTS)]
        hearing = []
        for client in clients:
            await client.begin(proxy, f"content-length: {BODY_BYTES + 1}")
            hearing.append(asyncio.create_task(client.hear()))
            await client.send(b" " * BODY_BYTES)
        await small_requests_are_served(proxy)
        num_held = BUDGET_MIB * MIB * 7 // 8 // (2 * BODY_BYTES)
        await until(lambda: [client.status for client in clients].count(b"503") == NUM_CLIENTS - num_held)
        assert await num_used(proxy) > 0.7 * BUDGET_MIB * MIB
        for client in clients:
            client.leave()
        await asyncio.wait(hearing)
        assert peak_mib(proxy) - before < BUDGET_MIB + CONSTANT_MIB
        for _ in range(500):  # a process tells nobody that it has noticed
            if not await num_used(proxy):
                break
            await asyncio.sleep(0.01)

        before = peak_mib(proxy)
        tiny = Sender()
        await tiny.begin(proxy, "transfer-encoding: chunked")
        for _ in range(2 * BODY_BYTES // MIB):
            await tiny.send(b"2\r\n  \r\n" * (MIB // 4))
        await small_requests_are_served(proxy)
        assert await num_used(proxy) > BODY_BYTES
        tiny.leave()
        assert peak_mib(proxy) - before < CONSTANT_MIB, "a body in chunks of two bytes is as large as any"


async def test_an_answer_without_end_takes_the_budget_and_no_more(tmp_path: Path) -> None:
    pieces: Any = itertools.chain([b'{"a":"'], itertools.repeat(b"x" * (MIB // 4)))
    async with process(tmp_path, *OPTIONS, "--retries", "0") as proxy:
        await small_requests_are_served(proxy)
        before = peak_mib(proxy)
        answered = proxy.decoder._decode

        async def decode(path: str, body: dict[str, Any]) -> FakeReply:
            return FakeReply(200, pieces) if body.get("echo") else await answered(path, body)

        proxy.decoder._decode = decode  # type: ignore[method-assign]
        asking = {"model": "tiny", "prompt": "a", "echo": True}
        answers = [asyncio.create_task(proxy.client.post("/v1/completions", json=asking)) for _ in range(3)]
        await until(lambda: len(proxy.decoder.generations()) >= 3)
        await small_requests_are_served(proxy)
        for answer in answers:
            told = await answer
            assert (told.status_code, json.loads(told.content)["error"]["code"]) == (503, "memory_budget_spent")
        await small_requests_are_served(proxy)
        assert not await num_used(proxy)
        assert peak_mib(proxy) - before < BUDGET_MIB + CONSTANT_MIB
