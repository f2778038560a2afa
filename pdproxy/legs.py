"""One leg of an attempt: opened, its status judged, closed whatever happens.

Held in ``async with`` by the coroutine that owns the attempt, so that a client that goes away closes both legs at once,
and the engines notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

import anyio

from pdproxy.engines.base import Call, EngineBroken, EngineUnreachable, Leg
from pdproxy.errors import Backpressure, DeadlineExceeded, EngineReply, LegFailed
from pdproxy.fleet.instance import Instance
from pdproxy.telemetry.record import Observer

CLOSE_S = 2.0
"""For closing one connection; after that the socket is left to the operating system."""


class LegUnreachable(LegFailed):
    """The engine has not seen the request: nothing is under way there."""


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
    and 503, `LegUnreachable` or `LegFailed` for the rest. Mutable state: the leg, once it is open; how it ended.
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

    async def __aenter__(self) -> OpenLeg:
        self._instance.num_legs += 1
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
            self._instance.suspect(f"it cannot be reached: {error}", is_lost=True)
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
        self._instance.num_legs -= 1
        self._observer.leg_finished(self._name, self._instance.name, self._outcome)
        leg, self._leg = self._leg, None
        if leg is not None:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await leg.aclose()
