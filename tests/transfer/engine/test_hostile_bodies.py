"""Hostile bodies at the transfer routes of the engine: an error object says what is wrong; never a fault of ours."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.fakes.engine_core import ScriptedCore
from tests.fakes.hostile import WRONG, new_dice, spoilt
from transfer.engine.sampling import SampledToken
from transfer.engine.server import build_app
from transfer.engine.tiny import make_tiny_tokenizer

PUSH: dict[str, Any] = {
    "attempt": "a",
    "receivers": [{"rank": 0, "host": "127.0.0.1", "port": 7300}],
    "timeout_s": 5.0,
    "notify": "tcp://127.0.0.1:7301",
    "prompt_token_ids": [5, 6, 7],
    "num_answer_tokens": 1,
    "capability": "c" * 64,
}
HANDOFF: dict[str, Any] = {
    "attempt": "a",
    "prompt_token_ids": [5, 6, 7],
    "first_token_id": 8,
    "num_pages": 1,
    "first_token_logprobs": {"logprob": -0.5, "top_logprobs": [[8, -0.5]]},
    "num_answer_tokens": 0,
}
RESUME: dict[str, Any] = {"prompt_token_ids": [5, 6, 7], "num_answer_tokens": 1}
TOO_MANY = [{"rank": rank, "host": "127.0.0.1", "port": 1} for rank in range(1000)]
TEXT = "Hello"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), "bytes")


@pytest.fixture
def core(tokenizer: Any) -> ScriptedCore:
    ids = [*tokenizer.encode(TEXT, add_special_tokens=False), 1]
    return ScriptedCore(lambda job: [SampledToken(token_id, -0.25, [(token_id, -0.25)]) for token_id in ids])


@asynccontextmanager
async def served(core: ScriptedCore, tokenizer: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(core, tokenizer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        yield client
    assert core.num_lent == 0


@pytest.fixture
async def client(core: ScriptedCore, tokenizer: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with served(core, tokenizer) as client:
        yield client


def is_json(value: Any) -> bool:
    """Bytes, NaN and what is too large for JSON's readers are left out: they cannot even be sent."""
    if isinstance(value, dict | list):
        return all(map(is_json, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, bytes) and not (isinstance(value, float) and not math.isfinite(value))


def broken(valid: dict[str, Any]) -> Iterator[bytes]:
    yield from (json.dumps(params).encode() for params in spoilt(valid) if is_json(params))
    yield from (json.dumps(wrong).encode() for wrong in WRONG if is_json(wrong))
    yield json.dumps(valid | {"receivers": TOO_MANY}).encode()
    yield json.dumps(valid | {"timeout_s": 1.0}).replace("1.0", "NaN").encode()
    yield json.dumps(valid | {"timeout_s": 1.0}).replace("1.0", "1e999").encode()
    yield json.dumps(valid | {"attempt": "ATTEMPT"}).replace("ATTEMPT", "\\ud800").encode()
    yield b"[" * 100_000
    yield b'{"attempt":"a","attempt":7}'


async def check(client: httpx.AsyncClient, path: str, body: bytes) -> bool:
    """True when it was accepted; otherwise it was refused in so many words."""
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    if response.status_code == 200:
        return True
    error = response.json()["error"]
    assert response.status_code in (400, 404, 413), (body[:300], response.text)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return False


@pytest.mark.parametrize(
    ("role", "valid"), [("prefill", PUSH), ("decode", HANDOFF), ("both", PUSH), ("both", HANDOFF), ("decode", RESUME)]
)
async def test_transfer_params(core: ScriptedCore, tokenizer: Any, role: str, valid: dict[str, Any]) -> None:
    """What is accepted reaches the core with names and numbers of sizes that can be kept."""
    core.role = role
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 3, "kv_transfer_params": "HERE"}).encode()
    async with served(core, tokenizer) as client:
        assert await check(client, "/v1/completions", body.replace(b'"HERE"', json.dumps(valid).encode()))
        results = [await check(client, "/v1/completions", body.replace(b'"HERE"', params)) for params in broken(valid)]
    assert results.count(False) > 50
    for job in core.jobs:
        if job.push is not None:
            assert len(job.push.attempt) <= 256
            assert len(job.push.receivers) <= 256
            assert job.push.timeout_s <= 1e9
        if job.handoff is not None:
            assert len(job.handoff.attempt) <= 256


async def test_cancel(client: httpx.AsyncClient, core: ScriptedCore) -> None:
    """An attempt's name is remembered after its end: one of any length would be memory for the asking."""
    for body in broken({"attempt": "a"}):
        await check(client, "/kv_transfer/cancel", body)
    assert core.cancelled
    assert max(map(len, core.cancelled)) <= 256


async def test_noise(client: httpx.AsyncClient) -> None:
    dice = new_dice()
    for _ in range(200):
        assert not await check(client, "/kv_transfer/cancel", dice.randbytes(dice.choice([0, 1, 5, 50, 5000])))
        assert not await check(client, "/v1/completions", dice.randbytes(dice.choice([0, 1, 5, 50, 5000])))


async def test_facts_are_told_to_whoever_asks_and_in_whatever_way(client: httpx.AsyncClient) -> None:
    expected = (await client.get("/kv_buffer")).json()
    for query in ("?" + "x" * 5000, "?attempt[]=1", "?%00", "#x"):
        assert (await client.get(f"/kv_buffer{query}")).json() == expected
    assert (await client.request("GET", "/kv_buffer", content=b"\xff" * 5000)).json() == expected
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert (await client.request(method, "/kv_buffer")).status_code == 405
