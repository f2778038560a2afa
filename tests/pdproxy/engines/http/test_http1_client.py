"""The HTTP/1.1 client alone: bodies poured into sinks, connections kept and closed, and nothing left of anything."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.engines.http.base import SLICE_BYTES, EngineBroken, EngineRefused, EngineUnreachable
from pdproxy.engines.http.http1 import connection, leg, origin
from pdproxy.engines.http.http1.client import Http1Client, can_reach
from pdproxy.engines.http.http1.connection import Connection
from pdproxy.engines.http.http1.dial import dial
from pdproxy.engines.http.http1.leg import Http1Leg
from tests.fakes.both_loops import on_both_loops
from tests.fakes.proxy_harness import until
from tests.fakes.raw_peer import RawPeer, Serve, Wire, raw_peer
from tests.fakes.suspension import Suspensions, num_timers

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
Ask = Callable[[Http1Client], Coroutine[Any, Any, bytes]]
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def talking_to(serve: Serve, host: str = "127.0.0.1") -> AsyncIterator[tuple[RawPeer, Http1Client]]:
    async with raw_peer(serve) as peer:
        client = Http1Client(f"http://{host}:{peer.port}", connect_timeout_s=2)
        try:
            yield peer, client
        finally:
            await client.aclose()


async def ok(wire: Wire) -> None:
    while True:
        await wire.request()
        await wire.send(OK)


async def ask(client: Http1Client) -> bytes:
    return await (await client.post("/", b"{}", {})).read()


# ── a leg, without any socket ───────────────────────────────────────────────────────────────────────────────────────


class Transport:
    """A connection's, as far as it is used. Mutable state: what was done to it."""

    def __init__(self) -> None:
        self.written = b""
        self.num_writes = 0
        self.is_reading = True
        self.is_aborted = False
        self.num_unsent = 0

    def write(self, data: bytes) -> None:
        self.written += data
        self.num_writes += 1

    def writelines(self, pieces: tuple[bytes, ...]) -> None:
        self.write(b"".join(pieces))

    def pause_reading(self) -> None:
        assert self.is_reading
        self.is_reading = False

    def resume_reading(self) -> None:
        assert not self.is_reading
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def abort(self) -> None:
        self.is_aborted = True


class Shelf:
    """Implements `connection.Keeper`."""

    def __init__(self) -> None:
        self.kept: list[Connection] = []
        self.descriptors = DescriptorBudget()

    def keep(self, connection: Connection) -> None:
        self.kept.append(connection)

    def forget(self, connection: Connection) -> None:
        self.kept.remove(connection)


class Call:
    """A leg whose engine is the test: `comes` are its bytes."""

    def __init__(self) -> None:
        self.transport = Transport()
        self.shelf = Shelf()
        self.connection = Connection(self.shelf)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self.leg = Http1Leg(self.connection)
        self.connection.send(self.leg, b"head", b"body")
        self.comes = self.connection.data_received

    @property
    def is_kept(self) -> bool:
        return self.shelf.kept == [self.connection]


