"""Channel: when what is said goes, and that frames are handled however they come."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from pdproxy.fronts import messages
from pdproxy.fronts.channel import LENGTH, Channel


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.frames: list[list[Any]] = []

    def write(self, data: bytes) -> None:
        (length,) = LENGTH.unpack_from(data)
        assert len(data) == LENGTH.size + length
        self.frames.append(msgspec.msgpack.decode(data[LENGTH.size :], type=list[messages.FromLeader]))

    def is_closing(self) -> bool:
        return False


def connected() -> tuple[Channel, Transport]:
    channel, transport = Channel(messages.FromFront, lambda why: None), Transport()
    channel.connection_made(cast(asyncio.Transport, transport))
    return channel, transport


def frame_of(*said: Any) -> bytes:
    content = msgspec.msgpack.encode(list(said))
    return LENGTH.pack(len(content)) + content


async def test_answers_go_in_the_turn_in_which_they_were_asked_for_and_in_one_frame() -> None:
    channel, transport = connected()
    channel.handlers = {messages.Hurry: lambda message: channel.send(messages.Settled(message.attempt, "lease_over"))}
    channel.data_received(frame_of(messages.Hurry("a"), messages.Hurry("b")) + frame_of(messages.Hurry("c")))
    [answers] = transport.frames
    assert [answer.attempt for answer in answers] == ["a", "b", "c"]
    channel.send(messages.Scarce())
    assert len(transport.frames) == 1, "what nobody has asked for waits for the end of the turn"
    await asyncio.sleep(0)
    assert transport.frames[1:] == [[messages.Scarce()]]


async def test_what_may_wait_is_not_sent_because_something_comes() -> None:
    channel, transport = connected()
    channel.handlers = {messages.Hurry: lambda message: channel.send_soon(messages.Left(2))}
    channel.send_soon(messages.Left(1))
    channel.data_received(frame_of(messages.Hurry("a")))
    assert transport.frames == []
    channel.send(messages.Scarce())
    await asyncio.sleep(0)
    assert transport.frames == [[messages.Left(1), messages.Left(2), messages.Scarce()]]


async def test_what_a_handler_has_said_goes_where_the_next_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    channel, transport = connected()
    transport.close = lambda: None  # type: ignore[attr-defined]
    channel.handlers = {messages.Hurry: lambda message: channel.send(messages.Scarce())}
    channel.data_received(frame_of(messages.Hurry("a"), messages.Cancel("b")))
    assert transport.frames == [[messages.Scarce()]]
    assert "cannot be handled" in caplog.text


async def test_frames_are_handled_once_and_in_order_wherever_they_are_cut() -> None:
    names = ["a", "\0\0\0\1b", "c"]  # the second one looks like a frame itself
    stream = b"".join(frame_of(messages.Hurry(name), messages.Cancel(name)) for name in names)
    for first in range(len(stream)):
        for second in range(first, len(stream), 5):
            channel, _ = connected()
            heard: list[Any] = []
            channel.handlers = dict.fromkeys((messages.Hurry, messages.Cancel), heard.append)
            for part in (stream[:first], stream[first:second], stream[second:]):
                channel.data_received(part)
            assert [message.attempt for message in heard] == [name for name in names for _ in range(2)], (first, second)
