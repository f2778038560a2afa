"""Prompts larger than the decoder's PD buffer, from one engine to another over NIXL: they pass through it, the answer
is that of `generate`, and whatever happens on the way every page of cache and buffer comes back."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

from tests.fakes.engine_pair import (
    CHUNK,
    LAYER_BYTES,
    LAYERS_PER_PAGE,
    Leg,
    Pair,
    alone,
    new_job,
    num_used,
)
from tests.fakes.transfer_world import cut_off, until
from transfer import wire
from transfer.dataplane.in_process import InProcess
from transfer.engine.api import JobTooLarge
from transfer.engine.engine import Engine
from transfer.errors import AttemptLost, ReservationRefused

pytestmark = pytest.mark.engine

BUFFER_PAGES = 5

NewPair = Callable[..., Awaitable[Pair]]


@pytest.fixture
async def new_pair(new_pair: NewPair) -> NewPair:
    async def make_small(family: str = "llama", **options: Any) -> Pair:
        page_bytes = CHUNK * LAYER_BYTES * LAYERS_PER_PAGE[family]
        pair = await new_pair(family, page_bytes=page_bytes, buffer_pages=BUFFER_PAGES, **options)
        assert pair.decoder.buffer_facts().num_pages == BUFFER_PAGES
        return pair

    return make_small


# ── the answer ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", LAYERS_PER_PAGE)
async def test_it_is_that_of_generate_before_and_after_too(new_pair: NewPair, family: str) -> None:
    """Up to twelve times the buffer; those that fit go as ever."""
    pair = await new_pair(family)
    for length in (3, 3 * BUFFER_PAGES * CHUNK, 7, BUFFER_PAGES * CHUNK + 1, 12 * BUFFER_PAGES * CHUNK - 2, 9):
        job = new_job(length)
        assert await pair.answer(job) == pair.expected(job), length


async def test_an_answer_longer_than_the_prompt(new_pair: NewPair) -> None:
    pair = await new_pair("gemma3")
    job = new_job(60, 100)
    assert await pair.answer(job) == pair.expected(job)


async def test_many_at_once_through_a_cache_for_one_of_them(new_pair: NewPair) -> None:
    """The largest needs all of the decoder's cache; others come by the buffer, through it, and without a prefiller."""
    pair = await new_pair(cache_pages=16)
    handed = [new_job(length, 9, seed) for seed in range(2) for length in (56, 3, 48, 17, 40, 56, 20)]
    local = [new_job(length, 9, 7) for length in (30, 50, 4)]
    answers = await asyncio.gather(*map(pair.answer, handed), *(alone(pair.decoder, job) for job in local))
    for job, answer in zip([*handed, *local], answers, strict=True):
        assert answer == pair.expected(job)


# ── no answer ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_only_where_it_may_and_what_the_cache_can_hold(new_pair: NewPair) -> None:
    pair = await new_pair(cache_pages=10)
    assert pair.decoder.buffer_facts().windowed
    with pytest.raises(ReservationRefused, match="needs 11 pages of KV cache, and this engine has 10"):
        await pair.prefill(new_job(40))
    assert len(await pair.answer(new_job(39, 2))) == 2
    for options in ({"windowed": False}, {"reservation": "incremental"}):
        without = await new_pair(**options)
        assert not without.decoder.buffer_facts().windowed
        with pytest.raises((ReservationRefused, AttemptLost)):
            await without.prefill(new_job(40))


async def test_an_answer_that_can_never_fit(new_pair: NewPair) -> None:
    pair = await new_pair(cache_pages=12)
    leg = await pair.prefill(new_job(40))
    with pytest.raises(JobTooLarge, match="need 13 pages of KV cache, this engine has 12"):
        await pair.decode(Leg(replace(leg.job, max_tokens=10), leg.handoff))
    assert (await pair.proxy.next(wire.KvReleased, leg.handoff.attempt)).num_pages == BUFFER_PAGES
    await pair.all_is_back()


async def test_a_handoff_with_another_prompt(new_pair: NewPair) -> None:
    pair = await new_pair()
    leg = await pair.prefill(new_job(40))
    with pytest.raises(AttemptLost, match="the handoff has 41 prompt tokens, the KV here 40"):
        await pair.decode(Leg(new_job(41), leg.handoff))


