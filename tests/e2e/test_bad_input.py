"""What cannot be served is answered with an OpenAI error object that names the field, and nothing stays held."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.cluster import Cluster, running
from tests.helpers.sockets import listening

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

OK = {"model": "tiny", "max_tokens": 4, "temperature": 0}
CHAT = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    # A buffer of ten pages: prompts of more than 640 tokens cannot pass, and are refused rather than served elsewhere.
    engine = ("--chunk-size", "64", "--served-model-name", "tiny", "--max-model-len", "2048")
    decode = ("--pd-buffer-size", str(10 * 64 * 1024))
    proxy = ("--chunk-size", "64", "--oversized", "refuse")
    folder = tmp_path_factory.mktemp("bad-input")
    async with running(tiny_model(), folder, engine=engine, decode=decode, proxy=proxy) as cluster:
        yield cluster


async def post(cluster: Cluster, path: str, content: bytes | dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=cluster.proxy, timeout=30) as client:
        if isinstance(content, bytes):
            return await client.post(path, content=content, headers={"content-type": "application/json"})
        return await client.post(path, json=content)


def error_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.headers["content-type"].startswith("application/json"), reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("completions", b'{"model": "tiny", "prompt": ', 400, None, "JSON"),
        ("completions", b"[1, 2]", 400, None, "object"),
        ("completions", b'{"model": "tiny", "prompt": "\xff\xfe"}', 400, None, "UTF-8|JSON|utf-8"),
        ("completions", {**OK}, 400, "prompt", "prompt"),
        ("completions", {**OK, "prompt": ""}, 400, "prompt", "empty|prompt"),
        ("completions", {**OK, "prompt": []}, 400, "prompt", "empty|prompt"),
        ("completions", {**OK, "prompt": 7}, 400, "prompt", "prompt"),
        ("completions", {**OK, "prompt": {"text": "x"}}, 400, "prompt", "prompt"),
        ("completions", {**OK, "prompt": [1, "x"]}, 400, "prompt", "prompt"),
        ("completions", {**OK, "prompt": "x", "max_tokens": "many"}, 400, "max_tokens", "max_tokens"),
        ("completions", {**OK, "prompt": "x", "max_tokens": 0}, 400, "max_tokens", "max_tokens"),
        ("completions", {**OK, "prompt": "x", "stream": "yes"}, 400, "stream", "stream"),
        ("completions", {**OK, "prompt": "x", "temperature": 9}, 400, "temperature", "temperature"),
        ("completions", {**OK, "prompt": "x", "model": "no-such-model"}, 404, "model", "no-such-model"),
        ("completions", {**OK, "prompt": [20] * 3000}, 400, "prompt", "3000"),
        ("completions", {**OK, "prompt": [20] * 1000}, 400, "prompt", "10"),
        ("chat/completions", {**OK}, 400, "messages", "messages"),
        ("chat/completions", {**OK, "messages": []}, 400, "messages", "messages|empty"),
        ("chat/completions", {**OK, "messages": "hello"}, 400, "messages", "messages"),
        ("chat/completions", {**OK, "messages": [{"role": "nobody", "content": "x"}]}, 400, "messages", "role|nobody"),
        ("chat/completions", {**OK, "messages": CHAT, "n": 0}, 400, "n", "n"),
    ],
)
async def test_refused_with_the_fields_name(
    cluster: Cluster, path: str, body: bytes | dict[str, Any], status: int, param: str | None, says: str
) -> None:
    reply = await post(cluster, f"/v1/{path}", body)
    assert reply.status_code == status, reply.text
    error = error_of(reply)
    assert error["param"] == param
    assert any(word in error["message"] for word in says.split("|")), error["message"]
    assert await cluster.held() == 0


async def test_too_long_for_context_or_buffer_has_the_code_clients_know(cluster: Cluster) -> None:
    for length in (1000, 3000):
        reply = await post(cluster, "/v1/completions", {**OK, "prompt": [20] * length})
        assert error_of(reply)["code"] == "context_length_exceeded"


async def test_body_of_thirty_megabytes(cluster: Cluster) -> None:
    reply = await post(cluster, "/v1/completions", {**OK, "prompt": "x" * (30 << 20)})
    assert reply.status_code == 413
    assert error_of(reply)["message"]


async def test_unknown_route_and_wrong_method(cluster: Cluster) -> None:
    assert error_of(await post(cluster, "/v1/no-such-route", {}))["message"]
    async with httpx.AsyncClient(base_url=cluster.proxy) as client:
        reply = await client.get("/v1/completions")
    assert reply.status_code == 405
    error_of(reply)


async def test_kv_params_of_a_stranger_are_removed(cluster: Cluster) -> None:
    stolen = {"attempt": "someone-elses", "prompt_token_ids": [1], "first_token_id": 2, "num_pages": 1}
    body = {**OK, "prompt": "hello there", "kv_transfer_params": stolen, "bootstrap_room": 1}
    reply = await post(cluster, "/v1/completions", body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens"] > 1


async def test_no_process_listens_anywhere_but_where_it_was_told(cluster: Cluster) -> None:
    """The proxy's and the engines' HTTP, the signal and control sockets, and what NIXL and UCX listen on."""
    for name, process in cluster.processes.items():
        found = listening(process.pid)
        assert found, name
        assert {address for address, _ in found} == {"127.0.0.1"}, (name, found)


async def test_everything_is_back_and_the_next_request_is_served(cluster: Cluster) -> None:
    reply = await post(cluster, "/v1/chat/completions", {**OK, "messages": CHAT})
    assert reply.status_code == 200
    await cluster.settled()
