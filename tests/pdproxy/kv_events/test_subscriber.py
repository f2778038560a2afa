"""The subscriber against a publisher on real sockets: its index is the publisher's cache, or it says that it is not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from pdproxy.kv_events import subscriber as module
from pdproxy.kv_events.index import STEP_BLOCKS, KvIndex, PromptBlocks, Trust
from pdproxy.kv_events.subscriber import Subscriber
from pdproxy.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored
from tests.fakes.calls import until
from tests.fakes.hostile import new_dice, noise
from tests.fakes.kv_publisher import KvPublisher, block
from tests.fakes.prefix_cache import PrefixCache

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_S", 0.1)
    monkeypatch.setattr(module, "REPLY_S", 0.5)
    monkeypatch.setattr(module, "RETRY_S", 0.1)


@asynccontextmanager
async def following(publisher: KvPublisher, *, replays: bool = True) -> AsyncIterator[Subscriber]:
    context = zmq.asyncio.Context()
    replay_address = publisher.replay_address if replays else None
    subscriber = Subscriber(KvIndex(), context, publisher.address, replay_address, name="prefill-0")
    task = asyncio.create_task(subscriber.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            yield subscriber
        assert not task.done(), "nothing that a publisher sends ends it"
        subscriber.index.check_integrity()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


def knows(subscriber: Subscriber, num_blocks: int, trust: Trust = Trust.EXACT) -> Callable[[], bool]:
    index = subscriber.index
    return lambda: (index.num_blocks, index.trust) == (num_blocks, trust)


@pytest.mark.parametrize("is_sglang", [False, True])
async def test_events_before_and_after_it_came(is_sglang: bool) -> None:
    async with KvPublisher(is_sglang=is_sglang) as publisher:
        publisher.publish(block(1, [1, 2]), block(2, [3, 4], parent=1))
        async with following(publisher) as subscriber:
            await until(knows(subscriber, 2))
            publisher.publish(block(3, [5, 6], parent=2))
            await until(knows(subscriber, 3))
            assert subscriber.index.cached_tokens(PromptBlocks([1, 2, 3, 4, 5, 6, 7])) == 6
            publisher.publish(BlockRemoved(block_hashes=[3], medium="GPU"))
            await until(knows(subscriber, 2))
            publisher.publish(AllBlocksCleared())
            await until(knows(subscriber, 0))
            assert (subscriber.index.num_gaps, subscriber.index.num_drops) == (0, 0)


async def test_lost_batches_are_asked_for() -> None:
    """Those in the middle are missed when the next one comes, and the last ones when it is quiet."""
    async with KvPublisher() as publisher, following(publisher) as subscriber:
        await publisher.subscribed()
        publisher.publish(block(1, [1, 2]))
        publisher.publish(block(2, [3, 4], parent=1), is_lost=True)
        publisher.publish(block(3, [5, 6], parent=2))
        await until(knows(subscriber, 3))
        assert subscriber.index.num_gaps <= 1
        publisher.publish(block(4, [7, 8], parent=3), is_lost=True)
        await until(knows(subscriber, 4))
        assert subscriber.index.num_drops == 0


async def test_answers_that_get_lost_are_asked_for_again() -> None:
    """The publisher's socket drops what it has no room for."""
    async with KvPublisher() as publisher:
        for name in range(20):
            publisher.publish(block(name, [name, name]))
        publisher.num_dropped = 7
        async with following(publisher) as subscriber:
            await until(knows(subscriber, 20))
            assert publisher.num_asked >= 2


async def test_the_beginning_is_no_longer_kept() -> None:
    async with KvPublisher(num_kept=2) as publisher:
        publisher.publish(block(1, [1, 2]))
        publisher.publish(block(2, [3, 4], parent=1))
        publisher.publish(block(3, [1, 1]))
        async with following(publisher) as subscriber:
            await until(knows(subscriber, 1, Trust.APPROXIMATE))
            assert "1 batches of events cannot be had" in subscriber.index.why
            publisher.publish(AllBlocksCleared(), block(4, [1, 2]))
            await until(knows(subscriber, 1))


async def test_a_gap_that_nobody_can_fill(caplog: pytest.LogCaptureFixture) -> None:
    async with KvPublisher(num_kept=2) as publisher, following(publisher) as subscriber:
        await publisher.subscribed()
        publisher.publish(block(1, [1, 2]))
        await until(knows(subscriber, 1))
        for name in range(2, 6):
            publisher.publish(block(name, [name, 2]), is_lost=True)
        publisher.publish(block(9, [9, 9]))
        await until(knows(subscriber, 2, Trust.APPROXIMATE))
        assert subscriber.index.cached_tokens(PromptBlocks([1, 2, 3])) == 0
        # It is told when the replay is over, and that much is known before.
        told = "not known exactly (approximate)"
        await until(lambda: any(told in record.getMessage() for record in caplog.records))


