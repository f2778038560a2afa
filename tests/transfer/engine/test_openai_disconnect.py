"""A client that leaves, in every phase: the request hangs at one named point, the client goes, nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from tests.fakes.engine_core import ENTERING, ScriptedCore
from transfer.engine.api import ModelFacts
from transfer.engine.sampling import SampledToken
from transfer.engine.server import build_app
from transfer.engine.tiny import make_tiny_tokenizer

Message = MutableMapping[str, Any]
App = Callable[[Any, Any, Any], Awaitable[None]]

LIMIT_S = 10
"""No test waits for this to pass; it only ends one that hangs."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), "ascii")


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore(lambda job: itertools.repeat(SampledToken(60)))


class Client:
    """The other side of one ASGI call. `leave` hangs up; sends beyond `num_reads` are never taken off its hands."""

    def __init__(self, body: bytes, *, more_body: bool = False, num_reads: int = 1_000) -> None:
        self.gone = asyncio.Event()
        self.stalled = asyncio.Event()
        self.sent: list[Message] = []
        self._body: list[Message] = [{"type": "http.request", "body": body, "more_body": more_body}]
        self._num_reads = num_reads

    def leave(self) -> None:
        self.gone.set()

    async def receive(self) -> Message:
        if self._body:
            return self._body.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.sent) == self._num_reads:
            self.stalled.set()
            await asyncio.Event().wait()
        self.sent.append(message)
        await asyncio.sleep(0)  # an endless script must not keep the loop for itself

    async def post(self, app: App, path: str) -> None:
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        async with asyncio.timeout(LIMIT_S):
            await app(scope | {"root_path": "", "http_version": "1.1"}, self.receive, self.send)


def body(path: str, **fields: Any) -> bytes:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    return json.dumps({"model": "tiny", "max_tokens": 200} | prompt | fields).encode()


PUSH = {"attempt": "a-1", "receivers": [{"rank": 0, "host": "127.0.0.1", "port": 7300}], "timeout_s": 5.0}
HANDOFF = {"attempt": "a-1", "prompt_token_ids": [9, 8, 7], "first_token_id": 60, "num_pages": 3}
PATHS = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


async def leave_when(event: asyncio.Event, client: Client, request: Coroutine[Any, Any, None]) -> None:
    """Run `request` to its end; the client leaves when `event` says that it hangs."""
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        group.create_task(request)
        await event.wait()
        client.leave()


@PATHS
async def test_leaving_while_the_body_is_sent(core: ScriptedCore, tokenizer: Any, path: str) -> None:
    client = Client(b'{"model": ', more_body=True)
    client.leave()
    await client.post(build_app(core, tokenizer), path)
    assert (client.sent, core.jobs) == ([], [])


