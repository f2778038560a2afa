"""Prompts that begin alike, in real engines: their answers are those of `generate`, and less is computed for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

from tests.fakes.engine_pair import CHUNK, Pair, alone, new_job, num_used
from tests.fakes.transfer_world import until
from transfer.engine.api import GenerationJob
from transfer.engine.engine import Engine

pytestmark = pytest.mark.engine

NAN = 0xFF
NewPair = Callable[..., Awaitable[Pair]]


def with_tail(job: GenerationJob, num_system: int, *tail: int) -> GenerationJob:
    """The first so many tokens of the job's prompt, and these."""
    return replace(job, prompt_token_ids=[*job.prompt_token_ids[:num_system], *tail])


async def read(engine: Engine, job: GenerationJob) -> tuple[list[int], int, int]:
    """The answer, how many tokens of the prompt were computed, and how many the engine says were not."""
    before = engine._runner.num_tokens_fed
    async with engine.generate(job) as running:
        answer = [token.token_id async for token in running]
        num_cached = running.num_cached_tokens
    return answer, engine._runner.num_tokens_fed - before - (len(answer) - 1), num_cached


async def test_a_repeated_prompt_is_read_once(new_pair: NewPair) -> None:
    pair = await new_pair()
    for length in (1, 4, 5, 19, 20, 40):
        job = new_job(length)
        expected = pair.expected(job)
        assert await read(pair.decoder, job) == (expected, length, 0)
        num_cached = (length - 1) // CHUNK * CHUNK
        assert await read(pair.decoder, job) == (expected, length - num_cached, num_cached)
    num_full = sum(length // CHUNK for length in (4, 5, 19, 20, 40))
    await until(lambda: pair.decoder.statistics()["prefix_cache"]["num_idle"] == num_full)
    statistics = pair.decoder.statistics()
    assert statistics["prefix_cache"]["num_hits"] == sum((n - 1) // CHUNK for n in (4, 5, 19, 20, 40))
    assert statistics["cache_pages"] == {"total": 100, "free": 100}


async def test_a_shared_system_prompt(new_pair: NewPair) -> None:
    pair = await new_pair()
    job = new_job(23)
    await read(pair.decoder, job)
    before = pair.decoder._store.buffer.pages.clone()
    for num_system, tail in ((23, [7, 8, 9]), (23, [9] * 30), (20, [5]), (21, [6, 6]), (3, [8, 9, 10])):
        other = with_tail(job, num_system, *tail)
        assert await read(pair.decoder, other) == (
            pair.expected(other),
            len(other.prompt_token_ids) - num_system // CHUNK * CHUNK,
            num_system // CHUNK * CHUNK,
        )
    store = pair.decoder._worker.scheduler.store
    shared = store.lookup("test", (await keys_of(pair, job))[:5]).pages
    assert len(shared) == 5
    assert all((pair.decoder._store.buffer.pages[page] == before[page]).all() for page in shared), "never written again"
    store.release("test")


async def keys_of(pair: Pair, job: GenerationJob) -> list[bytes]:
    return pair.decoder._sequence(job, len(job.prompt_token_ids)).keys


@pytest.mark.parametrize(("family", "num_cached"), [("deepseek", 16), ("gemma3", 0)])
async def test_latents_are_shared_too_and_windows_are_not(new_pair: NewPair, family: str, num_cached: int) -> None:
    pair = await new_pair(family)
    job = new_job(18)
    for cached in (0, num_cached):
        assert await read(pair.decoder, job) == (pair.expected(job), 18 - cached, cached)
    for _ in range(2):
        assert await pair.answer(job) == pair.expected(job)


async def test_it_can_be_turned_off(new_pair: NewPair) -> None:
    pair = await new_pair(prefix_cache=False)
    job = new_job(18)
    for _ in range(2):
        assert await read(pair.decoder, job) == (pair.expected(job), 18, 0)
    assert pair.decoder.statistics()["prefix_cache"]["num_objects"] == 0


async def test_a_prefiller_sends_what_it_need_not_compute(new_pair: NewPair) -> None:
    """The decoder has nothing of it, and what is not written there is NaN."""
    pair = await new_pair()
    job = new_job(42)
    await read(pair.prefiller, job)
    for longer in (with_tail(job, 42, 7, 8, 9), job, with_tail(job, 40), with_tail(job, 13)):
        fresh = await new_pair()
        fresh.prefiller, pair.prefiller = pair.prefiller, fresh.prefiller
        assert fresh.decoder._received is not None
        for buffer in (fresh.decoder._received, fresh.decoder._store.buffer):
            buffer.pages.fill_(NAN)
        before = fresh.prefiller._runner.num_tokens_fed
        assert await fresh.answer(longer) == fresh.expected(longer)
        num_prompt = len(longer.prompt_token_ids)
        assert fresh.prefiller._runner.num_tokens_fed - before == num_prompt - min(
            40, (num_prompt - 1) // CHUNK * CHUNK
        )
        fresh.prefiller, pair.prefiller = pair.prefiller, fresh.prefiller


async def test_what_was_handed_over_is_kept(new_pair: NewPair) -> None:
    pair = await new_pair()
    job = new_job(22)
    assert await pair.answer(job) == pair.expected(job)
    assert await read(pair.decoder, job) == (pair.expected(job), 2, 20)
    assert await pair.answer(job) == pair.expected(job), "and not copied again"


async def test_what_went_through_the_window_is_kept(new_pair: NewPair) -> None:
    """Beside what is there of it already."""
    pair = await new_pair(buffer_pages=4)
    job = new_job(50)
    await read(pair.decoder, with_tail(job, 17))
    assert await pair.answer(job) == pair.expected(job)
    assert await read(pair.decoder, job) == (pair.expected(job), 2, 48)


async def test_after_eviction(new_pair: NewPair) -> None:
    """A cache for two prompts; each is as good as new when it comes again."""
    pair = await new_pair(cache_pages=14)
    jobs = [new_job(20 + i) for i in range(5)]
    for job in [*jobs, *reversed(jobs), *jobs]:
        assert (await read(pair.decoder, job))[0] == pair.expected(job)
    await until(lambda: pair.decoder.statistics()["prefix_cache"]["num_evicted"] > 0)
    await until(lambda: pair.decoder.statistics()["prefix_cache"]["num_hits"] > 0)


async def test_after_an_abort_in_mid_prompt(new_pair: NewPair) -> None:
    pair = await new_pair()
    job = new_job(200)
    runner = pair.decoder._runner
    async with pair.decoder.generate(job):
        await until(lambda: runner.num_tokens_fed > 3 * CHUNK)
    await until(lambda: num_used(pair.decoder) == 0)
    answer, num_read, num_cached = await read(pair.decoder, job)
    assert answer == pair.expected(job)
    assert num_read + num_cached == 200
    assert num_cached >= 3 * CHUNK


async def test_two_answers_to_one_prompt(new_pair: NewPair) -> None:
    pair = await new_pair()
    job = new_job(30)
    answers = await asyncio.gather(alone(pair.decoder, job), alone(pair.decoder, job))
    assert answers == [pair.expected(job)] * 2


@pytest.mark.parametrize("cache_pages", [100, 14], ids=["cache for all", "cache for two"])
async def test_twenty_at_once_with_one_system_prompt(new_pair: NewPair, cache_pages: int) -> None:
    """Half of them by the prefiller, half at the decoder alone."""
    pair = await new_pair(cache_pages=cache_pages, buffer_pages=16)
    system = new_job(23)
    jobs = [with_tail(system, 23, *range(30, 31 + i)) for i in range(20)]
    answers = await asyncio.gather(
        *(pair.answer(job) for job in jobs[::2]), *(alone(pair.decoder, job) for job in jobs[1::2])
    )
    for job, answer in zip([*jobs[::2], *jobs[1::2]], answers, strict=True):
        assert answer == pair.expected(job)
    await until(lambda: pair.decoder.statistics()["prefix_cache"]["num_hits"] > 0)
