"""Tags: where they lie, which spans carry them, and what a receiver makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.fakes.transfer_world import PATIENT, World, fill, hold, new_world, next_held
from transfer import wire
from transfer.agents.base import TAG_BYTES, TAG_COPIES
from transfer.errors import AttemptLost
from transfer.memory.buffer import PagedBuffer
from transfer.memory.page_tags import PageTags
from transfer.plan.layout import KvLayout
from transfer.plan.spans import SpanMap
from transfer.plan.tags import TAG_SLOTS, slab_bytes, tag_of, tag_spans


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with new_world() as world:
        yield world


def stamped(buffer: PagedBuffer, slot: int, pages: list[int], attempt: str) -> None:
    """Write tags as an agent does: byte by byte, where the spans say."""
    slab = np.concatenate([buffer.pages.numpy().reshape(-1), buffer.tags.numpy().reshape(-1)])
    strip = tag_of(attempt) * TAG_COPIES
    for here, there, size in tag_spans(slot, pages, buffer.num_pages, buffer.page_bytes).tolist():
        assert there + size <= slab_bytes(buffer.num_pages, buffer.page_bytes) == len(slab)
        slab[there : there + size] = np.frombuffer(strip[here : here + size], dtype=np.uint8)
    tail = slab[buffer.num_pages * buffer.page_bytes :]
    buffer.tags.numpy().reshape(-1)[:] = tail


@pytest.mark.parametrize("pages", [[3], [0, 1, 2], [7, 2, 5], list(range(150)), [149, 0]], ids=len)
@pytest.mark.parametrize("slot", [0, TAG_SLOTS - 1])
def test_the_spans_of_tags_reach_their_pages_and_no_other(pages: list[int], slot: int) -> None:
    buffer = PagedBuffer(150, 24)
    stamped(buffer, slot, pages, "a")
    is_tagged = (buffer.tags.numpy() == np.frombuffer(tag_of("a"), dtype=np.uint8)).all(axis=2)
    assert sorted(pages) == np.flatnonzero(is_tagged[slot]).tolist()
    assert is_tagged.sum() == len(pages)
    assert not buffer.pages.any()


def test_tags_of_neighbours_are_few_spans() -> None:
    assert len(tag_spans(0, list(range(TAG_COPIES)), 1000, 64)) == 1
    assert len(tag_spans(0, list(range(10 * TAG_COPIES)), 1000, 64)) == 10
    assert tag_spans(0, list(range(100))[::-1], 1000, 64)[:, 2].sum() == 100 * TAG_BYTES


def test_a_page_is_wrong_until_every_writer_has_written_its_tag() -> None:
    buffer = PagedBuffer(4, 64)
    tags = PageTags(buffer.tags, lambda num_senders: num_senders)
    assert tags.wrong([0, 1, 2, 3]) == [], "nobody has written them, and nobody asks"
    tags.expect([1, 2], tag_of("a"), 2)
    assert tags.wrong([0, 1, 2]) == [1, 2]
    stamped(buffer, 0, [1, 2], "a")
    assert tags.wrong([1, 2]) == [1, 2]
    stamped(buffer, 1, [1, 2], "a")
    assert tags.wrong([1, 2]) == []
    stamped(buffer, 0, [2], "b")
    assert tags.wrong([1, 2]) == [2], "one of two writers came late, into a slot of its own"
    assert tags.wrong([0, 1, 2, 3, 1]) == [2], "as for many"
    assert tags.wrong([]) == []
    stamped(buffer, 0, [0, 3], "b")
    assert tags.wrong([0, 3]) == tags.wrong([0, 0, 0, 3, 3, 3]) == [], "still nobody asks"


def test_what_one_rank_knows_of_pages_another_can_be_told() -> None:
    """In order, equal neighbours together; each rank has as many slots of a page as ranks write to it there."""
    here, there = PagedBuffer(9, 64), PagedBuffer(12, 32)
    known, told = PageTags(here.tags, lambda num_senders: num_senders), PageTags(there.tags, lambda num_senders: 1)
    known.expect([6, 7, 2], tag_of("a"), 2)
    known.expect([3], tag_of("a"), 1)
    known.expect([4], tag_of("b"), 1)
    order = [4, 6, 7, 2, 3, 0]
    written = known.who_wrote(order)
    assert [(one.pages, one.tag[:4], one.num_senders) for one in written] == [
        ([(4, 1)], tag_of("b")[:4], 1),
        ([(6, 2), (2, 1)], tag_of("a")[:4], 2),
        ([(3, 1)], tag_of("a")[:4], 1),
        ([(0, 1)], bytes(4), 0),
    ]
    assert told.expect_all(written) == order
    assert told.wrong(order) == order[:-1], "of the last one nothing is known"
    stamped(there, 0, [6, 7, 2, 3], "a")
    stamped(there, 0, [4], "b")
    assert told.wrong(order) == []
    assert known.who_wrote([]) == told.expect_all([]) == []


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (4, 2), (2, 4), (16, 1), (8, 8)])
def test_ranks_that_write_one_page_have_slots_of_their_own(senders: int, receivers: int) -> None:
    kv = KvLayout.uniform(num_layers=2, num_kv_heads=16, head_dim=8, chunk_size=4, dtype="float16", element_bytes=2)
    for reader in range(receivers):
        maps = [SpanMap(kv.of_rank(senders, index), kv.of_rank(receivers, reader)) for index in range(senders)]
        slots = [one.tag_slot for one in maps if any(one.page_bytes)]
        assert sorted(slots) == sorted(index % TAG_SLOTS for index in range(len(slots)))


async def test_a_late_write_is_seen_at_take_and_its_chunks_are_forgotten(world: World) -> None:
    """Nobody else is told that the chunk is here, and the next attempt writes it anew."""
    decoder, prefiller = await world.decoder(num_pages=2, config=PATIENT), world.prefiller()
    prefiller.agent.script = hold
    late = await world.open(prefiller, decoder, "late")
    fill(late, 0, 1)
    write = await next_held(prefiller.agent)
    (identity,) = decoder.pages.writers
    decoder.receiver.cancel("late")
    for change in decoder.pages.writer_gone(identity):  # the mistake
        decoder.receiver._follow(change)
    other = world.prefiller()
    push = await world.open(other, decoder, "a", keys=[b"x", b"y"])
    fill(push, 5, 6)
    await push.finish()
    await decoder.receiver.wait_ready("a")
    write.land()
    with pytest.raises(AttemptLost, match="2 of the 2 pages of attempt a were not written by it last"):
        decoder.receiver.take("a")
    assert decoder.receiver.num_wrong_tags == 1
    assert "not written by it last" in (await world.proxy.next(wire.KvFailed, "a")).reason
    await world.proxy.next(wire.KvReleased, "a")
    again = await world.open(other, decoder, "b", keys=[b"x", b"y"])
    assert not again.is_present(0)
    fill(again, 5, 6)
    await again.finish()
    assert decoder.bytes_of(await decoder.read("b")) == [6, 7]
    decoder.receiver.check_tags("b")
    decoder.receiver.consumed("b")


async def test_a_late_write_behind_take_is_seen_behind_the_copy(world: World) -> None:
    decoder, prefiller = await world.decoder(num_pages=2, config=PATIENT), world.prefiller()
    push = await world.open(prefiller, decoder, "a", keys=[b"x", b"y"])
    fill(push, 5, 6)
    await push.finish()
    pages = await decoder.read("a")
    await asyncio.to_thread(decoder.receiver.check_tags, "a")
    stamped(decoder.buffer, 0, [pages[1]], "another")
    with pytest.raises(AttemptLost, match="1 of the 2 pages"):
        await asyncio.to_thread(decoder.receiver.check_tags, "a")
    decoder.receiver.consumed("a")
    again = await world.open(prefiller, decoder, "b", keys=[b"x", b"y"])
    assert not again.is_present(0)
    again.abort("seen enough")


async def test_shared_pages_keep_the_tag_of_whoever_wrote_them(world: World) -> None:
    decoder, prefiller = await world.decoder(num_pages=4, config=PATIENT), world.prefiller()
    for attempt in ("a", "b"):
        push = await world.open(prefiller, decoder, attempt, keys=[b"x", b"y"])
        fill(push, 5, 6)
        await push.finish()
        assert decoder.bytes_of(await decoder.read(attempt)) == [6, 7]
        decoder.receiver.check_tags(attempt)
        decoder.receiver.consumed(attempt)
    assert push.is_present(0)
    assert decoder.receiver.num_wrong_tags == 0
