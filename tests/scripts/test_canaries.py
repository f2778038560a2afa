"""Waiting until the proxy has got a request through each instance. A stand-in for the proxy says what a test
tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from pdproxy.launch.canaries import Standing, until_served
from pdproxy.launch.errors import NothingServed


def status(**states: str) -> str:
    return json.dumps(
        {"fleet": [{"name": name, "state": state, "why": f"{name} is {state}"} for name, state in states.items()]}
    )


@asynccontextmanager
async def proxy(answers: Iterator[str]) -> AsyncIterator[str]:
    """Gives each of these once, and the last again and again; its address."""
    latest = ""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal latest
        latest = next(answers, latest)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /status ")
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(latest)}\r\nconnection: close\r\n\r\n"
        writer.write((head + latest).encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())


async def test_until_all_that_are_named_are_ready() -> None:
    answers = iter(
        [
            "not what one expects",
            status(near="alive", other="ready", far="unknown"),
            status(near="ready", other="ready", far="unknown"),
        ]
    )
    async with proxy(answers) as url:
        fleet = await until_served(url, ("near", "other"), 20)
    assert fleet == (
        Standing("near", True, "near is ready"),
        Standing("other", True, "other is ready"),
        Standing("far", False, "far is unknown"),
    )


async def test_who_is_not_ready_in_time_is_named_in_the_proxys_words() -> None:
    async with proxy(iter([status(near="ready", other="alive")])) as url:
        with pytest.raises(NothingServed, match="no request has gone through other within 0 s: other is alive"):
            await until_served(url, ("near", "other"), 0)


async def test_one_that_the_proxy_does_not_know() -> None:
    async with proxy(iter([status(near="ready")])) as url:
        with pytest.raises(NothingServed, match="through other within 0 s: the proxy does not know it"):
            await until_served(url, ("near", "other"), 0)


async def test_a_proxy_that_does_not_answer() -> None:
    with pytest.raises(NothingServed, match="through the proxy within 0 s: it does not answer"):
        await until_served("http://127.0.0.1:9", ("near",), 0)
