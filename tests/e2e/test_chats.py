"""Chats of agents through real processes: each is read alike by both legs, by the decoder alone, and in /tokenize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import running

pytestmark = pytest.mark.engine

TEMPLATE = """\
{%- for one in documents or [] %}[{{ one.text }}]{% endfor %}{{ reasoning_effort or "" }}
{%- for message in messages %}<{{ message.role }}>{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<go>{% endif %}"""
"""Goes through the arguments of calls one by one, as Qwen's templates do."""
CALL = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Rome"}'}}
AGENT = [
    {"role": "user", "content": "Will it rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "No."},
]
CHATS: dict[str, dict[str, Any]] = {
    "calls": {},
    "documents": {"documents": [{"text": "dry"}]},
    "effort": {"reasoning_effort": "low"},
    "a program of the client's": {"chat_template_kwargs": {"chat_template": "{% for a in range(9**9) %}{% endfor %}"}},
    "continued": {"continue_final_message": True, "add_generation_prompt": False},
    "unanswered": {"add_generation_prompt": False},
}


async def test_agents_are_answered_alike_on_every_path(tmp_path: Path) -> None:
    from transfer.engine.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path / "tiny", "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    proxy = ("--chunk-size", "64", "--model", str(folder))
    async with running(folder, tmp_path, proxy=proxy) as cluster, httpx.AsyncClient(timeout=60) as client:
        decoder = next(one["url"] for one in await fleet(client, cluster.proxy) if one["role"] == "decode")
        for what, fields in CHATS.items():
            body = {"model": "tiny", "messages": AGENT, "max_tokens": 8, "temperature": 0} | fields
            paired = await client.post(f"{cluster.proxy}/v1/chat/completions", json=body)
            alone = await client.post(f"{decoder}/v1/chat/completions", json=body)
            counted = await client.post(f"{decoder}/tokenize", json={"messages": AGENT} | fields)
            assert paired.status_code == alone.status_code == counted.status_code == 200, (what, paired.text)
            assert paired.headers["x-pdproxy-path"] == "disaggregated", what
            assert paired.json()["choices"] == alone.json()["choices"], what
            lengths = {answer.json()["usage"]["prompt_tokens"] for answer in (paired, alone)}
            assert lengths == {counted.json()["count"]}, what
        refused = await client.post(f"{cluster.proxy}/v1/chat/completions", json=body | {"tools": [5]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        assert [one["tokenizer"]["agrees"] for one in await fleet(client, cluster.proxy)] == [True, True]


async def fleet(client: httpx.AsyncClient, proxy: str) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = (await client.get(f"{proxy}/status")).json()["fleet"]
    return told
