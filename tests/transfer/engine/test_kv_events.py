"""What the built-in engine publishes of its prefix cache, as the proxy's own follower reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio

from pdproxy.kv_events.index import KvIndex, PromptBlocks
from pdproxy.kv_events.subscriber import Subscriber
from tests.fakes.engine_pair import CHUNK, Pair, new_job
from tests.fakes.hostile import new_dice
from tests.fakes.transfer_world import until
from transfer.engine.config import EngineSettings
from transfer.engine.kv_events import KvEventPublisher
from transfer.errors import TransferError

NewPair = Callable[..., Awaitable[Pair]]
ANYWHERE = "tcp://127.0.0.1:*"


@asynccontextmanager
async def following(publisher: KvEventPublisher | None) -> AsyncIterator[KvIndex]:
    assert publisher is not None
    context, index = zmq.asyncio.Context(), KvIndex()
    task = asyncio.create_task(Subscriber(index, context, *publisher.addresses, name="engine").run())
    try:
        await until(lambda: index.is_exact)
        yield index
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


@pytest.mark.engine
async def test_what_is_published_is_what_is_found(new_pair: NewPair) -> None:
    """In a cache for two prompts of those that come again and again, in part or whole."""
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    pair = await new_pair(cache_pages=14, kv_events=ANYWHERE, kv_events_replay=ANYWHERE)
    dice, jobs = new_dice(), [new_job(length) for length in (9, 20, 23, 31, 33)]
    async with following(pair.decoder.kv_events) as index:
        num_found = 0
        for _ in range(60):
            job = dice.choice(jobs)
            store = pair.decoder._worker.scheduler.store
            await until(lambda: index.num_blocks == store.statistics().num_objects)  # noqa: B023
            predicted = index.cached_tokens(PromptBlocks(job.prompt_token_ids))
            async with pair.decoder.generate(job) as running:
                async for _ in running:
                    pass
                assert predicted == running.num_cached_tokens
            num_found += predicted > 0
            assert index.is_exact, index.why
        assert index.block_size == CHUNK
        assert num_found > 5
        assert store.statistics().num_evicted > 5


@pytest.mark.engine
async def test_what_was_handed_over_is_published_too(new_pair: NewPair) -> None:
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    pair = await new_pair(kv_events=ANYWHERE, kv_events_replay=ANYWHERE)
    job = new_job(22)
    async with following(pair.decoder.kv_events) as index:
        await pair.answer(job)
        await until(lambda: index.num_blocks == 5)
        assert index.cached_tokens(PromptBlocks(job.prompt_token_ids)) == 20


def publisher() -> KvEventPublisher:
    return KvEventPublisher(ANYWHERE, ANYWHERE, 2)


async def test_a_chunk_whose_parent_is_gone_is_kept_quiet() -> None:
    """No prompt gets to it, and a follower could not tell which prompt it belongs to."""
    one = publisher()
    try:
        one.stored(None, b"a", [1, 2])
        one.stored(b"a", b"b", [3, 4])
        one.removed([b"b", b"a"])
        one.stored(b"b", b"c", [5, 6])
        one.stored(None, b"d", [7, 8])
        one.removed([b"c"])
        async with following(one) as index:
            await until(lambda: index.num_blocks == 1)
            assert index.cached_tokens(PromptBlocks([7, 8, 9])) == 2
            assert index.is_exact
    finally:
        one.close()


def test_questions_that_are_none_get_no_answer() -> None:
    one = publisher()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        replay = one.addresses[1]
        assert replay is not None
        socket.connect(replay)
        for frames in ([b""], [b"", b"short"], [b"", b"x" * 8, b"more"], [b"x" * 100]):
            socket.send_multipart(frames)
        socket.send_multipart([b"", bytes(8)])
        assert socket.poll(5_000)
        assert socket.recv_multipart()[-2:] == [b"\xff" * 8, b""]
        assert not socket.poll(200)
    finally:
        socket.close(linger=0)
        context.term()
        one.close()


def test_a_port_that_is_taken_is_named() -> None:
    one = publisher()
    try:
        with pytest.raises(TransferError, match="kv_events: cannot listen on"):
            KvEventPublisher(one.addresses[0], None, 2)
    finally:
        one.close()


def test_addresses_that_cannot_be(tmp_path: Path) -> None:
    for wrong in ({"kv_events": "ipc:///x"}, {"kv_events_replay": "tcp://*:5657"}, {"kv_events": "tcp://*"}):
        with pytest.raises(ValueError, match="kv_events"):
            EngineSettings(role="prefill", model=tmp_path, **wrong)  # type: ignore[arg-type]
