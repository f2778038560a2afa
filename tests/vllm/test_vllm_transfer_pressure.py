"""pdproxy's own connector on engines that have few blocks, read prompts in pieces and know LoRA adapters: a prompt may
lose its blocks in the middle, at the prefiller and at the decoder, and its answer is a single vLLM's all the same."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.vllm.engines import ADAPTERS, BLOCK_SIZE, MODEL, Engine, Fleet
from tests.vllm.questions import Question, Said, ask_all, client_of, ids
from tests.vllm.test_vllm_answers import SEED
from tests.vllm.test_vllm_faults import body, reached, shown
from tests.vllm.test_vllm_transfer import Pair, pair

ENGINES = ("single", "tight-sender", "tight-receiver")
ALL_ENGINES = ENGINES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]


async def ask_single(using: Fleet, questions: list[Question]) -> list[Said]:
    """What a single vLLM says. It stands still otherwise: the machine is small."""
    using["single"].thaw()
    async with client_of(using["single"].url) as single:
        expected = await ask_all(single, questions, 8)
    using["single"].freeze()
    return expected


async def compare(two: Pair, questions: list[Question], expected: list[Said], at_once: int) -> None:
    async with client_of(two.proxy.url) as ours:
        answers = await ask_all(ours, questions, at_once)
    wrong = [one for one in zip(questions, expected, answers, strict=True) if one[1] != one[2]]
    assert not wrong, f"{len(wrong)} of {len(questions)} (seed {SEED}), the first: {wrong[0]}"
    await two.all_is_free()


@asynccontextmanager
async def grows(engine: Engine, metric: str, say: Callable[[str], None]) -> AsyncIterator[None]:
    """A metric of vLLM's that has to be larger afterwards: else the test has shown nothing."""
    before = await engine.value(metric)
    yield
    grown = await engine.value(metric) - before
    say(f"seed {SEED}: {metric} of {engine.name} has grown by {grown:g}")
    assert grown > 0


async def test_prompts_whose_blocks_the_prefiller_takes_away(using: Fleet, say: Callable[[str], None]) -> None:
    """None of them is lost, and none asked again."""
    dice = random.Random(SEED)
    lengths = [dice.randint(18, 26) * BLOCK_SIZE + dice.randint(-1, 1) for _ in range(20)]
    questions = [Question(ids(dice, length), stream=bool(length % 2)) for length in lengths]
    expected = await ask_single(using, questions)
    async with pair(using, "--retries", "0", kind="tight-") as two:
        async with grows(two.sender, "vllm:num_preemptions_total", say):
            await compare(two, questions, expected, 10)
        assert (await two.proxy.status())["totals"] == {"done": len(questions)}


async def test_answers_whose_blocks_the_decoder_takes_away(using: Fleet, say: Callable[[str], None]) -> None:
    dice = random.Random(SEED + 1)
    questions = [Question(ids(dice, dice.randint(250, 330)), max_tokens=150, stream=bool(i % 2)) for i in range(12)]
    expected = await ask_single(using, questions)
    async with (
        pair(using, "--retries", "0", kind="tight-") as two,
        grows(two.receiver, "vllm:num_preemptions_total", say),
    ):
        await compare(two, questions, expected, 12)


