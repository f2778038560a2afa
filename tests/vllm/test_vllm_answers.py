"""One prefiller and one decoder of vLLM behind the proxy answer what a single vLLM answers."""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.vllm.engines import MODEL, Fleet
from tests.vllm.proxy import Proxy, serving
from tests.vllm.questions import Question, ask, ask_all, chat, client_of, ids, words

ENGINES = ("single", "prefill-0", "decode-0")
ALL_ENGINES = ENGINES
SEED = int(os.environ.get("PDPROXY_TEST_SEED", "5"))
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 777, 1000, 1023, 1024, 1025, 1499, 1500)
NUM_WORDS = (1, 2, 5, 10, 20, 50, 90, 130, 200, 280, 400, 450)
AT_ONCE = 24

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(using: Fleet) -> AsyncIterator[Proxy]:
    async with serving(using, [using["prefill-0"].url], [using["decode-0"].url]) as proxy:
        yield proxy


@pytest_asyncio.fixture(loop_scope="module")
async def ours(proxy: Proxy) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(proxy.url) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def single(using: Fleet) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(using["single"].url) as client:
        yield client


def everything(dice: random.Random) -> list[Question]:
    """Completions of ids and of text, and chats; each kind streamed and not. No two begin alike."""
    questions = [Question(ids(dice, length), stream=stream) for length in LENGTHS for stream in (False, True)]
    questions += [Question(words(dice, count), stream=count % 4 == 2) for count in NUM_WORDS]
    questions += [Question(chat(dice, count), is_chat=True, stream=s) for count in NUM_WORDS for s in (False, True)]
    dice.shuffle(questions)
    return questions


async def test_every_answer_equals_a_single_engines(
    using: Fleet, single: AsyncOpenAI, ours: AsyncOpenAI, proxy: Proxy, say: Callable[[str], None]
) -> None:
    questions = everything(random.Random(SEED))
    expected = await ask_all(single, questions, AT_ONCE)
    before = await _pulled(using)
    answers = await ask_all(ours, questions, AT_ONCE)
    different = [
        (question, one, other)
        for question, one, other in zip(questions, expected, answers, strict=True)
        if one != other
    ]
    num_tokens = sum(said.usage[0] for said in expected)
    pulled = await _pulled(using) - before
    say(f"seed {SEED}: {len(questions)} answers compared; of {num_tokens} prompt tokens {pulled:g} came by transfer")
    assert not different, f"{len(different)} of {len(questions)} (seed {SEED}), the first: {different[0]}"
    assert min(said.usage[0] for said in expected) == 1
    assert max(said.usage[0] for said in expected) >= 1500
    # A few blocks the decoder had already, because some chats begin alike.
    assert 0.98 * num_tokens <= pulled <= num_tokens
    assert (await proxy.status())["totals"] == {"done": len(questions)}
    await proxy.settled()
    assert await using["prefill-0"].becomes_idle(within_s=5) < 5


async def _pulled(fleet: Fleet) -> float:
    """Prompt tokens that the decoder has, by its own account, from elsewhere."""
    return await fleet["decode-0"].value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


async def test_the_decoder_tokenizes_nothing_twice(using: Fleet, ours: AsyncOpenAI) -> None:
    """The proxy hands it the ids that the prefiller read; nobody else is shown them."""
    raw = await ours.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    assert raw.headers["x-pdproxy-path"] == "disaggregated"
    assert json.loads(raw.text)["prompt_token_ids"] is None


async def both(single: AsyncOpenAI, ours: AsyncOpenAI, endpoint: str, **arguments: Any) -> tuple[Any, Any]:
    """The two whole answers, as JSON, without what differs between any two answers."""
    replies = []
    for client in (single, ours):
        create = client.chat.completions if endpoint == "chat" else client.completions
        reply = await create.with_raw_response.create(model=MODEL, temperature=0, **arguments)  # type: ignore[attr-defined]
        body = json.loads(reply.text)
        replies.append({name: value for name, value in body.items() if name not in ("id", "created")})
    return replies[0], replies[1]


async def test_log_probabilities(using: Fleet, single: AsyncOpenAI, ours: AsyncOpenAI) -> None:
    for name in ENGINES:  # which compile something for the first such request; that is not to look like a fault
        async with client_of(using[name].url) as engine:
            await engine.completions.create(model=MODEL, prompt=[10], max_tokens=1, logprobs=3)
    one, other = await both(single, ours, "completions", prompt=ids(random.Random(1), 100), max_tokens=6, logprobs=3)
    expected, got = (reply["choices"][0]["logprobs"] for reply in (one, other))
    assert got["tokens"] == expected["tokens"]
    assert got["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-3)
    assert [pytest.approx(top, abs=1e-3) for top in expected["top_logprobs"]] == got["top_logprobs"]


async def test_log_probabilities_of_chat(single: AsyncOpenAI, ours: AsyncOpenAI) -> None:
    messages = chat(random.Random(2), 40)
    one, other = await both(single, ours, "chat", messages=messages, max_tokens=6, logprobs=True, top_logprobs=2)
    expected, got = (reply["choices"][0]["logprobs"]["content"] for reply in (one, other))
    assert [token["token"] for token in got] == [token["token"] for token in expected]
    assert len(got) == 6
    for token, like in zip(got, expected, strict=True):
        assert token["logprob"] == pytest.approx(like["logprob"], abs=1e-3)
        assert [top["token"] for top in token["top_logprobs"]] == [top["token"] for top in like["top_logprobs"]]


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "place": {"enum": ["here", "there"]}},
            "required": ["unit", "place"],
            "additionalProperties": False,
        },
    },
}
CHOICES: dict[str, Any] = {
    "required": "required",
    "named": {"type": "function", "function": {"name": "get_weather"}},
    "auto": "auto",
}


