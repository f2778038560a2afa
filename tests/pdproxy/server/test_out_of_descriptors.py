"""`pdproxy serve` with few descriptors: who is served, who is told to come again, and that no engine is blamed."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdproxy.serve import REST_S
from tests.fakes.front_door import Answer, RawClient
from tests.pdproxy.server.test_serve_process import Proxy, hold, process

FEW = 256
HELD, INNOCENT, ENDED = 112, 20, 20
BODY = json.dumps({"model": "tiny", "prompt": "a b", "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ncontent-length: %d\r\n\r\n"


@dataclass
class Crowd:
    """Clients of one proxy, each on a connection of its own."""

    port: int
    held: list[RawClient] = field(default_factory=list)
    refused: list[Answer] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> RawClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return RawClient(reader, writer)

    def leave(self) -> None:
        for writer in self.writers:
            writer.close()

    async def ask(self) -> Answer:
        """Returns the whole answer to one request. A connection that is reset raises."""
        client = await self.connect()
        client.send(HEAD % len(BODY) + BODY)
        try:
            return await client.answer()
        finally:
            client.leave()

    async def hold(self) -> None:
        """Begins one stream, which stays open unless it is refused."""
        client = await self.connect()
        client.send(HEAD % len(BODY) + BODY)
        status, headers = await client.head()
        if status == 200:
            self.held.append(client)
        else:
            self.refused.append(Answer(status, headers, await client.read(int(headers["content-length"]))))


def is_told_to_come_again(answer: Answer) -> bool:
    error = json.loads(answer.body)["error"]
    is_named = (error["code"], error["type"]) == ("out_of_descriptors", "service_unavailable")
    return answer.status == 503 and is_named and int(answer.headers["retry-after"]) >= 1


@asynccontextmanager
async def crowded(folder: Path, *options: str) -> AsyncIterator[tuple[Proxy, Crowd]]:
    """A proxy with few descriptors, at which as many streams are under way as it takes."""
    async with process(folder, *options, num_descriptors=FEW) as proxy:
        passed = proxy.decoder.pass_point
        gate = hold(proxy.decoder, "middle")
        crowd = Crowd(proxy.client.base_url.port or 0)
        await asyncio.gather(*(crowd.hold() for _ in range(HELD)))
        proxy.decoder.pass_point = passed  # type: ignore[method-assign]  # for those that come now
        try:
            yield proxy, crowd
        finally:
            crowd.leave()
            gate.set()


async def status_of(proxy: Proxy) -> dict[str, Any]:
    status: dict[str, Any] = (await proxy.client.get("/status")).json()
    return status


async def counted(proxy: Proxy, sample: str) -> float:
    page = (await proxy.client.get("/metrics")).text
    return float(re.findall(rf"^{re.escape(sample)} (\S+)$", page, re.MULTILINE)[0])


async def within(seconds: float, is_so: Callable[[], Awaitable[bool]]) -> float:
    """Asks until it is so. Returns after how many seconds it was."""
    started = time.monotonic()
    async with asyncio.timeout(seconds):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # another process tells nobody
    return time.monotonic() - started


async def check_that_nobody_is_blamed(proxy: Proxy) -> None:
    for one in (await status_of(proxy))["fleet"]:
        assert (one["state"], one["routable"]) == ("ready", True), one
        breaker = one["breaker"]
        assert (breaker["state"], breaker["num_faults"], breaker["num_opened"]) == ("closed", 0, 0)
    assert "is down" not in proxy.said()
    assert "Traceback" not in proxy.said()
    assert "out of system resource" not in proxy.said()


@pytest.mark.parametrize("client", ["relay", "httpx"])
async def test_who_cannot_be_served_is_told_to_come_again(tmp_path: Path, client: str) -> None:
    async with crowded(tmp_path, "--engine-client", client, "--probe-interval-s", "0.1") as (proxy, crowd):
        assert len(crowd.held) > 70, "a stream takes two descriptors, and a few are kept"
        assert all(map(is_told_to_come_again, crowd.refused))
        assert all(answer.headers["connection"] == "close" for answer in crowd.refused)

        answers = await asyncio.gather(*(crowd.ask() for _ in range(INNOCENT)))
        refused = [answer for answer in answers if answer.status != 200]
        assert all(map(is_told_to_come_again, refused))
        assert all(answer.headers["connection"] == "close" for answer in refused)
        assert await counted(proxy, "process_max_fds") == FEW
        if client == "relay":
            assert await counted(proxy, "process_open_fds") <= FEW - 8
            told = len(crowd.refused) + len(refused)
            refusals = [
                await counted(proxy, f'pdproxy_descriptors_refused_total{{what="{what}"}}')
                for what in ("request", "connection")
            ]
            assert refusals[0] > 0
            assert sum(refusals) == told
            assert await counted(proxy, 'pdproxy_local_errors_total{kind="EMFILE"}') == 0
        await check_that_nobody_is_blamed(proxy)

        for one in crowd.held[:ENDED]:
            one.leave()

        async def is_served() -> bool:
            return (await crowd.ask()).status == 200

        print(f"{client}: served after {await within(1.0, is_served):.3f} s")
        assert {(await crowd.ask()).status for _ in range(5)} == {200}
        if client == "relay":
            await within(10.0, lambda: is_over(proxy))
        await check_that_nobody_is_blamed(proxy)


async def is_over(proxy: Proxy) -> bool:
    """Tells whether the log says that the shortage is over. It says so as often as it says that one has begun, and in
    turn."""
    words = re.findall(r"out of descriptors or|descriptors suffice again", proxy.said())
    assert words == ["out of descriptors or", "descriptors suffice again", *words][: len(words)]
    assert len(words) <= 4, "not for each request"
    return bool(words) and len(words) % 2 == 0


async def test_clients_beyond_the_last_descriptors_are_told_so_and_closed(tmp_path: Path) -> None:
    async with process(tmp_path, num_descriptors=FEW) as proxy:
        crowd = Crowd(proxy.client.base_url.port or 0)
        try:
            await status_of(proxy)  # this connection stays
            silent = await asyncio.gather(*(crowd.connect() for _ in range(2 * FEW)))
            told = await asyncio.gather(*(first_words(one) for one in silent))
            refused = [one for one in told if one is not None]
            assert len(refused) > FEW
            assert all(map(is_told_to_come_again, refused))
            assert (await status_of(proxy))["descriptors"]["limit"] == FEW
            assert await counted(proxy, 'pdproxy_descriptors_refused_total{what="connection"}') == len(refused)
            await check_that_nobody_is_blamed(proxy)
            crowd.leave()

            async def is_served() -> bool:
                return (await crowd.ask()).status == 200

            await within(1.0, is_served)
        finally:
            crowd.leave()


async def first_words(client: RawClient) -> Answer | None:
    """Returns what a client hears that says nothing; None where that is nothing."""
    try:
        async with asyncio.timeout(0.4):
            answer = await client.answer()
    except TimeoutError:
        return None
    assert await client.rest() == b""
    return answer


async def test_the_soft_limit_is_raised_and_idle_connections_to_engines_give_way(tmp_path: Path) -> None:
    async with process(tmp_path, num_descriptors=FEW // 2, most_descriptors=FEW) as proxy:
        assert await counted(proxy, "process_max_fds") == FEW
        [num_requests] = re.findall(rf"{FEW} descriptors: enough for about (\d+) requests at once", proxy.said())
        assert 90 < int(num_requests) < 110
        crowd = Crowd(proxy.client.base_url.port or 0)
        try:
            for _ in range(2):  # each leaves 70 idle connections at either engine
                answers = await asyncio.gather(*(crowd.ask() for _ in range(70)))
                assert {answer.status for answer in answers} == {200}
            await asyncio.gather(*(crowd.connect() for _ in range(120)))
            assert (await crowd.ask()).status == 200
            assert "out of descriptors" not in proxy.said()
        finally:
            crowd.leave()


async def test_a_client_that_asks_nothing_gives_way(tmp_path: Path) -> None:
    async with process(tmp_path, num_descriptors=FEW) as proxy:
        crowd = Crowd(proxy.client.base_url.port or 0)
        try:
            resting = await asyncio.gather(*(crowd.connect() for _ in range(FEW - 40)))
            assert is_told_to_come_again(await crowd.ask()), "a connection that is fresh is about to be used"
            await asyncio.sleep(REST_S)
            assert {(await crowd.ask()).status for _ in range(5)} == {200}
            ended = sum([await is_ended(one) for one in resting])
            assert 0 < ended < 20, "no more than has to be"
        finally:
            crowd.leave()


async def is_ended(client: RawClient) -> bool:
    try:
        async with asyncio.timeout(0.001):
            return await client.rest() == b""
    except TimeoutError:
        return False
