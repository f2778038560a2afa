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
NESTED = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}}}
SCHEMA = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
USED = {"type": "tool_use", "id": "call_1", "name": "rain", "input": {"city": "Oslo"}}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "rain", "arguments": '{"city":"Oslo"}'}
FUNCTION = OPENAI_TOOLS["tools"][0]  # type: ignore[index]
PARTS = [
    {"type": "text", "text": "Will it rain", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "?"},
]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "message": (MESSAGES, {"messages": SAID}),
    "message, a system prompt": (MESSAGES, {"messages": SAID, "system": "Be short."}),
    "message, turns": (MESSAGES, {"messages": TALK}),
    "message, one token": (MESSAGES, {"messages": SAID, "max_tokens": 1}),
    "message, a tool": (MESSAGES, {"messages": SAID, **ANTHROPIC_TOOLS}),
    "message, in parts": (MESSAGES, {"messages": [{"role": "user", "content": PARTS}], "system": PARTS}),
    "message, stop strings": (MESSAGES, {"messages": SAID, "stop_sequences": ["e", "a"]}),
    "message, sampling": (MESSAGES, {"messages": SAID, "temperature": 0.9, "top_k": 1, "top_p": 0.5}),
    "message, not thinking": (MESSAGES, {"messages": SAID, "thinking": {"type": "disabled"}}),
    "message, effort": (MESSAGES, {"messages": SAID, "output_config": {"effort": "low"}}),
    "message, a schema": (MESSAGES, {"messages": SAID, "output_config": {"format": {"schema": SCHEMA}}}),
    "message, any tool": (MESSAGES, {"messages": SAID, **ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}}),
    "message, one tool": (
        MESSAGES,
        {"messages": SAID, **ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "rain"}},
    ),
    "message, a nested tool": (MESSAGES, {"messages": SAID, "tools": [{"name": "f", "input_schema": NESTED}]}),
    "message, a tool's result": (
        MESSAGES,
        {
            "messages": [
                *SAID,
                {"role": "assistant", "content": [USED]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "no"}]},
            ],
            **ANTHROPIC_TOOLS,
        },
    ),
    "message, who it is for": (MESSAGES, {"messages": SAID, "metadata": {"user_id": "me"}, "service_tier": "auto"}),
    "response": (RESPONSES, {"input": "Will it rain tomorrow?"}),
    "response, turns": (RESPONSES, {"input": TALK}),
    "response, instructions": (RESPONSES, {"input": "Will it rain?", "instructions": "Be short."}),
    "response, one token": (RESPONSES, {"input": "Will it rain?", "max_output_tokens": 1}),
    "response, a function": (RESPONSES, {"input": SAID, **OPENAI_TOOLS}),
    "response, any function": (RESPONSES, {"input": SAID, **OPENAI_TOOLS, "tool_choice": "required"}),
    "response, one function": (
        RESPONSES,
        {"input": SAID, **OPENAI_TOOLS, "tool_choice": {"type": "function", "name": "rain"}},
    ),
    "response, functions of a namespace": (
        RESPONSES,
        {"input": SAID, "tools": [{"type": "namespace", "name": "sky", "description": "d", "tools": [FUNCTION]}]},
    ),
    "response, a call and its result": (
        RESPONSES,
        {
            "input": [*SAID, CALLED, {"type": "function_call_output", "call_id": "call_1", "output": "no"}],
            **OPENAI_TOOLS,
        },
    ),
    "response, a schema": (
        RESPONSES,
        {"input": SAID, "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
    ),
    "response, any object": (RESPONSES, {"input": SAID, "text": {"format": {"type": "json_object"}}}),
    "response, log-probabilities": (RESPONSES, {"input": SAID, **LOGPROBS}),
    "response, a seed": (RESPONSES, {"input": SAID, "temperature": 1.0, "seed": 5}),
    "response, stop strings": (RESPONSES, {"input": SAID, "stop": ["e", "a"]}),
    "response, penalties": (RESPONSES, {"input": SAID, "frequency_penalty": 1.5, "presence_penalty": 1.0}),
    "response, effort": (RESPONSES, {"input": SAID, "reasoning": {"effort": "low"}}),
    "response, cut off before it is read": (RESPONSES, {"input": "word " * 3000, "truncation": "auto"}),
    "response, not to be kept": (RESPONSES, {"input": SAID, "store": False, "metadata": {"for": "me"}}),
    "response, its own messages": (RESPONSES, {"input": SAID, "enable_response_messages": True}),
}
SERVED_ALONE = {"response, cut off before it is read"}
"""Those that the decoder serves alone: as it comes the prompt is larger than the prefiller's memory."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "message, no limit": (MESSAGES, {"messages": SAID, "max_tokens": None}),
    "message, too long": (MESSAGES, {"messages": [{"role": "user", "content": "word " * 3000}]}),
    "message, a role": (MESSAGES, {"messages": [{"role": 5, "content": "a"}]}),
    "message, unknown model": (MESSAGES, {"messages": SAID, "model": "nobody"}),
    "message, no messages": (MESSAGES, {"messages": []}),
    "message, messages that are text": (MESSAGES, {"messages": "a"}),
    "message, no tokens": (MESSAGES, {"messages": SAID, "max_tokens": 0}),
    "message, a limit that is text": (MESSAGES, {"messages": SAID, "max_tokens": "many"}),
    "message, a limit beyond the model's": (MESSAGES, {"messages": SAID, "max_tokens": 10**6}),
    "message, a wrong type": (MESSAGES, {"messages": SAID, "temperature": "hot"}),
    "message, below zero": (MESSAGES, {"messages": SAID, "temperature": -1}),
    "message, more than all": (MESSAGES, {"messages": SAID, "top_p": 1.5}),
    "message, stop strings that are none": (MESSAGES, {"messages": SAID, "stop_sequences": 5}),
    "message, an unknown part": (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "smell"}]}]}),
    "message, an unknown role": (MESSAGES, {"messages": [{"role": "wizard", "content": "a"}]}),
    "message, a schema that is text": (MESSAGES, {"messages": SAID, "tools": [{"name": "f", "input_schema": "x"}]}),
    "message, a tool without a name": (MESSAGES, {"messages": SAID, "tools": [{"input_schema": TOOL}]}),
    "message, a choice without a name": (
        MESSAGES,
        {"messages": SAID, **ANTHROPIC_TOOLS, "tool_choice": {"type": "tool"}},
    ),
    "message, a choice of nobody's": (
        MESSAGES,
        {"messages": SAID, **ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "snow"}},
    ),
    "message, too much thinking": (
        MESSAGES,
        {"messages": SAID, "thinking": {"type": "enabled", "budget_tokens": 2000}},
    ),
    "message, too little thinking": (
        MESSAGES,
        {"messages": SAID, "thinking": {"type": "enabled", "budget_tokens": 1}},
    ),
    "message, an empty salt": (MESSAGES, {"messages": SAID, "cache_salt": ""}),
    "response, too long": (RESPONSES, {"input": "word " * 3000}),
    "response, a wrong type": (RESPONSES, {"input": "a", "temperature": "hot"}),
    "response, unknown model": (RESPONSES, {"input": "a", "model": "nobody"}),
    "response, after nobody's": (RESPONSES, {"input": "a", "previous_response_id": "resp_nobodys"}),
    "response, no input": (RESPONSES, {"input": None}),
    "response, an input that is a number": (RESPONSES, {"input": 5}),
    "response, an unknown item": (RESPONSES, {"input": [{"type": "smell"}]}),
    "response, no tokens": (RESPONSES, {"input": "a", "max_output_tokens": -1}),
    "response, a limit that is text": (RESPONSES, {"input": "a", "max_output_tokens": "many"}),
    "response, too many probabilities": (RESPONSES, {"input": "a", **LOGPROBS, "top_logprobs": 10_000}),
    "response, probabilities below zero": (RESPONSES, {"input": "a", **LOGPROBS, "top_logprobs": -1}),
    "response, something unknown included": (RESPONSES, {"input": "a", "include": ["smell"]}),
    "response, a limit beyond the model's": (RESPONSES, {"input": "a", "max_output_tokens": 10**6}),
    "response, a seed that is text": (RESPONSES, {"input": "a", "seed": "x"}),
    "response, a penalty that is too large": (RESPONSES, {"input": "a", "presence_penalty": 9}),
    "response, more than all": (RESPONSES, {"input": "a", "top_p": 1.5}),
    "response, an unknown format": (RESPONSES, {"input": "a", "text": {"format": {"type": "smell"}}}),
    "response, a schema that is none": (
        RESPONSES,
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "nothing"}}}},
    ),
    "response, a tool without a name": (RESPONSES, {"input": "a", "tools": [{"type": "function"}]}),
    "response, a choice of nobody's": (
        RESPONSES,
        {"input": "a", **OPENAI_TOOLS, "tool_choice": {"type": "function", "name": "snow"}},
    ),
    "response, a stored prompt": (RESPONSES, {"input": "a", "prompt": {"id": "p"}}),
    "response, a tier that is none": (RESPONSES, {"input": "a", "service_tier": "first class"}),
    "response, in the background and not kept": (RESPONSES, {"input": "a", "background": True, "store": False}),
}
AS_PROXY = {"message, no messages"}
"""Those that the proxy refuses by itself, whatever an engine says to them."""
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


IDS = ("id", "item_id", "call_id", "kv_transfer_params", "created_at")


def text(path: str, told: Any) -> Any:
    """What was written, without ids."""
    if isinstance(told, list):
        deltas = [one["delta"] for one in told if one["type"].endswith(".delta") or "block_delta" in one["type"]]
        return "".join(one if isinstance(one, str) else one.get("text", one.get("partial_json", "")) for one in deltas)
    if path == MESSAGES:
        return plain(told["content"]), told["stop_reason"], told.get("stop_sequence")
    return plain(told["output"]), told["status"], told["incomplete_details"], told["metadata"]


def plain(value: Any) -> Any:
    """A value without what is never the same twice; log-probabilities as far as floats of two machines agree."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name not in IDS}
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-3)
    return [plain(one) for one in value] if isinstance(value, list) else value


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
    assert got.headers["x-pdproxy-path"] == ("local" if name in SERVED_ALONE else "disaggregated")
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
async def test_what_a_single_engine_refuses(using: Fleet, proxy: Proxy, name: str, stream: bool) -> None:
    path, fields = REFUSED[name]
    body = body_of(path, fields, stream=stream)
    try:
        expected = await post(using["single"].url, path, body)
    except httpx.RemoteProtocolError:  # vLLM begins a stream there, and breaks it off before its first event
        expected = httpx.Response(400)  # which is what the prefill leg gets, as it is not streamed
    got = await post(proxy.url, path, body)
    if expected.status_code >= 500:  # as of a body that an engine stumbles over
        assert got.status_code == 502, (expected.text, got.text)
    else:
        assert got.status_code == (400 if name in AS_PROXY else expected.status_code), (expected.text, got.text)
    assert (got.json().get("type") == "error") == (path == MESSAGES)
    await proxy.settled()


@pytest.mark.parametrize("path", PASSED)
async def test_what_one_instance_answers(using: Fleet, proxy: Proxy, path: str) -> None:
    body = {"model": MODEL} | PASSED[path]
    expected, got = [await post(url, path, body) for url in (using["single"].url, proxy.url)]
    assert (got.status_code, got.json()) == (200, expected.json())


async def test_ids_that_no_tokenizer_has_take_no_engine_away(using: Fleet, proxy: Proxy) -> None:
    """vLLM 0.32 refuses them with 400. Whatever a release says, the engines stay in use."""
    for _ in range(12):
        expected, got = [
            await post(url, "/detokenize", {"model": MODEL, "tokens": [2**40]})
            for url in (using["single"].url, proxy.url)
        ]
        assert (got.status_code >= 400) == (expected.status_code >= 400)
    got = await post(proxy.url, MESSAGES, body_of(MESSAGES, {"messages": SAID}))
    assert got.status_code == 200, got.text


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
