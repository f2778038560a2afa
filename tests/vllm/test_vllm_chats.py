"""A chat is asked for at real vLLMs just as they read it, and answered through the proxy as by one of them alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdproxy.engines.tokenize import read_tokens, tokenize_call
from pdproxy.request.openai import CHAT, parse
from tests.vllm.engines import MODEL, Fleet
from tests.vllm.proxy import Proxy, serving

ENGINES = ("single", "prefill-0", "decode-0")
ALL_ENGINES = ENGINES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="module")]

CALL = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Rome", "days": 2}'}}
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}]
AGENT = [
    {"role": "user", "content": "Will it rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "No."},
]
HALF = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": AGENT[:1]},
    "tool calls": {"messages": AGENT, "tools": TOOLS},
    "no tools wanted": {"messages": AGENT, "tools": TOOLS, "tool_choice": "none"},
    "documents": {"messages": AGENT[:1], "documents": [{"title": "t", "text": "It is dry."}]},
    "effort": {"messages": AGENT[:1], "reasoning_effort": "low"},
    "no effort": {"messages": AGENT[:1], "reasoning_effort": "none"},
    "own variables": {"messages": AGENT[:1], "chat_template_kwargs": {"enable_thinking": False}},
    "continued": {"messages": HALF, "continue_final_message": True, "add_generation_prompt": False},
    "unanswered": {"messages": HALF, "add_generation_prompt": False},
    "more special tokens": {"messages": AGENT[:1], "add_special_tokens": True},
    "long": {"messages": [{"role": "user", "content": "tell me more " * 100}]},
}
REFUSED: dict[str, dict[str, Any]] = {
    "by the template": {"messages": [{"role": "wizard", "content": "hi"}], "tools": TOOLS},
    "a program": {"messages": AGENT[:1], "chat_template_kwargs": {"chat_template": "{{ 7 * 6 }}"}},
    "a template": {"messages": AGENT[:1], "chat_template": "{{ 7 * 6 }}"},
    "both": {"messages": HALF, "continue_final_message": True, "add_generation_prompt": True},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(using: Fleet) -> AsyncIterator[Proxy]:
    async with serving(using, [using["prefill-0"].url], [using["decode-0"].url]) as proxy:
        yield proxy


async def post(url: str, path: str, body: bytes) -> tuple[int, Any]:
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(url + path, content=body, headers={"content-type": "application/json"})
        return answer.status_code, answer.json()


def body_of(fields: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "max_tokens": 4, "temperature": 0} | fields | more).encode()


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS.keys())
async def test_tokenize_tells_what_the_chat_endpoint_reads(using: Fleet, fields: dict[str, Any]) -> None:
    url = using["single"].url
    call = tokenize_call(parse(CHAT, body_of(fields)))
    status, told = await post(url, call.path, call.body)
    assert status == 200, told
    status, answer = await post(url, CHAT, body_of(fields, return_token_ids=True))
    assert status == 200, answer
    assert read_tokens(json.dumps(told).encode(), with_ids=True)[1] == answer["prompt_token_ids"]


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS.keys())
async def test_every_chat_is_answered_as_by_a_single_engine(using: Fleet, proxy: Proxy, fields: dict[str, Any]) -> None:
    expected, got = [await post(url, CHAT, body_of(fields)) for url in (using["single"].url, proxy.url)]
    assert (expected[0], got[0]) == (200, 200), got
    assert got[1]["choices"] == expected[1]["choices"]
    assert got[1]["usage"]["prompt_tokens"] == expected[1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED.keys())
async def test_what_the_engine_refuses_is_refused_in_its_words(
    using: Fleet, proxy: Proxy, fields: dict[str, Any]
) -> None:
    expected, got = [await post(url, CHAT, body_of(fields)) for url in (using["single"].url, proxy.url)]
    assert (expected[0], got[0]) == (400, 400), (expected, got)
    assert got[1]["error"]["message"] == expected[1]["error"]["message"]


async def test_its_tokenizer_is_the_one_in_the_folder(proxy: Proxy) -> None:
    fleet = (await proxy.status())["fleet"]
    assert [one["tokenizer"] for one in fleet] == [{"agrees": True, "why": ""}] * 2
