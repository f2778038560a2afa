"""A scripted vLLM that also serves ``/v1/messages``, ``/v1/responses``, LoRA adapters, and what needs no generation.

The forms are those of vLLM 0.32: a stream of Anthropic's events ends with ``message_stop``, one of responses with
``response.completed`` whatever its status is; ``input_tokens`` of a message are without those that were cached; a
response's id is the body's ``request_id``; what the server refuses before an API sees it is an OpenAI error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from typing import Any

from pdproxy.config.values import Role
from pdproxy.openai.request import CHAT, MESSAGES, RESPONSES
from tests.fakes.fake_engine import FakeReply, Seen, error_reply, json_reply
from tests.fakes.fake_vllm import PARAMS, FakeNixl, ids_of

COUNT = f"{MESSAGES}/count_tokens"
VECTOR = [0.25, -0.5]
_numbers = count()


def anthropic_error(status: int, message: str) -> FakeReply:
    return json_reply({"type": "error", "error": {"type": "NotFoundError", "message": message}}, status)


class FakeApis(FakeNixl):
    """Mutable state besides: the responses that it keeps, by id."""

    def __init__(self, role: Role, *, adapters: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(role, **options)
        self.adapters = adapters
        self.missing: set[str] = set()
        """Paths that it does not have."""
        self.kept: dict[str, dict[str, Any]] = {}
        self.num_to_break: int | None = None
        """The number of events after which its streams break off."""

    def generations(self) -> list[Seen]:
        paths = (CHAT, "/v1/completions", MESSAGES, RESPONSES)
        return [
            one
            for one in self.calls
            if one.path in paths and not one.headers.get("x-request-id", "").startswith("canary")
        ]

    async def handle(self, path: str, raw: bytes, headers: Mapping[str, str]) -> FakeReply:
        path = path.partition("?")[0]
        try:
            body = json.loads(raw) if raw else {}
        except ValueError as error:
            return error_reply(400, f"JSON decode error: {error}")
        seen = Seen(path, body, {"x-request-id": f"direct-{next(_numbers)}"} | dict(headers), raw)
        if path in self.missing:
            self.calls.append(seen)
            return json_reply({"detail": "Not Found"}, 404)
        if isinstance(scripted := self.fail_at.get(path), FakeReply):
            self.calls.append(seen)
            return scripted
        if path in (MESSAGES, RESPONSES):
            self.calls.append(seen)
            return await self._serve_api(seen)
        if body.get("model") in self.adapters and path.endswith("completions"):
            self.calls.append(seen)
            return await self.generate(Seen(path, body | {"model": self.model}, seen.headers, raw))
        if (reply := self._passed(seen)) is not None:
            self.calls.append(seen)
            await self.pass_point("passed")
            return reply
        return await super().handle(path, raw, seen.headers)

    async def tell(self, seen: Seen) -> FakeReply:
        if seen.path.startswith("/v1/models/"):
            return json_reply({"id": seen.path.removeprefix("/v1/models/"), "object": "model"})
        if seen.path == "/v1/models" and self.adapters:
            base = {"id": self.model, "object": "model", "root": f"/{self.model}", "parent": None}
            cards = [base | {"max_model_len": self.max_model_len}]
            cards += [
                {"id": name, "object": "model", "root": f"/{name}", "parent": self.model} for name in self.adapters
            ]
            return json_reply({"object": "list", "data": cards})
        return await super().tell(seen)

    # ── two APIs more ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve_api(self, seen: Seen) -> FakeReply:
        body, is_message = seen.body, seen.path == MESSAGES
        if body.get("model") not in (self.model, *self.adapters):
            if (handed := (body.get(PARAMS) or {}).get("remote_request_id")) is not None:
                return await self._refuse(handed)
            message = f"The model `{body.get('model')}` does not exist."
            return anthropic_error(404, message) if is_message else error_reply(404, message)
        for name in ("messages", "max_tokens") if is_message else ("input",):
            if body.get(name) is None:
                return error_reply(400, f"{name}: Field required")
        if not isinstance(body.get("temperature", 0), int | float):
            return error_reply(400, "temperature: Input should be a valid number")
        chat = self._as_chat(seen.path, body)
        if len(ids_of(chat)) >= self.max_model_len:
            message = "This model's maximum context length is exceeded."
            return anthropic_error(400, message) if is_message else error_reply(400, message)
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.kept:
            return error_reply(404, f"Response with id '{previous}' not found.")
        reply = await self.generate(Seen(seen.path, chat, seen.headers, seen.raw))
        if self.num_to_break is not None and reply.headers.get("content-type", "").startswith("text/event-stream"):
            events = [piece for piece in reply.chunks if isinstance(piece, bytes)]
            reply.chunks = [*events[: self.num_to_break]]
        return reply

    def _as_chat(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The body in the form that the other fakes read; `api` is the body itself."""
        items = body["messages"] if path == MESSAGES else body["input"]
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        texts = [_text(item.get("content", "")) for item in items]
        limit = body.get("max_tokens") if path == MESSAGES else body.get("max_output_tokens")
        chat = {"model": self.model, "messages": [{"role": "user", "content": text} for text in texts], "api": body}
        return chat | {"max_tokens": limit, "stream": body.get("stream"), PARAMS: body.get(PARAMS)}

    def one_token(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if "api" not in body:
            return super().one_token(path, body)
        return self._in_form(path, body, super().whole(CHAT, body, 1), self.finish_at_first or "length")

    def whole(self, path: str, body: dict[str, Any], num_words: int | None = None) -> dict[str, Any]:
        whole = super().whole(CHAT if "api" in body else path, body, num_words)
        return self._in_form(path, body, whole, whole["choices"][0]["finish_reason"]) if "api" in body else whole

    def stream(self, path: str, body: dict[str, Any]) -> list[bytes]:
        if "api" not in body:
            return super().stream(path, body)
        chat = [json.loads(one[6:]) for one in super().stream(CHAT, body)[:-1]]
        words = [text for one in chat if (text := one["choices"][0]["delta"].get("content"))]
        whole = self.whole(path, body)
        events = _message_events(whole, words) if path == MESSAGES else _response_events(whole, words)
        return [f"event: {one['type']}\ndata: {json.dumps(one, separators=(',', ':'))}\n\n".encode() for one in events]

    def _in_form(self, path: str, body: dict[str, Any], chat: dict[str, Any], finish: str) -> dict[str, Any]:
        text, usage = chat["choices"][0]["message"]["content"], chat["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if path == MESSAGES:
            return {
                "id": self.answer_id,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": text}],
                "model": body["api"]["model"],
                "stop_reason": {"length": "max_tokens", "stop": "end_turn"}[finish],
                "usage": {
                    "input_tokens": usage["prompt_tokens"] - cached,
                    "output_tokens": usage["completion_tokens"],
                    "cache_read_input_tokens": cached,
                },
            }
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        answer = {
            "id": body["api"].get("request_id", "resp_own"),
            "object": "response",
            "created_at": 1,
            "model": body["api"]["model"],
            "output": [message],
            "status": "incomplete" if finish == "length" else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
            "error": None,
            "metadata": body["api"].get("metadata"),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        if body["api"].get("store") is not False:
            self.kept[answer["id"]] = answer
        return answer

    # ── what needs no generation ────────────────────────────────────────────────────────────────────────────────────

    def _passed(self, seen: Seen) -> FakeReply | None:
        path, body = seen.path, seen.body
        if path.startswith(f"{RESPONSES}/"):
            kept = self.kept.get(path.removeprefix(f"{RESPONSES}/").removesuffix("/cancel"))
            return error_reply(404, "Response not found.") if kept is None else json_reply(kept)
        if path == COUNT:
            return json_reply({"input_tokens": len(ids_of(self._as_chat(MESSAGES, body)))})
        if path == "/detokenize":
            return json_reply({"prompt": " ".join(map(str, body["tokens"]))})
        if path == "/v1/embeddings":
            inputs = [body["input"]] if isinstance(body["input"], str) else body["input"]
            data = [{"object": "embedding", "index": i, "embedding": VECTOR} for i in range(len(inputs))]
            usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
            return json_reply({"object": "list", "model": body["model"], "data": data, "usage": usage})
        if path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            results = [{"index": i, "relevance_score": 1.0 - i} for i in range(len(body["documents"]))]
            return json_reply({"id": "rerank-1", "results": results})
        if path in ("/score", "/v1/score", "/pooling", "/classify"):
            return json_reply({"object": "list", "data": [{"index": 0, "data": VECTOR}]})
        return None


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content)


def _message_events(whole: dict[str, Any], words: list[str]) -> list[dict[str, Any]]:
    usage = whole["usage"]
    first = whole | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in words
    ]
    return [
        {"type": "message_start", "message": first},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *deltas,
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None},
            "usage": usage,
        },
        {"type": "message_stop"},
    ]


def _response_events(whole: dict[str, Any], words: list[str]) -> list[dict[str, Any]]:
    first = whole | {"output": [], "status": "in_progress", "incomplete_details": None, "usage": None}
    where = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    item = whole["output"][0]
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": first},
        {"type": "response.in_progress", "response": first},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": item | {"content": [], "status": "in_progress"},
        },
        {"type": "response.content_part.added", **where, "part": part},
        *({"type": "response.output_text.delta", **where, "delta": word, "logprobs": []} for word in words),
        {"type": "response.output_text.done", **where, "text": "".join(words), "logprobs": []},
        {"type": "response.content_part.done", **where, "part": part | {"text": "".join(words)}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return [one | {"sequence_number": number} for number, one in enumerate(events)]
