"""Links over real connections: what is sent is handled once and in order, or both ends hear that it is over."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.errors import ConfigError
from pdproxy.fronts import handshake, link_server, session_end
from pdproxy.fronts.connection import Connection
from pdproxy.fronts.handshake import Lead, Peer, tls_contexts
from pdproxy.fronts.link import Link
from pdproxy.fronts.link_server import LinkServer
from tests.fakes.both_loops import on_both_loops
from tests.helpers.unsteady_relay import UnsteadyRelay

SECRET = "a secret"
TTL_S = 0.6


class Said(msgspec.Struct, array_like=True, tag=1):
    number: int
    pad: bytes = b""


async def until(is_so: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not is_so():  # noqa: ASYNC110 (nobody tells what the test looks at)
            await asyncio.sleep(0.005)


class Opened:
    """What the leader has for a front: what it heard in one session."""

    def __init__(self, peer: Peer, send: Callable[[Any], None], on_close: Callable[[Opened], object]) -> None:
        self.peer, self.send = peer, send
        self.heard: list[int] = []
        self.num_closed = 0
        self.handlers = {Said: self._hear}
        self.fails_at = -1
        self._on_close = on_close

    def _hear(self, message: Said) -> None:
        if message.number == self.fails_at:
            raise RuntimeError("planted")
        self.heard.append(message.number)

    def close(self) -> None:
        self.num_closed += 1
        self._on_close(self)


class Leader:
    def __init__(self, *, term: int = 1, secret: str = SECRET, ttl_s: float = TTL_S, **options: Any) -> None:
        self.sessions: list[Opened] = []
        self.leads = True
        self.port = 0
        self.on_close: Callable[[Opened], object] = lambda opened: None
        self.greets: list[int] = []
        self.server = LinkServer(
            Said,
            term=term,
            secret=secret,
            ttl_s=ttl_s,
            open_session=self._open,
            may_lead=lambda: self.leads,
            **options,
        )

    def _open(self, peer: Peer, send: Callable[[Any], None]) -> Opened:
        self.sessions.append(Opened(peer, send, lambda opened: self.on_close(opened)))
        for number in self.greets:
            send(Said(number))
        return self.sessions[-1]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Leader]:
        self.port = await self.server.listen("127.0.0.1", 0)
        task = asyncio.create_task(self.server.run())
        try:
            yield self
        finally:
            self.server.close()
            await task


class Front:
    def __init__(self, name: str = "front-0", **options: Any) -> None:
        self.begun: list[int] = []
        self.lapses = 0
        self.heard: list[list[int]] = []
        self.fails_at = -1
        self.says: list[int] = []
        self.events: list[str] = []
        self.link = Link(Said, front=Peer(name), on_begin=self._begin, on_lapse=self._lapse, **options)
        self.link.handlers = {Said: self._hear}

    def _begin(self, term: int) -> None:
        self.begun.append(term)
        self.heard.append([])
        self.events.append("begin")
        for number in self.says:
            self.link.send(Said(number))

    def _lapse(self) -> None:
        self.lapses += 1
        self.events.append("lapse")
        assert not self.link.is_held

    def _hear(self, message: Said) -> None:
        if message.number == self.fails_at:
            raise RuntimeError("planted")
        self.heard[-1].append(message.number)

    def follow(self, port: int, *, term: int = 1, secret: str = SECRET, ttl_s: float = TTL_S) -> None:
        self.link.follow(Lead(term, f"127.0.0.1:{port}", secret, ttl_s))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Front]:
        task = asyncio.create_task(self.link.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None


@asynccontextmanager
async def linked(**options: Any) -> AsyncIterator[tuple[Front, Leader, UnsteadyRelay]]:
    """A front, a leader, and a relay in between."""
    front = Front()
    async with (
        Leader(**options).running() as leader,
        UnsteadyRelay(leader.port) as relay,
        front.running(),
    ):
        front.follow(relay.port, ttl_s=options.get("ttl_s", TTL_S))
        await until(lambda: front.link.is_held)
        yield front, leader, relay


# ── exactly once, in order ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", [1, 2])
@on_both_loops
async def test_what_is_sent_is_handled_once_and_in_order_however_often_the_connection_breaks(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    front = Front()
    async with (
        Leader(ttl_s=3.0).running() as leader,
        UnsteadyRelay(leader.port, max_piece=700, rng=rng) as relay,
        front.running(),
    ):
        relay.lives = [rng.randint(0, 6000) for _ in range(30)] + [1 << 62]
        front.link._pause_s = 0.001
        front.follow(relay.port, ttl_s=3.0)
        await until(lambda: front.begun)
        num = 3000
        for number in range(num):
            front.link.send(Said(number, bytes(rng.randint(0, 40))))
            leader.sessions[-1].send(Said(number, bytes(rng.randint(0, 40))))
            front.link._pause_s = 0.001  # or most of the time goes into pauses
            if rng.random() < 0.2:
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003]))
            if rng.random() < 0.003:
                relay.cut()
            if rng.random() < 0.001:
                relay.freeze()
                asyncio.get_running_loop().call_later(0.03, relay.thaw)
        async with asyncio.timeout(30):
            while len(front.heard[0]) < num or len(leader.sessions[0].heard) < num:
                front.link._pause_s = 0.001
                await asyncio.sleep(0.005)
        assert leader.sessions[0].heard == front.heard[0] == list(range(num))
        assert len(leader.sessions) == len(front.begun) == 1, "one session over all connections"
        assert relay.num_connections > 15, "it was meant to break"
        assert leader.sessions[0].num_closed == front.lapses == 0


async def test_what_was_sent_while_there_was_no_connection_comes_with_the_next() -> None:
    async with linked(ttl_s=3.0) as (front, leader, relay):
        relay.is_refusing = True
        relay.cut()
        await until(lambda: not front.link.is_connected)
        for number in range(10):
            front.link.send(Said(number))
            leader.sessions[0].send(Said(number))
            await asyncio.sleep(0.001)
        assert front.link.num_unsent_bytes
        relay.is_refusing = False
        await until(lambda: len(front.heard[0]) == 10 and len(leader.sessions[0].heard) == 10)
        assert front.heard == [list(range(10))]
        assert len(leader.sessions) == 1
        await until(lambda: front.link.num_unsent_bytes == 0)  # with the next beat


async def test_what_is_sent_in_the_beginning_goes_first() -> None:
    leader, front = Leader(), Front()
    leader.greets, front.says = [1, 2], [3, 4]
    async with leader.running(), front.running():
        front.link.send(Said(9))  # there is no session, and so nobody hears it
        front.follow(leader.port)
        await until(lambda: leader.sessions and leader.sessions[0].heard and front.heard and front.heard[0])
        front.link.send(Said(5))
        await until(lambda: leader.sessions[0].heard == [3, 4, 5])
        assert front.heard == [[1, 2]]


async def test_a_frozen_connection_is_given_up_and_the_session_goes_on() -> None:
    async with linked(ttl_s=3.0) as (front, leader, relay):
        before = relay.num_connections
        relay.freeze()
        front.link.send(Said(1))
        await until(lambda: relay.num_connections > before, 4.0)
        relay.thaw()
        await until(lambda: leader.sessions[0].heard == [1])
        await until(lambda: front.link.is_connected)
        front.link.send(Said(2))
        await until(lambda: leader.sessions[0].heard == [1, 2])
        assert len(leader.sessions) == 1


async def test_a_slow_connection_is_not_given_up_while_it_brings_something() -> None:
    """Answers of the leader stand in line behind what it sends, for longer than a front waits for a sign."""
    front = Front()
    async with (
        Leader().running() as leader,
        UnsteadyRelay(leader.port, max_piece=3000, rng=random.Random(5)) as relay,
        front.running(),
    ):
        front.follow(relay.port)
        await until(lambda: front.link.is_held)
        for number in range(100):
            leader.sessions[0].send(Said(number, bytes(60_000)))
        await until(lambda: len(front.heard[0]) == 100, 20.0)
        assert relay.num_connections == 1


# ── the end of a session ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_front_that_is_not_heard_is_taken_for_gone_after_its_lease() -> None:
    async with linked() as (front, leader, relay):
        held_at_close: list[bool] = []
        leader.on_close = lambda opened: held_at_close.append(front.link.is_held)
        relay.freeze()
        await until(lambda: front.lapses == 1)
        assert leader.sessions[0].num_closed == 0
        await until(lambda: leader.sessions[0].num_closed == 1)
        assert held_at_close == [False]
        relay.thaw()
        await until(lambda: front.link.is_held)
        assert front.begun == [1, 1]
        assert front.events == ["begin", "lapse", "begin"]
        assert len(leader.sessions) == 2


async def test_a_lease_that_lapsed_comes_back_with_the_session_where_the_leader_stood_still() -> None:
    """The leader counts no time in which it did nothing, and so blames nobody."""
    now = 0.0
    front = Front()
    async with Leader(clock=lambda: now).running() as leader, front.running():  # its ticks do not come: it stands still
        front.follow(leader.port)
        await until(lambda: front.link.is_held)
        now += 60.0
        leader.server.tick()
        leader.server.tick()
        assert leader.sessions[0].num_closed == 0


@on_both_loops
async def test_goodbye_ends_the_session_at_once_after_all_that_was_said() -> None:
    async with linked(ttl_s=30.0) as (front, leader, _):
        front.link.send(Said(1))
        front.link.say_goodbye()
        assert not front.link.is_held
        await until(lambda: leader.sessions[0].num_closed == 1, 3.0)
        assert leader.sessions[0].heard == [1]
        assert front.lapses == 0
        assert not leader.server.peers


@pytest.mark.timeout(20)
async def test_a_front_that_never_heard_of_a_leader_ends() -> None:
    """The process that started it went before it had told of anybody."""
    front = Front()
    running = asyncio.create_task(front.link.run())
    await asyncio.sleep(0)
    front.link.follow(None)
    front.link.say_goodbye()
    await running


async def test_a_server_that_closes_tells_all_sessions_once() -> None:
    async with linked() as (front, leader, _):
        leader.server.close()
        leader.server.close()
        assert leader.sessions[0].num_closed == 1
        await until(lambda: front.lapses == 1)


async def test_a_process_that_may_not_lead_handles_nothing_and_closes_no_session() -> None:
    async with linked() as (front, leader, _):
        leader.leads = False
        front.link.send(Said(1))
        await until(lambda: front.lapses == 1)
        await asyncio.sleep(TTL_S / 2)
        assert leader.sessions[0].heard == []
        assert leader.sessions[0].num_closed == 0
        leader.leads = True
        await asyncio.sleep(TTL_S / 2)
        assert not front.link.is_held, "once is for ever"


@pytest.mark.parametrize("end", ["front", "leader"])
@on_both_loops
async def test_a_message_that_cannot_be_handled_ends_the_session_at_both_ends(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked() as (front, leader, _):
        held_at_close: list[bool] = []
        leader.on_close = lambda opened: held_at_close.append(len(front.begun) == 1 and front.link.is_held)
        if end == "front":
            front.fails_at = 7
            leader.sessions[0].send(Said(7))
        else:
            leader.sessions[0].fails_at = 7
            front.link.send(Said(7))
        await until(lambda: len(front.begun) == 2)
        assert held_at_close == [False]
        assert leader.sessions[0].num_closed == 1
        assert front.events == ["begin", "lapse", "begin"]


@pytest.mark.parametrize("end", ["front", "leader"])
@on_both_loops
async def test_a_tape_that_overflows_ends_the_session_at_both_ends(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_end, "MAX_TAPE_BYTES", 100_000)
    async with linked(ttl_s=3.0) as (front, leader, relay):
        relay.freeze()
        held_at_close: list[bool] = []
        leader.on_close = lambda opened: held_at_close.append(len(front.begun) == 1 and front.link.is_held)
        send = front.link.send if end == "front" else leader.sessions[0].send
        for number in range(30):
            send(Said(number, bytes(10_000)))
            await asyncio.sleep(0)
        assert front.link.num_unsent_bytes <= 100_000
        relay.cut()
        relay.thaw()
        await until(lambda: len(front.begun) == 2)
        assert front.events == ["begin", "lapse", "begin"]
        assert held_at_close == [False]
        front.link.send(Said(99))
        await until(lambda: leader.sessions[1].heard == [99])


# ── terms ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_both_loops
async def test_a_new_term_ends_the_session_at_once_while_messages_are_under_way() -> None:
    front = Front()
    async with Leader(term=1).running() as old, Leader(term=2).running() as new, front.running():
        front.follow(old.port)
        await until(lambda: front.link.is_held)
        for number in range(1000):
            front.link.send(Said(number))
            old.sessions[0].send(Said(number))
            if number == 500:
                await asyncio.sleep(0.001)
        front.follow(new.port, term=2)
        heard = list(front.heard[0])
        assert front.link.is_held, "its lease ends by its clock"
        assert front.link.term == 2
        front.follow(old.port, term=1)
        await until(lambda: len(front.begun) == 2)
        front.link.send(Said(7))
        await until(lambda: new.sessions and new.sessions[0].heard == [7])
        assert front.heard == [heard, []]
        assert front.begun == [1, 2]
        assert front.link.term == 2
        assert front.events == ["begin", "begin"]
        assert not old.server.peers or not old.server.peers[0].is_connected


async def test_a_new_term_is_obeyed_in_the_midst_of_a_frame() -> None:
    front = Front()
    async with Leader(term=1).running() as old, Leader(term=2).running() as new, front.running():
        front.follow(old.port)
        await until(lambda: front.link.is_held)

        def hear(message: Said) -> None:
            front.heard[-1].append(message.number)
            front.follow(new.port, term=2)

        front.link.handlers = {Said: hear}
        for number in range(5):
            old.sessions[0].send(Said(number))
        await until(lambda: front.begun == [1, 2])
        assert front.heard == [[0], []]


async def test_a_leader_of_another_term_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    front = Front()
    async with Leader(term=1).running() as leader, front.running():
        front.follow(leader.port, term=2)
        await asyncio.sleep(0.5)
        assert not leader.sessions
        assert [one.levelno for one in caplog.records if "another term" in one.getMessage()] == [logging.WARNING] * 2


async def test_without_a_leader_nobody_is_connected_to_and_what_is_connected_stays() -> None:
    async with linked() as (front, _, relay):
        front.link.follow(None)
        await asyncio.sleep(1.5 * TTL_S)
        assert front.link.is_held
        before = relay.num_connections
        relay.cut()
        await until(lambda: front.lapses == 1)
        assert relay.num_connections == before


# ── who is let in ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_another_secret_is_refused_and_said_once_at_each_end(caplog: pytest.LogCaptureFixture) -> None:
    front = Front()
    async with Leader().running() as leader, front.running():
        front.follow(leader.port, secret="another")
        await asyncio.sleep(0.6)
        assert not leader.sessions
        assert not front.begun
        said = [one.name for one in caplog.records if "different secrets" in one.getMessage()]
        assert sorted(said) == ["pdproxy.fronts.dialler", "pdproxy.fronts.link_server"]


async def test_a_leader_with_another_secret_is_believed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who takes every proof cannot prove himself."""
    monkeypatch.setattr(link_server, "is_proved", lambda *_: True)
    front = Front()
    leader = Leader(secret="another")
    leader.greets = [1]
    async with leader.running(), front.running():
        front.follow(leader.port)
        await until(lambda: leader.sessions)
        await asyncio.sleep(0.1)
        assert not front.begun
        assert not front.link.is_held


