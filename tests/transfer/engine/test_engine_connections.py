"""What one client sends without an end costs the engine a bounded amount of memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.fakes.engine_core import ScriptedCore
from transfer.bounded_connection import MAX_HEAD_BYTES, MAX_PIPELINED, BoundedConnection
from transfer.descriptors import Descriptors
from transfer.engine.server import EngineServer, build_app
from transfer.engine.tiny import make_tiny_tokenizer

LINES = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(32))
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]]:
    core = ScriptedCore(lambda job: [])
    descriptors = Descriptors()
    app = build_app(core, make_tiny_tokenizer(folder, "bytes"), descriptors=descriptors)
    config = uvicorn.Config(app, http=BoundedConnection, port=0, lifespan="off", log_level="critical")
    config.load()
    server = EngineServer(config, descriptors)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
        try:
            yield server, reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    finally:
        await server.shutdown()


async def send_until_refused(writer: asyncio.StreamWriter, piece: bytes, most_bytes: int) -> int:
    """Sends the piece again and again, and returns how many bytes there were until the connection was closed."""
    num_bytes = 0
    with suppress(OSError):
        while num_bytes < most_bytes and not writer.transport.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
            num_bytes += len(piece)
    return num_bytes


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the end, however the connection ends."""
    said = b""
    with suppress(OSError):
        while piece := await asyncio.wait_for(reader.read(1 << 16), 5):
            said += piece
    return said


@pytest.mark.parametrize("begin", [GET[:-2], POST + b"0\r\n"], ids=["head", "trailers"])
async def test_a_head_or_trailers_without_an_end_are_refused(begin: bytes, tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, _, writer):
        writer.write(begin)
        num_bytes = await send_until_refused(writer, LINES, 64 * MAX_HEAD_BYTES)
        assert num_bytes < 32 * MAX_HEAD_BYTES
        assert not server.server_state.connections


async def test_trailers_are_dropped_and_the_request_is_answered(tmp_path: Path) -> None:
    body = b'{"prompt": "hi"}'
    async with connected(tmp_path) as (_, reader, writer):
        last = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        writer.write(POST + b"%x\r\n%b\r\n0\r\n%b\r\n%b" % (len(body), body, LINES, last))
        said = await rest(reader)
        assert said.count(b"HTTP/1.1 200 OK") == 2, said


@pytest.mark.parametrize("num", [MAX_PIPELINED, 5000])
async def test_so_many_requests_wait_on_one_connection_and_no_more(num: int, tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, reader, writer):
        writer.write(GET * num + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        said = await rest(reader)
        num_answered = said.count(b"HTTP/1.1 200 OK")
        assert num_answered == num + 1 if num == MAX_PIPELINED else num_answered <= MAX_PIPELINED