class Bucket:
    """Implements `Sink`. Mutable state: what it heard; `act` is done at every `feed`."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        self.heard: list[Any] = []
        self._act = act

    def feed(self, data: bytes) -> None:
        self.heard.append(data)
        self._act()

    def end(self) -> None:
        self.heard.append("end")

    def fail(self, error: EngineBroken) -> None:
        self.heard.append(str(error))


async def test_a_request_is_one_write() -> None:
    assert Call().transport.num_writes == 1


async def test_poured_as_it_comes() -> None:
    call, bucket = Call(), Bucket()
    call.comes(CHUNKED + b"3\r\nabc\r\n2\r\nd")
    call.leg.pour(bucket)
    assert bucket.heard == [b"abcd"], "what has come already comes at once"
    call.comes(b"e\r\n1\r\nf\r\n")
    assert bucket.heard[1:] == [b"ef"]
    call.comes(b"0\r\n\r\n")
    assert bucket.heard[2:] == ["end"]
    assert call.is_kept
    call.leg.close()
    assert not call.transport.is_aborted


@pytest.mark.parametrize("has_body", [False, True])
async def test_poured_when_all_has_come(has_body: bool) -> None:
    call, bucket = Call(), Bucket()
    call.comes(CHUNKED + (b"3\r\nabc\r\n" if has_body else b"") + b"0\r\n\r\n")
    call.leg.pour(bucket)
    assert bucket.heard == ([b"abc"] if has_body else []) + ["end"]


async def test_a_body_of_known_length_is_poured_too() -> None:
    call, bucket = Call(), Bucket()
    call.comes(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab")
    call.leg.pour(bucket)
    call.comes(b"cde")
    assert bucket.heard == [b"ab", b"cde", "end"]


@pytest.mark.parametrize(
    ("rest", "what"), [(b"xyz\r\n", "not framed"), (b"", "last chunk"), (None, "lost"), (b"0\r\n\r\nmore", "end")]
)
async def test_how_a_pouring_ends(rest: bytes | None, what: str) -> None:
    call, bucket = Call(), Bucket()
    call.comes(CHUNKED)
    call.leg.pour(bucket)
    if rest:
        call.comes(rest)
    elif rest is None:
        call.connection.connection_lost(ConnectionResetError())
    else:
        call.connection.eof_received()
    call.connection.connection_lost(None)
    assert len(bucket.heard) == 1, "once"
    assert what in bucket.heard[0]
    assert call.transport.is_aborted
    assert not call.is_kept
    call.leg.close()
    assert len(bucket.heard) == 1


async def test_poured_when_it_has_broken_off() -> None:
    call, bucket = Call(), Bucket()
    call.comes(CHUNKED + b"3\r\nabc\r\n")
    call.connection.eof_received()
    call.leg.pour(bucket)
    assert bucket.heard == [b"abc", "it closed the connection before the last chunk of its answer"]


async def test_a_sink_that_closes_the_leg_hears_nothing_more() -> None:
    for first in (b"", b"3\r\nabc\r\n"):
        call = Call()
        bucket = Bucket(call.leg.close)
        call.comes(CHUNKED + first)
        call.leg.pour(bucket)
        call.comes(b"2\r\nde\r\n0\r\n\r\n")
        assert len(bucket.heard) == 1
        assert call.transport.is_aborted
        assert not call.is_kept


async def test_a_sink_that_wants_no_more_for_now() -> None:
    call = Call()
    bucket = Bucket(call.leg.pause)
    call.comes(CHUNKED)
    call.leg.pour(bucket)
    assert call.transport.is_reading
    call.comes(b"3\r\nabc\r\n")
    assert not call.transport.is_reading
    call.leg.pause()
    call.leg.resume()
    call.leg.resume()
    assert call.transport.is_reading


async def test_a_paused_connection_is_not_handed_back_so() -> None:
    call = Call()
    call.comes(CHUNKED)
    call.leg.pour(Bucket(call.leg.pause))
    call.comes(b"3\r\nabc\r\n0\r\n\r\n")
    assert call.is_kept
    assert call.transport.is_reading
    call.leg.pause()
    assert call.transport.is_reading, "it is another's now"


async def test_poured_or_read_but_not_both() -> None:
    call = Call()
    call.comes(CHUNKED)
    call.leg.pour(Bucket())
    for act in (call.leg.read, call.leg.read_chunk):
        with pytest.raises(RuntimeError):
            await act()
    with pytest.raises(RuntimeError):
        call.leg.pour(Bucket())


async def test_an_engine_waits_while_much_is_unread() -> None:
    call = Call()
    call.comes(b"HTTP/1.1 200 OK\r\n\r\n")
    call.comes(bytes(leg.MAX_UNREAD_BYTES))
    assert call.transport.is_reading
    call.comes(b"x")
    assert not call.transport.is_reading
    assert len(await call.leg.read_chunk()) == leg.MAX_UNREAD_BYTES + 1
    assert call.transport.is_reading
    call.comes(bytes(leg.MAX_UNREAD_BYTES + 1))
    assert not call.transport.is_reading
    reading = asyncio.create_task(call.leg.read())
    await asyncio.sleep(0)
    assert call.transport.is_reading, "who wants all of it takes what has come"
    call.comes(bytes(leg.MAX_UNREAD_BYTES + 1))
    assert call.transport.is_reading, "and what comes"
    call.connection.eof_received()
    assert len(await reading) == 2 * leg.MAX_UNREAD_BYTES + 2


ONE_BYTE_CHUNKS = b"1\r\nx\r\n" * 20_000
LAST_CHUNK = b"0\r\n\r\n"


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slice is a turn."""
    monkeypatch.setattr(connection, "TURN_S", 1e-9)