async def test_another_protocol_is_refused_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    front = Front()
    monkeypatch.setattr(handshake.messages, "PROTOCOL", 7)  # both ends look it up here …
    async with Leader().running() as leader, front.running():
        monkeypatch.setattr(link_server, "LINK", 99)  # … and this one at the leader alone
        front.follow(leader.port)
        await until(lambda: len([one for one in caplog.records if "versions" in one.getMessage()]) == 2)
        assert not leader.sessions


def test_a_proof_holds_for_one_handshake_and_one_end_alone() -> None:
    first = handshake.hello("front", 1, Peer("f"), "p", 1)
    mac = handshake.prove(SECRET, "front", first, b"n", "s", 3)
    said = handshake.Proof(mac, "s", 3)
    assert handshake.is_proved(SECRET, "front", first, b"n", said)
    others = [
        (SECRET, "leader", first, b"n", said),
        ("another", "front", first, b"n", said),
        (SECRET, "front", first, b"m", said),
        (SECRET, "front", handshake.hello("front", 1, Peer("f"), "p", 1), b"n", said),
        (SECRET, "front", msgspec.structs.replace(first, peer=Peer("g")), b"n", said),
        (SECRET, "front", msgspec.structs.replace(first, term=2), b"n", said),
        (SECRET, "front", msgspec.structs.replace(first, purpose="operators"), b"n", said),
        (SECRET, "front", first, b"n", handshake.Proof(mac, "s", 4)),
    ]
    assert not [one for one in others if handshake.is_proved(*one)]  # type: ignore[arg-type]


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x01\x93", b"\0\0\0\x05hello", b"\0\x01\0\0", b""])
@on_both_loops
async def test_a_stranger_is_sent_away_and_harms_nobody(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "STRANGER_S", 0.2)
    async with linked(ttl_s=3.0) as (front, leader, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", leader.port)
        writer.write(sent)
        async with asyncio.timeout(2.0):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.transport.abort()
        front.link.send(Said(1))
        await until(lambda: leader.sessions[0].heard == [1])
        assert leader.server._num_strangers == 0


async def test_only_so_many_strangers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "MAX_STRANGERS", 3)
    monkeypatch.setattr(link_server, "STRANGER_S", 1.0)
    front = Front()
    async with Leader().running() as leader, front.running():
        strangers = [await asyncio.open_connection("127.0.0.1", leader.port) for _ in range(5)]
        await until(lambda: sum(reader.at_eof() for reader, _ in strangers) == 2 or None)
        front.follow(leader.port)
        await until(lambda: front.begun)  # when those have had their time
        for _, writer in strangers:
            writer.transport.abort()


