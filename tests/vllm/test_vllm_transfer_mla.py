"""pdproxy's own connector with a model of multi-head latent attention: one head, and keys that are values, too."""

from __future__ import annotations

import random

import pytest

from tests.vllm.engines import Fleet
from tests.vllm.questions import Question, ask_all, client_of, ids
from tests.vllm.test_vllm_answers import SEED
from tests.vllm.test_vllm_transfer import pair

ENGINES = ("mla-sender", "mla-receiver")
ALL_ENGINES = ENGINES
BLOCK_SIZE = 16
"""vLLM's for this attention on a CPU, whatever it is told."""

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]


async def test_every_answer_equals_that_of_the_prefiller_alone(using: Fleet) -> None:
    dice = random.Random(SEED)
    lengths = {BLOCK_SIZE * at + rest for at in (1, 2, 5, 20) for rest in (-1, 0, 1, 2)} | {1, 2, 700}
    questions = [Question(ids(dice, length), stream=bool(length % 2)) for length in sorted(lengths)]
    async with pair(using, "--retries", "0", kind="mla-") as two, client_of(two.proxy.url) as ours:
        async with client_of(two.sender.url) as alone:
            expected = await ask_all(alone, questions, 4)
        answers = await ask_all(ours, questions, 4)
        wrong = [one for one in zip(questions, expected, answers, strict=True) if one[1] != one[2]]
        assert not wrong, f"{len(wrong)} of {len(questions)} (seed {SEED}), the first: {wrong[0]}"
        (group,) = (await two.receiver.buffer())["groups"]
        assert group["kind"] == "mla"
        loaded = await two.receiver.value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        assert loaded == sum(lengths) - len(lengths)
        await two.all_is_free()
