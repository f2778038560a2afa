"""vLLM with our own connector and unlike numbers of tensor-parallel ranks answers what a single vLLM answers."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable

import pytest

from tests.vllm.engines import BLOCK_SIZE, Engine, Fleet
from tests.vllm.proxy import serving_ours
from tests.vllm.questions import Question, ask_all, client_of, ids

PAIRS = (("sender", "receiver-2"), ("sender-2", "receiver"))
ENGINES = ("single",)
ALL_ENGINES = ENGINES
SEED = int(os.environ.get("PDPROXY_TEST_SEED", "5"))

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]


def all_questions(dice: random.Random) -> list[Question]:
    """Prompts whose last token, or the one before, begins or ends a block."""
    lengths = [BLOCK_SIZE * blocks + rest for blocks in (0, 1, 2, 7, 31) for rest in (-1, 0, 1, 2)]
    return [Question(ids(dice, length), max_tokens=12) for length in lengths if length > 0]


@pytest.mark.parametrize("names", PAIRS, ids=["1 to 2", "2 to 1"])
async def test_every_answer_equals_a_single_engines(
    using: Fleet, names: tuple[str, str], say: Callable[[str], None]
) -> None:
    sender, receiver = using[names[0]], using[names[1]]
    questions = all_questions(random.Random(SEED))
    async with client_of(using["single"].url) as single:
        expected = await ask_all(single, questions, 4)
    using.use(*names)
    async with (
        serving_ours(using, {names[0]: sender.url}, {names[1]: receiver.url}) as proxy,
        client_of(proxy.url) as ours,
    ):
        answers = await ask_all(ours, questions, 4)
        num_loaded = await receiver.value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        facts = await receiver.buffer()
        await is_free(receiver)
    using.use("single")
    say(f"seed {SEED}: {len(answers)} answers of {names}; {num_loaded:g} tokens came by transfer")
    assert answers == expected
    assert num_loaded >= 0.9 * (sum(said.usage[0] for said in expected) - len(questions))
    assert [end["rank"] for end in facts["receivers"]] == list(range(len(receiver.cores)))


async def is_free(receiver: Engine) -> None:
    await receiver.becomes_idle(3.0)
    async with asyncio.timeout(3.0):
        while (facts := await receiver.buffer())["num_free"] != facts["num_pages"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert facts["num_wrong_tags"] == 0
