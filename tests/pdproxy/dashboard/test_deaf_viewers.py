"""Viewers that stop reading, over real sockets: their descriptors come back, and they cost no more than a little memory
until then."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette

from pdproxy.dashboard import feed as feed_module
from pdproxy.dashboard import routes
from pdproxy.dashboard.feed import Feed
from pdproxy.dashboard.routes import dashboard_routes
from tests.fakes.both_loops import on_both_loops
from tests.fakes.eyes import picture_of, told
from tests.fakes.front_door import FrontDoor, front_door
from tests.fakes.proxy_harness import until

ASK = b"GET /ui/events HTTP/1.1\r\nhost: proxy\r\n\r\n"
LIFE_S = 0.3
STALLED_S = 0.1
REST_S = 0.2
"""Of a connection whose client takes nothing, beyond `STALLED_S`."""
LARGE = 300_000


class Subject:
    """Implements `Subject`: a picture of `num_bytes`, another one at each look."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.num_looks = 0
        self.is_over = False

    @property
    def now(self) -> float:
        return float(self.num_looks)

    def take(self) -> dict[str, Any]:
        self.num_looks += 1
        return {"fleet": {"text": f"{self.num_looks:08d}" * (self._num_bytes // 8)}}


@asynccontextmanager
async def page_of(subject: Subject) -> AsyncIterator[tuple[FrontDoor, Feed]]:
    feed = Feed(subject)
    running = asyncio.create_task(feed.run())
    app = Starlette(routes=[*dashboard_routes(feed)])
    try:
        async with front_door(app=app, keep_alive_s=REST_S) as door:
            yield door, feed
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def deaf_viewer(door: FrontDoor) -> socket.socket:
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", door.port))
    deaf.sendall(ASK)
    return deaf


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "EVERY_S", 0.02)
    monkeypatch.setattr(feed_module, "GAP_S", 0.01)
    monkeypatch.setattr(feed_module, "BEAT_S", 0.05)
    monkeypatch.setattr(routes, "STALLED_S", STALLED_S)


@on_both_loops
async def test_a_viewer_that_stops_reading_gives_its_descriptor_back_with_much_unsent() -> None:
    """It is dropped long before its stream would end, and what it has not taken does not grow meanwhile."""
    async with page_of(Subject(LARGE)) as (door, feed):
        before, most = num_descriptors(), 0
        with deaf_viewer(door):
            await until(lambda: feed.num_viewers == 1)
            await until(lambda: door.memory.num_bytes > 0)
            async with asyncio.timeout(5.0):
                while door.state.connections:
                    most = max(most, door.memory.num_bytes)
                    await asyncio.sleep(0.005)
            await until(lambda: feed.num_viewers == 0)
            assert num_descriptors() == before + 1, "only the viewer's own end is left"
        assert 0 < most < (feed_module.MAX_PENDING + 1) * 2 * LARGE
        assert door.memory.num_bytes == 0


@on_both_loops
async def test_a_viewer_that_stops_reading_gives_its_descriptor_back_where_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The operating system takes all that it is told, so that it looks like one who reads."""
    monkeypatch.setattr(routes, "LIFE_S", LIFE_S)
    async with page_of(Subject(8)) as (door, feed):
        before = num_descriptors()
        with deaf_viewer(door):
            await until(lambda: feed.num_viewers == 1)
            began = asyncio.get_running_loop().time()
            await door.is_empty()
            assert asyncio.get_running_loop().time() - began < LIFE_S + 2 * REST_S + 2.0
            assert num_descriptors() == before + 1
            await until(lambda: feed.num_viewers == 0)


@on_both_loops
async def test_who_still_looks_is_told_to_come_again_and_sees_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "LIFE_S", LIFE_S)
    async with page_of(Subject(8)) as (door, _feed):
        last = ""
        for _ in range(2):
            client = await door.connect()
            client.send(ASK)
            async with asyncio.timeout(5.0):
                answer = await client.answer()
            assert answer.headers["connection"] == "close"
            assert answer.body.endswith(routes.AGAIN)
            kinds = [kind for kind, _ in told(answer.body)]
            assert (kinds[0], kinds[-1]) == ("snapshot", "again")
            seen = picture_of(told(answer.body)[:-1])["fleet"]["text"]
            assert seen > last, "the second one goes on where the first has ended"
            last = seen


@on_both_loops
async def test_a_viewer_that_reads_is_kept_for_as_long_as_its_stream_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a connection may not rest for long does not concern it."""
    monkeypatch.setattr(routes, "LIFE_S", 4 * REST_S)
    async with page_of(Subject(8)) as (door, _feed):
        client = await door.connect()
        began = asyncio.get_running_loop().time()
        client.send(ASK)
        async with asyncio.timeout(5.0):
            answer = await client.answer()
        assert answer.body.endswith(routes.AGAIN)
        assert asyncio.get_running_loop().time() - began > 3 * REST_S
