"""Turns of a chat, from one engine to another over NIXL: the decoder keeps what it has, the answer is that of
`generate`, and whatever happens on the way every pin, cache page and page of the buffer comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

from tests.fakes.engine_pair import CHUNK, Pair, alone, new_job, num_used
from tests.fakes.transfer_world import until
from transfer import wire
from transfer.engine.api import EngineBusy, GenerationJob, JobTooLarge
from transfer.errors import AttemptLost

pytestmark = pytest.mark.engine

CACHE_PAGES, BUFFER_PAGES = 90, 16
MAX_MODEL_LEN = 40 * CHUNK
NAN = 0xFF
luck = random.Random(4)
NewPair = Callable[..., Awaitable[Pair]]


@pytest.fixture
async def new_pair(new_pair: NewPair) -> NewPair:
    return partial(new_pair, cache_pages=CACHE_PAGES, buffer_pages=BUFFER_PAGES, max_model_len=MAX_MODEL_LEN)


@pytest.fixture
async def pair(new_pair: NewPair) -> Pair:
    return await new_pair()


def next_turn(job: GenerationJob, answer: list[int], *question: int) -> GenerationJob:
    return replace(job, prompt_token_ids=[*job.prompt_token_ids, *answer, *question])


def num_full(job: GenerationJob) -> int:
    """Pages that the job's prompt fills."""
    return len(job.prompt_token_ids) // CHUNK


