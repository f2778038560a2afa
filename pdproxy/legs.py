"""One leg of an attempt: opened, its status judged, closed whatever happens.

Held in ``async with`` by the coroutine that owns the attempt, so that a client that goes away closes both legs at once,
and the engines notice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

import anyio

from pdproxy.engines.base import Call, EngineBroken, EngineRefused, EngineUnreachable, Leg
from pdproxy.errors import Backpressure, DeadlineExceeded, EngineReply, HandoffMissing, LegFailed
from pdproxy.fleet.instance import Instance
from pdproxy.telemetry.record import Observer

CLOSE_S = 2.0
"""For closing one connection; after that the socket is left to the operating system."""


class LegUnreachable(LegFailed):
    """The engine has not seen the request: nothing is under way there."""


class EngineSaidError(LegFailed):
    """The engine ended a stream under way with an error event: `events`, as it came.

    `is_ours` False: the event blames the request, which would fare no better elsewhere.
    """

    code = "engine_error"

    def __init__(self, leg: str, instance: str, events: bytes, *, is_ours: bool) -> None:
        super().__init__(leg, instance, "it reported an error")
        self.events = events
        self.is_ours = is_ours


class LegTimedOut(DeadlineExceeded):
    """A leg was silent for as long as it may be."""

    def __init__(self, leg: str, instance: str, message: str) -> None:
        super().__init__(message)
        self.leg = leg
        self.instance = instance


@contextmanager
def time_limit(limit_s: float, message: str) -> Iterator[None]:
    """Raises `DeadlineExceeded` with `message` when the block takes longer."""
    with anyio.move_on_after(limit_s) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineExceeded(message)


class OpenLeg:
    """``async with OpenLeg(…) as leg``: an engine's answer with HTTP 200.

    `name` is ``prefill`` or ``decode``. Entering raises `EngineReply` for the engine's own 4xx, `Backpressure` for 429
    and 503, `LegUnreachable` or `LegFailed` for the rest. Mutable state: the leg, once it is open; how it ended; when
    the engine's next word is due (on the loop's clock), by which a leg cut short is known to have been too slow.
    """

    def __init__(
        self, name: str, instance: Instance, call: Call, headers: Mapping[str, str], observer: Observer
    ) -> None:
        self._name = name
        self._instance = instance
        self._call = call
        self._headers = headers
        self._observer = observer
        self._leg: Leg | None = None
        self._outcome = "closed"
        self._era = 0
        self.due_at = math.inf

    @property
    def instance(self) -> str:
        return self._instance.name

    @contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """The whole leg, its opening included, may take so long. Raises `LegTimedOut`."""
        with anyio.move_on_after(limit_s) as scope:
            self.due_at = scope.deadline
            yield
        if scope.cancelled_caught:
            raise self.too_slow(f"the {self._name} leg took longer than {limit_s:g} s")

    async def __aenter__(self) -> OpenLeg:
        self._era = self._instance.leg_started()
        try:
            self._leg = await self._open()
            await self._judge(self._leg)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def read(self) -> bytes:
        """The whole body. Raises `LegFailed`."""
        try:
            body = await self._opened.read()
        except EngineBroken as error:
            raise self._broken(error) from error
        self._outcome = "ok"
        return body

    async def read_chunk(self) -> bytes:
        """The next piece, ``b""`` at the end. Raises `LegFailed`."""
        try:
            chunk = await self._opened.read_chunk()
        except EngineBroken as error:
            raise self._broken(error) from error
        if not chunk:
            self._outcome = "ok"
        return chunk

    def header(self, name: str) -> str | None:
        return self._opened.header(name)

    def failed(self, what: str) -> LegFailed:
        """The error that says what is wrong with this leg's answer."""
        self._outcome = "failed"
        return LegFailed(self._name, self._instance.name, what)

    def handed_nothing(self, what: str) -> HandoffMissing:
        """The error of a prefill leg whose KV was not kept."""
        self._outcome = "no_handoff"
        return HandoffMissing(self._name, self._instance.name, what)

    def said_error(self, events: bytes, *, is_ours: bool) -> EngineSaidError:
        """The error that an engine's own error event is."""
        self._outcome = "failed" if is_ours else "refused"
        return EngineSaidError(self._name, self._instance.name, events, is_ours=is_ours)

    def too_slow(self, message: str) -> LegTimedOut:
        """The error of a leg that missed its time."""
        return LegTimedOut(self._name, self._instance.name, message)

    @property
    def _opened(self) -> Leg:
        if self._leg is None:
            raise RuntimeError("the leg is not open")
        return self._leg

    async def _open(self) -> Leg:
        try:
            return await self._instance.client.post(self._call.path, self._call.body, self._headers)
        except EngineUnreachable as error:
            self._outcome = "failed"
            self._instance.suspect(f"it cannot be reached: {error}", is_lost=isinstance(error, EngineRefused))
            raise LegUnreachable(self._name, self._instance.name, "it cannot be reached") from error
        except EngineBroken as error:
            raise self._broken(error) from error

    def _broken(self, error: EngineBroken) -> LegFailed:
        self._instance.suspect(f"a connection to it broke: {error}", is_lost=False)
        return self.failed("the connection broke")

    async def _judge(self, leg: Leg) -> None:
        if leg.status == 200:
            return
        if leg.status in (429, 503):
            self._outcome = "busy"
            raise Backpressure(self._name, self._instance.name, await self._whole_reply(leg))
        if 400 <= leg.status < 500:
            self._outcome = "refused"
            raise await self._whole_reply(leg)
        raise self.failed(f"it answered HTTP {leg.status}")

    async def _whole_reply(self, leg: Leg) -> EngineReply:
        try:
            content = await leg.read()
        except EngineBroken as error:
            raise self._broken(error) from error
        content_type = leg.header("content-type") or "application/json"
        return EngineReply(leg.status, content, content_type, leg.header("retry-after"))

    async def _close(self) -> None:
        if self._outcome == "closed" and anyio.current_time() >= self.due_at:
            self._outcome = "timed_out"
            self._instance.suspect(f"it did not answer a {self._name} leg in time", is_lost=False)
        self._instance.leg_finished(self._era, self._outcome)
        self._observer.leg_finished(self._name, self._instance.name, self._outcome)
        leg, self._leg = self._leg, None
        if leg is not None:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await leg.aclose()
