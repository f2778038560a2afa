"""How far one streamed request walks through the proxy's own code: function entries, files, returns to a file left.

    python -m tests.helpers.walk [--list]

A real client asks a real server over sockets, in front of scripted engines of this process. The third request is the
one that is followed: by then connections are open, and what is computed once has been. `--list` names each function in
the order in which it is entered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, CoroutineType, FrameType
from typing import Any

import pdproxy
from pdproxy.assemble import assemble
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.serve import Server
from tests.fakes.calls import until
from tests.fakes.fake_engine import FakeClient, FakeEngine, ScriptedEngine
from tests.helpers.standin_http import Reply, serve

HOUSE = str(Path(pdproxy.__file__).parent)
BODY = {"model": "tiny", "prompt": "one two three four five six seven", "max_tokens": 4, "stream": True}


@dataclass
class Walk:
    """What was entered, in order, and how deep the coroutines stood in mid-stream."""

    entered: list[CodeType] = field(default_factory=list)
    depth: int = 0

    @property
    def files(self) -> list[str]:
        """Returns the file of each entry."""
        return [code.co_filename.removeprefix(HOUSE + "/") for code in self.entered]

    @property
    def num_changes(self) -> int:
        files = self.files
        return sum(one != other for one, other in pairwise(files))

    @property
    def num_returns(self) -> int:
        """Counts the changes into a file that had been left before."""
        return self.num_changes - (len(set(self.files)) - 1)

    def __str__(self) -> str:
        return (
            f"{len(self.entered)} function entries, {len(set(self.files))} files, {self.num_changes} changes of file, "
            f"{self.num_returns} of them back; {self.depth} coroutines deep in mid-stream"
        )


class Follower:
    """A profiler's function that notes which functions of the proxy are entered. A coroutine that goes on is not."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._seen: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOUSE) and frame not in self._seen:
            if frame.f_code.co_flags & GENERATORS:
                self._seen.append(frame)
            self._walk.entered.append(frame.f_code)


GENERATORS = 0x20 | 0x80 | 0x200
"""The flags of generators, coroutines and asynchronous generators, whose frames are entered more than once."""


def coroutines_deep(task: asyncio.Task[Any]) -> int:
    """Returns how many of the proxy's coroutines await each other in `task`."""
    depth, at = 0, task.get_coro()
    while isinstance(at, CoroutineType):
        depth += at.cr_code.co_filename.startswith(HOUSE)
        at = at.cr_await
    return depth


@asynccontextmanager
async def served_engine(engine: ScriptedEngine) -> AsyncIterator[str]:
    """Serves `engine` over a socket. Yields its URL."""
    client = FakeClient(engine)

    async def route(method: str, path: str, body: bytes) -> Reply:
        if method == "GET":
            status, content = await client.get(path, timeout_s=10.0)
            return Reply(content, status)
        leg = await client.post(path, body, {})
        content_type = leg.header("content-type") or "application/json"
        if not content_type.startswith("text/event-stream"):
            return Reply(await leg.read(), leg.status, content_type)
        return Reply(status=leg.status, events=events(leg))

    async def events(leg: Any) -> AsyncIterator[bytes]:
        while chunk := await leg.read_chunk():
            yield chunk

    server = await serve(route, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def served_proxy() -> AsyncIterator[tuple[int, ScriptedEngine]]:
    """Serves a proxy in front of one prefiller and one decoder. Yields its port, and the decoder."""
    prefiller, decoder = FakeEngine("prefill"), FakeEngine("decode")
    decoder.prefillers, prefiller.decoders, decoder.port = [prefiller], [decoder], 7300
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served_engine(engine)) for engine in (prefiller, decoder)]
        instances = tuple(
            InstanceSettings(name=engine.role, role=engine.role, url=url, **engine.settings)
            for engine, url in zip((prefiller, decoder), urls, strict=True)
        )
        proxy = assemble(Settings(instances=instances, port=0, proxy_port=0, probe_interval_s=60.0))
        decoder.sink = proxy.board.deliver
        server = Server(proxy)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started and all(one.is_ready for one in proxy.pool.instances))
        yield server.servers[0].sockets[0].getsockname()[1], decoder
        server.should_exit = True
        await serving


async def ask(port: int) -> None:
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: walk\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200") or b"[DONE]" not in answer:
        raise RuntimeError(f"the walk ended early: {answer.decode()}")


async def walk() -> Walk:
    """Returns the walk of one streamed request."""
    found = Walk()
    async with served_proxy() as (port, decoder):
        for _ in range(2):
            await ask(port)
        before = asyncio.all_tasks()
        follower = Follower(found)
        sys.setprofile(follower)
        try:
            decoder.forget()
            decoder.hang_at.add("middle")
            asking = asyncio.create_task(ask(port))
            await decoder.reached("middle")
            await asyncio.sleep(0.05)  # what the engine has said until here has come to the client
            sys.setprofile(None)
            found.depth = max(map(coroutines_deep, asyncio.all_tasks() - before))
            sys.setprofile(follower)
            decoder.let_go("middle")
            await asking
        finally:
            sys.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(walk())
    if options.list:
        for code, file in zip(found.entered, found.files, strict=True):
            print(file, code.co_qualname)
    print(found)


if __name__ == "__main__":
    main()