async def until_reading(call: Call) -> int:
    """Returns after how many turns of the loop the connection reads again."""
    for num_turns in range(1000):
        if call.transport.is_reading:
            return num_turns
        await asyncio.sleep(0)
    raise AssertionError("it does not read again")


@pytest.mark.usefixtures("short_turns")
async def test_much_that_is_read_at_once_is_heard_turn_by_turn() -> None:
    call, bucket = Call(), Bucket()
    call.comes(CHUNKED)
    call.leg.pour(bucket)
    call.comes(ONE_BYTE_CHUNKS)
    assert len(b"".join(bucket.heard)) <= SLICE_BYTES, "the others have their turn first"
    assert not call.transport.is_reading
    assert await until_reading(call) >= len(ONE_BYTE_CHUNKS) / SLICE_BYTES - 2
    assert b"".join(bucket.heard) == b"x" * 20_000
    call.comes(LAST_CHUNK)
    assert bucket.heard[-1] == "end"
    assert call.is_kept


async def test_what_costs_little_is_heard_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TURN_S", 60.0)
    call, bucket = Call(), Bucket()
    call.comes(CHUNKED)
    call.leg.pour(bucket)
    call.comes(ONE_BYTE_CHUNKS + LAST_CHUNK)
    assert b"".join(bucket.heard[:-1]) == b"x" * 20_000
    assert bucket.heard[-1] == "end"
    assert call.is_kept
    assert await until_reading(call) <= 2


@pytest.mark.parametrize("is_counted", [False, True])
@on_both_loops
async def test_one_large_read_is_a_turns_work(is_counted: bool) -> None:
    """However little it costs. uvloop would go on reading in the same turn, as long as there is more."""
    num_bytes = 160 * 65536

    async def pour(wire: Wire) -> None:
        await wire.request()
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % num_bytes
        await wire.send(head if is_counted else CHUNKED)
        for _ in range(160):
            await wire.send(bytes(65536) if is_counted else b"10000\r\n" + bytes(65536) + b"\r\n")
        if not is_counted:
            await wire.send(LAST_CHUNK)

    num_turns, by_turn = 0, Counter[int]()

    def count(num_bytes: int) -> None:
        by_turn[num_turns] += num_bytes - by_turn.total()

    def next_turn() -> None:
        nonlocal num_turns
        num_turns += 1
        if not reading.done():
            asyncio.get_running_loop().call_soon(next_turn)

    async with talking_to(pour) as (_, client):
        call = await client.post("/", b"{}", {})
        reading = asyncio.create_task(call.read(count))
        next_turn()
        assert len(await reading) == num_bytes
    assert max(by_turn.values()) <= 256 * 1024


async def test_a_full_sink_hears_nothing_more_of_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TURN_S", 60.0)
    call = Call()
    bucket = Bucket(call.leg.pause)
    call.comes(CHUNKED)
    call.leg.pour(bucket)
    call.comes(ONE_BYTE_CHUNKS + LAST_CHUNK)
    for num_slices in range(1, 4):
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(bucket.heard) == num_slices
        assert not call.transport.is_reading
        call.leg.resume()
        assert len(bucket.heard) == num_slices, "who resumes is not called from within"
    for _ in range(100):
        await asyncio.sleep(0)
        call.leg.resume()
    assert bucket.heard[-1] == "end"
    assert b"".join(bucket.heard[:-1]) == b"x" * 20_000
    assert call.is_kept
    assert call.transport.is_reading, "another's call is answered on it"


