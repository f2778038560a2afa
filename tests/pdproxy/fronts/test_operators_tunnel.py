"""Pages by way of the operators' tunnel: whole answers, half-closed ends, slow readers, and nothing that is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from pdproxy.fronts.handshake import Lead, Peer
from pdproxy.fronts.operators_tunnel import OperatorsTunnel
from tests.fakes.both_loops import on_both_loops
from tests.helpers.unsteady_relay import UnsteadyRelay
from tests.pdproxy.fronts.test_link import SECRET, TTL_S, Leader, contexts, num_descriptors, until

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]
BODY = os.urandom(1 << 20) * 5


async def tell_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says what was said, once all was."""
    writer.write(await reader.read())
    await writer.drain()
    writer.close()


class Pages:
    """A leader with a page, a relay, and a tunnel to it."""

    def __init__(self, leader: Leader, relay: UnsteadyRelay, tunnel: OperatorsTunnel, path: str, tls: bool) -> None:
        self.leader, self.relay, self.tunnel, self.path = leader, relay, tunnel, path
        self.lead = Lead(1, f"127.0.0.1:{relay.port}", SECRET, TTL_S)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.path)


@asynccontextmanager
async def pages(
    folder: Path, talk: Talk, keys: Path | None = None, *, operators: str = "leader"
) -> AsyncIterator[Pages]:
    server, client = (None, None) if keys is None else contexts(keys, "fleet", "fleet")
    behind = await asyncio.start_unix_server(talk, str(folder / "leader"))
    tunnel = OperatorsTunnel(str(folder / "front"), front=Peer("f"), tls=client)
    async with (
        Leader(tls=server, operators=str(folder / operators)).running() as leader,
        UnsteadyRelay(leader.port) as relay,
    ):
        task = asyncio.create_task(tunnel.run())
        try:
            await until((folder / "front").exists)
            found = Pages(leader, relay, tunnel, str(folder / "front"), keys is not None)
            tunnel.follow(found.lead)
            yield found
        finally:
            task.cancel()
            await asyncio.wait([task])
            behind.close()
    assert not (folder / "front").exists()


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
@on_both_loops
async def test_a_large_body_goes_there_and_back_after_a_half_close(
    is_tls: bool, tmp_path: Path, certificates: Path
) -> None:
    async with pages(tmp_path, tell_back, certificates if is_tls else None) as found:
        reader, writer = await found.open()
        writer.write(BODY)
        writer.write_eof()
        assert await reader.read() == BODY
        writer.close()
        await until(lambda: found.tunnel.num_pipes == 0)
        await until(lambda: not found.leader.server._connections)


