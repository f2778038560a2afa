"""One client request under way, over all its attempts, and the client at its other end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from pdproxy.engines.base import Adapter, PrefillReply
from pdproxy.fleet.routing import Route
from pdproxy.flight import Flight, Path
from pdproxy.reply.seam import PromptUsage
from pdproxy.reply.streamed import StreamedAnswer
from pdproxy.request.openai import GenerationRequest
from pdproxy.request.path import PromptSize
from pdproxy.telemetry.record import RequestRecord

Headers = list[tuple[bytes, bytes]]


class ClientStalledError(Exception):
    """The client does not take what it asked for."""


class Client(Protocol):
    """Where the answer goes. Sending waits while the client's side is full, and does nothing once it has gone."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The client's own, names in lower case."""

    @property
    def forwarded(self) -> Mapping[str, str]:
        """Headers of the client's that go with every leg, its request id among them."""

    @property
    def is_started(self) -> bool:
        """A status line was sent, so that no other can be."""

    async def start(self, status: int, headers: Headers) -> None: ...

    async def send(self, chunk: bytes) -> None: ...

    async def end(self) -> None: ...

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """All of it: `start`, `send` and `end` in one."""

    @property
    def outlet(self) -> Outlet | None:
        """The way past waiting, between `start` and `end`; None where there is none."""


class Outlet(Protocol):
    """A client's own connection, which pieces of a body that was started are put on from within callbacks."""

    def write(self, piece: bytes) -> None:
        """Never waits; does nothing once the client has gone. Not while it `is_full`, or memory has no bound."""

    @property
    def is_full(self) -> bool:
        """More was written than the client has taken and the operating system will keep."""

    def on_room(self, callback: Callable[[], None] | None) -> None:
        """Call `callback`, whenever it is no longer full; None: nobody any more."""


@dataclass(eq=False, slots=True, kw_only=True)
class Trip:
    """Mutable state: who failed so far, what is known of the prompt and was shown of the answer, whether shutdown has
    caught up with it, and the record.
    """

    request: GenerationRequest
    client: Client
    record: RequestRecord
    scope: anyio.CancelScope
    limit_s: float
    """For everything, all attempts together."""
    stream: StreamedAnswer
    deadline: float = field(init=False)
    """Absolute, on the monotonic clock."""
    is_aborted: bool = False
    """The proxy is shutting down and its patience is over."""
    avoid: frozenset[str] = frozenset()
    """Instances that have failed this request."""
    tokenize_s: float | None = None
    prompt_usage: PromptUsage | None = None
    """As the prefiller told it whose token the client sees first."""
    _prompt_ids: list[int] | None = None
    _handed_ids: Callable[[], list[int] | None] | None = None
    """Reads the prompt's ids from that prefiller's reply."""

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.limit_s
        self.scope.deadline = anyio.current_time() + self.limit_s

    def fly(self, route: Route, path: Path, num_prompt_tokens: int) -> Flight:
        """A new attempt, with a fresh id."""
        flight = Flight(
            self.record.request_id,
            path=path,
            prefiller=None if path is Path.LOCAL else route.prefiller.name,
            decoder=None if path is Path.PREFILL_ONLY else route.decoder.name,
            num_prompt_tokens=num_prompt_tokens,
            tokenize_s=self.tokenize_s,
        )
        self.tokenize_s = None
        self.record.flight = flight
        self.record.num_attempts += 1
        return flight

    @property
    def last_flight(self) -> Flight:
        """Of the attempt under way, or the latest one."""
        if self.record.flight is None:
            raise RuntimeError("nothing was tried yet")
        return self.record.flight

    def prefilled(self, reply: PrefillReply, adapter: Adapter) -> None:
        """What the reply tells of the prompt. Later ones, of attempts that go on with the answer, tell nothing new."""
        if not self.client.is_started:
            self.prompt_usage = reply.usage
            self._handed_ids = lambda: adapter.prompt_ids(reply)

    def prompt_ids(self, size: PromptSize) -> list[int] | None:
        """The prompt as its first prefiller read it; None where nobody told. The first `size` is the prompt's own."""
        if self._prompt_ids is None:
            handed = self._handed_ids() if self._handed_ids is not None else None
            self._prompt_ids = handed or size.ids or self.request.prompt_ids
        return self._prompt_ids

    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    async def start(self, status: int, content_type: str, *more: tuple[bytes, bytes]) -> None:
        """Send status and headers to the client."""
        self.record.status = status
        headers = [(b"content-type", content_type.encode("latin-1")), *more, *self._headers()]
        await self.client.start(status, headers)

    def _headers(self) -> Headers:
        """Which way the request went, and where its time went until now."""
        headers = [(b"x-request-id", self.record.request_id.encode("latin-1"))]
        if self.record.flight is not None:
            headers += _flight_headers(self.record.flight)
        return headers


def _flight_headers(flight: Flight) -> Headers:
    told = {"path": flight.path.value, "attempt": flight.attempt}
    if flight.prefiller is not None:
        told["prefiller"] = flight.prefiller
    if flight.decoder is not None:
        told["decoder"] = flight.decoder
    if flight.num_kv_bytes is not None:
        transfer_ms = (flight.transfer_s or 0.0) * 1000
        told["kv"] = f"pages={flight.num_pages};bytes={flight.num_kv_bytes};transfer_ms={transfer_ms:.3f}"
    timing = ", ".join(f"{step};dur={s * 1000:.1f}" for step, s in flight.phase_seconds().items())
    headers = [(f"x-pdproxy-{name}".encode(), value.encode()) for name, value in told.items()]
    return [*headers, (b"server-timing", timing.encode())]