@pytest.mark.usefixtures("short_turns")
async def test_what_follows_an_answer_in_a_later_slice_costs_the_connection() -> None:
    call, bucket = Call(), Bucket()
    call.comes(CHUNKED)
    call.leg.pour(bucket)
    answer = ONE_BYTE_CHUNKS + LAST_CHUNK
    filler = bytes(-(len(answer) + len(b"fff\r\n\r\n")) % SLICE_BYTES)
    answer = b"%03x\r\n%b\r\n" % (len(filler), filler) + answer
    assert len(answer) % SLICE_BYTES == 0, "it ends where a slice does"
    call.comes(answer + b"HTTP/1.1 200 OK\r\n")
    await until(lambda: bucket.heard[-1] == "end")
    assert call.transport.is_aborted
    assert not call.is_kept


@pytest.mark.usefixtures("short_turns")
async def test_a_leg_that_is_closed_hears_no_further_slice() -> None:
    call, bucket = Call(), Bucket()
    call.comes(CHUNKED)
    call.leg.pour(bucket)
    call.comes(ONE_BYTE_CHUNKS)
    call.leg.close()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(bucket.heard) == 1
    assert call.transport.is_aborted


@pytest.mark.usefixtures("short_turns")
async def test_what_was_read_is_heard_before_the_connections_loss() -> None:
    call, bucket = Call(), Bucket()
    call.comes(CHUNKED)
    call.leg.pour(bucket)
    call.comes(ONE_BYTE_CHUNKS)
    call.connection.connection_lost(ConnectionResetError("reset"))
    assert b"".join(bucket.heard[:-1]) == b"x" * 20_000
    assert "reset" in str(bucket.heard[-1])


@pytest.mark.usefixtures("short_turns")
async def test_a_bug_in_a_later_slice_costs_the_connection_and_comes_back_as_a_failure() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    call = Call()

    def meet_a_bug() -> None:
        if len(bucket.heard) == 3:
            raise ZeroDivisionError("a bug")

    bucket = Bucket(meet_a_bug)
    call.comes(CHUNKED)
    call.leg.pour(bucket)
    call.comes(ONE_BYTE_CHUNKS)
    await until(lambda: len(bucket.heard) == 4)
    assert "a bug" in str(bucket.heard[3])
    assert call.transport.is_aborted
    assert [str(context["exception"]) for context in told] == ["a bug"]


@pytest.mark.parametrize(
    ("flood", "complaint"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 4000, "larger than"),
        (b"HTTP/1.1 200 OK\r\n" + b"x-more: and more\r\n" * 5000, "lines|larger than"),
        (b"HTTP/1.1 200 OK\r\n" + b"a:\r\n" * 5000, "more than 1000 lines"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, "larger than"),
    ],
    ids=["interim", "long", "lines", "line"],
)
async def test_heads_without_end_are_refused(flood: bytes, complaint: str) -> None:
    call = Call()
    arrival = call.leg.arrival()
    for start in range(0, len(flood), 1000):
        call.comes(flood[start : start + 1000])
        if arrival.done():
            break
    with pytest.raises(EngineBroken, match=complaint):
        await arrival
    assert call.transport.is_aborted


async def test_what_had_come_can_still_be_read() -> None:
    call = Call()
    call.comes(CHUNKED + b"3\r\nabc\r\n")
    call.connection.connection_lost(ConnectionResetError("reset"))
    assert await call.leg.read_chunk() == b"abc"
    for _ in range(2):
        with pytest.raises(EngineBroken, match="reset"):
            await call.leg.read_chunk()


async def test_an_answer_before_the_requests_end_costs_the_connection() -> None:
    call = Call()
    call.transport.num_unsent = 1
    call.comes(OK)
    assert await call.leg.read() == b"hi"
    assert call.transport.is_aborted


