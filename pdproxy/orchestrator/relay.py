"""Relay takes answers from the decoder to the client.

It promises nothing before it has looked at the first event, and it never ends an answer silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from pdproxy.aio.deadline import Deadline
from pdproxy.engines.http.base import EngineBroken
from pdproxy.errors import EngineReply, LegFailed, ProxyError
from pdproxy.openai import response as answer
from pdproxy.openai.assembled import NotAssembledError
from pdproxy.openai.body import Fields
from pdproxy.openai.first_token import Opening, with_opening
from pdproxy.openai.response import CorruptAnswer
from pdproxy.openai.sse import EventBuffer
from pdproxy.openai.transcript import Shown
from pdproxy.orchestrator.context import ClientStalledError, Outlet, RequestContext
from pdproxy.orchestrator.error_reply import JSON
from pdproxy.orchestrator.leg import OpenLeg
from pdproxy.orchestrator.stream_pump import StreamPump

EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
_LARGE_BYTES: Final = 256 * 1024
"""The size of events above which the event loop goes round between two things that are done with them. To put them
together, to read them and to look for something in them takes milliseconds each.
"""
_STREAM_HEADERS: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class _Kept:
    """_Kept stands in the client's place while a whole answer is put together from a stream. It drops what it gets,
    because `Relay._look` has kept the events before that. Implements `context.Outlet`."""

    is_full = False

    def write(self, piece: bytes) -> None:
        """Does nothing, because nothing is left to be written."""

    def on_room(self, callback: Callable[[], None] | None) -> None:
        """Does nothing, because there always is room."""


_KEPT: Final = _Kept()


class _Patience(Deadline):
    """_Patience is the limit of an answer without a first event. It raises `too_late` after `whole_s` seconds, and has
    the instance looked at every `look_s` seconds.

    Mutable state: the seconds that are left.
    """

    __slots__ = ("_left_s", "_leg", "_look_s", "_too_late")

    def __init__(
        self, leg: OpenLeg, look_s: float, whole_s: float, too_late: Callable[[], Exception], outer: Deadline
    ) -> None:
        super().__init__(min(look_s, whole_s), too_late, outer)
        self._leg = leg
        self._look_s = look_s
        self._left_s = whole_s - look_s
        self._too_late = too_late

    def is_due(self) -> None:
        if self._left_s <= 0.0:
            self.cut()
            return
        self._leg.look()
        self.wait(min(self._look_s, self._left_s), self._too_late)
        self._left_s -= self._look_s


class Relay:
    """Relay takes one attempt's answer to its client.

    `idle_s`: seconds for the next piece to come, or to be taken. `whole_s`: seconds for an answer that is asked for as
    a whole. `max_event_bytes`: for each event of a stream, and for all that comes before the first token. `begun` is
    called once: at the first event of a stream that says something, at the end of what is not streamed.
    """

    __slots__ = (
        "_begun",
        "_context",
        "_dialect",
        "_first_byte_s",
        "_idle_s",
        "_is_kept",
        "_max_event_bytes",
        "_whole_s",
    )

    def __init__(
        self,
        context: RequestContext,
        *,
        begun: Callable[[], None] | None,
        first_byte_s: float,
        idle_s: float,
        whole_s: float,
        max_event_bytes: int,
    ) -> None:
        self._context = context
        self._dialect = context.dialect
        self._begun = begun
        self._idle_s = idle_s
        self._first_byte_s = first_byte_s
        self._whole_s = whole_s
        self._max_event_bytes = max_event_bytes
        # State: whether the events are kept for a whole answer, instead of being sent.
        self._is_kept = False

    async def decode(self, leg: OpenLeg, *, needs_text: bool, opening: Opening | None = None) -> None:
        """Opens the decode leg and relays its answer, behind the `opening` if there is one.

        Raises as `OpenLeg` does, `LegTimedOut`, and `ClientStalledError`.
        """
        if self._context.request.stream:
            limit = Deadline(self._first_byte_s, lambda: leg.time_out(self._too_late), self._context.limit)
            with limit, leg.relied_on(limit):
                await leg.open()
                try:
                    await self._relay_stream(leg, limit, needs_text, opening)
                finally:
                    leg.close()
            return
        outer = self._context.limit
        limit = _Patience(leg, self._first_byte_s, self._whole_s, lambda: leg.time_out(self._too_long), outer)
        with limit, leg.relied_on(limit):
            await leg.open()
            try:
                body = leg.read_now(self._context.max_answer_bytes)
                if body is None:
                    body = await leg.read(self._context.max_answer_bytes)
                body = self._as_client_gets(body, leg, needs_text, opening)
            finally:
                leg.close()
        if not self._sent_now(body):
            await self._send_whole(body)

    async def assemble(self, leg: OpenLeg, *, needs_text: bool, opening: Opening | None = None) -> None:
        """Does the same as `decode`, where the client wants a whole answer and the engine is asked for a stream.

        Raises `NotAssembled` as well, and `EngineReply` for an error of the client's that the engine found when its
        stream had begun.
        """
        self._is_kept = True
        limit = Deadline(self._first_byte_s, lambda: leg.time_out(self._too_late), self._context.limit)
        with limit, leg.relied_on(limit):
            await leg.open()
            try:
                if _is_stream(leg) or self._context.has_begun:
                    await self._relay_stream(leg, limit, needs_text, opening)
                    body = self._assembled(leg)
                else:  # as the client wanted it in the first place
                    body = await leg.read(self._context.max_answer_bytes)
                    body = self._as_client_gets(body, leg, needs_text, opening)
            finally:
                leg.close()
        await self._send_whole(body)

    async def answer(self, fields: Fields) -> None:
        """Sends the prefiller's answer, in the shape that the client asked for. It may be the end of what others
        began."""
        context = self._context
        if not context.request.stream:
            if context.has_begun and context.as_stream is not None:
                body = self._ended(context.stream.take(answer.as_stream(fields, context.as_stream)))
            else:
                body = answer.as_json(fields)
            await self._send_whole(body)
            return
        with Deadline(self._idle_s, self._stalled):
            await self._start_stream()
            await context.client.send(context.stream.take(answer.as_stream(fields, context.request)))
            if "usage" in fields:  # also where the client does not want to see it
                context.record.tokens.tell(bytes(fields["usage"]))
            await context.client.end()

    async def finish(self, shown: Shown) -> None:
        """Ends a stream of which everything was `shown` but its end, which needs no engine."""
        context = self._context
        rest = context.stream.rest(shown, context.prompt_usage)
        if not context.request.stream:
            await self._send_whole(self._ended(rest))
        else:
            await self.end(rest)

    async def end(self, rest: bytes) -> None:
        """Ends a stream that has begun with the events `rest`, of which there may be none."""
        client = self._context.client
        with Deadline(self._idle_s, self._stalled):
            if rest:
                await client.send(rest)
            await client.end()

    @property
    def _too_late(self) -> str:
        return f"the decoder's first token took longer than {self._first_byte_s:g} s"

    @property
    def _too_long(self) -> str:
        return f"the decoder's whole answer took longer than {self._whole_s:g} s"

    def _stalled(self) -> ClientStalledError:
        return ClientStalledError(f"the client took nothing for {self._idle_s:g} s")

    async def _start_stream(self) -> None:
        """Sends status and headers once, however many engines write the stream."""
        if not self._context.client.is_started:
            await self._context.start(200, EVENT_STREAM, *_STREAM_HEADERS)

    async def _relay_stream(self, leg: OpenLeg, limit: Deadline, needs_text: bool, opening: Opening | None) -> None:
        """Relays the stream of `leg` from its first event to its end, or keeps it for a whole answer. Raises
        `LegFailed` where it is no stream or breaks off, and as the methods below do."""
        if not _is_stream(leg):
            raise leg.fail("it did not answer with a stream")
        buffer = EventBuffer(self._max_event_bytes, lambda: leg.give_up_event(self._max_event_bytes))
        events = await self._read_first_events(leg, buffer, needs_text)
        if self._begun is not None:
            self._begun()
        if not self._is_kept:
            self._await_client(limit)
            await self._start_stream()
        if opening is not None:
            opened = self._context.stream.open(opening, events)
            if self._is_kept:
                self._keep(leg, opened)
            else:
                await self._context.client.send(opened)
        is_done = self._dialect.has_done(events)
        if len(events) > _LARGE_BYTES:
            await asyncio.sleep(0)
        await self._show(leg, events)
        is_done = await self._relay_rest(leg, buffer, limit, is_done=is_done)
        if not is_done or buffer.num_pending_bytes:
            raise leg.fail("its answer broke off")
        if not self._is_kept:
            self._await_client(limit)
            await self._context.client.end()

    async def _read_first_events(self, leg: OpenLeg, buffer: EventBuffer, needs_text: bool) -> bytes:
        """Returns everything up to the event that makes it an answer. Raises `LegFailed`, and `EngineReply` as `_said`
        does."""
        before: list[bytes] = []
        num_bytes = 0
        while True:
            chunk = await leg.read_chunk()
            if not chunk:
                raise leg.fail("its answer is empty")
            events = buffer.feed(chunk)
            if not events:
                continue
            if len(events) > _LARGE_BYTES:
                await asyncio.sleep(0)
            try:
                has_begun = self._dialect.has_begun(events, needs_text=needs_text)
            except CorruptAnswer as error:
                error_events = self._dialect.before_error(events)[1]
                if self._is_kept and error_events:
                    raise self._said(leg, error_events) from error
                raise leg.fail(str(error)) from error
            before.append(events)
            if has_begun:
                break
            num_bytes += len(events)
            if num_bytes > self._max_event_bytes:
                raise leg.fail(f"it sent more than {self._max_event_bytes} bytes before its first token")
        if len(events) > _LARGE_BYTES:
            await asyncio.sleep(0)
        return b"".join(before)

    async def _relay_rest(self, leg: OpenLeg, buffer: EventBuffer, limit: Deadline, *, is_done: bool) -> bool:
        """Relays whole events as they come. Returns True when the answer said that it is complete."""

        def silent() -> Exception:
            return leg.time_out(f"the decoder was silent for {self._idle_s:g} s")

        source, outlet = leg.source, self._outlet
        # Where both ends can do it, events go from socket to socket by callbacks. Elsewhere this task takes each piece.
        if source is not None and outlet is not None:
            pump = StreamPump(
                source,
                outlet,
                buffer,
                partial(self._look, leg),
                limit,
                idle_s=self._idle_s,
                silent=silent,
                stalled=self._stalled,
                shows_all=not self._is_kept and self._context.stream.is_as_it_comes,
                tokens=self._context.record.tokens,
                dialect=self._dialect,
            )
            try:
                pump.start()
                await pump.over
            except EngineBroken as error:
                raise leg.break_off(error) from error
            finally:
                outlet.on_room(None)
            leg.complete()
            return is_done or pump.is_done
        while True:
            limit.wait(self._idle_s, silent)
            chunk = await leg.read_chunk()
            if not chunk:
                return is_done
            events = buffer.feed(chunk)
            if not events:
                continue
            is_done = is_done or self._dialect.has_done(events)
            if not self._is_kept:
                self._await_client(limit)
            await self._show(leg, events)

    @property
    def _outlet(self) -> Outlet | None:
        return _KEPT if self._is_kept else self._context.client.outlet

    def _await_client(self, limit: Deadline) -> None:
        """Sets the limit to the client's side, because from now on the client is waited for."""
        limit.wait(self._idle_s, self._stalled)

    async def _show(self, leg: OpenLeg, events: bytes) -> None:
        """Sends whole events to the client, up to the engine's own error event if there is one; then raises
        `EngineSaidError`."""
        shown, error = self._look(leg, events)
        if len(shown) > _LARGE_BYTES:
            await asyncio.sleep(0)
        if shown:
            await self._context.client.send(shown)
        if error is not None:
            raise error

    def _look(self, leg: OpenLeg, events: bytes) -> tuple[bytes, Exception | None]:
        """Returns whole events as the client gets them, and the engine's own error that they end with, if they do."""
        context, dialect, error = self._context, self._dialect, None
        if events.find(dialect.error_mark) >= 0:
            events, error_events = dialect.before_error(events)
            if error_events:
                error = self._said(leg, error_events)
        try:
            if context.stream.has_opening:
                events = context.stream.with_opening_counted(events)
            if events.find(dialect.usage_mark) >= 0:
                if context.prompt_usage is not None:
                    events = dialect.stream_with_prompt_usage(events, context.prompt_usage)
                context.record.tokens.tell(events)
            shown = context.stream.take(events)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return b"", leg.fail("an event of its answer cannot be read")
        if not self._is_kept:
            return shown, error
        try:
            self._keep(leg, shown)
        except ProxyError as failure:
            error = error or failure
        return b"", error

    def _said(self, leg: OpenLeg, error_events: bytes) -> Exception:
        """Returns the error for the engine's own error event. While there can be a status, it is the engine's."""
        error = leg.say_error(error_events, is_ours=not self._dialect.is_clients_fault(error_events))
        if not self._is_kept or error.is_ours:
            return error
        reply = self._dialect.error_reply(error_events)
        return error if reply is None else EngineReply(*reply)

    def _keep(self, leg: OpenLeg, events: bytes) -> None:
        """Keeps events for the whole answer that is put together of them. Raises `NotAssembled`, `LegFailed`,
        `MemoryBudgetSpent`."""
        try:
            self._context.keep(events)
        except NotAssembledError as error:
            raise leg.give_up_assembling(str(error)) from error
        except CorruptAnswer as error:
            raise leg.fail(str(error)) from error

    def _assembled(self, leg: OpenLeg) -> bytes:
        """Returns the whole answer that was put together. Raises `NotAssembled`, `LegFailed`."""
        assembled, shape = self._context.assembled, self._context.shape
        assert assembled is not None
        assert shape is not None
        try:
            return assembled.body(shape)
        except NotAssembledError as error:
            raise leg.give_up_assembling(str(error)) from error
        except CorruptAnswer as error:
            raise leg.fail(str(error)) from error

    def _ended(self, events: bytes) -> bytes:
        """Returns the whole answer that was put together, with `events` at its end, which come from no decoder. Raises
        `LegFailed`."""
        assembled, shape = self._context.assembled, self._context.shape
        assert assembled is not None
        assert shape is not None
        try:
            self._context.keep(events)
            return assembled.body(shape)
        except (CorruptAnswer, NotAssembledError) as error:
            raise LegFailed("decode", self._context.last_attempt.decoder or "", str(error)) from error

    def _as_client_gets(self, body: bytes, leg: OpenLeg, needs_text: bool, opening: Opening | None) -> bytes:
        """Returns a whole answer as the client gets it. Raises `LegFailed` where it is none."""
        try:
            self._dialect.check_whole(body, needs_text=needs_text)
        except CorruptAnswer as error:
            raise leg.fail(str(error)) from error
        if self._begun is not None:
            self._begun()
        if opening is not None:
            body = with_opening(body, opening)
        usage = self._context.prompt_usage
        return body if usage is None else self._dialect.with_prompt_usage(body, usage)

    def _sent_now(self, body: bytes) -> bool:
        """Sends a whole answer where the client need not be waited for; else returns False."""
        self._context.record.tokens.tell(body)
        return self._context.answer_now(200, JSON, body)

    async def _send_whole(self, body: bytes) -> None:
        if self._sent_now(body):
            return
        with Deadline(self._idle_s, self._stalled):
            await self._context.answer(200, JSON, body)


def _is_stream(leg: OpenLeg) -> bool:
    return (leg.header("content-type") or "").startswith("text/event-stream")