@pytest.mark.parametrize("where", ["waiting for cache pages", "ready"])
@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_nobody_wants_it_any_more(new_pair: NewPair, where: str, how: str) -> None:
    pair = await new_pair(cache_pages=16)
    async with pair.cache_taken(10 if where == "waiting for cache pages" else 1):
        leg = await pair.prefill(new_job(40), timeout_s=30 if how == "cancelled" else 1.0)
        attempt = leg.handoff.attempt
        if where == "ready":
            await pair.proxy.next(wire.KvReady, attempt)
            assert await pair.on_worker(lambda: (pair.scheduler.counts["staged"], num_used(pair.decoder))) == (
                1,
                11,
            )
        else:
            await until(lambda: bool(pair.decoder._receiver.reservations.get(attempt).num_written))  # type: ignore[union-attr]
            assert await pair.on_worker(lambda: pair.scheduler.counts["waiting"]) == 1
            assert pair.num_taken == 0, "no credit before its turn"
        if how == "cancelled":
            await pair.decoder.cancel(attempt)
        await pair.proxy.next(wire.KvReleased, attempt)
        counts = await pair.on_worker(lambda: (pair.scheduler.counts, num_used(pair.decoder)))
        assert (counts[0]["staged"], counts[0]["waiting"]) == (0, 0)
        assert counts[1] == (10 if where == "waiting for cache pages" else 1)
        with pytest.raises(AttemptLost):
            await pair.decode(leg)
    assert len(await pair.answer(new_job(44))) == 6


@pytest.mark.parametrize("how", ["cancelled", "given up by the prefiller", "the prefiller is cut off"])
async def test_it_ends_in_the_middle(new_pair: NewPair, how: str) -> None:
    """The decoder's thread stands still in the midst of copying: the sender waits for credit."""
    pair = await new_pair(heartbeat_s=0.1, writer_timeout_s=0.5)
    reached, go_on = hold_second_copy(pair)
    leg = await pair.prefill(new_job(60), keep=how != "given up by the prefiller", give_up_at=reached)
    await asyncio.wait_for(reached.wait(), 10)
    assert pair.num_taken < 15
    if how != "given up by the prefiller":  # by now that may be known, and the attempt with its count be gone
        await until(lambda: pair.num_taken > 0)
    if how == "cancelled":
        await pair.decoder.cancel(leg.handoff.attempt)
    elif how == "the prefiller is cut off":
        forget_sessions(pair.prefiller)
    await until(lambda: pair.decoder._intake._staged == {})  # type: ignore[union-attr]
    go_on.set()
    job = new_job(60, seed=1)
    assert await pair.answer(job) == pair.expected(job)
    await pair.proxy.next(wire.KvReleased, leg.handoff.attempt)
    await pair.all_is_back()


def hold_second_copy(pair: Pair) -> tuple[asyncio.Event, threading.Event]:
    copy, loop = pair.decoder._store.copy_in, asyncio.get_running_loop()
    reached, go_on, number = asyncio.Event(), threading.Event(), itertools.count(1)

    def held(*args: Any) -> None:
        if next(number) == 2:
            loop.call_soon_threadsafe(reached.set)
            go_on.wait(10)
        copy(*args)

    pair.decoder._store.copy_in = held  # type: ignore[method-assign]
    return reached, go_on


def forget_sessions(prefiller: Engine) -> None:
    """Nothing more is said on them, until the next push makes another; its pushes end at this side."""
    assert prefiller._plane is not None
    home = prefiller._plane._backend
    assert isinstance(home, InProcess)
    sender, loop = home._sender, home._loop
    assert sender is not None
    assert loop is not None

    def forget() -> None:
        cut_off(sender)
        sender._sessions.clear()

    run_on(loop, forget)
    for push in list(prefiller._pushes.values()):
        push.abort("gone")


def run_on(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Run `work` on the loop of another thread, and wait until that is done."""
    done = threading.Event()

    def run() -> None:
        work()
        done.set()

    loop.call_soon_threadsafe(run)
    assert done.wait(10)


async def test_the_client_leaves_while_its_answer_is_written(new_pair: NewPair) -> None:
    pair = await new_pair(cache_pages=16)
    leg = await pair.prefill(new_job(40))
    async with pair.decoder.generate(replace(leg.job, max_tokens=20, handoff=leg.handoff)) as running:
        await anext(aiter(running))
    await pair.all_is_back()


async def test_the_client_leaves_while_its_answer_waits_for_pages(new_pair: NewPair) -> None:
    """The staged prompt's pages come back with the sequence that had taken them over."""
    pair = await new_pair(cache_pages=16)
    async with pair.cache_taken(5):
        leg = await pair.prefill(new_job(40))
        async with pair.decoder.generate(replace(leg.job, max_tokens=20, handoff=leg.handoff)):
            await pair.proxy.next(wire.KvReleased, leg.handoff.attempt)
            counts = await pair.on_worker(lambda: pair.scheduler.counts)
            assert (counts["waiting"], counts["staged"]) == (1, 0)
    await pair.all_is_back()