async def test_prompts_that_begin_with_what_an_engine_has_in_its_cache(
    using: Fleet, say: Callable[[str], None]
) -> None:
    """Either engine, or both; up to any token around a block's border, and in the end the whole prompt."""
    dice = random.Random(SEED + 2)
    start, other = ids(dice, 9 * BLOCK_SIZE + 7), ids(dice, 9 * BLOCK_SIZE + 7)
    cuts = [at * BLOCK_SIZE + rest for at in (1, 4, 7) for rest in (-1, 0, 1)]
    more = [Question([*start[:cut], *ids(dice, rest)]) for cut in cuts for rest in (1, 31, 32, 33, 70)]
    same = [Question(start), Question(start[: 4 * BLOCK_SIZE]), Question(start[: 4 * BLOCK_SIZE + 1])]
    ends = [Question([*other, *ids(dice, rest)]) for rest in (0, 1, 25, 26, 60)]
    questions = [Question(start), *more, *same, *ends]
    expected = await ask_single(using, questions)
    async with pair(using, kind="tight-") as two, client_of(two.sender.url) as alone:
        hits = "vllm:prefix_cache_hits_total"
        async with grows(two.sender, hits, say), grows(two.receiver, hits, say):
            await compare(two, questions[:1], expected[:1], 1)
            await compare(two, questions[1:], expected[1:], 6)
        with_answers = [Question(other, max_tokens=40)]
        (answer,) = await ask_all(alone, with_answers, 1)  # the prefiller's cache has it, and the decoder's has not
        async with grows(two.sender, hits, say):
            await compare(two, with_answers, [answer], 1)
        await compare(two, with_answers, [answer], 1)


@pytest.mark.parametrize("num_answers", [2, 3])
async def test_several_answers_to_one_prompt(using: Fleet, num_answers: int) -> None:
    """By way of the proxy, where the decoder makes them alone; and as a decode leg that wants so many of one attempt.
    vLLM refuses several answers at temperature 0, and 0.01 comes to the same here. (A seed kills vLLM on a CPU where it
    reads the prompt in pieces.)"""
    mark = f"several {num_answers}"
    request = body(mark, n=num_answers, temperature=0.01)
    (expected,) = await ask_single(using, [Question(request["prompt"], max_tokens=request["max_tokens"])])
    async with pair(using, kind="tight-") as two:
        greedy = await two.post(body("greedy", n=num_answers))
        assert greedy.status_code == 400, greedy.text
        alone = (await two.post(request | {"prompt": [99, *request["prompt"]]})).json()["choices"]
        assert len(alone) == num_answers
        stop = two.to_receiver.stop("request", mark)
        one = asyncio.create_task(two.post(body(mark)))
        await reached(stop)
        leg = json.loads(two.to_receiver.bodies[-1]) | {"n": num_answers, "temperature": 0.01, "stream": False}
        source = {"source": "external_kv_transfer"}
        before = await two.receiver.value("vllm:prompt_tokens_by_source_total", **source)
        several = await two.client.post(f"{two.receiver.url}/v1/completions", json=leg)
        loaded = await two.receiver.value("vllm:prompt_tokens_by_source_total", **source) - before
        stop.go.set()
        assert [choice["text"] for choice in several.json()["choices"]] == [expected.text] * num_answers
        assert shown(await one) == expected.text
        assert 0 < loaded < 2 * expected.usage[0], "loaded once, and found in the cache by the others"
        await two.all_is_free()


async def test_adapters_never_get_the_kv_of_another_one(using: Fleet) -> None:
    """Equal prompts of two LoRA adapters at the same time, then of the model itself, and all again. The model itself is
    asked alone: in a batch with adapters, vLLM on a CPU computes it with the last one of them."""
    models = (MODEL, *ADAPTERS)
    prompts = [ids(random.Random(SEED + length), length) for length in (64, 65, 257, 500)]
    async with pair(using, kind="tight-") as two:
        expected = {}
        for model in models:
            for at, prompt in enumerate(prompts):
                plain = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
                expected[model, at] = shown(await two.client.post(f"{two.sender.url}/v1/completions", json=plain))
        for at in range(len(prompts)):
            assert len({expected[model, at] for model in models}) == len(models), "the adapters change nothing"

        async def ask(model: str, at: int) -> str:
            reply = await two.post(body("lora", model=model, prompt=prompts[at]))
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-pdproxy-path"] == "disaggregated"
            return shown(reply)

        for _ in range(2):
            for together in (ADAPTERS, (MODEL,)):
                asked = [(model, at) for at in range(len(prompts)) for model in together for _ in range(2)]
                answers = await asyncio.gather(*(ask(*one) for one in asked))
                wrong = [(one, got) for one, got in zip(asked, answers, strict=True) if got != expected[one]]
                assert not wrong, wrong
        await two.all_is_free()