@pytest.mark.parametrize("choice", CHOICES)
async def test_tools(single: AsyncOpenAI, ours: AsyncOpenAI, choice: str) -> None:
    arguments = {"messages": chat(random.Random(3), 30), "tools": [TOOL], "tool_choice": CHOICES[choice]}
    one, other = await both(single, ours, "chat", max_tokens=400, parallel_tool_calls=False, **arguments)
    expected, got = (reply["choices"][0] for reply in (one, other))
    for message in (expected["message"], got["message"]):
        for call in message.get("tool_calls") or []:
            call.pop("id")
    assert got == expected
    if choice != "auto":
        call = got["message"]["tool_calls"][0]["function"]
        assert call["name"] == "get_weather"
        assert set(json.loads(call["arguments"])) == {"unit", "place"}


async def test_tools_streamed(single: AsyncOpenAI, ours: AsyncOpenAI) -> None:
    said = []
    for client in (single, ours):
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL,
            messages=chat(random.Random(3), 30),
            tools=[TOOL],
            tool_choice="required",
            max_tokens=160,
            temperature=0,
            stream=True,
        )
        calls = [call async for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or []]
        names = [call.function.name for call in calls if call.function.name]
        said.append((names, "".join(call.function.arguments or "" for call in calls)))
    assert said[1] == said[0]
    assert set(said[1][0]) == {"get_weather"}


async def test_response_format(single: AsyncOpenAI, ours: AsyncOpenAI) -> None:
    schema = {"name": "answer", "schema": TOOL["function"]["parameters"]}  # type: ignore[index]
    wanted = {"type": "json_schema", "json_schema": schema}
    one, other = await both(
        single, ours, "chat", messages=chat(random.Random(4), 30), max_tokens=160, response_format=wanted
    )
    assert other["choices"] == one["choices"]
    assert set(json.loads(other["choices"][0]["message"]["content"])) == {"unit", "place"}


async def test_several_answers_come_from_the_decoder_alone(single: AsyncOpenAI, ours: AsyncOpenAI) -> None:
    """Sampled with a seed, because vLLM refuses several greedy ones."""
    arguments = {"prompt": ids(random.Random(6), 90), "max_tokens": 6, "n": 2, "temperature": 0.5, "seed": SEED}
    expected = await single.completions.create(model=MODEL, **arguments)  # type: ignore[call-overload]
    raw = await ours.completions.with_raw_response.create(model=MODEL, **arguments)
    assert raw.headers["x-pdproxy-path"] == "local"
    got = json.loads(raw.text)
    assert [choice["text"] for choice in got["choices"]] == [choice.text for choice in expected.choices]
    assert got["usage"]["completion_tokens"] == expected.usage.completion_tokens == 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 2, 5])
async def test_stop(single: AsyncOpenAI, ours: AsyncOpenAI, at: int, stream: bool) -> None:
    """`at`: the token that is the stop string; the first one ends the answer at the prefiller already."""
    prompt = ids(random.Random(7 + at), 70)
    whole = await single.completions.create(model=MODEL, prompt=prompt, max_tokens=10, temperature=0, logprobs=0)
    assert whole.choices[0].logprobs is not None
    stop = (whole.choices[0].logprobs.tokens or [])[at]
    question = Question(prompt, stream=stream, extra={"stop": [stop]})
    expected, got = await ask(single, question), await ask(ours, question)
    assert got == expected
    assert got.finish_reason == "stop"
    assert stop not in got.text


async def test_an_answer_that_ends_with_its_first_token(using: Fleet, ours: AsyncOpenAI, proxy: Proxy) -> None:
    """The prefiller has kept KV that nobody will ask for: the decoder is made to tell it so."""
    question = Question(ids(random.Random(11), 600), extra={"logit_bias": {"1": 100}})
    said = await ask(ours, question)
    assert (said.text, said.finish_reason, said.usage) == ("", "stop", (600, 1))
    await proxy.settled(within_s=3)
    await using["prefill-0"].becomes_idle(within_s=3)
    assert (await proxy.status())["reaper"]["dropped"] >= 1


async def test_a_single_token(using: Fleet, single: AsyncOpenAI, ours: AsyncOpenAI, proxy: Proxy) -> None:
    for stream in (False, True):
        question = Question(ids(random.Random(12), 200), max_tokens=1, stream=stream)
        assert await ask(ours, question) == await ask(single, question)
    await proxy.settled(within_s=3)
    await using["prefill-0"].becomes_idle(within_s=3)