async def test_another_process_is_seen_by_its_events() -> None:
    async with KvPublisher() as publisher, following(publisher) as subscriber:
        publisher.publish(block(1, [1, 2]))
        await until(knows(subscriber, 1))
        await publisher.subscribed()
        await publisher.restart()
        await publisher.subscribed()
        publisher.publish(block(2, [3, 4]))
        publisher.publish(block(3, [5, 6]))
        await until(knows(subscriber, 2))
        assert subscriber.index.cached_tokens(PromptBlocks([1, 2, 3])) == 0


async def test_another_process_is_seen_when_it_is_quiet() -> None:
    async with KvPublisher() as publisher, following(publisher) as subscriber:
        publisher.publish(block(1, [1, 2]))
        await until(knows(subscriber, 1))
        await publisher.restart()
        await until(knows(subscriber, 0))
        for name in range(3):
            publisher.publish(block(name, [name, 4]), is_lost=True)
        await until(knows(subscriber, 3))


async def test_another_process_that_has_published_as_much() -> None:
    """Its batch of the same number is another one."""
    async with KvPublisher() as publisher, following(publisher) as subscriber:
        publisher.publish(block(1, [1, 2]))
        await until(knows(subscriber, 1))
        await publisher.restart()
        for name in (2, 3):
            publisher.publish(block(name, [3, name]), is_lost=True)
        await until(lambda: subscriber.index.cached_tokens(PromptBlocks([3, 2, 0])) == 2)
        await until(knows(subscriber, 2))
        assert subscriber.index.cached_tokens(PromptBlocks([1, 2, 3])) == 0


async def test_the_proxy_knows_of_a_restart_first() -> None:
    async with KvPublisher() as publisher, following(publisher) as subscriber:
        publisher.publish(block(1, [1, 2]))
        await until(knows(subscriber, 1))
        subscriber.restarted()
        assert subscriber.index.trust is Trust.OFF
        await until(knows(subscriber, 1))


async def test_nobody_answers(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that is silent is doubted, and one that was never heard says nothing."""
    caplog.set_level(logging.INFO)
    async with KvPublisher() as publisher:
        publisher.is_mute = True
        async with following(publisher) as subscriber:
            await until(lambda: "does not answer" in subscriber.index.why)
            assert subscriber.index.trust is Trust.OFF
            publisher.is_mute = False
            publisher.publish(block(1, [1, 2]))
            await until(knows(subscriber, 1))
            publisher.is_mute = True
            await until(knows(subscriber, 1, Trust.APPROXIMATE))
            publisher.is_mute = False
            await until(knows(subscriber, 1))
    told = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert any("known exactly" in line for line in told)
    assert any("does not answer" in line for line in told)


async def test_without_a_replay() -> None:
    async with KvPublisher() as publisher, following(publisher, replays=False) as subscriber:
        await publisher.subscribed()
        publisher.publish(block(1, [1, 2]))
        await until(knows(subscriber, 1, Trust.APPROXIMATE))
        assert subscriber.index.why == module.NO_REPLAY
        publisher.publish(block(2, [1, 3]), is_lost=True)
        publisher.publish(block(3, [1, 4]))
        await until(lambda: subscriber.index.num_gaps == 1)
        await until(knows(subscriber, 1, Trust.APPROXIMATE))
        await publisher.restart()
        await publisher.subscribed()
        publisher.publish(block(4, [1, 2]))
        publisher.publish(block(5, [1, 5]))
        await until(knows(subscriber, 2, Trust.APPROXIMATE))


async def test_a_replay_that_keeps_nothing_is_not_believed() -> None:
    async with KvPublisher(num_kept=0) as publisher, following(publisher) as subscriber:
        await publisher.subscribed()
        publisher.publish(block(1, [1, 2]))
        publisher.publish(block(2, [3, 4]), is_lost=True)
        publisher.publish(block(3, [5, 6]))
        await until(lambda: subscriber.index.why == module.FORGETFUL)
        await until(knows(subscriber, 1, Trust.APPROXIMATE))


async def test_noise_and_a_future_number() -> None:
    """Whatever a publisher sends: the index is right again once it behaves."""
    dice = new_dice()
    async with KvPublisher() as publisher, following(publisher) as subscriber:
        await publisher.subscribed()
        publisher.publish(block(1, [1, 2]))
        await until(knows(subscriber, 1))
        for payload in noise(dice, 50):
            frames = [b"topic", dice.randbytes(8), payload]
            publisher.send_raw(frames[: dice.randrange(1, 4)])
        publisher.send_raw([b"", (2**63).to_bytes(8, "big"), msgspec.msgpack.encode([1e9, []])])
        publisher.send_raw([b"", b"1234567", b""])
        publisher.send_raw([b"", (1).to_bytes(8, "big"), b"\x93\xc0\xc0\xc0"])
        publisher.send_raw([b""] * 1000)
        await asyncio.sleep(0)
        publisher.publish(block(2, [3, 4]))
        subscriber.restarted()
        await until(knows(subscriber, 2))


async def test_what_breaks_it_in_the_history_keeps_it_off() -> None:
    async with KvPublisher() as publisher, following(publisher) as subscriber:
        publisher.send(msgspec.msgpack.encode([1.0, [["BlockMoved", [1], [2]]]]))
        await until(lambda: "BlockMoved" in subscriber.index.why)
        assert subscriber.index.trust is Trust.OFF
        asked = publisher.num_asked
        await until(lambda: publisher.num_asked >= asked + 2)
        assert subscriber.index.trust is not Trust.EXACT
        await publisher.restart()
        publisher.publish(block(1, [1, 2]))
        await until(knows(subscriber, 1))


async def test_a_message_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not even read; once the publisher is another one, everything is well again."""
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 10_000)
    async with KvPublisher() as publisher, following(publisher) as subscriber:
        publisher.publish(block(1, [1, 2]))
        await until(knows(subscriber, 1))
        publisher.publish(block(2, [3] * 20_000))
        await until(lambda: subscriber.index.trust is not Trust.EXACT)
        assert subscriber.index.num_blocks <= 1
        await publisher.restart()
        publisher.publish(block(3, [1, 2]))
        await until(knows(subscriber, 1))


