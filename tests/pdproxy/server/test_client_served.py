"""The routes as plain ASGI endpoints: what servers say of clients that leave, or that have everything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdproxy.openai.priority import PriorityLimits
from pdproxy.openai.request import COMPLETIONS
from pdproxy.server.api_keys import ApiKeys
from pdproxy.server.routes import GenerationRoute
from pdproxy.telemetry.record import Outcome, RequestRecord
from pdproxy.telemetry.trace import PassTraceOn
from tests.fakes.proxy_harness import until
from transfer.memory_budget import MemoryBudget

BODY = b'{"prompt":"hi"}'
GONE = {"type": "http.disconnect"}


class Orchestrator:
    """Answers, and is not done at once, whether it has said that this was all or not. Implements `RequestObserver`."""

    def __init__(self, *, is_ended_first: bool = False) -> None:
        self._is_ended_first = is_ended_first
        self.prompts: list[str | None] = []
        self.outcomes: list[str] = []

    async def serve(self, request: Any, client: Any, record: RequestRecord) -> None:
        self.prompts.append(request.prompt_text)
        try:
            assert client.outlet is None
            await client.start(200, [])
            await client.send(b"all")
            if self._is_ended_first:
                await client.end()
            for _ in range(10):
                await asyncio.sleep(0)
            record.end(Outcome.DONE)
        except asyncio.CancelledError:
            record.end(Outcome.CLIENT_GONE)
            raise
        finally:
            self.request_finished(record)

    def request_finished(self, record: RequestRecord) -> None:
        self.outcomes.append(record.outcome.value)


class Server:
    """The server's side of one request: `messages`, then a disconnect as soon as a piece of the answer was sent, or
    when it `is_gone`."""

    def __init__(self, orchestrator: Orchestrator, *messages: dict[str, Any], max_body_bytes: int = 1000) -> None:
        orchestrator_like: Any = orchestrator
        self._messages = list(messages)
        self.memory = MemoryBudget(1 << 20)
        self.sent: list[dict[str, Any]] = []
        self.is_gone = asyncio.Event()
        self.is_full = False
        self.route = GenerationRoute(
            COMPLETIONS,
            orchestrator_like,
            orchestrator,
            max_body_bytes=max_body_bytes,
            body_timeout_s=0.05,
            memory=self.memory,
            priorities=PriorityLimits(least=0, most=0),
            keys=ApiKeys(()),
            passes_authorization=False,
            tracing=PassTraceOn(),
        )

    async def run(self, *headers: tuple[bytes, bytes]) -> None:
        await self.route({"type": "http", "headers": list(headers)}, self._receive, self._send)
        assert not self.memory.num_bytes

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self.is_gone.wait()
        return GONE

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            if self.is_full:
                await asyncio.Event().wait()
            self.is_gone.set()


def piece(body: bytes, *, is_last: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": not is_last}


@pytest.mark.parametrize(("is_ended_first", "outcome"), [(True, "done"), (False, "client_gone")])
async def test_a_client_that_has_everything_has_not_left(is_ended_first: bool, outcome: str) -> None:
    """Servers say ``http.disconnect`` also of a client to whom everything has been sent."""
    orchestrator = Orchestrator(is_ended_first=is_ended_first)
    await Server(orchestrator, piece(BODY)).run()
    assert orchestrator.outcomes == [outcome]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_body_in_pieces() -> None:
    orchestrator = Orchestrator(is_ended_first=True)
    await Server(orchestrator, piece(BODY[:3], is_last=False), piece(b"", is_last=False), piece(BODY[3:])).run()
    assert orchestrator.prompts == ["hi"]


async def test_gone_before_the_body_is_there() -> None:
    orchestrator = Orchestrator()
    server = Server(orchestrator, piece(BODY[:3], is_last=False), GONE)
    await server.run()
    assert (orchestrator.outcomes, orchestrator.prompts, server.sent) == (["client_gone"], [], [])


@pytest.mark.parametrize(
    ("pieces", "headers", "status"),
    [
        ([piece(b"x" * 600, is_last=False), piece(b"x" * 600, is_last=False)], [], 413),
        ([], [(b"content-length", b"1001")], 413),
        ([piece(BODY[:3], is_last=False)], [], 408),
        ([piece(b"{]")], [], 400),
    ],
)
async def test_what_is_refused(pieces: list[dict[str, Any]], headers: list[tuple[bytes, bytes]], status: int) -> None:
    orchestrator = Orchestrator()
    server = Server(orchestrator, *pieces)
    await server.run(*headers)
    assert server.sent[0]["status"] == status
    assert dict(server.sent[0]["headers"])[b"content-length"] == b"%d" % len(server.sent[1]["body"])
    assert (orchestrator.outcomes, orchestrator.prompts) == (["refused"], [])


@pytest.mark.parametrize("is_gone_too", [False, True])
async def test_cancelled_by_somebody_else(is_gone_too: bool) -> None:
    """That goes on, also where the client leaves in the same turn."""
    orchestrator = Orchestrator()
    server = Server(orchestrator, piece(BODY))
    server.is_full = True
    task = asyncio.create_task(server.run())
    await until(lambda: len(server.sent) == 2)
    if is_gone_too:
        server.is_gone.set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert orchestrator.outcomes == ["client_gone"]
