"""The official client against the proxy, as a user would write it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.e2e.cluster import Cluster, running

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Tell me of the sea. " * 12}]
PROMPT = "Once upon a time there was a lighthouse keeper who counted ships. " * 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    # The usage of a repeated prompt is to be that of the first time.
    engine = ("--chunk-size", "64", "--served-model-name", "tiny", "--no-prefix-cache")
    async with running(tiny_model(), tmp_path_factory.mktemp("openai"), engine=engine) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.proxy}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client
    await cluster.settled()


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_completion_streaming_equals_not_streaming(client: AsyncOpenAI) -> None:
    whole = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    chunks = [
        chunk
        async for chunk in await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stream=True
        )
    ]
    assert whole.object == "text_completion"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens > 64
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


async def test_chat_streaming_equals_not_streaming(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, temperature=0)
    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.role == "assistant"
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")


async def test_logprobs_of_every_token_the_first_included(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 8
    assert "".join(t.token for t in content) == chat.choices[0].message.content
    assert all(len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob >= t.logprob for t in content)
    completion = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2)
    assert completion.choices[0].logprobs is not None
    assert len(completion.choices[0].logprobs.token_logprobs or []) == 8


async def test_stop_string_wherever_it_falls(client: AsyncOpenAI) -> None:
    """Cut at each place of the answer, across token borders and across the border between the two engines."""
    plain = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    text = plain.choices[0].text
    for start in range(len(text) - 3):
        stop = text[start : start + 3]
        cut = text[: text.index(stop)]
        for stream in (False, True):
            assert await stopped_text(client, stop, stream=stream) == (cut, "stop"), (stop, stream)


async def stopped_text(client: AsyncOpenAI, stop: str, *, stream: bool) -> tuple[str, str | None]:
    answer = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop], stream=stream
    )
    if not isinstance(answer, openai.AsyncStream):
        return answer.choices[0].text, answer.choices[0].finish_reason
    choices = [chunk.choices[0] async for chunk in answer]
    return "".join(c.text for c in choices), choices[-1].finish_reason


async def test_one_token_needs_no_decoder(client: AsyncOpenAI, cluster: Cluster) -> None:
    before = (await cluster.statistics("decode-0"))["handoffs"]
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=1, temperature=0
    )
    answer = raw.parse()
    assert raw.headers["x-pdproxy-path"].startswith("prefill_only")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert (await cluster.statistics("decode-0"))["handoffs"] == before


async def test_no_max_tokens_at_all(client: AsyncOpenAI) -> None:
    completion = await client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16
    chunks = await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, stream=True)
    count = 0
    async for _ in chunks:
        count += 1
        if count == 40:
            break
    await chunks.close()
    assert count == 40


async def test_min_tokens_holds_across_both_engines(client: AsyncOpenAI) -> None:
    """Token 1 is the tiny model's end of sequence; the bias makes it win as soon as it may."""
    answers = [
        await client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            logit_bias={"1": 100},
            extra_body={"min_tokens": least},
        )
        for least in (0, 1, 2, 5)
    ]
    assert [answer.choices[0].finish_reason for answer in answers] == ["stop"] * 4
    counts = [answer.usage.completion_tokens for answer in answers if answer.usage is not None]
    assert counts == [1, 2, 3, 6]


async def test_seeded_sampling_repeats(client: AsyncOpenAI) -> None:
    texts = [
        (await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, temperature=1.0, seed=seed))
        .choices[0]
        .text
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_several_answers_come_from_the_decoder_alone(client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=4, n=2, temperature=1.0, seed=3
    )
    assert raw.headers["x-pdproxy-path"].startswith("local")
    assert sorted(c.index for c in raw.parse().choices) == [0, 1]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_equal_one_by_one(client: AsyncOpenAI, stream: bool, n: int) -> None:
    """With one answer each they go through both engines; with several they go to the decoder alone."""
    prompts = [PROMPT, "Tell me of the sea.", [20 + i for i in range(100)]]
    texts = []
    for prompt in prompts:
        alone = await client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0, seed=3, n=1)
        texts.append(alone.choices[0].text)
    for batch, expected in ((prompts[:2], texts[:2]), ([prompts[2]] * 2, texts[2:] * 2)):
        raw = await client.completions.with_raw_response.create(
            model="tiny", prompt=batch, max_tokens=12, temperature=0, n=n, stream=stream
        )
        assert raw.headers.get("x-pdproxy-path") == (None if n == 1 else "local")
        answer = raw.parse()
        told = dict.fromkeys(range(2 * n), "")
        if isinstance(answer, openai.AsyncStream):
            async for choice in (choice async for chunk in answer for choice in chunk.choices):
                told[choice.index] += choice.text
        else:
            told |= {choice.index: choice.text for choice in answer.choices}
            assert [choice.index for choice in answer.choices] == list(range(2 * n))
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 2 * n * 12
        assert list(told.values()) == [text for text in expected for _ in range(n)]


@pytest.mark.parametrize("chunks_read", [0, 1, 5])
async def test_client_that_leaves_in_the_middle(client: AsyncOpenAI, cluster: Cluster, chunks_read: int) -> None:
    """Slots come back and both engines stop working for it."""
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6000, temperature=0, stream=True
    )
    for _ in range(chunks_read):
        await anext(stream)
    await stream.close()
    await cluster.settled()
    fed = (await cluster.statistics("decode-0"))["tokens_fed"]
    await asyncio.sleep(0.3)  # nobody to wait for: the claim is that nothing happens any more
    assert (await cluster.statistics("decode-0"))["tokens_fed"] == fed


async def test_clients_that_leave_while_their_prompt_is_read(client: AsyncOpenAI, cluster: Cluster) -> None:
    async def leave_early(delay_s: float) -> None:
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=delay_s).completions.create(
                model="tiny", prompt=[20 + i % 400 for i in range(6000)], max_tokens=2000, temperature=0
            )

    await asyncio.gather(*(leave_early(0.02 + 0.02 * i) for i in range(10)))
    await cluster.settled()
    assert await cluster.held() == 0