async def test_a_second_process_of_the_same_name_is_refused_while_the_first_is_linked() -> None:
    async with linked() as (front, leader, _):
        second = Front()
        async with second.running():
            second.follow(leader.port)
            await asyncio.sleep(TTL_S)
            assert not second.begun
            assert front.link.is_held
            front.link.say_goodbye()
            await until(lambda: second.begun)
        assert len(leader.sessions) == 2


@on_both_loops
async def test_an_older_connection_of_a_front_is_over_before_the_newer_is_answered() -> None:
    """Bytes that the older one brings later are not handled."""
    async with linked(ttl_s=3.0) as (front, leader, relay):
        relay.freeze()
        front.link.send(Said(1))  # it waits in the relay
        await asyncio.sleep(0.05)
        front.follow(leader.port, ttl_s=3.0)  # the same leader, by another way
        assert front.link._end is not None
        assert front.link._end.connection is not None
        front.link._end.connection.abort("planted")
        await until(lambda: leader.sessions[0].heard == [1])
        relay.thaw()
        front.link.send(Said(2))
        await until(lambda: leader.sessions[0].heard == [1, 2])
        await asyncio.sleep(0.05)
        assert leader.sessions[0].heard == [1, 2]
        assert len(leader.sessions) == 1


async def test_a_try_that_comes_late_takes_nothing_from_a_younger_one() -> None:
    """It was on its way while the front had given it up, and would close the session that the front has."""
    async with linked(ttl_s=3.0) as (front, leader, _):
        first = handshake.hello("front", 1, Peer("front-0"), front.link.dialler._process, 0)
        refused: list[Any] = []

        def take(frame: bytes) -> None:
            message = handshake.read_one(frame)
            if isinstance(message, handshake.Challenge):
                late.send(handshake.Proof(handshake.prove(SECRET, "front", first, message.nonce, "", 0), "", 0))
            else:
                refused.append(message)

        late = Connection(lambda connection: connection.send(first), lambda why: None)
        late.on_frame = take
        await asyncio.get_running_loop().create_connection(lambda: late, "127.0.0.1", leader.port)
        await asyncio.wait_for(late.over.wait(), 3.0)
        assert [one.reason for one in refused] == ["late"]
        assert leader.sessions[0].num_closed == 0
        front.link.send(Said(1))
        await until(lambda: leader.sessions[0].heard == [1])


