"""From the decoder to the client: nothing promised before the first event was looked at, nothing ended silently."""

from __future__ import annotations

from types import TracebackType

import anyio

from pdproxy import answer
from pdproxy.answer import CorruptAnswer
from pdproxy.errors import DeadlineExceeded
from pdproxy.flight import Flight
from pdproxy.legs import OpenLeg
from pdproxy.openai import Fields
from pdproxy.sse import EventBuffer, has_done
from pdproxy.telemetry.record import Outcome
from pdproxy.trip import ClientStalledError, Trip

EVENT_STREAM = "text/event-stream; charset=utf-8"
_STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class Patience:
    """A time limit that moves: ``with`` it, whoever is waited for *now* has so many seconds.

    Mutable state: the scope's deadline and the error that it stands for.
    """

    def __init__(self) -> None:
        self._scope = anyio.CancelScope()
        self._error: Exception = DeadlineExceeded("it took too long")

    def wait(self, limit_s: float, error: Exception) -> None:
        """From now on, `error` is raised out of the block after `limit_s`."""
        self._error = error
        self._scope.deadline = anyio.current_time() + limit_s

    def __enter__(self) -> Patience:
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        is_handled = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught:
            raise self._error
        return is_handled


class Relay:
    """Takes one attempt's answer to its client. `idle_s`: for the next piece to come, or to be taken."""

    def __init__(self, trip: Trip, flight: Flight, *, first_byte_s: float, idle_s: float) -> None:
        self._trip = trip
        self._flight = flight
        self._idle_s = idle_s
        self._first_byte_s = first_byte_s
        self._silent = DeadlineExceeded(f"the decoder was silent for {idle_s:g} s")
        self._stalled = ClientStalledError(f"the client took nothing for {idle_s:g} s")

    async def decode(self, leg: OpenLeg, *, needs_text: bool) -> None:
        """Open the decode leg and relay its answer. Raises as `OpenLeg` does; `DeadlineExceeded`, stalled client."""
        with Patience() as patience:
            if self._trip.request.stream:
                message = f"the decoder's first token took longer than {self._first_byte_s:g} s"
                patience.wait(self._first_byte_s, DeadlineExceeded(message))
                async with leg:
                    await self._relay_stream(leg, patience, needs_text)
            else:
                async with leg:
                    body = await self._read_whole(leg, needs_text)
                await self._send_whole(body, patience)

    async def answer(self, fields: Fields) -> None:
        """The prefiller's answer, in the shape that the client asked for."""
        request = self._trip.request
        with Patience() as patience:
            if not request.stream:
                await self._send_whole(answer.as_json(fields), patience)
                return
            patience.wait(self._idle_s, self._stalled)
            await self._trip.start(200, EVENT_STREAM, *_STREAM_HEADERS)
            await self._trip.client.send(answer.as_stream(fields, request))
            await self._trip.client.end()

    async def _relay_stream(self, leg: OpenLeg, patience: Patience, needs_text: bool) -> None:
        if not (leg.header("content-type") or "").startswith("text/event-stream"):
            raise leg.failed("it did not answer with a stream")
        buffer = EventBuffer()
        events = await self._read_first_events(leg, buffer, needs_text)
        self._flight.mark_first_byte()
        patience.wait(self._idle_s, self._stalled)
        await self._trip.start(200, EVENT_STREAM, *_STREAM_HEADERS)
        await self._trip.client.send(events)
        is_done = await self._relay_rest(leg, buffer, patience, is_done=has_done(events))
        if not is_done or buffer.num_pending_bytes:
            raise leg.failed("its answer broke off")
        patience.wait(self._idle_s, self._stalled)
        await self._trip.client.end()

    async def _read_first_events(self, leg: OpenLeg, buffer: EventBuffer, needs_text: bool) -> bytes:
        """Everything up to the event that makes it an answer."""
        events = b""
        try:
            while not answer.has_begun(events, needs_text=needs_text):
                chunk = await leg.read_chunk()
                if not chunk:
                    raise leg.failed("its answer is empty")
                events += buffer.feed(chunk)
        except CorruptAnswer as error:
            raise leg.failed(str(error)) from error
        return events

    async def _relay_rest(self, leg: OpenLeg, buffer: EventBuffer, patience: Patience, *, is_done: bool) -> bool:
        """Whole events as they come. True when the answer said that it is complete."""
        send = self._trip.client.send
        while True:
            patience.wait(self._idle_s, self._silent)
            chunk = await leg.read_chunk()
            if not chunk:
                return is_done
            events = buffer.feed(chunk)
            if not events:
                continue
            is_done = is_done or has_done(events)
            if b'data: {"error"' in events:
                self._trip.record.error = "engine_error"
                self._trip.record.end(Outcome.FAILED)
            patience.wait(self._idle_s, self._stalled)
            await send(events)

    async def _read_whole(self, leg: OpenLeg, needs_text: bool) -> bytes:
        body = await leg.read()
        try:
            answer.check_whole(body, needs_text=needs_text)
        except CorruptAnswer as error:
            raise leg.failed(str(error)) from error
        self._flight.mark_first_byte()
        return body

    async def _send_whole(self, body: bytes, patience: Patience) -> None:
        patience.wait(self._idle_s, self._stalled)
        length = (b"content-length", str(len(body)).encode())
        await self._trip.start(200, "application/json", length)
        await self._trip.client.send(body)
        await self._trip.client.end()
