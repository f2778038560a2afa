"""The relay's way without waiting: what reaches the client, who is waited for, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdproxy.aio.deadline import Deadline
from pdproxy.engines.http.base import EngineBroken, Sink
from pdproxy.openai.request import COMPLETIONS
from pdproxy.openai.sse import DONE, EventBuffer
from pdproxy.orchestrator.stream_pump import StreamPump
from pdproxy.telemetry.record import RequestRecord


class SilentError(Exception):
    """The engine says nothing."""


class StalledError(Exception):
    """The client takes nothing."""


class EventError(Exception):
    """The engine's own."""


class FakeSource:
    """A leg that is poured by hand."""

    def __init__(self, *at_once: bytes) -> None:
        self.sink: Sink | None = None
        self.is_paused = False
        self._at_once = at_once

    def pour(self, sink: Sink) -> None:
        self.sink = sink
        for data in self._at_once:
            sink.feed(data)

    def feed(self, data: bytes) -> None:
        assert self.sink is not None
        self.sink.feed(data)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


class FakeOutlet:
    """A client that takes `room` pieces."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.pieces: list[bytes] = []
        self.room = room
        self.callback: Callable[[], None] | None = None

    def write(self, piece: bytes) -> None:
        assert piece
        self.pieces.append(piece)

    @property
    def is_full(self) -> bool:
        return len(self.pieces) >= self.room

    def on_room(self, callback: Callable[[], None] | None) -> None:
        self.callback = callback

    def take_all(self) -> None:
        self.room += len(self.pieces)
        if self.callback is not None:
            self.callback()

    @property
    def text(self) -> bytes:
        return b"".join(self.pieces)


def as_it_is(events: bytes) -> tuple[bytes, Exception | None]:
    return events, None


class Stream:
    """A pour under way, and both its ends."""

    def __init__(
        self,
        source: FakeSource,
        outlet: FakeOutlet,
        *,
        idle_s: float = 60.0,
        show: Callable[[bytes], tuple[bytes, Exception | None]] = as_it_is,
        shows_all: bool = False,
        max_event_bytes: int = 1 << 30,
    ) -> None:
        self.source, self.outlet = source, outlet
        self.buffer = EventBuffer(max_event_bytes, lambda: EventError("too large"))
        self.pour: StreamPump | None = None
        self.record = RequestRecord("id", COMPLETIONS)
        self._idle_s = idle_s
        self._show = show
        self._shows_all = shows_all
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> bool:
        with Deadline(60.0, AssertionError) as limit:
            self.pour = StreamPump(
                self.source,
                self.outlet,
                self.buffer,
                self._show,
                limit,
                idle_s=self._idle_s,
                silent=SilentError,
                stalled=StalledError,
                shows_all=self._shows_all,
                record=self.record,
            )
            self.pour.start()
            try:
                await self.pour.over
            finally:
                self.outlet.on_room(None)
        return self.pour.is_done

    async def begun(self) -> Sink:
        await asyncio.sleep(0)
        assert self.source.sink is not None
        return self.source.sink


async def test_whole_events_reach_the_client_in_the_callback_that_brings_them() -> None:
    stream = Stream(FakeSource(b"data: 1\n\nda"), FakeOutlet())
    sink = await stream.begun()
    assert stream.outlet.pieces == [b"data: 1\n\n"]
    sink.feed(b"ta: 2\n")
    assert len(stream.outlet.pieces) == 1
    sink.feed(b"\ndata: 3\n\n")
    assert stream.outlet.pieces[1:] == [b"data: 2\n\ndata: 3\n\n"]
    sink.feed(DONE)
    assert stream.record.num_events == 4
    sink.end()
    assert await stream.task is True
    assert stream.buffer.num_pending_bytes == 0


async def test_an_end_without_done_is_told_and_so_is_a_rest() -> None:
    stream = Stream(FakeSource(), FakeOutlet())
    sink = await stream.begun()
    sink.feed(b"data: 1\n\ndata: 2")
    sink.end()
    assert await stream.task is False
    assert stream.buffer.num_pending_bytes == len(b"data: 2")


async def test_a_body_that_breaks_off_is_the_engines_fault() -> None:
    stream = Stream(FakeSource(), FakeOutlet())
    sink = await stream.begun()
    sink.feed(b"data: 1\n\n")
    sink.fail(EngineBroken("reset"))
    with pytest.raises(EngineBroken, match="reset"):
        await stream.task


async def test_what_the_client_gets_is_for_others_to_say_and_an_error_ends_it_behind_what_is_shown() -> None:
    def show(events: bytes) -> tuple[bytes, Exception | None]:
        before, _, after = events.partition(b"!")
        return before.upper(), EventError(after.decode()) if after else None

    stream = Stream(FakeSource(), FakeOutlet(), show=show)
    sink = await stream.begun()
    sink.feed(b"data: a\n\n")
    sink.feed(b"data: b\n\n!it failed\n\n")
    sink.feed(b"data: c\n\n")
    sink.end()
    with pytest.raises(EventError, match="it failed"):
        await stream.task
    assert stream.outlet.text == b"DATA: A\n\nDATA: B\n\n"


async def test_a_bug_is_the_requests_and_not_the_connections() -> None:
    def show(events: bytes) -> tuple[bytes, Exception | None]:
        raise EventError("unforeseen")

    stream = Stream(FakeSource(), FakeOutlet(), show=show)
    sink = await stream.begun()
    sink.feed(b"data: 1\n\n")
    sink.feed(b"data: 2\n\n")
    sink.end()
    with pytest.raises(EventError, match="unforeseen"):
        await stream.task
    assert stream.outlet.pieces == []


@pytest.mark.parametrize("is_broken", [False, True], ids=["ended", "broken"])
async def test_all_of_it_may_have_come_before(is_broken: bool) -> None:
    class Finished(FakeSource):
        def pour(self, sink: Sink) -> None:
            super().pour(sink)
            sink.fail(EngineBroken("reset")) if is_broken else sink.end()

    stream = Stream(Finished(b"data: 1\n\n" + DONE), FakeOutlet(room=1))
    if is_broken:
        with pytest.raises(EngineBroken, match="reset"):
            await stream.task
    else:
        assert await stream.task is True
    assert stream.outlet.text == b"data: 1\n\n" + DONE
    assert stream.outlet.callback is None


async def test_an_event_that_is_too_large_ends_the_stream_behind_what_was_shown() -> None:
    stream = Stream(FakeSource(), FakeOutlet(), max_event_bytes=20)
    sink = await stream.begun()
    sink.feed(b"data: 1\n\n")
    sink.feed(b"data: 123456789")
    sink.feed(b"123456789")
    sink.feed(b"\n\n" + DONE)
    sink.end()
    with pytest.raises(EventError, match="too large"):
        await stream.task
    assert stream.outlet.text == b"data: 1\n\n"


async def test_nothing_to_show_is_no_piece() -> None:
    stream = Stream(FakeSource(), FakeOutlet(), show=lambda events: (b"", None))
    sink = await stream.begun()
    sink.feed(b"data: 1\n\n")
    sink.end()
    await stream.task
    assert stream.outlet.pieces == []


async def test_a_full_client_stops_the_engine_until_it_has_room() -> None:
    stream = Stream(FakeSource(), FakeOutlet(room=2))
    sink = await stream.begun()
    sink.feed(b"data: 1\n\n")
    assert not stream.source.is_paused
    sink.feed(b"data: 2\n\n")
    assert stream.source.is_paused
    sink.feed(b"data: 3\n\n")  # it had been read from the socket already
    stream.outlet.take_all()
    assert not stream.source.is_paused
    sink.feed(b"data: 4\n\n" + DONE)
    sink.end()
    assert await stream.task is True
    assert stream.outlet.text == b"".join(b"data: %d\n\n" % i for i in range(1, 5)) + DONE


async def test_a_silent_engine_and_a_stalled_client_are_two_errors() -> None:
    stream = Stream(FakeSource(), FakeOutlet(), idle_s=0.02)
    with pytest.raises(SilentError):
        await stream.task
    stream = Stream(FakeSource(b"data: 1\n\n"), FakeOutlet(room=1), idle_s=0.02)
    with pytest.raises(StalledError):
        await stream.task
    assert stream.outlet.callback is None


async def test_a_client_that_takes_again_leaves_the_engine_its_time() -> None:
    stream = Stream(FakeSource(b"data: 1\n\n"), FakeOutlet(room=1), idle_s=0.05)
    await stream.begun()
    stream.outlet.take_all()
    with pytest.raises(SilentError):
        await stream.task


async def test_every_piece_moves_the_limit() -> None:
    stream = Stream(FakeSource(), FakeOutlet(), idle_s=0.5)
    sink = await stream.begun()
    for _ in range(7):
        await asyncio.sleep(0.1)
        sink.feed(b"half a piece")
    sink.end()
    assert await stream.task is False


async def test_cancelled_it_hears_nothing_more() -> None:
    stream = Stream(FakeSource(b"data: 1\n\n"), FakeOutlet(room=1))
    sink = await stream.begun()
    stream.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.task
    assert stream.outlet.callback is None
    sink.feed(b"data: 2\n\n")
    sink.end()
    sink.fail(EngineBroken("reset"))
    assert stream.outlet.pieces == [b"data: 1\n\n"]


async def test_where_all_is_shown_only_what_is_rare_is_looked_at() -> None:
    asked: list[bytes] = []

    def show(events: bytes) -> tuple[bytes, Exception | None]:
        asked.append(events)
        return b"data: shown\n\n", EventError("it failed") if b"error" in events else None

    stream = Stream(FakeSource(), FakeOutlet(), show=show, shows_all=True)
    sink = await stream.begun()
    sink.feed(b'data: {"text":"error"}\n\n')
    sink.feed(b'data: {"usage":{"prompt_tokens":3}}\n\n')
    sink.feed(DONE)
    sink.feed(b'data: {"error":{}}\n\n')
    with pytest.raises(EventError):
        await stream.task
    assert asked == [b'data: {"usage":{"prompt_tokens":3}}\n\n', b'data: {"error":{}}\n\n']
    assert stream.outlet.pieces == [b'data: {"text":"error"}\n\n', b"data: shown\n\n", DONE, b"data: shown\n\n"]
    assert stream.pour is not None
    assert stream.pour.is_done