async def test_a_front_of_an_expired_session_begins_anew_and_lapses_first() -> None:
    async with linked() as (front, leader, relay):
        relay.is_refusing = True
        relay.cut()
        front.link.send(Said(1))
        await until(lambda: leader.sessions[0].num_closed == 1)
        relay.is_refusing = False
        await until(lambda: len(front.begun) == 2)
        assert front.events == ["begin", "lapse", "begin"]
        await asyncio.sleep(0.1)
        assert leader.sessions[1].heard == [], "what was told in a session that is over is told anew, or not at all"


# ── TLS ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def contexts(folder: Path, who: str, ca: str) -> Any:
    return tls_contexts(str(folder / f"{who}.pem"), str(folder / f"{who}.key"), str(folder / f"{ca}-ca.pem"))


@on_both_loops
async def test_a_link_over_tls_breaks_and_goes_on(certificates: Path) -> None:
    server, client = contexts(certificates, "fleet", "fleet")
    front = Front(tls=client)
    async with (
        Leader(ttl_s=3.0, tls=server).running() as leader,
        UnsteadyRelay(leader.port, max_piece=5000, rng=random.Random(3)) as relay,
        front.running(),
    ):
        relay.lives = [1000, 8000, 30_000, 60_000, 1 << 62]
        front.follow(relay.port, ttl_s=3.0)
        await until(lambda: front.begun)
        for number in range(300):
            front.link.send(Said(number, bytes(300)))
            leader.sessions[-1].send(Said(number, bytes(300)))
            await asyncio.sleep(0)
        await until(lambda: len(front.heard[0]) == 300 and len(leader.sessions[0].heard) == 300)
        assert front.heard == [list(range(300))]
        assert relay.num_connections >= 5
        front.link.say_goodbye()
        await until(lambda: leader.sessions[0].num_closed == 1, 2.0)


