"""The engine's clients leave the last descriptors to its KV side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.fakes.calls import until
from tests.fakes.engine_core import ScriptedCore
from transfer.descriptors import CLIENT_RESERVE, RESERVE, Descriptors
from transfer.engine.sampling import SampledToken
from transfer.engine.server import EngineServer, build_app
from transfer.engine.tiny import make_tiny_tokenizer

BODY = {"model": "tiny", "prompt": "Say hello", "max_tokens": 100}


class Few(Descriptors):
    """`num_free` descriptors besides the clients' connections, however many this process has."""

    def __init__(self, num_free: int) -> None:
        self.num = num_free
        super().__init__()

    def measure(self) -> None:
        self.num_others, self.limit = 0, self.num


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return make_tiny_tokenizer(tmp_path, "bytes")


@pytest.fixture
def core(tokenizer: Any) -> ScriptedCore:
    ids = [*tokenizer.encode("Hello", add_special_tokens=False), 1]
    script = [SampledToken(token_id, -0.25, [(token_id, -0.25)]) for token_id in ids]
    return ScriptedCore(lambda job: script)


@asynccontextmanager
async def served(core: ScriptedCore, tokenizer: Any, descriptors: Descriptors) -> AsyncIterator[str]:
    config = uvicorn.Config(
        build_app(core, tokenizer, descriptors=descriptors), port=0, lifespan="off", log_level="error"
    )
    config.load()
    server = EngineServer(config, descriptors)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield "http://{}:{}".format(*server.servers[0].sockets[0].getsockname())
    finally:
        await server.shutdown()


def is_told_to_come_again(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    is_named = (error["code"], error["type"]) == ("out_of_descriptors", "service_unavailable")
    headers = answer.headers
    return answer.status_code == 503 and is_named and (headers["retry-after"], headers["connection"]) == ("1", "close")


async def test_nothing_is_generated_with_the_reserve(core: ScriptedCore, tokenizer: Any) -> None:
    descriptors = Few(RESERVE + 2)
    async with served(core, tokenizer, descriptors) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        descriptors.num = RESERVE + 1  # the KV side has opened something
        descriptors._measured_at = 0.0
        for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", BODY | {"messages": []})):
            assert is_told_to_come_again(await client.post(path, json=body))
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/kv_buffer")).status_code == 200
        descriptors.num += 10
        descriptors._measured_at = 0.0
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_client_beyond_the_limit_is_told_so(core: ScriptedCore, tokenizer: Any) -> None:
    descriptors = Few(CLIENT_RESERVE + 3)
    async with served(core, tokenizer, descriptors) as url:
        address = httpx.URL(url)
        silent = [socket.create_connection((address.host, address.port)) for _ in range(3)]
        await until(lambda: descriptors.num_clients == 3)
        async with httpx.AsyncClient(base_url=url) as client:
            for _ in range(3):
                assert is_told_to_come_again(await client.post("/v1/completions", json=BODY))
        silent.pop().close()
        await until(lambda: descriptors.num_clients == 2)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200
        for one in silent:
            one.close()
        await until(lambda: descriptors.num_clients == 0)
        await asyncio.sleep(0)
