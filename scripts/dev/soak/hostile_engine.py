"""The module is a prefiller and a decoder in one process which speak as vLLM does, and whose answers do harm.

    python -m scripts.dev.soak.hostile_engine MODEL PREFILL_PORT DECODE_PORT

The first word of a prompt says what the decoder does (`HARMS`); any other prompt gets `NUM_TOKENS` tokens, one each
`TOKEN_S` seconds, as from an engine that is well. The prefiller always does what it should.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

MODEL = sys.argv[1] if len(sys.argv) > 1 else "hostile"
NUM_TOKENS, TOKEN_S = 25, 0.02
PIECE_BYTES = 256 * 1024
LONG_EVENT_BYTES = 40 << 20
LIMIT_S = 20.0
"""The seconds after which harm that has no end of its own ends, if the proxy has not ended it before."""
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


END = chunk("", "length") + b"data: [DONE]\n\n"


async def usual() -> AsyncIterator[bytes]:
    for _ in range(NUM_TOKENS - 1):
        yield chunk(" a")
        await asyncio.sleep(TOKEN_S)
    yield END


async def slow() -> AsyncIterator[bytes]:
    """Yields a token each second, for as long as anybody listens."""
    while True:
        yield chunk(" a")
        await asyncio.sleep(1.0)


async def long_event() -> AsyncIterator[bytes]:
    """Yields one event of `LONG_EVENT_BYTES`, after a first one that is as usual."""
    yield chunk(" a")
    start, end = chunk("#").split(b"#")
    yield start
    for _ in range(LONG_EVENT_BYTES // PIECE_BYTES):
        yield b"a" * PIECE_BYTES
    yield end + END


async def comments() -> AsyncIterator[bytes]:
    while True:
        yield b": x\n\n" * (PIECE_BYTES // 5)


async def empty_events() -> AsyncIterator[bytes]:
    yield chunk(" a")
    while True:
        yield b"data:\n\n" * (PIECE_BYTES // 7)


async def flood() -> AsyncIterator[bytes]:
    """Yields usual tokens as fast as they are taken."""
    some = chunk(" a") * (PIECE_BYTES // len(chunk(" a")))
    while True:
        yield some


HARMS: dict[str, Callable[[], AsyncIterator[bytes]]] = {
    "slow": slow,
    "long_event": long_event,
    "comments": comments,
    "empty_events": empty_events,
    "flood": flood,
}
"""The streamed answers, by the first word of the prompt. Besides, "crumbs" sends usual tokens in HTTP chunks of one
byte, "endless_head" a head without an end, and "endless" a whole answer without one.
"""


def facts(path: str) -> bytes | None:
    """Returns the answer to what a proxy asks an engine; None for other paths."""
    match path:
        case "/health" | "/version":
            return b'{"version":"0.0"}'
        case "/v1/models":
            return json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL}]}).encode()
        case "/metrics":
            return (
                b'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000000"} 1.0\n'
                b'vllm:kv_cache_usage_perc{engine="0"} 0.0\nprocess_start_time_seconds 1.0\n'
            )
    return None


def prefilled(number: int) -> bytes:
    """Returns the reply of a prefill leg: a token, and where the KV is."""
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [number],
        "remote_engine_id": "hostile",
        "remote_request_id": f"cmpl-{number}",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    }
    return json.dumps(whole() | {"kv_transfer_params": params}).encode()


def whole() -> dict[str, Any]:
    choice = {"index": 0, "text": " a", "logprobs": None, "finish_reason": "length"}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        "usage": USAGE,
    }


class Engine:
    """An `Engine` answers one request after another on each connection. Mutable state: the number of prefills."""

    def __init__(self) -> None:
        self._num_prefills = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                path = head[0].split(" ")[1]
                lengths = [line.partition(":")[2] for line in head if line.lower().startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0]) if lengths else 0)
                async with asyncio.timeout(LIMIT_S):
                    await self._answer(path, body, writer)
        writer.transport.abort()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        told = facts(path)
        if told is not None or not path.endswith("/completions"):
            await send_whole(writer, told or b"{}")
            return
        asked = json.loads(body)
        if (asked.get("kv_transfer_params") or {}).get("do_remote_decode"):
            self._num_prefills += 1
            await send_whole(writer, prefilled(self._num_prefills))
            return
        prompt = asked["prompt"]
        harm = prompt.split()[0] if isinstance(prompt, str) and prompt.strip() else ""
        if harm == "endless_head":
            await send_endless_head(writer)
        elif harm == "endless":
            await send_endless(writer)
        elif asked.get("stream"):
            await send_events(writer, HARMS.get(harm, usual)(), is_crumbs=harm == "crumbs")
        else:
            await asyncio.sleep(NUM_TOKENS * TOKEN_S)
            await send_whole(writer, json.dumps(whole()).encode())


async def send_whole(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await writer.drain()


async def send_events(writer: asyncio.StreamWriter, events: AsyncIterator[bytes], *, is_crumbs: bool) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    async for piece in events:
        if is_crumbs:  # a chunk of HTTP for each byte
            writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in piece))
        else:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def send_endless_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x-more: " + b"a" * 1000 + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0)


async def send_endless(writer: asyncio.StreamWriter) -> None:
    """Sends a whole answer without an end."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
    piece = b" " * PIECE_BYTES
    while True:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
        await asyncio.sleep(0)


async def main(ports: list[int]) -> None:
    engine = Engine()
    servers = [await asyncio.start_server(engine.connected, "127.0.0.1", port, limit=1 << 24) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(main([int(word) for word in sys.argv[2:]]))
