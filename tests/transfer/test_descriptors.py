"""Connections are taken only while there are descriptors for them, and whoever is turned away is told so."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes.both_loops import on_both_loops
from tests.fakes.calls import until
from transfer.descriptors import BATCH, CLIENT_RESERVE, NUM_LEAVING, Acceptor, Descriptors, num_open

REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"


class Few(Descriptors):
    """Room for `num` clients, whatever else this process has open."""

    def __init__(self, num: int) -> None:
        self.num = num
        super().__init__()

    def measure(self) -> None:
        self.num_others = 0
        self.limit = self.num + CLIENT_RESERVE


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(b"hello")

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@asynccontextmanager
async def accepting(descriptors: Descriptors) -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.get_running_loop()

    async def serve(accepted: socket.socket) -> None:
        await loop.connect_accepted_socket(Echo, accepted)

    acceptor = Acceptor(listener, serve, descriptors, refusal=REFUSAL, backlog=1000)
    address = listener.getsockname()
    try:
        yield address
    finally:
        acceptor.close()
        acceptor.close()
        await acceptor.wait_closed()
        assert acceptor.sockets == ()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


async def hears(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(5):
        return await reader.readexactly(5)


@on_both_loops
async def test_who_comes_while_there_is_room_is_served_and_counted_until_closed() -> None:
    descriptors = Few(BATCH + 20)
    async with accepting(descriptors) as address:
        made = await asyncio.gather(*(asyncio.open_connection(*address) for _ in range(BATCH + 20)))
        assert {await hears(reader) for reader, _ in made} == {b"hello"}
        assert (descriptors.num_clients, descriptors.num_free) == (BATCH + 20, CLIENT_RESERVE)
        for _, writer in made:
            writer.close()
        await until(lambda: descriptors.num_clients == 0)
        assert descriptors.num_turned_away == 0


@on_both_loops
async def test_who_comes_beyond_is_told_so_whether_it_has_written_or_not() -> None:
    descriptors = Few(2)
    async with accepting(descriptors) as address:
        kept = [await asyncio.open_connection(*address) for _ in range(2)]
        assert {await hears(reader) for reader, _ in kept} == {b"hello"}
        made = await asyncio.gather(*(asyncio.open_connection(*address) for _ in range(4 * NUM_LEAVING)))
        for _, writer in made[::2]:
            writer.write(b"x" * 1000)
        async with asyncio.timeout(5):
            assert {await reader.read() for reader, _ in made} == {REFUSAL}
        assert (descriptors.num_clients, descriptors.num_turned_away) == (2, len(made))
        kept[0][1].close()
        await until(lambda: descriptors.num_clients == 1)
        reader, writer = await asyncio.open_connection(*address)
        assert await hears(reader) == b"hello", "it is back to normal at once"
        for one in (writer, kept[1][1], *(writer for _, writer in made)):
            one.close()
        await until(lambda: descriptors.num_clients == 0)


async def test_a_client_that_is_turned_away_is_not_reset_by_what_it_still_writes() -> None:
    async with accepting(Few(0)) as address:
        with socket.create_connection(address) as client:
            for _ in range(3):
                client.send(b"a" * 1000)
                await asyncio.sleep(0.02)  # a reset comes back at once
            assert client.recv(1000) == REFUSAL


@on_both_loops
async def test_accepting_goes_on_after_the_system_had_no_descriptor() -> None:
    descriptors = Few(100)
    async with accepting(descriptors) as address:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        clients = [socket.socket() for _ in range(3)]
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            for one in clients:
                one.connect(address)
            await asyncio.sleep(0.02)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in clients:
            one.setblocking(False)
        heard = await asyncio.gather(*(asyncio.get_running_loop().sock_recv(one, 5) for one in clients))
        assert heard == [b"hello"] * 3, "who came meanwhile has waited, and was not reset"
        for one in clients:
            one.close()
        await until(lambda: descriptors.num_clients == 0)


def test_what_is_open_is_measured() -> None:
    before = num_open()
    assert before is not None
    more = [os.dup(0) for _ in range(5)]
    assert num_open() == before + 5
    descriptors = Descriptors()
    for one in more:
        os.close(one)
    others = descriptors.num_others
    descriptors.num_clients = 2  # two of those that were measured as others
    descriptors.measure()
    assert descriptors.num_others == others - 7
    descriptors.num_opened = descriptors.num_pending = 3  # none of which has a descriptor yet
    descriptors.measure()
    assert descriptors.num_others == others - 7
    more = os.dup(0), os.dup(0), os.dup(0), os.dup(0)  # now they have, and there is another one
    descriptors.measure()
    assert descriptors.num_others == others - 6
    for one in more:
        os.close(one)


RAISES = "from transfer.descriptors import raise_limit; import resource as r; print(raise_limit(), r.getrlimit(7))"


def test_the_soft_limit_becomes_the_hard_one() -> None:
    assert resource.RLIMIT_NOFILE == 7
    command = ["sh", "-c", 'ulimit -Sn 100 && ulimit -Hn 200 && exec "$@"', "sh", sys.executable, "-c", RAISES]
    assert subprocess.check_output(command, text=True).split(maxsplit=1) == ["200", "(200, 200)\n"]
