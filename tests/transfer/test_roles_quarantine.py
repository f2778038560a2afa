"""Pages into which a sender may still write are nobody else's until there is evidence: what counts, and what does not.

Messages are lost here by cutting the control connection between the two, as a sidecar or a load balancer would.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import msgspec
import pytest

from tests.fakes.transfer_world import (
    LAYOUT,
    QUICK,
    Decoder,
    RawSender,
    World,
    fill,
    hold,
    new_world,
    next_held,
    settled,
    until,
)
from transfer import wire
from transfer.agents.mock import Fail
from transfer.errors import AttemptLost, PeerLost, TransferError
from transfer.memory.reservations import Holding
from transfer.roles import sender_process
from transfer.roles.session import Session
from transfer.roles.standing import Standing

BRISK = replace(QUICK, heartbeat_s=0.05, writer_timeout_s=10.0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with new_world() as world:
        yield world


def lose_messages(session: Session, *kinds: type[wire.Message]) -> Callable[[], None]:
    """Messages of these kinds are lost on their way, until what is returned is called."""
    send = session.send
    session.send = lambda message: None if isinstance(message, kinds) else send(message)  # type: ignore[method-assign]

    def again() -> None:
        session.send = send  # type: ignore[method-assign]

    return again


async def test_a_lost_word_that_all_is_there_is_said_again_within_a_heartbeat(world: World) -> None:
    decoder, prefiller = await world.decoder(config=BRISK), world.prefiller()
    push = await world.open(prefiller, decoder)
    (session,) = prefiller.sender._sessions.values()
    again = lose_messages(session, wire.WritesDone)
    fill(push, 0, 1)
    await push.finish()
    await asyncio.sleep(2 * BRISK.heartbeat_s)
    assert decoder.holding("a") is Holding.RESERVED
    again()
    assert len(await decoder.read("a")) == 2
    decoder.receiver.consumed("a")
    await until(lambda: not session._unconfirmed and not prefiller.sender._standing._last_words)


async def test_a_lost_word_that_all_has_ended_is_said_again_within_a_heartbeat(world: World) -> None:
    decoder, prefiller = await world.decoder(config=BRISK), world.prefiller()
    push = await world.open(prefiller, decoder)
    (session,) = prefiller.sender._sessions.values()
    again = lose_messages(session, wire.WritesEnded)
    push.abort("not needed")
    await asyncio.sleep(2 * BRISK.heartbeat_s)
    assert decoder.holding("a") is Holding.RESERVED
    again()
    assert (await world.proxy.next(wire.KvReleased, "a")).reason == "failed"


@pytest.mark.parametrize("is_done", [True, False], ids=["done", "aborted"])
async def test_what_was_lost_with_a_connection_is_said_over_the_next_one(world: World, is_done: bool) -> None:
    """The word is lost, and the connection for good: the attempt ends as its sender meant it, all the same."""
    decoder, prefiller = await world.decoder(config=BRISK), world.prefiller()
    push = await world.open(prefiller, decoder, num_pages=2)
    (session,) = prefiller.sender._sessions.values()
    lose_messages(session, wire.WritesDone, wire.WritesEnded, wire.Heartbeat)
    fill(push, 0, 1)
    if is_done:
        await push.finish()
    else:
        push.abort("not needed")
    session.lose(PeerLost("fell silent"))
    other = await world.open(prefiller, decoder, "b", num_pages=1)
    if is_done:
        assert len(await decoder.read("a")) == 2
        decoder.receiver.consumed("a")
    else:
        assert (await world.proxy.next(wire.KvReleased, "a")).reason == "failed"
    other.abort("not needed")
    await until(lambda: not prefiller.sender._standing.has_unsettled(decoder.agent.epoch))


async def test_a_reconnected_sender_keeps_what_it_still_writes(world: World) -> None:
    """Its new connection names the attempt, so the pages are not taken for free, and it speaks for them in the end."""
    decoder, prefiller = await world.decoder(num_pages=4, config=BRISK), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder)
    fill(push, 0, 1)
    write = await next_held(prefiller.agent)
    (session,) = prefiller.sender._sessions.values()
    lose_messages(session, wire.WritesEnded, wire.Heartbeat)
    session.lose(PeerLost("fell silent"))
    other = await world.open(prefiller, decoder, "b")
    await asyncio.sleep(3 * BRISK.heartbeat_s)
    assert decoder.pages.num_free == 0
    write.land()
    await world.proxy.next(wire.KvReleased, "a")
    other.abort("not needed")


async def test_what_ends_late_is_said_over_the_next_connection_though_that_has_nothing_of_its_own(world: World) -> None:
    """The earlier connection brings nothing any more; the later one has no attempt left when the write ends."""
    decoder, prefiller = await world.decoder(num_pages=4, config=BRISK), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder)
    fill(push, 0, 1)
    write = await next_held(prefiller.agent)
    (session,) = prefiller.sender._sessions.values()
    lose_messages(session, wire.WritesEnded, wire.Heartbeat)
    session.lose(PeerLost("fell silent"))
    (await world.open(prefiller, decoder, "b", num_pages=1)).abort("not needed")
    await world.proxy.next(wire.KvReleased, "b")
    await asyncio.sleep(3 * BRISK.heartbeat_s)
    assert decoder.holding("a") is not None
    write.land()
    await world.proxy.next(wire.KvReleased, "a")
    (successor,) = prefiller.sender._sessions.values()
    await until(successor._is_at_rest.is_set)


async def test_an_earlier_connection_does_not_take_the_word_of_a_later_one_for_heard(world: World) -> None:
    """The attempt was begun anew: what has arrived over the first connection is that it was not granted there."""
    decoder, prefiller = await world.decoder(config=BRISK), world.prefiller()
    (await world.open(prefiller, decoder, "first")).abort("not needed")
    (early,) = prefiller.sender._sessions.values()
    await until(early._is_at_rest.is_set)
    lose_messages(early, wire.Reserve)
    opening = asyncio.create_task(world.open(prefiller, decoder))
    await until(lambda: early.is_open("a"))
    early.lose(PeerLost("fell silent"))
    push = await opening
    (late,) = prefiller.sender._sessions.values()
    again = lose_messages(late, wire.WritesDone, wire.Heartbeat)
    fill(push, 0, 1)
    await push.finish()
    await until(early._is_at_rest.is_set)
    again()
    assert len(await decoder.read("a")) == 2
    decoder.receiver.consumed("a")


async def test_an_earlier_connection_cannot_speak_for_a_later_one(world: World) -> None:
    """What it says may have lain on its way since before the attempt was begun anew."""
    decoder = await world.decoder()
    late, early = world.stranger(decoder), world.stranger(decoder)
    early.epoch = late.epoch
    for raw, serial in ((early, 1), (late, 2)):
        await raw.say(wire.Hello(version=wire.PROTOCOL_VERSION, epoch=raw.epoch, layout=LAYOUT, serial=serial))
        assert isinstance(await raw.hear(), wire.Welcome)
        raw._has_greeted = True
    assert isinstance(await late.reserve("a"), wire.Reserved)
    await early.say(wire.WritesEnded(attempt="a", reason="old"))
    await early.say(wire.Heartbeat(epoch=early.epoch, serial=1))
    assert await early.hear() == wire.HeartbeatAck(epoch=decoder.agent.epoch, serial=1)
    assert decoder.holding("a") is Holding.RESERVED
    assert isinstance(await early.reserve("b"), wire.Reserved)
    await late.say(wire.WritesEnded(attempt="b", reason="over"))
    await world.proxy.next(wire.KvReleased, "b")
    await late.say(wire.WritesEnded(attempt="a", reason="over"))
    await world.proxy.next(wire.KvReleased, "a")


async def test_a_cancel_finds_the_sender_at_its_next_connection(world: World) -> None:
    """It is asked to stop where it can be reached, not only where it began."""
    decoder = await world.decoder()
    early, late = world.stranger(decoder), world.stranger(decoder)
    late.epoch = early.epoch
    await early.reserve("a")
    await late.say(wire.Hello(version=wire.PROTOCOL_VERSION, epoch=late.epoch, layout=LAYOUT, serial=1))
    assert isinstance(await late.hear(), wire.Welcome)
    early.hang_up()
    await until(lambda: not decoder.receiver._send(decoder.receiver.reservations.writers[0], wire.Cancel(attempt="x")))
    decoder.receiver.cancel("a")
    assert await late.hear() == wire.Cancel(attempt="a")
    await late.say(wire.WritesEnded(attempt="a", reason="over"))
    await world.proxy.next(wire.KvReleased, "a")


async def test_a_late_grant_is_given_back(world: World) -> None:
    """Nobody waits for it at the sender any more, and nothing else would tell the receiver."""
    decoder, prefiller = await world.decoder(config=BRISK), world.prefiller()
    push = await world.open(prefiller, decoder, "first", 1)
    (session,) = prefiller.sender._sessions.values()
    session.send(msgspec.structs.replace(push._message(session, 1), attempt="a"))
    await world.proxy.next(wire.KvReleased, "a")
    push.abort("not needed")


async def test_a_sender_known_to_be_dead_gets_nothing_more(world: World) -> None:
    """What it had asked for may still be on its way to us."""
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    await raw.reserve("a")
    assert decoder.receiver.sender_ended(raw.epoch)
    assert (await world.proxy.next(wire.KvReleased, "a")).reason == "failed"
    assert "vanished" in (await world.proxy.next(wire.KvFailed, "a")).reason
    while not isinstance(answer := await raw.reserve("b"), wire.Refusal):
        assert isinstance(answer, wire.Cancel)
    assert "process has ended" in answer.reason
    assert decoder.receiver.sender_ended("nobody that is known")


async def test_an_empty_name_is_no_engines(world: World) -> None:
    """The epochs of engines with one rank name no engine. Nobody of these is dead because of that."""
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    assert isinstance(await raw.reserve("a"), wire.Reserved)
    assert decoder.receiver.sender_ended("")
    assert decoder.holding("a") is Holding.RESERVED
    assert isinstance(await raw.reserve("b"), wire.Reserved)
    raw.die()


async def test_a_process_on_this_machine_is_watched(world: World) -> None:
    decoder = await world.decoder(num_pages=4)
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    try:
        raw = await greeted_as(world, decoder, sender_process._describe(child.pid))
        await raw.reserve("a")
        assert list(decoder.receiver._watched) == [raw.epoch]
    finally:
        child.kill()
        await child.wait()
    await world.proxy.next(wire.KvReleased, "a")
    assert decoder.receiver._watched == {}


async def test_a_process_is_watched_though_another_one_was_before(world: World) -> None:
    """Its descriptor may have the number of the earlier one."""
    decoder = await world.decoder(num_pages=4)
    options = {"stdin": asyncio.subprocess.PIPE}
    children = [await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", **options) for _ in range(2)]
    try:
        first, second = [await greeted_as(world, decoder, sender_process._describe(child.pid)) for child in children]
        await first.reserve("a", notify=None)  # no socket takes the number
        assert decoder.receiver.sender_ended(first.epoch)
        await second.reserve("b")
        assert list(decoder.receiver._watched) == [second.epoch]
    finally:
        for child in children:
            child.kill()
            await child.wait()
    await world.proxy.next(wire.KvReleased, "b")


async def test_processes_are_watched_up_to_a_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with attempts here stays watched; one without makes room."""
    monkeypatch.setattr("transfer.roles.receiver.MAX_WATCHED", 1)
    decoder, ours = await world.decoder(num_pages=4), sender_process.own_process()
    first, second = await greeted_as(world, decoder, ours), await greeted_as(world, decoder, ours)
    await first.reserve("a", 1)
    await second.reserve("b", 1)
    assert list(decoder.receiver._watched) == [first.epoch]
    await first.say(wire.WritesEnded(attempt="a", reason="over"))
    await world.proxy.next(wire.KvReleased, "a")
    await second.reserve("c", 1)
    assert list(decoder.receiver._watched) == [second.epoch]
    for raw in (first, second):
        raw.die()


