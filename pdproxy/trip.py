"""One client request under way, over all its attempts, and the client at its other end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import anyio

from pdproxy.fleet.routing import Route
from pdproxy.flight import Flight, Path
from pdproxy.openai import GenerationRequest
from pdproxy.telemetry.record import RequestRecord

Headers = list[tuple[bytes, bytes]]


class ClientStalledError(Exception):
    """The client does not take what it asked for."""


class Client(Protocol):
    """Where the answer goes. Sending waits while the client's side is full, and does nothing once it has gone."""

    @property
    def forwarded(self) -> Mapping[str, str]:
        """Headers of the client's that go with every leg, its request id among them."""

    @property
    def is_started(self) -> bool:
        """A status line was sent, so that no other can be."""

    async def start(self, status: int, headers: Headers) -> None: ...

    async def send(self, chunk: bytes) -> None: ...

    async def end(self) -> None: ...


@dataclass(eq=False, slots=True, kw_only=True)
class Trip:
    """Mutable state: who failed so far, whether shutdown has caught up with it, and the record."""

    request: GenerationRequest
    client: Client
    record: RequestRecord
    scope: anyio.CancelScope
    deadline: float
    """Absolute, on the monotonic clock."""
    is_aborted: bool = False
    """The proxy is shutting down and its patience is over."""
    avoid: frozenset[str] = frozenset()
    """Instances that have failed this request."""
    tokenize_s: float | None = None

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
