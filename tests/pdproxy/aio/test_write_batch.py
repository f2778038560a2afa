"""Writes that wait for the end of the loop's turn: each socket's bytes in their order, and none left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from typing import Any

import pytest
import uvloop

from pdproxy.aio import write_batch
from pdproxy.aio.write_batch import (
    MAX_BYTES,
    MAX_WRITES,
    MIN_WRITES,
    PROBE_WRITES,
    BatchedTransport,
    WriteBatch,
    batched,
)
from tests.fakes.both_loops import on_both_loops

LIMIT_S = 10.0


class Loop:
    """As much of an event loop as a batch needs: its turns end when a test says so."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def call_soon(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def end_turn(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class Wire:
    """A transport that keeps what it was told, in order with everybody else's."""

    def __init__(self, name: str, told: list[tuple[str, bytes]]) -> None:
        self.name = name
        self.told = told
        self.num_unsent = 0
        self.is_closed = False
        self.bug: BaseException | None = None

    def write(self, data: bytes) -> None:
        if self.bug is not None:
            raise self.bug
        assert not self.is_closed, "nobody may write to a closed transport"
        self.told.append((self.name, data))

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def close(self) -> None:
        self.is_closed = True
        self.told.append((self.name, b"closed"))

    def abort(self) -> None:
        self.is_closed = True
        self.told.append((self.name, b"aborted"))

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return self.num_unsent


class World:
    def __init__(self, num_wires: int) -> None:
        self.loop: Any = Loop()
        self.told: list[tuple[str, bytes]] = []
        self.wires: list[Any] = [Wire(f"w{number}", self.told) for number in range(num_wires)]
        batch = WriteBatch()
        self.transports = [BatchedTransport(wire, batch, self.loop) for wire in self.wires]

    def make_busy(self) -> None:
        """A turn after which it pays that writes wait."""
        for _ in range(PROBE_WRITES + MIN_WRITES):
            self.transports[0].write(b"busy")
        self.loop.end_turn()
        self.told.clear()


def test_what_is_written_in_a_busy_turn_goes_out_at_its_end() -> None:
    world = World(3)
    world.make_busy()
    first, second, third = world.transports
    first.write(b"a")
    second.writelines((b"head", b"body"))
    third.write(b"c")
    assert world.told == []
    world.loop.end_turn()
    assert world.told == [("w0", b"a"), ("w1", b"headbody"), ("w2", b"c")]
    assert not world.loop.callbacks, "an idle loop has nothing to do"


def test_few_writes_in_a_turn_go_out_at_once() -> None:
    """All but one in `PROBE_WRITES`, by which the number of them is seen."""
    world = World(1)
    num_late = 0
    for number in range(10 * PROBE_WRITES):
        world.transports[0].write(b"%d" % number)
        num_late += len(world.told) == number
        world.loop.end_turn()
        assert len(world.told) == number + 1
    assert num_late == 10


def test_no_more_than_so_many_wait() -> None:
    world = World(MAX_WRITES)
    world.make_busy()
    for number, transport in enumerate(world.transports[:-1]):
        transport.write(b"%d" % number)
    assert world.told == []
    world.transports[-1].write(b"last")
    assert len(world.told) == MAX_WRITES
    world.loop.end_turn()
    assert len(world.told) == MAX_WRITES