async def test_an_engine_that_speaks_unasked() -> None:
    call = Call()
    call.comes(OK)
    assert call.is_kept
    call.comes(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert call.transport.is_aborted
    assert call.shelf.kept == []


async def test_one_leg_after_the_other() -> None:
    """A leg that has ended has no hold on the connection any more."""
    call = Call()
    call.comes(OK)
    second = Http1Leg(call.connection)
    call.connection.send(second, b"head", b"")
    call.leg.close()
    assert not call.transport.is_aborted
    call.comes(OK)
    assert await second.read() == b"hi"


# ── connections ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_newest_connection_is_used_first() -> None:
    async with talking_to(ok) as (peer, client):
        first, second = await client.post("/", b"", {}), await client.post("/", b"", {})
        first.close()
        second.close()
        assert len(peer.wires) == 1, "an answer that is there needs no connection any more"
        await asyncio.gather(*(ask(client) for _ in range(3)))
        before = [len(wire.requests) for wire in peer.wires]
        for _ in range(5):
            await ask(client)
        gains = [len(wire.requests) - num for wire, num in zip(peer.wires, before, strict=True)]
        assert sorted(gains) == [0, 0, 5]


async def test_connections_that_nobody_needs_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "KEEPALIVE_S", 0.05)
    before = num_timers()
    async with talking_to(ok) as (peer, client):
        await asyncio.gather(*(ask(client) for _ in range(3)))
        assert num_timers() == before + 2, "one timer for all; the other is this test's"
        await peer.served()
        assert len(peer.wires) == 3
        await asyncio.sleep(0)
        assert num_timers() == before + 1
        await ask(client)
        assert len(peer.wires) == 4


async def test_no_more_than_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "MAX_KEPT", 2)
    async with talking_to(ok) as (peer, client):
        await asyncio.gather(*(ask(client) for _ in range(5)))
        await until(lambda: peer.num_open == 2)


async def test_connection_too_old_to_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with talking_to(ok) as (peer, client):
        await ask(client)
        monkeypatch.setattr(origin, "KEEPALIVE_S", 0.0)
        await ask(client)
        assert len(peer.wires) == 2


async def test_connection_just_used_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """That costs a system call."""
    monkeypatch.setattr(connection, "FRESH_S", 60.0)
    monkeypatch.setattr(Connection, "_is_readable", None)
    async with talking_to(ok) as (peer, client):
        assert [await ask(client), await ask(client)] == [b"hi", b"hi"]
        assert len(peer.wires) == 1


async def test_client_closed_while_it_connects() -> None:
    async with talking_to(ok) as (peer, client):
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(EngineUnreachable):
            await asking
        assert peer.requests == []


async def test_a_leg_survives_its_client() -> None:
    proceed = asyncio.Event()

    async def slow(wire: Wire) -> None:
        await wire.request()
        await wire.send(CHUNKED)
        await proceed.wait()
        await wire.send(b"2\r\nhi\r\n0\r\n\r\n")
        await wire.gone()

    async with talking_to(slow) as (peer, client):
        leg = await client.post("/", b"", {})
        await client.aclose()
        proceed.set()
        assert await leg.read() == b"hi"
        await peer.served()


# ── a loop that is held ─────────────────────────────────────────────────────────────────────────────────────────────


def hold(seconds: float) -> None:
    """Lets the loop do nothing else for so long."""
    time.sleep(seconds)


@on_both_loops
async def test_connections_of_a_turn_that_took_longer_than_their_limit_are_there() -> None:
    """Large requests can hold the loop for seconds. That says nothing about an engine."""
    async with raw_peer(ok) as peer:
        client = Http1Client(f"http://127.0.0.1:{peer.port}", connect_timeout_s=0.1)

        async def ask_and_hold() -> bytes:
            hold(0.05)
            answer = asyncio.ensure_future(ask(client))
            await asyncio.sleep(0)
            hold(0.05)
            return await answer

        assert await asyncio.gather(*(ask_and_hold() for _ in range(6))) == [b"hi"] * 6
        await client.aclose()


@on_both_loops
async def test_a_name_that_was_resolved_while_the_loop_was_held_is_resolved() -> None:
    loop = asyncio.get_running_loop()
    async with raw_peer(ok) as peer:
        client = Http1Client(f"http://localhost:{peer.port}", connect_timeout_s=0.2)
        asking = asyncio.ensure_future(ask(client))
        loop.call_soon(loop.call_soon, hold, 0.3)
        assert await asking == b"hi"
        await client.aclose()