@on_both_loops
async def test_httpx_reads_a_page_and_sees_a_cut_as_an_error(tmp_path: Path) -> None:
    """An answer without a length ends with its connection: a cut must not look like its end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if b"/endless" in request:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
            await reader.read()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello")
        writer.close()

    async with pages(tmp_path, answer) as found:
        transport = httpx.AsyncHTTPTransport(uds=found.path)
        async with httpx.AsyncClient(transport=transport, base_url="http://leader", timeout=5.0) as client:
            assert (await client.get("/status")).text == "hello"
            async with client.stream("GET", "/endless") as response:
                pieces = response.aiter_raw()
                assert await anext(pieces) == b"hi"
                found.relay.cut()
                with pytest.raises(httpx.HTTPError):
                    await anext(pieces)
            found.relay.is_refusing = True
            with pytest.raises(httpx.HTTPError):
                await client.get("/status")
            found.relay.is_refusing = False
            found.tunnel.follow(None)
            with pytest.raises(httpx.HTTPError):
                await client.get("/status")
            found.tunnel.follow(found.lead)
            assert (await client.get("/status")).text == "hello"


@on_both_loops
async def test_who_reads_slowly_makes_the_other_end_wait(tmp_path: Path) -> None:
    num_taken = {"there": 0, "back": 0}
    piece = bytes(1 << 16)
    until_read = asyncio.Event()

    async def pour(writer: asyncio.StreamWriter, way: str) -> None:
        for _ in range(800):  # 50 MiB
            writer.write(piece)
            await writer.drain()
            num_taken[way] += len(piece)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pouring = asyncio.ensure_future(pour(writer, "back"))
        await until_read.wait()
        while await reader.read(1 << 16):
            pass
        await pouring
        writer.close()

    async with pages(tmp_path, talk) as found:
        reader, writer = await found.open()
        pouring = asyncio.ensure_future(pour(writer, "there"))
        last = 0
        while not last or last != sum(num_taken.values()):  # until nothing moves any more
            last = sum(num_taken.values())
            await asyncio.sleep(0.1)
        assert 0 < max(num_taken.values()) < 25 << 20, num_taken
        until_read.set()
        num = 0
        while data := await reader.read(1 << 16):
            num += len(data)
            if num == 800 << 16:
                await pouring
                writer.write_eof()
        assert num == 800 << 16
        writer.close()


@pytest.mark.parametrize("who", ["front", "leader", "wire", "term", "server"])
@on_both_loops
async def test_an_end_that_vanishes_takes_the_other_along(who: str, tmp_path: Path) -> None:
    gone = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b"x")
        try:
            await reader.read()
        finally:
            gone.set()
            writer.close()

    async def once(found: Pages) -> None:
        gone.clear()
        writers.clear()
        reader, writer = await found.open()
        assert await reader.readexactly(1) == b"x"
        if who == "front":
            writer.transport.abort()
        elif who == "leader":
            writers[0].transport.abort()
        elif who == "wire":
            found.relay.cut()
        elif who == "term":
            found.tunnel.follow(Lead(found.lead.term + 1, "127.0.0.1:1", SECRET, TTL_S))
            found.tunnel.follow(found.lead)
        else:
            found.leader.server.close()
        async with asyncio.timeout(3.0):
            if who != "front":
                assert await reader.read() == b""
            await gone.wait()
        writer.transport.abort()
        await until(lambda: not found.tunnel.num_pipes and not found.leader.server._connections)

    async with pages(tmp_path, talk) as found:
        if who != "server":
            await once(found)
        await asyncio.sleep(0.05)
        before = num_descriptors(), len(asyncio.all_tasks())
        await once(found)
        await asyncio.sleep(0.05)
        after = num_descriptors(), len(asyncio.all_tasks())
        assert after[0] <= before[0]
        assert after[1] <= before[1]


@on_both_loops
async def test_where_nobody_answers_behind_the_leader_the_connection_ends(tmp_path: Path) -> None:
    async with pages(tmp_path, tell_back, operators="nobody") as found:
        reader, writer = await found.open()
        assert await asyncio.wait_for(reader.read(), 3.0) == b""
        writer.close()


@on_both_loops
async def test_a_wrong_secret_opens_no_tunnel(tmp_path: Path) -> None:
    async with pages(tmp_path, tell_back) as found:
        found.tunnel.follow(Lead(1, found.lead.address, "another", TTL_S))
        reader, writer = await found.open()
        writer.write(b"who is there?")
        with suppress(ConnectionResetError):  # what it said was not read
            assert await asyncio.wait_for(reader.read(), 3.0) == b""
        writer.close()


@on_both_loops
async def test_a_page_that_never_ends_stops_when_its_reader_has_gone(tmp_path: Path) -> None:
    """The page looks at nothing that its reader says, so that it learns of this by writing alone."""
    stopped = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(bytes(1000))
                await writer.drain()
                await asyncio.sleep(0.001)
        except OSError:
            stopped.set()
        writer.close()

    async with pages(tmp_path, talk) as found:
        reader, writer = await found.open()
        await reader.readexactly(5000)
        writer.transport.abort()
        await asyncio.wait_for(stopped.wait(), 3.0)
        await until(lambda: not found.tunnel.num_pipes and not found.leader.server._connections)
