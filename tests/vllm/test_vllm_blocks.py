"""A prefiller and a decoder of vLLM whose blocks have unlike sizes answer what a single vLLM answers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.vllm.engines import BLOCK_SIZE, WIDE_BLOCK_SIZE, Fleet
from tests.vllm.questions import Question, ask_all, client_of, ids
from tests.vllm.test_vllm_answers import AT_ONCE, SEED
from tests.vllm.test_vllm_transfer import pair

ALL_ENGINES = ("single", "sender", "receiver", "sender-wide", "receiver-wide")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]


@pytest.mark.parametrize("names", [("sender-wide", "receiver"), ("sender", "receiver-wide")], ids="-to-".join)
async def test_every_answer_equals_a_single_engines(
    fleet: Fleet, names: tuple[str, str], say: Callable[[str], None]
) -> None:
    fleet.use("single", *names)
    dice = random.Random(SEED)
    lengths = [WIDE_BLOCK_SIZE * blocks + rest for blocks in range(8) for rest in (-1, 0, 1, 2, 17)]
    lengths += [length + BLOCK_SIZE for length in lengths]
    questions = [Question(ids(dice, length), max_tokens=4) for length in lengths if length > 0]
    shared = ids(dice, 5 * WIDE_BLOCK_SIZE + 5)  # what was sent for one of them the others need not be sent
    questions += [Question([*shared, *ids(dice, 20)], max_tokens=4) for _ in range(4)]
    async with pair(fleet, names=names) as two, client_of(fleet["single"].url) as single:
        async with client_of(two.proxy.url) as ours:
            expected = await ask_all(single, questions, AT_ONCE)
            answers = await ask_all(ours, questions, AT_ONCE)
        wrong = [trio for trio in zip(questions, expected, answers, strict=True) if trio[1] != trio[2]]
        num_tokens = sum(said.usage[0] for said in expected)
        loaded = await two.receiver.value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        say(f"seed {SEED}: {len(questions)} answers; of {num_tokens} prompt tokens {loaded:g} came by transfer")
        assert not wrong, f"{len(wrong)} of {len(questions)} (seed {SEED}), the first: {wrong[0]}"
        assert loaded >= 0.9 * (num_tokens - len(questions))
        assert (await two.receiver.buffer())["chunk_size"] == BLOCK_SIZE
        await two.all_is_free()