@on_both_loops
async def test_an_address_that_says_nothing_takes_its_time_and_no_more() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.socket() as only:  # its place in the line is the only one
            only.connect(full.getsockname())
            client = Http1Client(f"http://127.0.0.1:{full.getsockname()[1]}", connect_timeout_s=0.2)
            before, started = open_sockets(), time.monotonic()
            with pytest.raises(EngineUnreachable, match=r"no connection within 0\.2 s"):
                await ask(client)
            assert 0.2 <= time.monotonic() - started < 1.0
            assert open_sockets() == before
            await client.aclose()


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def resolving(*hosts: str) -> tuple[list[str], Any]:
    """What was asked, and a `getaddrinfo` that answers so."""
    asked: list[str] = []

    async def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        asked.append(host)
        await asyncio.sleep(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in hosts]

    return asked, getaddrinfo


async def test_each_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, getaddrinfo = resolving("127.0.0.2", "127.0.0.1")
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with talking_to(ok, host="engine.test") as (peer, client):
        await asyncio.gather(*(ask(client) for _ in range(3)))
        await asyncio.gather(*(ask(client) for _ in range(5)))
        assert b"host: engine.test:%d\r\n" % peer.port in peer.requests[0]
        assert 1 <= len(asked) <= 3, "what was found is believed for a while"


async def test_a_silent_address_does_not_take_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, getaddrinfo = resolving("127.0.0.2", "127.0.0.1")

    async def some_are_silent(address: str, port: int, limit_s: float) -> socket.socket:
        if address == "127.0.0.2":
            await asyncio.sleep(limit_s)
            raise TimeoutError
        return await dial(address, port, limit_s)

    async with raw_peer(ok) as peer:
        client = Http1Client(f"http://engine.test:{peer.port}", connect_timeout_s=0.2)
        monkeypatch.setattr(origin, "dial", some_are_silent)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        assert await ask(client) == b"hi"
        await client.aclose()


