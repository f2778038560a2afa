"""Servers say ``http.disconnect`` also of a client to whom everything has been sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdproxy.request.openai import COMPLETIONS
from pdproxy.request.priority import PriorityLimits
from pdproxy.routes import GenerationRoute
from pdproxy.telemetry.record import RequestRecord


class Orchestrator:
    """Answers, and is not done at once, whether it has said that this was all or not."""

    def __init__(self, *, is_ended_first: bool) -> None:
        self._is_ended_first = is_ended_first
        self.outcome: str | None = None

    async def serve(self, request: Any, client: Any, record: RequestRecord) -> None:
        try:
            await client.start(200, [])
            await client.send(b"all")
            if self._is_ended_first:
                await client.end()
            for _ in range(10):
                await asyncio.sleep(0)
            self.outcome = "done"
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise


class Anything:
    """Says yes to whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: {}


@pytest.mark.parametrize(("is_ended_first", "outcome"), [(True, "done"), (False, "cancelled")])
async def test_a_client_that_has_everything_has_not_left(is_ended_first: bool, outcome: str) -> None:
    orchestrator = Orchestrator(is_ended_first=is_ended_first)
    messages = [{"type": "http.request", "body": b'{"prompt":"hi"}', "more_body": False}, {"type": "http.disconnect"}]
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if len(messages) == 1:
            await gone.wait()
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            gone.set()

    anything: Any = Anything()
    route = GenerationRoute(
        COMPLETIONS,
        orchestrator,  # type: ignore[arg-type]
        anything,
        max_body_bytes=1000,
        body_timeout_s=5.0,
        priorities=PriorityLimits(least=0, most=0),
        keys=anything,
        passes_authorization=False,
        tracing=anything,
    )
    await route({"type": "http", "headers": []}, receive, send)
    assert orchestrator.outcome == outcome
