"""A whole proxy in one process, in front of scripted engines.

Requests go in as ASGI messages, so that a client can leave at any instant. Leaving the harness checks that nothing was
left behind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pdproxy.assemble import Proxy, assemble
from pdproxy.config import InstanceSettings, Settings
from tests.fakes.fake_engine import FakeClient, FakeEngine, ScriptedEngine

LIMIT_S = 5.0


async def until(condition: Callable[[], bool]) -> None:
    """For conditions that nobody announces: looked at after every turn of the loop."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def events(self) -> list[Any]:
        """The data of every event, ``[DONE]`` as text."""
        blocks = [block for block in self.body.decode().split("\n\n") if block]
        data = [block.removeprefix("data: ") for block in blocks]
        return [text if text == "[DONE]" else json.loads(text) for text in data]

    def text(self) -> str:
        """What a streaming client has read."""
        choices = [event["choices"][0] for event in self.events() if event != "[DONE]" and event.get("choices")]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


class Call:
    """One client. `leave` is a closed connection; `is_blocked` True a full one."""

    def __init__(self, proxy: Proxy, path: str, body: bytes, headers: dict[str, str], method: str = "POST") -> None:
        self.messages: list[dict[str, Any]] = []
        self.unblocked = asyncio.Event()
        self.unblocked.set()
        self.first_byte = asyncio.Event()
        self._body: list[bytes] = [body]
        self._gone = asyncio.Event()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(self._run(proxy, scope))

    async def _run(self, proxy: Proxy, scope: dict[str, Any]) -> None:
        await proxy.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(dict(message))
        if message["type"] == "http.response.body":
            self.first_byte.set()
            await self.unblocked.wait()

    def leave(self) -> None:
        self._gone.set()

    async def done(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.task

    async def answer(self) -> Answer:
        await self.done()
        return self.so_far()

    def so_far(self) -> Answer:
        start = self.messages[0]
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        body = b"".join(message.get("body", b"") for message in self.messages[1:])
        return Answer(start["status"], headers, body)


@dataclass
class Harness:
    proxy: Proxy
    prefillers: Sequence[Any]
    """Scripted engines of whatever kinds the test gave."""
    decoders: Sequence[Any]
    clients: list[FakeClient] = field(default_factory=list)

    @property
    def prefiller(self) -> Any:
        return self.prefillers[0]

    @property
    def decoder(self) -> Any:
        return self.decoders[0]

    @property
    def held(self) -> int:
        return sum(i.admission.held for i in self.proxy.pool.instances if i.has_admission)

    def client_of(self, engine: ScriptedEngine) -> FakeClient:
        return next(client for client in self.clients if client.engine is engine)

    def limit(self, **seconds: float) -> None:
        """Other time limits from now on: for a fleet that could not have come up with them."""
        settings = self.proxy.settings.model_copy(update=seconds)
        orchestrator = self.proxy.orchestrator
        for part in (orchestrator, orchestrator._pairing, orchestrator._steps):
            part._settings = settings

    def call(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> Call:
        body = {"model": "tiny", "max_tokens": 8} | body
        if path == "/v1/completions":
            body.setdefault("prompt", "a b c")
        return self.call_raw(path, json.dumps(body).encode(), headers)

    def call_raw(self, path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST") -> Call:
        return Call(self.proxy, path, body, headers or {}, method)

    async def post(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> Answer:
        return await self.call(path, headers, **body).answer()

    async def get(self, path: str) -> Answer:
        call = self.call_raw(path, b"", method="GET")
        return await call.answer()

    async def settled(self) -> None:
        """Until the reaper has nothing to do."""
        async with asyncio.timeout(LIMIT_S):
            await self.proxy.reaper.idle()

    async def is_ready(self) -> None:
        await until(lambda: all(instance.is_ready for instance in self.proxy.pool.instances))

    async def check_nothing_left(self) -> None:
        await self.settled()
        assert self.proxy.orchestrator.num_trips == 0
        assert self.held == 0
        assert self.proxy.board.statistics().num_open == 0
        assert all(instance.num_legs == 0 for instance in self.proxy.pool.instances)
        self.proxy.check_integrity()


@asynccontextmanager
async def proxy_in_front_of(
    prefillers: Sequence[ScriptedEngine] = (),
    decoders: Sequence[ScriptedEngine] = (),
    *,
    wait: bool = True,
    **options: Any,
) -> AsyncIterator[Harness]:
    """A running, ready proxy. On the way out nothing may be held, expected or running any more."""
    before = asyncio.all_tasks()
    prefillers = prefillers or [FakeEngine("prefill")]
    decoders = decoders or [FakeEngine("decode")]
    harness = _build(prefillers, decoders, options)
    async with harness.proxy.app.router.lifespan_context(harness.proxy.app):
        if wait:
            await harness.is_ready()
            for engine in (*prefillers, *decoders):
                engine.forget()
        yield harness
        await harness.check_nothing_left()
    await asyncio.sleep(0)
    left = {task for task in asyncio.all_tasks() - before if not task.done()}
    assert not left, left


def _build(
    prefillers: Sequence[ScriptedEngine], decoders: Sequence[ScriptedEngine], options: dict[str, Any]
) -> Harness:
    engines = {
        f"http://{role}{i}:1": engine
        for role, group in (("p", prefillers), ("d", decoders))
        for i, engine in enumerate(group)
    }
    for number, engine in enumerate(decoders):
        engine.port = 7300 + 10 * number
        engine.prefillers = prefillers
    for engine in prefillers:
        engine.decoders = decoders
    for group in (prefillers, decoders):
        for number, engine in enumerate(group):
            engine.epoch += f"-{number}" if number else ""  # no two processes have the same
    clients = {url: FakeClient(engine) for url, engine in engines.items()}
    instances = tuple(
        InstanceSettings(name=f"{engine.role}-{url[8]}", role=engine.role, url=url, **engine.settings)
        for url, engine in engines.items()
    )
    defaults: dict[str, Any] = {"proxy_port": 0, "probe_interval_s": 60.0, "port": 0, "instances": instances}
    proxy = assemble(Settings(**(defaults | options)), make_client=lambda one: clients[one.url])
    for engine in decoders:
        engine.sink = proxy.board.deliver
    return Harness(proxy, prefillers, decoders, list(clients.values()))
