"""The clients' side of the proxy over real sockets, before an orchestrator that plays what a test has written.

Leaving it checks that no connection, no task and no half-ended record is left behind.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from pdproxy.openai.priority import PriorityLimits
from pdproxy.openai.request import CHAT, COMPLETIONS, GenerationRequest
from pdproxy.orchestrator.context import Client
from pdproxy.server.api_keys import ApiKeys
from pdproxy.server.connection import ClientConnection
from pdproxy.server.direct import DirectRoutes
from pdproxy.server.routes import GenerationRoute
from pdproxy.telemetry.record import Outcome, RequestRecord
from pdproxy.telemetry.trace import PassTraceOn
from tests.fakes.proxy_harness import LIMIT_S, until
from transfer.memory_budget import MemoryBudget

Play = Callable[[GenerationRequest, Client], Awaitable[None]]


async def echo(request: GenerationRequest, client: Client) -> None:
    """The prompt is the whole answer."""
    await client.answer(200, [(b"content-type", b"text/plain")], str(request.prompt_text).encode())


async def stream_echo(request: GenerationRequest, client: Client) -> None:
    """The prompt is the answer, a word at a time."""
    await client.start(200, [(b"content-type", b"text/plain")])
    for word in str(request.prompt_text).split():
        await client.send(word.encode())
    await client.end()


async def other_app(scope: Any, receive: Any, send: Any) -> None:
    """What is behind the routes: it says how it was asked."""
    body = f"{scope['method']} {dict(scope['headers'])[b'host'].decode()}{scope['path']}".encode()
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def post(prompt: str = "hi", *more: str, path: str = COMPLETIONS, version: str = "1.1") -> bytes:
    """A whole request. `more`: header lines."""
    body = f'{{"prompt":"{prompt}"}}'
    lines = [f"POST {path} HTTP/{version}", "host: proxy", f"content-length: {len(body)}", *more, "", body]
    return "\r\n".join(lines).encode()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class RawClient:
    """A socket's other end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(LIMIT_S):
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        pairs = [line.partition(": ")[::2] for line in lines[1:]]
        assert len({name for name, _ in pairs}) == len(pairs), lines
        return int(lines[0].split()[1]), dict(pairs)

    async def chunk(self) -> bytes:
        """Of a body in chunks; empty at its end."""
        async with asyncio.timeout(LIMIT_S):
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            data = await self._reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def answer(self) -> Answer:
        status, headers = await self.head()
        assert not {"content-length", "transfer-encoding"} <= headers.keys()
        if "content-length" in headers:
            return Answer(status, headers, await self.read(int(headers["content-length"])))
        if headers.get("transfer-encoding") != "chunked":
            return Answer(status, headers, await self.rest())
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return Answer(status, headers, body)

    async def read(self, num_bytes: int) -> bytes:
        async with asyncio.timeout(LIMIT_S):
            return await self._reader.readexactly(num_bytes)

    async def rest(self) -> bytes:
        """Until the connection is closed."""
        async with asyncio.timeout(LIMIT_S):
            return await self._reader.read()

    def leave(self) -> None:
        """A reset: it is noticed whatever else is on its way. Idempotent."""
        if self._writer.transport.is_closing():
            return
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def half_close(self) -> None:
        self._writer.write_eof()


@dataclass
class FrontDoor:
    """Implements `RequestObserver`, and what routes need of an orchestrator. Mutable state: what was served and what of
    it has ended, and what is played."""

    state: ServerState = field(default_factory=ServerState)
    play: Play = echo
    memory: MemoryBudget = field(default_factory=lambda: MemoryBudget(1 << 30))
    prompts: list[str | None] = field(default_factory=list)
    finished: list[RequestRecord] = field(default_factory=list)
    clients: list[RawClient] = field(default_factory=list)
    port: int = 0
    make: Callable[[], ClientConnection] = field(init=False)
    """What a server would make of a new connection."""

    def hold(self) -> asyncio.Event:
        """Holds up what is served from now on until the event is set; then it is echoed."""
        gate = asyncio.Event()

        async def play(request: GenerationRequest, client: Client) -> None:
            await gate.wait()
            await echo(request, client)

        self.play = play
        return gate

    async def serve(self, request: GenerationRequest, client: Client, record: RequestRecord) -> None:
        self.prompts.append(request.prompt_text)
        try:
            await self.play(request, client)
            record.end(Outcome.DONE)
        except BaseException:
            record.end(Outcome.CLIENT_GONE)
            raise
        finally:
            self.request_finished(record)

    def request_finished(self, record: RequestRecord) -> None:
        self.finished.append(record)

    async def connect(self) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    @property
    def outcomes(self) -> list[str]:
        return [record.outcome.value for record in self.finished]

    async def ended(self, num: int = 1) -> None:
        """Until so many requests have, and no task serves any."""
        await until(lambda: len(self.finished) >= num and not self.state.tasks)

    async def is_empty(self) -> None:
        """Until every connection is closed."""
        await until(lambda: not self.state.connections)


def make_door(
    *,
    keys: tuple[str, ...] = (),
    max_body_bytes: int = 1000,
    body_timeout_s: float = 5.0,
    memory_budget: int = 1 << 30,
    keep_alive_s: float = 60.0,
    may_be_asked_from_elsewhere: bool = False,
    app: Any = other_app,
) -> FrontDoor:
    door = FrontDoor(memory=MemoryBudget(memory_budget))
    orchestrator: Any = door
    routes = {
        path: GenerationRoute(
            path,
            orchestrator,
            door,
            max_body_bytes=max_body_bytes,
            body_timeout_s=body_timeout_s,
            memory=door.memory,
            priorities=PriorityLimits(least=0, most=0),
            keys=ApiKeys(keys),
            passes_authorization=False,
            tracing=PassTraceOn(),
        )
        for path in (COMPLETIONS, CHAT)
    }
    direct = DirectRoutes(routes, may_be_asked_from_elsewhere=may_be_asked_from_elsewhere)
    config = uvicorn.Config(
        app,
        log_config=None,
        lifespan="off",
        interface="asgi3",
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
    )
    config.load()
    door.make = partial(ClientConnection, config, door.state, {}, routes=direct, memory=door.memory)
    return door


@asynccontextmanager
async def front_door(**options: Any) -> AsyncIterator[FrontDoor]:
    door = make_door(**options)
    server = await asyncio.get_running_loop().create_server(door.make, "127.0.0.1", 0)
    door.port = server.sockets[0].getsockname()[1]
    try:
        yield door
    finally:
        server.close()
        for client in door.clients:
            client.leave()
    await door.is_empty()
    await until(lambda: not door.state.tasks)
    assert not door.memory.num_bytes
    assert Outcome.RUNNING not in {record.outcome for record in door.finished}


class Wire:
    """A transport that goes nowhere: what was written, one entry per write, and how many bytes of it were not taken, as
    a test says. Implements as much as is used of one."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False
        self.is_reading = True
        self.num_unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


def wired(door: FrontDoor) -> tuple[ClientConnection, Any]:
    """A connection to which a test says what a transport would, when it would."""
    connection, wire = door.make(), Wire()
    transport: Any = wire
    connection.connection_made(transport)
    return connection, wire
