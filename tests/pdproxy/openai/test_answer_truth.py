"""What the client reads is what one engine alone would have said: usage, events, characters, tools, order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.fake_engine import WORDS, FakeReply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of

pytestmark = pytest.mark.usefixtures("both_ways")

TEXT = "".join(WORDS)
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "tell me"}]
STREAM = {"content-type": "text/event-stream"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def events(*chunks: Any) -> bytes:
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in chunks]
    return b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)


def cut(data: bytes, size: int) -> list[bytes | Exception | str]:
    return [data[start : start + size] for start in range(0, len(data), size)]


# ── usage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_cached_tokens_are_the_prefillers_and_completion_is_the_decoders(stream: bool) -> None:
    """A decoder takes the KV it was sent for KV it had cached."""
    async with proxy_in_front_of() as house:
        house.prefiller.num_cached_tokens, house.decoder.num_cached_tokens = 2, 3
        answer = await house.post(**(USAGE if stream else {}))
        usage = answer.events()[-2]["usage"] if stream else answer.json()["usage"]
        assert usage == {
            "prompt_tokens": 3,
            "completion_tokens": len(WORDS),
            "total_tokens": 3 + len(WORDS),
            "prompt_tokens_details": {"cached_tokens": 2},
        }


@pytest.mark.parametrize("wanted", [False, True])
async def test_usage_chunk_only_where_wanted_and_last(wanted: bool) -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(**(USAGE if wanted else {"stream": True}))
        with_usage = [number for number, event in enumerate(answer.events()[:-1]) if event.get("usage")]
        assert with_usage == ([len(answer.events()) - 2] if wanted else [])
        assert answer.events()[-1] == "[DONE]"


async def test_alone_a_decoders_usage_is_its_own() -> None:
    async with proxy_in_front_of(min_prompt_tokens=100) as house:
        house.decoder.num_cached_tokens = 1
        assert (await house.post()).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_what_agrees_keeps_its_bytes() -> None:
    body = b'{ "choices": [{"text": "x", "finish_reason": "stop"}],  "usage": {"prompt_tokens": 3} }'
    async with proxy_in_front_of() as house:
        house.decoder.fail_at["decode"] = FakeReply(200, [body])
        assert (await house.post()).body == body


# ── the stream ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def through(house: Harness, data: bytes, size: int, **body: Any) -> Any:
    house.decoder.fail_at["decode"] = FakeReply(200, cut(data, size), STREAM)
    return await house.post(CHAT, messages=MESSAGES, stream=True, **body)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
async def test_wherever_the_network_cuts(size: int) -> None:
    """In the middle of an event, of a character, of a blank line: the client gets whole events, unchanged."""
    chunks = [
        {"id": "i", "choices": [{"index": 0, "delta": {"content": text}}]} for text in ("é", "日本", "🦊\r\n", '"')
    ]
    data = b": hello\n\n" + events(*chunks, "[DONE]")
    async with proxy_in_front_of() as house:
        answer = await through(house, data, size)
        assert answer.body == data
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        call = house.call(CHAT, messages=MESSAGES, stream=True)
        await call.done()
        assert all(piece.endswith(b"\n\n") for piece in call.pieces)


async def test_tools_reasoning_and_logprobs_pass_through_untouched() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"token_ids":[1]}'}}
    first = {"content": [{"token": "x", "logprob": -0.10, "bytes": [120], "top_logprobs": []}], "refusal": None}
    data = events(
        {"id": "i", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"id": "i", "choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "logprobs": first}]},
        {"id": "i", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]},
        {"id": "i", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        "[DONE]",
    )
    async with proxy_in_front_of() as house:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]
        answer = await through(house, data, 50, tools=tools, logprobs=True)
        assert answer.body == data
        for engine in (house.prefiller, house.decoder):
            assert json.dumps(engine.generations()[0].body["tools"]) == json.dumps(tools), "keys in their order"


async def test_whole_chat_with_tools_passes_through_untouched() -> None:
    message = b'{"role": "assistant", "content": null, "tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]}'
    body = b'{"id": "i", "choices": [{"message": ' + message + b', "finish_reason": "tool_calls"}]}'
    async with proxy_in_front_of() as house:
        house.decoder.fail_at["decode"] = FakeReply(200, [body])
        assert (await house.post(CHAT, messages=MESSAGES)).body == body


async def test_stop_string_that_straddles_the_first_token_and_the_decode() -> None:
    """The first token showed text at the prefiller; the decoder, which sees the stop whole, shows none of it."""
    data = events({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, "[DONE]")
    async with proxy_in_front_of() as house:
        answer = await through(house, data, 1000, stop=["Once upon"])
        assert answer.status == 200
        assert answer.body == data


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_first_token_that_is_the_whole_answer(stream: bool) -> None:
    scores = {"tokens": ["x"], "token_logprobs": [-0.5], "top_logprobs": [{"x": -0.5}], "text_offset": [0]}
    choice = {"index": 0, "text": "x", "logprobs": scores, "finish_reason": "stop"}
    reply = json.dumps({"id": "i", "created": 5, "choices": [choice], "usage": {"prompt_tokens": 3}}).encode()
    async with proxy_in_front_of() as house:
        house.prefiller.fail_at["prefill"] = FakeReply(200, [reply])
        answer = await house.post(logprobs=1, stream=stream)
        told = answer.events()[0] if stream else answer.json()
        assert told["choices"][0]["logprobs"] == scores
        assert (told["id"], told["created"]) == ("i", 5)
