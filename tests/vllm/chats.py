"""Chats of every kind that a client can send, those among them that vLLM refuses, and how they are posted."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.vllm.engines import MODEL

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


async def post(url: str, path: str, body: bytes) -> tuple[int, Any]:
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(url + path, content=body, headers={"content-type": "application/json"})
        return answer.status_code, answer.json()


def body_of(fields: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "max_tokens": 4, "temperature": 0} | fields | more).encode()