async def test_a_name_is_asked_again_when_none_of_its_addresses_works(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, getaddrinfo = resolving("127.0.0.2", "127.0.0.3")
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    client = Http1Client("http://engine.test:1", connect_timeout_s=1)
    for _ in range(2):
        with pytest.raises(EngineRefused):
            await ask(client)
    assert len(asked) == 2
    await client.aclose()


@pytest.mark.parametrize("silence", ["late", "again", "no such name"])
async def test_a_resolver_that_says_nothing_is_no_fault_of_a_known_engine(
    monkeypatch: pytest.MonkeyPatch, silence: str
) -> None:
    _, answers = resolving("127.0.0.1")

    async def says_nothing(host: str, port: int, **options: Any) -> list[Any]:
        if silence == "late":
            await asyncio.Event().wait()
        raise socket.gaierror(socket.EAI_AGAIN if silence == "again" else socket.EAI_NONAME, "as planned")

    monkeypatch.setattr(origin, "RESOLVED_S", 0.0)
    loop = asyncio.get_running_loop()
    async with raw_peer(ok) as peer:
        for is_known in (False, True):
            client = Http1Client(f"http://engine.test:{peer.port}", connect_timeout_s=0.1)
            if is_known:
                monkeypatch.setattr(loop, "getaddrinfo", answers)
                assert await ask(client) == b"hi"
                client._home[0].give_up_one()
            monkeypatch.setattr(loop, "getaddrinfo", says_nothing)
            if is_known and silence != "no such name":
                assert await ask(client) == b"hi"
            else:
                with pytest.raises(EngineUnreachable):
                    await ask(client)
            await client.aclose()


def test_what_it_can_reach() -> None:
    assert [can_reach(url) for url in ("http://a:1", "http://[::1]:1/x", "http://a")] == [True] * 3
    others = ("https://a:1", "http://user:secret@a:1", "http://", "unix:///x", "a:1", "http://ü:1")
    assert not any(can_reach(url) for url in others)
    with pytest.raises(ValueError, match="https"):
        Http1Client("https://a:1", connect_timeout_s=1)


async def test_elsewhere_only_in_clear_text() -> None:
    async with talking_to(ok) as (_, client):
        with pytest.raises(EngineUnreachable, match="https"):
            await client.get("https://127.0.0.1:1/x", timeout_s=1)


# ── interrupted anywhere, on both loops ─────────────────────────────────────────────────────────────────────────────


def open_sockets() -> set[str]:
    """File descriptors of the process, each by its own number."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


PIECES = (b"HTTP/1.1 200 OK\r\n", b"transfer-encoding: chunked\r\n\r\n", b"2\r\nhi\r\n", b"1\r\n!\r\n0\r\n\r\n")


async def stutter(wire: Wire) -> None:
    """Every step of an answer is another turn of the loop."""
    while True:
        await wire.request()
        for piece in PIECES:
            await wire.send(piece)
            for _ in range(5):
                await asyncio.sleep(0)


async def by_chunks(client: Http1Client) -> bytes:
    leg = await client.post("/", b"{}", {})
    try:
        body = b""
        while chunk := await leg.read_chunk():
            body += chunk
        return body
    finally:
        leg.close()


async def by_get(client: Http1Client) -> bytes:
    return (await client.get("/", timeout_s=2))[1]


async def poured(client: Http1Client) -> bytes:
    leg = await client.post("/", b"{}", {})
    try:
        bucket, over = Bucket(), asyncio.Event()
        bucket.end = over.set  # type: ignore[method-assign]
        leg.pour(bucket)
        await over.wait()
        return b"".join(bucket.heard)
    finally:
        leg.close()


async def interrupt(call: Ask, n: int, *, as_it_wakes: bool, is_warm: bool) -> bool:
    """At the n-th point, if there is one. Nothing may be left, and the client must work as ever."""
    async with raw_peer(stutter) as peer:
        sockets, tasks = open_sockets(), asyncio.all_tasks()
        client = Http1Client(f"http://localhost:{peer.port}", connect_timeout_s=2)
        if is_warm:
            await ask(client)
        suspensions = Suspensions(n, lambda: asking.cancel(), as_it_wakes=as_it_wakes)
        asking = asyncio.create_task(suspensions.watch(call(client)))
        await asyncio.wait([asking])
        assert asking.cancelled() if suspensions.is_reached else asking.result() == b"hi!"
        await until(lambda: peer.num_open == len(client._home[0]._kept))
        assert await ask(client) == b"hi!"
        await client.aclose()
        await peer.served()
        await until(lambda: open_sockets() <= sockets)
        assert asyncio.all_tasks() <= tasks
        return suspensions.is_reached


async def interrupt_everywhere(call: Ask, *, as_it_wakes: bool, is_warm: bool) -> int:
    """At how many points it was."""
    for n in range(1, 100):
        if not await interrupt(call, n, as_it_wakes=as_it_wakes, is_warm=is_warm):
            return n - 1
    raise AssertionError("it never gets through")


@pytest.mark.cancellation
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("call", [ask, by_chunks, by_get, poured])
@pytest.mark.parametrize("as_it_wakes", [False, True])
@pytest.mark.parametrize("is_warm", [False, True])
def test_interrupted_anywhere(run: Any, call: Ask, as_it_wakes: bool, is_warm: bool) -> None:
    assert run(interrupt_everywhere(call, as_it_wakes=as_it_wakes, is_warm=is_warm)) >= 2


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_nothing_is_left_of_many_calls(run: Any) -> None:
    async def faulty(wire: Wire) -> None:
        """Every answer another one; every seventh ends the connection."""
        for i in range(7):
            await wire.request()
            if i == 3:
                await wire.dribble(CHUNKED + b"2\r\nhi\r\n0\r\n\r\n")
            else:
                await wire.send(OK if i < 6 else b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi")

    async def many() -> None:
        async with raw_peer(faulty) as peer:
            sockets, tasks = open_sockets(), asyncio.all_tasks()
            client = Http1Client(f"http://127.0.0.1:{peer.port}", connect_timeout_s=2)

            async def one(i: int) -> None:
                try:
                    async with asyncio.timeout(0.001 * (i % 5) if i % 3 == 0 else 2):
                        assert await ask(client) == b"hi"
                except (EngineBroken, TimeoutError):
                    pass

            for _ in range(10):
                await asyncio.gather(*(one(i) for i in range(30)))
            await client.aclose()
            await peer.served()
            await until(lambda: open_sockets() <= sockets)
            assert asyncio.all_tasks() <= tasks

    run(many())