async def test_leaving_while_the_prompt_is_tokenized(
    core: ScriptedCore, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def render(*args: Any, **kwargs: Any) -> str:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(LIMIT_S)
        return "late"

    monkeypatch.setattr(tokenizer, "apply_chat_template", render)
    path = "/v1/chat/completions"
    client = Client(body(path))
    try:
        await leave_when(begun, client, client.post(build_app(core, tokenizer), path))
    finally:
        may_end.set()
    assert (client.sent, core.jobs) == ([], [])


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", [ENTERING, 0, 3])
@pytest.mark.parametrize("n", [1, 2])
async def test_leaving_while_the_core_computes(
    core: ScriptedCore, tokenizer: Any, path: str, stream: bool, point: int, n: int
) -> None:
    core.hang_at = point
    client = Client(body(path, stream=stream, n=n))
    await leave_when(core.reached, client, client.post(build_app(core, tokenizer), path))
    assert core.num_lent == 0
    assert bool(client.sent) == (stream and point == 3)


@PATHS
async def test_leaving_in_the_decode_leg(core: ScriptedCore, tokenizer: Any, path: str) -> None:
    core.hang_at = 0
    client = Client(body(path, stream=True, kv_transfer_params=HANDOFF))
    await leave_when(core.reached, client, client.post(build_app(core, tokenizer), path))
    assert core.num_lent == 0


@PATHS
async def test_leaving_in_the_prefill_leg_drops_the_kv(core: ScriptedCore, tokenizer: Any, path: str) -> None:
    core.role, core.hang_at = "prefill", ENTERING
    client = Client(body(path, kv_transfer_params=PUSH))
    await leave_when(core.reached, client, client.post(build_app(core, tokenizer), path))
    assert (core.num_lent, core.kept, core.dropped) == (0, [], ["a-1"])


async def test_prefill_kv_is_kept_though_the_client_hangs_up_with_the_reply(core: ScriptedCore, tokenizer: Any) -> None:
    core.role = "prefill"
    client = Client(body("/v1/completions", kv_transfer_params=PUSH), num_reads=1)
    await leave_when(client.stalled, client, client.post(build_app(core, tokenizer), "/v1/completions"))
    assert (core.num_lent, core.kept, core.dropped) == (0, ["a-1"], [])


@PATHS
@pytest.mark.parametrize("num_reads", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 2])
async def test_leaving_with_a_full_socket(
    core: ScriptedCore, tokenizer: Any, path: str, num_reads: int, n: int
) -> None:
    client = Client(body(path, stream=True, n=n), num_reads=num_reads)
    await leave_when(client.stalled, client, client.post(build_app(core, tokenizer), path))
    assert core.num_lent == 0
    assert len(client.sent) == num_reads


async def test_sequence_that_ended_is_given_back_while_its_client_does_not_read(
    core: ScriptedCore, tokenizer: Any
) -> None:
    client = Client(body("/v1/completions", stream=True, max_tokens=1), num_reads=1)
    seen: list[int] = []

    async def look() -> None:
        await client.stalled.wait()
        seen.append(core.num_lent)

    looking = asyncio.ensure_future(look())
    await leave_when(client.stalled, client, client.post(build_app(core, tokenizer), "/v1/completions"))
    await looking
    assert seen == [0]


# ── the same over a real server and socket ──────────────────────────────────────────────────────────────────────────


class Watched:
    """An app whose first call is watched: `stuck` when a send does not return at once, `ended` when it is over."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.stuck = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def watched_send(message: Message) -> None:
            in_the_next_tick = asyncio.get_running_loop().call_soon(self.stuck.set)
            await send(message)
            in_the_next_tick.cancel()

        try:
            await self._app(scope, receive, watched_send)
        finally:
            self.ended.set()


@asynccontextmanager
async def served(app: App) -> AsyncIterator[tuple[str, int]]:
    """The address of a real server whose sockets hold little."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        config = uvicorn.Config(app, lifespan="off", log_level="error")
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        yield listener.getsockname()
        await server.shutdown(sockets=[listener])


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", [ENTERING, 0, 3])
async def test_connection_lost(core: ScriptedCore, tokenizer: Any, path: str, stream: bool, point: int) -> None:
    core.hang_at = point
    app = Watched(build_app(core, tokenizer))
    async with asyncio.timeout(LIMIT_S), served(app) as address:
        writer = await _post(address, path, body(path, stream=stream))
        await core.reached.wait()
        writer.transport.abort()
        await app.ended.wait()
    assert core.num_lent == 0


async def test_connection_lost_with_a_full_socket(core: ScriptedCore, tokenizer: Any) -> None:
    core.model = ModelFacts(name="tiny", max_model_len=10**9, vocab_size=512, eos_token_ids=frozenset())
    app = Watched(build_app(core, tokenizer))
    async with asyncio.timeout(LIMIT_S), served(app) as address:
        content = body("/v1/completions", stream=True, max_tokens=10**8)
        writer = await _post(address, "/v1/completions", content)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await app.stuck.wait()
        assert core.num_lent == 1
        writer.transport.abort()
        await app.ended.wait()
    assert core.num_lent == 0


async def _post(address: tuple[str, int], path: str, content: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(*address, limit=1024)
    head = f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return writer