async def test_of_too_many_dead_senders_the_earliest_is_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.roles.receiver.MAX_PEERS", 3)
    receiver = (await world.decoder()).receiver
    for number in range(5):
        receiver.sender_ended(f"sender-{number}")
    assert [number for number in range(5) if receiver._has_ended(f"sender-{number}")] == [2, 3, 4]


@pytest.mark.parametrize("change", ["pid_namespace", "boot_id"])
async def test_a_process_of_another_machine_is_not_taken_for_one_here(world: World, change: str) -> None:
    """Its number may be free here, or somebody else's."""
    decoder = await world.decoder()
    ours = sender_process.own_process()
    assert ours is not None
    other: dict[str, object] = {"pid_namespace": 1, "boot_id": "another boot"}
    theirs = msgspec.structs.replace(ours, pid=2**22 + 1, **{change: other[change]})
    raw = await greeted_as(world, decoder, theirs)
    assert isinstance(await raw.reserve("a"), wire.Reserved)
    await raw.round_trip()
    assert (decoder.receiver._watched, decoder.holding("a")) == ({}, Holding.RESERVED)
    raw.die()


async def test_a_number_that_another_process_has_now_proves_the_end(world: World) -> None:
    decoder = await world.decoder()
    ours = sender_process.own_process()
    assert ours is not None
    raw = await greeted_as(world, decoder, msgspec.structs.replace(ours, started=ours.started + 1))
    await raw.reserve("a")
    await world.proxy.next(wire.KvReleased, "a")


