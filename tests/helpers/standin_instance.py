"""A stand-in for an engine, or for a proxy in front of the instances named: it is healthy and answers at once.

python tests/helpers/standin_instance.py PORT [INSTANCE ...]
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.helpers.standin_http import Reply, event, serve

LOCKED = "--locked"
"""Among the instances: clients must show a key."""


def reply(content: Any) -> Reply:
    return Reply(json.dumps(content).encode())


async def route(method: str, path: str, body: bytes) -> Reply:
    if path == "/v1/models" and LOCKED in sys.argv:
        return Reply(b'{"error": {}}', status=401)
    if path == "/v1/models":
        return reply({"data": [{"id": "standin"}]})
    if path == "/status":
        return reply({"fleet": [{"name": n, "state": "ready", "why": ""} for n in sys.argv[2:]], "in_flight": []})
    if method == "GET":
        return reply({"status": "ok"})
    asked = json.loads(body)
    usage = {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": asked["max_tokens"]}
    if not asked.get("stream"):
        return reply({"choices": [{"index": 0, "text": "w", "finish_reason": "length"}], "usage": usage})
    return Reply(events=answer(asked["max_tokens"], usage))


async def answer(num_tokens: int, usage: dict[str, int]) -> AsyncIterator[bytes]:
    for index in range(num_tokens):
        reason = "length" if index == num_tokens - 1 else None
        yield event({"choices": [{"index": 0, "text": "w ", "finish_reason": reason}]})
    yield event({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


async def main() -> None:
    server = await serve(route, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