def num_all(job: GenerationJob) -> int:
    return -(-len(job.prompt_token_ids) // CHUNK)


async def counts(pair: Pair) -> tuple[int, int]:
    """Pages that were sent, and that the decoder had, so far."""
    await asyncio.gather(*pair.prefiller._background)
    cached: int = pair.decoder.statistics()["cached_pages"]
    assert pair.decoder.buffer_facts().num_cached == cached
    return pair.prefiller.statistics()["pushed_pages"], cached


async def others(pair: Pair) -> None:
    """Somebody else's prompt goes through the whole PD buffer, which remembers nothing else then."""
    job = new_job(BUFFER_PAGES * CHUNK, 2, luck.randrange(1000))
    assert await pair.answer(job) == pair.expected(job)


async def evict(pair: Pair) -> None:
    """Others have every page of the decoder's cache that nobody holds."""
    async with large(pair, 38 * CHUNK), large(pair, 38 * CHUNK):
        rest = await pair.on_worker(lambda: pair.scheduler.store.num_available)
        async with large(pair, rest * CHUNK):
            assert await pair.on_worker(lambda: pair.scheduler.store.num_available) == 0


@asynccontextmanager
async def large(pair: Pair, num_tokens: int) -> AsyncIterator[None]:
    """A sequence at the decoder, of so many tokens of KV."""
    async with pair.decoder.generate(new_job(3, num_tokens - 2, luck.randrange(1000))) as running:
        await anext(aiter(running))
        yield


async def first_turn(pair: Pair, length: int = 41) -> tuple[GenerationJob, list[int]]:
    job = new_job(length)
    answer = await pair.answer(job)
    assert answer == pair.expected(job)
    return job, answer


# ── the answer ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama", "deepseek"])
async def test_every_turn_sends_what_is_new(new_pair: NewPair, family: str) -> None:
    """What the last turn's prompt filled is not sent again: its answer and the new question are."""
    pair = await new_pair(family)
    job, expected_cached = new_job(21), 0
    for turn in range(4):
        await others(pair)
        sent, cached = await counts(pair)
        answer = await pair.answer(job)
        assert answer == pair.expected(job), turn
        now_sent, now_cached = await counts(pair)
        assert now_cached - cached == expected_cached
        assert now_sent - sent == num_all(job) - expected_cached
        expected_cached = num_full(job)
        job = next_turn(job, answer, *range(7, 12))


async def test_the_bytes_are_the_caches_own(pair: Pair) -> None:
    """Nothing else of the first turn is anywhere: what is not sent and not kept is NaN."""
    job, answer = await first_turn(pair)
    await others(pair)
    assert pair.decoder._received is not None
    pair.decoder._received.pages.fill_(NAN)
    kept = pair.scheduler.store._objects
    pages = {known.page for known in kept}
    for page in set(range(CACHE_PAGES)) - pages:
        pair.decoder._store.buffer.pages[page].fill_(NAN)
    job = next_turn(job, answer, 8, 9)
    assert await pair.answer(job) == pair.expected(job)
    assert (await counts(pair))[1] == 10


async def test_a_prompt_that_fills_its_last_page(pair: Pair) -> None:
    """All of it is there; the last page is sent nevertheless, and the next token comes into a page of its own."""
    job, _ = await first_turn(pair, 40)
    await others(pair)
    sent, _ = await counts(pair)
    for num_cached in (9, 18):
        assert await pair.answer(job) == pair.expected(job)
        assert (await counts(pair))[1] == num_cached
    assert (await counts(pair))[0] == sent + 1, "the second time, that page was in the PD buffer"


@pytest.mark.parametrize("what", ["windowed layers", "no prefix cache", "a cache for one prompt", "page by page"])
async def test_where_all_of_it_is_sent(new_pair: NewPair, what: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "windowed layers": {"family": "gemma3", "buffer_pages": 50},
        "no prefix cache": {"prefix_cache": False},
        "a cache for one prompt": {"cache_pages": 40},
        "page by page": {"reservation": "incremental"},
    }
    pair = await new_pair(**options[what])
    job, answer = await first_turn(pair)
    job = next_turn(job, answer, 8, 9)
    assert await pair.answer(job) == pair.expected(job)
    assert (await counts(pair))[1] == 0


async def test_a_prompt_larger_than_the_buffer_passes_through_it_as_a_whole(new_pair: NewPair) -> None:
    pair = await new_pair(buffer_pages=8)
    job = new_job(60)
    for _ in range(2):
        assert await pair.answer(job) == pair.expected(job)
    assert (await counts(pair))[1] == 0


# ── between the grant and the end ───────────────────────────────────────────────────────────────────────────────────


async def test_pressure_between_the_grant_and_the_take(pair: Pair) -> None:
    """Everything else in the cache is evicted; what the attempt keeps is not."""
    job, answer = await first_turn(pair)
    await others(pair)
    job = next_turn(job, answer, 8, 9)
    leg = await pair.prefill(job)
    await pair.proxy.next(wire.KvReady, leg.handoff.attempt)
    await evict(pair)
    assert ((await counts(pair))[1], leg.handoff.num_pages) == (10, num_all(job) - 10)
    assert await pair.decode(leg) == pair.expected(job)


async def test_evicted_just_before_the_grant(pair: Pair) -> None:
    job, answer = await first_turn(pair)
    await others(pair)
    await evict(pair)
    job = next_turn(job, answer, 8, 9)
    assert await pair.answer(job) == pair.expected(job)
    assert (await counts(pair))[1] < 10


async def test_the_page_goes_when_nobody_keeps_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that pins are against, planted: it is noticed, and is an error of this request alone."""
    scheduler = pair.scheduler
    pin = scheduler.pin

    def forgetful(attempt: str, keys: list[bytes]) -> int:
        count: int = pin(attempt, keys)
        if owner := scheduler._pins._owner_of.get(attempt):
            scheduler.store.unpin(owner, keys)
        return count

    monkeypatch.setattr(scheduler, "pin", forgetful)
    job, answer = await first_turn(pair)
    await others(pair)
    job = next_turn(job, answer, 8, 9)
    leg = await pair.prefill(job)
    await evict(pair)
    with pytest.raises(Exception, match="of the 10 pages pinned for it"):
        await pair.decode(leg)
    await until(lambda: num_used(pair.decoder) == 0)
    monkeypatch.undo()
    assert await pair.answer(job) == pair.expected(job)


async def test_many_attempts_keep_the_same_pages(pair: Pair) -> None:
    job, answer = await first_turn(pair)
    await others(pair)
    jobs = [next_turn(job, answer, 20 + i, 9) for i in range(4)]
    legs = [await pair.prefill(job) for job in jobs]
    assert (await counts(pair))[1] == 40
    await evict(pair)
    for job, leg in zip(jobs, legs, strict=True):
        assert await pair.decode(leg) == pair.expected(job)


async def test_the_handoff_waits_for_cache_pages(pair: Pair) -> None:
    """Behind somebody who needs all that a sequence can: it keeps its pins meanwhile, and they are in nobody's way."""
    job, answer = await first_turn(pair)
    await others(pair)
    job = next_turn(job, answer, 8, 9)
    leg = await pair.prefill(job)
    async with large(pair, 40 * CHUNK), large(pair, 40 * CHUNK - 1):
        largest = new_job(20, 40 * CHUNK - 20)
        waiting = asyncio.create_task(alone(pair.decoder, largest))
        await until(lambda: pair.scheduler.counts["waiting"] == 1)
        decoding = asyncio.create_task(pair.decode(leg))
        await until(lambda: pair.scheduler.counts["waiting"] == 2)
    assert await decoding == pair.expected(job)
    assert await waiting == pair.expected(largest)


POINTS = ("granted", "ready", "taken", "waiting for cache pages", "expired", "too large", "no place", "other prompt")


@pytest.mark.parametrize("point", POINTS)
async def test_an_end_at_every_point(new_pair: NewPair, point: str) -> None:
    """Then nothing is kept for it, and the next turn finds what there is."""
    pair = await new_pair(max_num_seqs=3)
    job, answer = await first_turn(pair)
    await others(pair)
    job = next_turn(job, answer, 8, 9)
    leg = await pair.prefill(job, keep=point != "granted", timeout_s=0.5 if point == "expired" else 30.0)
    attempt = leg.handoff.attempt
    if point not in ("granted", "expired"):
        await pair.proxy.next(wire.KvReady, attempt)
        assert pair.scheduler._pins.pages
    decoding = replace(job, handoff=leg.handoff)
    if point == "ready":
        assert await pair.decoder.cancel(attempt)
    elif point == "taken":
        async with pair.decoder.generate(replace(decoding, max_tokens=50)) as running:
            await anext(aiter(running))
            assert not await pair.decoder.cancel(attempt) or num_used(pair.decoder)
    elif point == "waiting for cache pages":
        async with (
            large(pair, 40 * CHUNK),
            large(pair, 40 * CHUNK),
            pair.decoder.generate(replace(decoding, max_tokens=100)),
        ):
            assert await pair.on_worker(lambda: pair.scheduler.counts["waiting"]) == 1
    elif point == "too large":
        with pytest.raises(JobTooLarge):
            await alone(pair.decoder, replace(decoding, max_tokens=200))
    elif point == "no place":
        async with large(pair, 9), pair.decoder.generate(new_job(4, 9)), pair.decoder.generate(new_job(5, 9)):
            with pytest.raises(EngineBusy):
                await alone(pair.decoder, decoding)
        await pair.decoder.cancel(attempt)
    elif point == "other prompt":
        ids = [*job.prompt_token_ids]
        ids[6] += 1
        other = msgspec.structs.replace(leg.handoff, prompt_token_ids=ids)
        with pytest.raises(AttemptLost, match="does not begin with"):
            await alone(pair.decoder, replace(job, prompt_token_ids=ids, handoff=other))
    await pair.proxy.next(wire.KvReleased, attempt)
    await until(lambda: num_used(pair.decoder) == 0)
    assert pair.scheduler._pins.pages == set()
    await pair.all_is_back()
    assert await pair.answer(job) == pair.expected(job)


async def test_the_same_attempt_decoded_twice(pair: Pair) -> None:
    job, answer = await first_turn(pair)
    job = next_turn(job, answer, 8, 9)
    leg = await pair.prefill(job)
    results = await asyncio.gather(pair.decode(leg), pair.decode(leg), return_exceptions=True)
    assert [one for one in results if not isinstance(one, Exception)] == [pair.expected(job)]


@pytest.mark.parametrize("seed", range(2))
async def test_many_conversations_at_once(new_pair: NewPair, seed: int) -> None:
    """In a cache for some of them, with prompts that no prefiller reads and turns that are cancelled beside them."""
    luck = random.Random(seed)
    print(f"seed {seed}")
    pair = await new_pair(cache_pages=70, buffer_pages=26)

    async def converse(number: int) -> None:
        job = new_job(11 + 3 * number, 5, seed)
        for _ in range(3):
            if luck.random() < 0.25:
                leg = await pair.prefill(job)
                await pair.decoder.cancel(leg.handoff.attempt)
            answer = await (alone(pair.decoder, job) if luck.random() < 0.2 else pair.answer(job))
            assert answer == pair.expected(job)
            job = next_turn(job, answer, *(luck.randrange(6, 500) for _ in range(luck.randrange(1, 9))))

    await asyncio.gather(*(converse(number) for number in range(5)))
    assert (await counts(pair))[1] > 0