async def greeted_as(world: World, decoder: Decoder, process: wire.Process | None) -> RawSender:
    """A sender that says that it is that process."""
    assert process is not None
    raw = world.stranger(decoder)
    hello = wire.Hello(version=wire.PROTOCOL_VERSION, epoch=raw.epoch, layout=LAYOUT, process=process)
    await raw.say(hello)
    assert isinstance(await raw.hear(), wire.Welcome)
    raw._has_greeted = True
    return raw


async def test_the_pages_of_a_dead_sender_wait_until_its_connections_are_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel delivers what a process wrote after it has ended."""
    is_pending = True
    monkeypatch.setattr("transfer.roles.rank_slab.has_undelivered_bytes", lambda: is_pending)
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    await raw.reserve("a")
    assert not decoder.receiver.sender_ended(raw.epoch)
    await asyncio.sleep(0.05)
    assert decoder.pages.num_quarantined == 2
    is_pending = False
    await world.proxy.next(wire.KvReleased, "a")


async def test_a_write_that_broke_is_waited_for_like_a_dead_sender(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_pending = True
    monkeypatch.setattr("transfer.roles.rank_slab.has_undelivered_bytes", lambda: is_pending)
    decoder, prefiller = await world.decoder(), world.prefiller()
    prefiller.agent.script = lambda write: Fail(TransferError("broken"), landed=0.5)
    push = await world.open(prefiller, decoder)
    fill(push, 0, 1)
    with pytest.raises(AttemptLost, match="broken"):
        await settled(asyncio.create_task(push.finish()))
    await until(lambda: decoder.pages.num_quarantined == 2)
    await asyncio.sleep(0.05)
    assert decoder.pages.num_quarantined == 2
    is_pending = False
    await world.proxy.next(wire.KvReleased, "a")


def test_unread_bytes_of_a_closed_connection_are_seen() -> None:
    """Also where the other end has closed with a reset, and where its last bytes have not even been sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        for is_reset in (False, True):
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
            with server:
                assert not sender_process.has_undelivered_bytes()
                client.setblocking(False)
                try:
                    while True:
                        client.send(b"x" * 65536)
                except BlockingIOError:
                    pass
                if is_reset:
                    server.send(b"never read")
                client.close()
                assert sender_process.has_undelivered_bytes()
            assert not sender_process.has_undelivered_bytes()


