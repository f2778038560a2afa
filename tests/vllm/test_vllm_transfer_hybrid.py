"""pdproxy's own connector with a model of which some layers see a window alone, which vLLM keeps in three groups."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.vllm.engines import BLOCK_SIZE, WINDOW, Fleet
from tests.vllm.questions import Question, ask_all, client_of, ids
from tests.vllm.test_vllm_answers import SEED
from tests.vllm.test_vllm_faults import body, leave
from tests.vllm.test_vllm_transfer import pair

ENGINES = ("hybrid-single", "hybrid-sender", "hybrid-receiver")
ALL_ENGINES = ENGINES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]


def around_borders(dice: random.Random) -> list[int]:
    """Lengths whose last token, or the one before, begins or ends a block, or whose window does."""
    borders = {BLOCK_SIZE * at for at in range(1, 9)} | {BLOCK_SIZE * at + WINDOW - 1 for at in (0, 1, 2, 30)}
    lengths = {border + rest for border in borders for rest in (-1, 0, 1, 2)} | {1, 2, 500, 1000, 1023, 1500}
    return dice.sample(sorted(lengths), len(lengths))


async def test_every_answer_equals_a_single_engines_also_where_a_part_is_cached(
    using: Fleet, say: Callable[[str], None]
) -> None:
    """Prompts of any length, and then prompts that begin with some of these: then the decoder loads the rest alone. The
    answers are longer than a block, and some than the window."""
    dice = random.Random(SEED)
    first = [Question(ids(dice, length), max_tokens=40, stream=bool(length % 2)) for length in around_borders(dice)]
    first += [Question(ids(dice, length), max_tokens=90) for length in (31, 64, 65, 200)]
    starts = [ids(dice, length) for length in (95, 96, 97, 127, 128, 130, 159, 161)]
    second = [Question(start, max_tokens=3) for start in starts]
    third = [Question([*start, *ids(dice, dice.randint(1, 150))], max_tokens=20) for start in starts]
    third += [Question(start, max_tokens=20) for start in starts]
    async with (
        pair(using, "--retries", "0", kind="hybrid-") as two,
        client_of(using["hybrid-single"].url) as single,
        client_of(two.proxy.url) as ours,
    ):
        for questions in (first, second, third):
            source = "vllm:prompt_tokens_by_source_total"
            before = [await two.receiver.value(source, source=s) for s in ("external_kv_transfer", "local_cache_hit")]
            expected = await ask_all(single, questions, 8)
            answers = await ask_all(ours, questions, 8)
            wrong = [one for one in zip(questions, expected, answers, strict=True) if one[1] != one[2]]
            assert not wrong, f"{len(wrong)} of {len(questions)} (seed {SEED}), the first: {wrong[0]}"
            after = [await two.receiver.value(source, source=s) for s in ("external_kv_transfer", "local_cache_hit")]
            loaded, cached = (now - then for now, then in zip(after, before, strict=True))
            num_tokens = sum(said.usage[0] for said in expected)
            say(f"seed {SEED}: {len(questions)} answers; of {num_tokens} tokens {loaded:g} loaded, {cached:g} cached")
            assert loaded + cached >= num_tokens - 2 * len(questions), "the decoder has computed what it was sent"
            assert (cached > 0) == (questions is third)
            await two.all_is_free()


async def test_clients_that_leave_in_each_phase(using: Fleet) -> None:
    using["hybrid-single"].freeze()
    async with pair(using, kind="hybrid-") as two:
        await leave(two, body("prefill"), two.to_sender.stop("request", "prefill"))
        await two.all_is_free()
        await leave(two, body("reply"), two.to_sender.stop("reply", "reply"))
        await two.all_is_free()
        await leave(two, body("asked"), two.to_receiver.stop("request", "asked"))
        await two.all_is_free()
        await leave(two, body("decode"), two.to_receiver.stop("reply", "decode"))
        await two.all_is_free()
        await leave(two, body("event", stream=True, max_tokens=1200), two.to_receiver.stop("event", "event"))
        await two.all_is_free()
        assert (await two.post(body("after"))).status_code == 200