@pytest.mark.parametrize("is_one_event", [True, False])
@pytest.mark.parametrize("is_sglang", [False, True])
async def test_nobody_waits_for_all_of_a_large_batch(is_one_event: bool, is_sglang: bool) -> None:
    num = 8_000
    ids = list(range(1, num + 1))
    if is_one_event:
        stored = [BlockStored(block_hashes=ids, parent_block_hash=None, token_ids=ids, block_size=1, medium="GPU")]
    else:
        stored = [block(one, [one], one - 1 or None) for one in ids]
    async with KvPublisher(is_sglang=is_sglang) as publisher, following(publisher) as subscriber:
        await until(knows(subscriber, 0))
        most = before = 0

        async def others() -> None:
            nonlocal most, before
            while True:
                most, before = max(most, abs(subscriber.index.num_blocks - before)), subscriber.index.num_blocks
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(others())
            publisher.publish(*stored)
            await until(knows(subscriber, num))
            assert subscriber.index.cached_tokens(PromptBlocks([*ids, 0])) == num
            publisher.publish(BlockRemoved(block_hashes=ids[1:], medium="GPU"))
            await until(knows(subscriber, 1))
            assert subscriber.index.cached_tokens(PromptBlocks([*ids, 0])) == 1
            looking.cancel()
        assert most <= STEP_BLOCKS
        assert subscriber.index.num_drops == 0


def test_what_waits_in_a_socket_has_bounds() -> None:
    """Of messages of any size: a publisher may send faster than anybody reads."""
    assert module.RECEIVE_QUEUE * module.MAX_MESSAGE_BYTES <= 512 << 20


async def test_more_batches_than_wait_in_a_socket() -> None:
    """A replay of all that an engine keeps does not fit in one: it is asked for until all of it is there."""
    num = 40 * module.RECEIVE_QUEUE
    async with KvPublisher() as publisher:
        for one in range(1, num + 1):
            publisher.publish(block(one, [one, 0], one - 1 or None), is_lost=True)
        async with following(publisher) as subscriber:
            await until(knows(subscriber, num))
            for one in range(num + 1, 2 * num + 1):
                publisher.publish(block(one, [one, 0], one - 1))
            await until(knows(subscriber, 2 * num))
            assert subscriber.index.num_drops == 0


async def test_a_restart_in_the_middle_of_a_large_batch() -> None:
    async with KvPublisher() as publisher, following(publisher) as subscriber:
        await until(knows(subscriber, 0))
        ids = list(range(1, 20_001))
        publisher.publish(BlockStored(block_hashes=ids, parent_block_hash=None, token_ids=ids, block_size=1))
        while not subscriber.index.num_blocks:  # noqa: ASYNC110
            await asyncio.sleep(0)
        subscriber.restarted()
        assert subscriber.index.num_blocks == 0
        await until(knows(subscriber, len(ids)))  # the publisher repeats what it has published


async def test_the_same_as_a_cache_while_batches_get_lost() -> None:
    dice = new_dice()
    cache, ids = PrefixCache(dice), [dice.randrange(3) for _ in range(50)]
    async with KvPublisher() as publisher, following(publisher) as subscriber:
        await publisher.subscribed()
        for _ in range(300):
            ids = [*ids[: dice.randrange(40)], *(dice.randrange(3) for _ in range(20))]
            cache.read(ids, again=dice.random() < 0.2)
            publisher.publish(*cache.take_events(), is_lost=dice.random() < 0.2)
            if dice.random() < 0.1:
                await asyncio.sleep(0)
        prompts = [ids[:end] for end in range(1, len(ids) + 1)]
        cached = [cache.cached_tokens(one) for one in prompts]
        # As many blocks as there are do not tell that the last batch was heard: it may have replaced some.
        await until(lambda: cached == [subscriber.index.cached_tokens(PromptBlocks(one)) for one in prompts])
        await until(knows(subscriber, len(set(cache.blocks))))
        assert subscriber.index.num_drops == 0