def test_a_standing_keeps_what_is_open_twice() -> None:
    """While one connection takes over from another, both have it."""
    standing = Standing()
    word = wire.WritesEnded(attempt="a", reason="over")
    standing.opened("r", "a")
    standing.opened("r", "a")
    standing.closed("r", "a")
    standing.said("r", word, 2)
    standing.arrived("r", "a", 1)
    assert (standing.open_at("r"), standing.last_word("r", "a"), standing.open_at("other")) == (["a"], None, [])
    standing.closed("r", "a")
    assert (standing.open_at("r"), standing.last_word("r", "a")) == ([], word)
    standing.arrived("r", "a", 2)
    assert standing.last_word("r", "a") == wire.WritesEnded(attempt="a", reason="the attempt is over")
    assert standing.next_serial() < standing.next_serial()


def test_of_too_many_last_words_the_earliest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lacks it is told that the attempt has ended: that is so, whatever the word was."""
    monkeypatch.setattr("transfer.roles.standing.MAX_LAST_WORDS", 2)
    standing = Standing()
    for attempt in ("a", "b", "c"):
        standing.said("r", wire.WritesDone(attempt=attempt, num_bytes=1, transfer_s=0.0), 1)
    assert standing.said_to("r") == ["b", "c"]
    assert isinstance(standing.last_word("r", "a"), wire.WritesEnded)
    assert isinstance(standing.last_word("r", "b"), wire.WritesDone)


def test_a_last_word_is_for_one_receiver() -> None:
    standing = Standing()
    standing.said("r", wire.WritesDone(attempt="a", num_bytes=1, transfer_s=0.0), 1)
    standing.arrived("other", "a", 1)
    assert (standing.said_to("r"), standing.said_to("other")) == (["a"], [])
    assert (standing.has_unsettled("r"), standing.has_unsettled("other")) == (True, False)
    standing.arrived("r", "a", 1)
    assert not standing.has_unsettled("r")


def test_own_process_is_the_one_that_runs() -> None:
    ours = sender_process.own_process()
    assert ours is not None
    assert ours.pid == os.getpid()
    assert sender_process.is_on_this_machine(ours)