def test_a_socket_that_is_written_much_to_is_one_of_those_that_wait() -> None:
    """It goes out each time it has a batch of its own, and does not make the others go early by that."""
    world = World(2)
    world.make_busy()
    first, second = world.transports
    piece = bytes(MAX_BYTES // 2)
    first.write(piece)
    second.write(b"waits")
    for _ in range(4 * MAX_WRITES):
        first.write(piece)
    assert ("w1", b"waits") not in world.told
    first.write(b"last")
    world.loop.end_turn()
    assert [name for name, _ in world.told[-2:]] == ["w0", "w1"]
    assert world.told[-1] == ("w1", b"waits")
    assert b"".join(data for name, data in world.told if name == "w0") == piece * (1 + 4 * MAX_WRITES) + b"last"
    assert not world.loop.callbacks


def test_several_writes_to_one_socket_are_one() -> None:
    world = World(1)
    world.make_busy()
    transport = world.transports[0]
    transport.write(b"a")
    transport.writelines([b"b", b"c"])
    transport.write(b"")
    transport.write(b"d")
    assert transport.get_write_buffer_size() == 4
    world.loop.end_turn()
    assert world.told == [("w0", b"abcd")]
    assert transport.get_write_buffer_size() == 0


def test_what_waits_goes_before_a_large_write_and_before_the_end() -> None:
    world = World(3)
    world.make_busy()
    large = bytes(MAX_BYTES)
    for transport in world.transports:
        transport.write(b"a")
    world.transports[0].write(large)
    world.transports[1].close()
    world.transports[2].abort()
    world.loop.end_turn()
    assert world.told == [("w0", b"a"), ("w0", large), ("w1", b"a"), ("w1", b"closed"), ("w2", b"aborted")]


def test_a_socket_that_takes_less_than_it_is_given_is_written_to_at_once() -> None:
    """So its transport says at once that it is full, and whoever writes can wait."""
    world = World(2)
    world.make_busy()
    world.wires[0].num_unsent = 1
    world.transports[0].write(b"a")
    world.transports[1].write(b"b")
    assert world.told == [("w0", b"a")]


def test_a_socket_that_closes_meanwhile_is_not_written_to() -> None:
    world = World(2)
    world.make_busy()
    for transport in world.transports:
        transport.write(b"a")
    world.wires[0].is_closed = True
    world.loop.end_turn()
    assert world.told == [("w1", b"a")]


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_what_waits_does_not_change(kind: Any) -> None:
    world = World(1)
    world.make_busy()
    data = bytearray(b"abc")
    world.transports[0].write(kind(data))
    data[:] = b"xyz"
    world.loop.end_turn()
    assert world.told == [("w0", b"abc")]


def test_an_interruption_of_one_write_does_not_keep_a_socket_from_later_ones() -> None:
    world = World(2)
    world.make_busy()
    first, second = world.transports
    world.wires[0].bug = KeyboardInterrupt()
    first.write(b"a")
    second.write(b"b")
    with pytest.raises(KeyboardInterrupt):
        world.loop.end_turn()
    world.wires[0].bug = None
    world.make_busy()
    second.write(b"c")
    world.loop.end_turn()
    assert world.told == [("w1", b"bc")]


def test_a_bug_at_one_socket_does_not_keep_the_others_from_their_bytes(caplog: pytest.LogCaptureFixture) -> None:
    world = World(2)
    world.make_busy()
    world.wires[0].bug = RuntimeError("a bug")
    for transport in world.transports:
        transport.write(b"a")
    world.loop.end_turn()
    assert world.told == [("w0", b"aborted"), ("w1", b"a")]
    assert "a write met a bug" in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_bytes_keep_their_order_whatever_comes_between(seed: int) -> None:
    chance = random.Random(seed)
    world = World(5)
    given: list[list[bytes]] = [[] for _ in world.wires]
    for serial in range(2000):
        number = chance.randrange(5)
        match chance.choices(("write", "lines", "large", "turn", "full"), (60, 10, 1, 8, 5))[0]:
            case "write":
                given[number].append(b"%d," % serial)
                world.transports[number].write(given[number][-1])
            case "lines":
                given[number] += [b"%d;" % serial, b"%d." % serial]
                world.transports[number].writelines(given[number][-2:])
            case "large":
                given[number].append(b"%d" % serial + bytes(MAX_BYTES))
                world.transports[number].write(given[number][-1])
            case "full":
                world.wires[number].num_unsent = chance.randrange(2)
            case _:
                world.loop.end_turn()
        num_told = sum(len(data) for _, data in world.told)
        num_waiting = sum(
            t.get_write_buffer_size() - w.num_unsent for t, w in zip(world.transports, world.wires, strict=True)
        )
        assert num_told + num_waiting == sum(len(piece) for pieces in given for piece in pieces)
        if not world.loop.callbacks:
            assert num_waiting == 0, "nobody will come for it"
    world.loop.end_turn()
    for wire, pieces in zip(world.wires, given, strict=True):
        assert b"".join(data for name, data in world.told if name == wire.name) == b"".join(pieces)


@on_both_loops
async def test_real_sockets_get_all_of_it_in_order() -> None:
    """Many in each turn, some of which read late, so that their sockets are full."""
    loop = asyncio.get_running_loop()
    pairs = [socket.socketpair() for _ in range(8)]
    transports, readers = [], []
    for ours, theirs in pairs:
        theirs.setblocking(False)
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        transports.append(batched(transport, loop))
        readers.append(await asyncio.open_connection(sock=theirs))
    expected = [bytearray() for _ in pairs]
    for serial in range(300):
        for number, transport in enumerate(transports):
            piece = (b"%d/%d|" % (number, serial)) * (1 + serial % 200)
            expected[number] += piece
            transport.write(piece)
        if serial % 3 == 0:
            await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
        for transport in transports:
            transport.close()
        for (reader, writer), wanted in zip(readers, expected, strict=True):
            assert await reader.read(-1) == wanted
            writer.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_loop_that_ended_is_let_go(new_loop: Any) -> None:
    async def write() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        batched(transport, loop).write(b"x")
        transport.abort()
        theirs.close()

    gc.collect()
    before = len(write_batch._all)
    loop = new_loop()
    loop.run_until_complete(write())
    loop.close()
    del loop
    gc.collect()
    assert len(write_batch._all) == before
