"""A decoder killed with −9 in the middle of its streams: other decoders go on, and no client can tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, running

pytestmark = pytest.mark.engine

CHUNK = ("--chunk-size", "64")
NUM_TOKENS = 600
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
SAMPLED = {"temperature": 0.9, "seed": 7, "presence_penalty": 0.6, "frequency_penalty": 0.2}
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "logprobs": 2}),
    (CHAT, {"messages": MESSAGES, **SAMPLED}),
]


async def ask(cluster: Cluster, path: str, fields: dict[str, Any], *, kill_after: int | None = None) -> list[Any]:
    """The stream's events; after so many of them the decoder that writes them is killed."""
    body = {"model": "tiny", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    events: list[Any] = []
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", cluster.proxy + path, json=body) as reply,
    ):
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line:
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
            if len(events) == kill_after and line:
                killed = cluster.processes.pop(reply.headers["x-pdproxy-decoder"])
                killed.child.kill()
                killed.child.wait()
    return events


def told(events: list[Any]) -> dict[str, Any]:
    """All that a client makes of a stream, however it is divided into events."""
    assert events.pop() == "[DONE]"
    assert len({(event["id"], event["created"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice.get("delta", choice) for choice in choices]
    scores = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return {
        "roles": [delta["role"] for delta in deltas if "role" in delta],
        "text": "".join(delta.get("content") or delta.get("text") or "" for delta in deltas),
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [event["usage"] for event in events if event.get("usage")],
        "offsets": [offset for score in scores for offset in score["text_offset"]],
        "tokens": [token for score in scores for token in score["tokens"]],
        "fields": {name for choice in choices for name in choice},
    }


async def test_streams_go_on(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    # Who goes on reads as a whole what was written token by token: float32 would round the two apart, now and then so
    # far that another token is drawn.
    engine = (*CHUNK, "--served-model-name", "tiny", "--dtype", "float64")
    async with running(tiny_model(), tmp_path, engine=engine, proxy=CHUNK, num_decoders=3) as cluster:
        for path, fields in QUESTIONS:
            undisturbed = told(await ask(cluster, path, fields))
            num_decoders = len(cluster.processes)
            disturbed = told(await ask(cluster, path, fields, kill_after=40))
            assert len(cluster.processes) == num_decoders - 1
            assert disturbed == undisturbed
            assert undisturbed["usage"][0]["completion_tokens"] == NUM_TOKENS
            assert undisturbed["finish"] == ["length"]
        async with httpx.AsyncClient() as client:
            metrics = await client.get(f"{cluster.proxy}/metrics")
        assert "pdproxy_streams_continued_total 2.0" in metrics.text
        await cluster.settled()