@pytest.mark.parametrize("who", ["front", "leader", "plain front", "plain leader"])
@on_both_loops
async def test_nobody_of_another_ca_is_let_in(who: str, certificates: Path) -> None:
    server, client = contexts(certificates, "fleet", "fleet")
    stranger_server, stranger_client = contexts(certificates, "other", "fleet")
    front = Front(tls={"front": stranger_client, "plain front": None}.get(who, client))
    async with (
        Leader(tls={"leader": stranger_server, "plain leader": None}.get(who, server)).running() as leader,
        front.running(),
    ):
        front.follow(leader.port)
        await asyncio.sleep(0.5)
        assert not front.begun
        assert not leader.sessions


def test_tls_files_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match="no-such-file"):
        tls_contexts("no-such-file", "key", "ca")


# ── what is left ────────────────────────────────────────────────────────────────────────────────────────────────────


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@on_both_loops
async def test_links_leave_no_task_and_no_descriptor() -> None:
    async def once() -> None:
        async with linked() as (front, leader, relay):
            front.link.send(Said(1))
            relay.cut()
            await until(lambda: leader.sessions[0].heard == [1])
            client = socket.create_connection(("127.0.0.1", leader.port))
            await asyncio.sleep(0.02)
            client.close()

    await once()
    await asyncio.sleep(0.05)
    before = num_descriptors()
    await once()
    await asyncio.sleep(0.05)
    assert num_descriptors() <= before
    assert len(asyncio.all_tasks()) == 1
