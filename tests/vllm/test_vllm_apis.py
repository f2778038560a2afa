"""``/v1/messages``, ``/v1/responses`` and what needs no generation: through the proxy as from a single vLLM."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from pdproxy.openai.request import MESSAGES, RESPONSES
from tests.vllm.engines import MODEL, Fleet
from tests.vllm.proxy import Proxy, serving

ENGINES = ("single", "prefill-0", "decode-0")
ALL_ENGINES = ENGINES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="module")]

SAID = [{"role": "user", "content": "Will it rain tomorrow, or the day after?"}]
TALK = [*SAID, {"role": "assistant", "content": "It may."}, {"role": "user", "content": "Tell me more. " * 40}]
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}
ANTHROPIC_TOOLS = {"tools": [{"name": "rain", "input_schema": TOOL}], "tool_choice": {"type": "none"}}
OPENAI_TOOLS = {"tools": [{"type": "function", "name": "rain", "parameters": TOOL}], "tool_choice": "none"}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "message": (MESSAGES, {"messages": SAID}),
    "message, a system prompt": (MESSAGES, {"messages": SAID, "system": "Be short."}),
    "message, turns": (MESSAGES, {"messages": TALK}),
    "message, one token": (MESSAGES, {"messages": SAID, "max_tokens": 1}),
    "message, a tool": (MESSAGES, {"messages": SAID, **ANTHROPIC_TOOLS}),
    "response": (RESPONSES, {"input": "Will it rain tomorrow?"}),
    "response, turns": (RESPONSES, {"input": TALK}),
    "response, instructions": (RESPONSES, {"input": "Will it rain?", "instructions": "Be short."}),
    "response, one token": (RESPONSES, {"input": "Will it rain?", "max_output_tokens": 1}),
    "response, a function": (RESPONSES, {"input": SAID, **OPENAI_TOOLS}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "message, no limit": (MESSAGES, {"messages": SAID, "max_tokens": None}),
    "message, too long": (MESSAGES, {"messages": [{"role": "user", "content": "word " * 3000}]}),
    "message, a role": (MESSAGES, {"messages": [{"role": 5, "content": "a"}]}),
    "message, unknown model": (MESSAGES, {"messages": SAID, "model": "nobody"}),
    "response, too long": (RESPONSES, {"input": "word " * 3000}),
    "response, a wrong type": (RESPONSES, {"input": "a", "temperature": "hot"}),
    "response, unknown model": (RESPONSES, {"input": "a", "model": "nobody"}),
    "response, after nobody's": (RESPONSES, {"input": "a", "previous_response_id": "resp_nobodys"}),
}
PASSED: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "It rains."},
    "/detokenize": {"tokens": [20, 21, 22]},
    "/v1/messages/count_tokens": {"messages": TALK},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(using: Fleet) -> AsyncIterator[Proxy]:
    async with serving(using, [using["prefill-0"].url], [using["decode-0"].url]) as proxy:
        yield proxy


def body_of(path: str, fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    limit = "max_tokens" if path == MESSAGES else "max_output_tokens"
    return {"model": MODEL, limit: 12, "temperature": 0} | fields | more


async def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120) as client:
        return await client.post(url + path, json=body)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def text(path: str, told: Any) -> Any:
    """What was written, without ids."""
    if isinstance(told, list):
        deltas = [one["delta"] for one in told if one["type"].endswith("_text.delta") or "block_delta" in one["type"]]
        return "".join(one if isinstance(one, str) else one.get("text", "") for one in deltas)
    if path == MESSAGES:
        return [part.get("text") for part in told["content"]], told["stop_reason"]
    return [part["text"] for item in told["output"] for part in item["content"]], told["status"]


def kinds(told: list[dict[str, Any]]) -> list[str]:
    """The types of events, each run of the same as one: a busy engine puts several tokens into one event."""
    return [kind for kind, _ in groupby(one["type"] for one in told)]


def prompt_tokens(usage: dict[str, Any]) -> int:
    return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens") or 0)


@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_is_that_of_a_single_engine(using: Fleet, proxy: Proxy, name: str) -> None:
    path, fields = BODIES[name]
    expected, got = [await post(url, path, body_of(path, fields)) for url in (using["single"].url, proxy.url)]
    assert (expected.status_code, got.status_code) == (200, 200), (expected.text, got.text)
    assert got.headers["x-pdproxy-path"] == "disaggregated"
    assert text(path, got.json()) == text(path, expected.json())
    assert "kv_transfer_params" not in got.json() or got.json()["kv_transfer_params"] is None
    ours, theirs = got.json()["usage"], expected.json()["usage"]
    assert (prompt_tokens(ours), ours["output_tokens"]) == (prompt_tokens(theirs), theirs["output_tokens"])
    await proxy.settled()


@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_is_that_of_a_single_engine(using: Fleet, proxy: Proxy, name: str) -> None:
    path, fields = BODIES[name]
    body = body_of(path, fields, stream=True)
    expected, got = [events(await post(url, path, body)) for url in (using["single"].url, proxy.url)]
    assert text(path, got) == text(path, expected)
    assert kinds(got) == kinds(expected)
    last, usual = got[-1], expected[-1]
    if path == MESSAGES:
        last, usual = got[-2], expected[-2]
        assert last["delta"] == usual["delta"]
        assert prompt_tokens(last["usage"]) == prompt_tokens(usual["usage"])
    else:
        assert text(path, last["response"]) == text(path, usual["response"])
    await proxy.settled()


@pytest.mark.parametrize("name", REFUSED)
async def test_what_a_single_engine_refuses(using: Fleet, proxy: Proxy, name: str) -> None:
    path, fields = REFUSED[name]
    expected, got = [await post(url, path, body_of(path, fields)) for url in (using["single"].url, proxy.url)]
    assert got.status_code == expected.status_code, (expected.text, got.text)
    assert (got.json().get("type") == "error") == (path == MESSAGES)
    await proxy.settled()


@pytest.mark.parametrize("path", PASSED)
async def test_what_one_instance_answers(using: Fleet, proxy: Proxy, path: str) -> None:
    body = {"model": MODEL} | PASSED[path]
    expected, got = [await post(url, path, body) for url in (using["single"].url, proxy.url)]
    assert (got.status_code, got.json()) == (200, expected.json())


async def test_paths_that_this_model_does_not_have(using: Fleet, proxy: Proxy) -> None:
    for path in ("/v1/embeddings", "/rerank", "/score", "/pooling", "/classify"):
        body = {"model": MODEL, "input": "a", "query": "q", "documents": ["a"], "text_1": "a", "text_2": "b"}
        expected, got = [await post(url, path, body) for url in (using["single"].url, proxy.url)]
        assert got.status_code == expected.status_code, (path, expected.text, got.text)
        assert path in got.json()["error"]["message"] or expected.status_code != 404


async def test_version_and_ping(using: Fleet, proxy: Proxy) -> None:
    async with httpx.AsyncClient(timeout=20) as client:
        for path in ("/version", "/ping"):
            expected, got = [await client.get(url + path) for url in (using["single"].url, proxy.url)]
            assert (got.status_code, got.content) == (expected.status_code, expected.content)


async def test_the_official_clients(proxy: Proxy) -> None:
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="none") as client:
        async with client.messages.stream(model=MODEL, messages=SAID, max_tokens=8) as stream:  # type: ignore[arg-type]
            written = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
        assert message.usage.output_tokens == 8
        assert written == "".join(part.text for part in message.content if part.type == "text")
    async with (
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none") as others,
        others.responses.stream(model=MODEL, input="a b c", max_output_tokens=8) as answer,
    ):
        async for _ in answer:
            pass
        assert (await answer.get_final_response()).usage.output_tokens == 8  # type: ignore[union-attr]
    await proxy.settled()
