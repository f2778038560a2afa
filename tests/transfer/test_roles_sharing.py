"""Chunks that are at the decoder already are not written again, and everybody reads the right bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import permutations

import pytest

from tests.fakes.reservations import named
from tests.fakes.transfer_world import (
    CHUNK,
    PAGE_BYTES,
    Decoder,
    Prefiller,
    World,
    fill,
    hold,
    next_held,
    settled,
    until,
)
from transfer import wire
from transfer.agents.mock import Fail, Hold, in_turn
from transfer.errors import AttemptLost, ReservationRefused, TransferError
from transfer.memory.reservations import Holding
from transfer.plan.blocks import page_table
from transfer.plan.keys import chunk_keys
from transfer.plan.layout import KvLayout, LayerKv
from transfer.plan.tags import tag_of
from transfer.roles import sender
from transfer.roles.push import Push

AB = named("a", "b")


async def push_pages(prefiller: Prefiller, push: Push, first_page: int = 0) -> int:
    """Fill every page, present or not. Returns the bytes that travelled."""
    fill(push, *range(first_page, first_page + len(push.table)))
    num_bytes, _ = await settled(asyncio.create_task(push.finish()))
    return int(num_bytes)


async def ready_pair(world: World, decoder: Decoder, prefiller: Prefiller) -> None:
    """`x` and `y` hold the same two chunks, which travelled once."""
    assert await push_pages(prefiller, await world.open(prefiller, decoder, "x", keys=AB)) == 2 * PAGE_BYTES
    await until(lambda: decoder.holding("x") is Holding.READY)
    second = await world.open(prefiller, decoder, "y", keys=AB)
    assert [second.is_present(ordinal) for ordinal in range(2)] == [True, True]
    assert await push_pages(prefiller, second, first_page=10) == 0
    await until(lambda: decoder.holding("y") is Holding.READY)
    assert decoder.pages.get("x").pages == decoder.pages.get("y").pages


# ── there already ───────────────────────────────────────────────────────────────────────────────────────────────────

ENDS = ["x consumed", "x cancelled", "y consumed", "y cancelled"]


@pytest.mark.parametrize(("first", "then"), [(a, b) for a, b in permutations(ENDS, 2) if a[0] != b[0]])
async def test_what_is_shared_outlives_either_of_its_owners(world: World, first: str, then: str) -> None:
    decoder, prefiller = await world.decoder(num_pages=3), world.prefiller()
    await ready_pair(world, decoder, prefiller)
    assert decoder.pages.num_free == 1
    for end, num_free in ((first, 1), (then, 3)):
        attempt, how = end.split()
        if how == "consumed":
            assert decoder.bytes_of(await decoder.read(attempt)) == [1, 2]
            decoder.receiver.consumed(attempt)
        else:
            assert decoder.receiver.cancel(attempt)
        assert decoder.pages.num_free == num_free
        decoder.pages.check_integrity()


async def test_both_read_at_the_same_time(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    await ready_pair(world, decoder, prefiller)
    assert [decoder.bytes_of(await decoder.read(attempt)) for attempt in "xy"] == [[1, 2], [1, 2]]
    for attempt in "yx":
        decoder.receiver.consumed(attempt)


async def test_what_was_consumed_can_be_found_until_its_page_is_needed(world: World) -> None:
    decoder, prefiller = await world.decoder(num_pages=3), world.prefiller()
    await ready_pair(world, decoder, prefiller)
    for attempt in "xy":
        decoder.receiver.cancel(attempt)
    again = await world.open(prefiller, decoder, "again", keys=AB)
    assert again.is_present(0)
    assert await push_pages(prefiller, again) == 0
    assert decoder.bytes_of(await decoder.read("again")) == [1, 2]
    decoder.receiver.consumed("again")
    others = await world.open(prefiller, decoder, "others", 3, keys=named("c", "d", "e"))
    await push_pages(prefiller, others, first_page=20)
    decoder.receiver.cancel("others")
    await world.proxy.next(wire.KvReleased, "others")
    anew = await world.open(prefiller, decoder, "anew", keys=AB)
    assert not anew.is_present(0)
    assert await push_pages(prefiller, anew, first_page=30) == 2 * PAGE_BYTES
    assert decoder.bytes_of(await decoder.read("anew")) == [31, 32]
    decoder.receiver.consumed("anew")


async def test_the_same_beginning_of_another_prompt(world: World) -> None:
    """Only what is new travels, into pages of its own."""
    decoder, prefiller = await world.decoder(num_pages=6), world.prefiller()
    table = page_table(prefiller.layout.kv.groups, 3 * CHUNK, CHUNK)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, *tail] for tail in ([9, 9, 9, 9], [10, 9, 9, 9])]
    for attempt, prompt, first_page, num_new in (("x", prompts[0], 0, 3), ("y", prompts[1], 10, 1)):
        push = await world.open(prefiller, decoder, attempt, 3, keys=chunk_keys(prompt, table))
        assert [push.is_present(ordinal) for ordinal in range(3)].count(False) == num_new
        assert await push_pages(prefiller, push, first_page) == num_new * PAGE_BYTES
    pages = {attempt: await decoder.read(attempt) for attempt in "xy"}
    assert decoder.bytes_of(pages["x"]) == [1, 2, 3]
    assert decoder.bytes_of(pages["y"]) == [1, 2, 13]
    assert len(set(pages["x"]) & set(pages["y"])) == 2
    for attempt in "xy":
        decoder.receiver.consumed(attempt)
    assert decoder.pages.statistics()["writes_saved"] == 2


async def test_a_block_that_the_prompt_does_not_fill_is_written_again(world: World) -> None:
    decoder, prefiller = await world.decoder(num_pages=6), world.prefiller()
    prompt = list(range(2 * CHUNK - 1))
    table = page_table(prefiller.layout.kv.groups, len(prompt), CHUNK)
    for attempt, num_new in (("x", 2), ("y", 1)):
        params = world.params(decoder, attempt)
        push = await prefiller.sender.open(params, num_tokens=len(prompt), keys=chunk_keys(prompt, table))
        assert await push_pages(prefiller, push) == num_new * PAGE_BYTES
        await until(lambda a=attempt: decoder.holding(a) is Holding.READY)  # type: ignore[misc]
    for attempt in "xy":
        decoder.receiver.cancel(attempt)


WINDOWED = KvLayout((LayerKv(1, 2, 2, "sliding", 4), LayerKv(1, 2, 2)), 2, 8, "int64")


@pytest.mark.parametrize(("second", "num_shared"), [(8, 4 + 2), (10, 4)], ids=["the same prompt", "a longer one"])
async def test_a_windows_tail_is_shared_by_the_same_prompt_only(world: World, second: int, num_shared: int) -> None:
    decoder = await world.decoder_ranks(WINDOWED, 1, 20)
    (prefiller,) = world.prefiller_ranks(WINDOWED, 1)
    present: list[int] = []
    for attempt, num_tokens in (("x", 8), ("y", second)):
        table = page_table(WINDOWED.groups, num_tokens, 2)
        keys = chunk_keys(range(num_tokens), table)
        push = await prefiller.sender.open(world.params(decoder, attempt), num_tokens=num_tokens, keys=keys)
        present = [ordinal for ordinal in range(len(table)) if push.is_present(ordinal)]
        prefiller.compute(table)
        await push_pages(prefiller, push)
        await until(lambda a=attempt: decoder.holding(a) is Holding.READY)  # type: ignore[misc]
    assert len(present) == num_shared
    for attempt, num_tokens in (("x", 8), ("y", second)):
        pages = await decoder.read(attempt)
        if attempt == "x" or second == 8:
            decoder.check_elements(page_table(WINDOWED.groups, num_tokens, 2), pages)
        decoder.receiver.consumed(attempt)


async def test_what_is_shared_is_shared_on_every_rank(world: World) -> None:
    """The other ranks are told who has written each page, and find its tag there: of two attempts in one prompt."""
    kv = KvLayout((LayerKv(2, 2, 2),) * 2, CHUNK, 8, "int64")
    decoder = await world.decoder_ranks(kv, 2)
    (whole,), halves = world.prefiller_ranks(kv, 1), world.prefiller_ranks(kv, 2)
    table = page_table(kv.groups, 2 * CHUNK, CHUNK)
    for prefiller in (whole, *halves):
        prefiller.compute(table)
    await push_pages(whole, await world.open(whole, decoder, "x", keys=AB))
    await decoder.read("x")
    decoder.receiver.consumed("x")
    decoder.pages._pool.leave("z", decoder.pages._pool.allocate(3, "z"))  # all pages but the prompt's first are others'
    pushes = [await world.open(prefiller, decoder, "y", keys=AB) for prefiller in halves]
    assert [[push.is_present(ordinal) for ordinal in range(2)] for push in pushes] == [[True, False]] * 2
    sent = [await push_pages(prefiller, push) for prefiller, push in zip(halves, pushes, strict=True)]
    assert sent == [decoder.layout.page_bytes] * 2
    pages = await decoder.read("y")
    decoder.check_elements(table, pages)
    written = decoder.receiver.written("y")
    assert [(one.pages, one.tag, one.num_senders) for one in written] == [
        ([(pages[0], 1)], tag_of("x"), 1),
        ([(pages[1], 1)], tag_of("y"), 2),
    ]
    decoder.receiver.consumed("y")


# ── not there yet ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("first_ends", ["well", "badly", "later"])
async def test_what_is_still_being_written_is_written_again(world: World, first_ends: str) -> None:
    """A copy of one's own: neither waits for the other, and a failure takes nobody else with it."""
    decoder, prefiller = await world.decoder(), world.prefiller()
    prefiller.agent.script = hold
    first = await world.open(prefiller, decoder, "x", keys=AB)
    fill(first, 0, 1)
    write = await next_held(prefiller.agent)
    prefiller.agent.script = in_turn()
    second = await world.open(prefiller, decoder, "y", keys=AB)
    assert not second.is_present(0)
    if first_ends == "badly":
        write.fail(TransferError("broken"), landed=0.5)
        await world.proxy.next(wire.KvReleased, "x")
    elif first_ends == "well":
        write.land()
        await first.finish()
    assert await push_pages(prefiller, second, first_page=10) == 2 * PAGE_BYTES
    assert decoder.bytes_of(await decoder.read("y")) == [11, 12]
    decoder.receiver.consumed("y")
    if first_ends == "later":
        write.land()
        await first.finish()
    if first_ends != "badly":
        assert decoder.bytes_of(await decoder.read("x")) == [1, 2]
        decoder.receiver.consumed("x")
    third = await world.open(prefiller, decoder, "z", keys=AB)
    assert third.is_present(0)
    await push_pages(prefiller, third)
    expected = [1, 2] if first_ends == "well" else [11, 12]
    assert decoder.bytes_of(await decoder.read("z")) == expected
    decoder.receiver.consumed("z")


@pytest.mark.parametrize("how", ["its write fails", "it is cancelled", "it is aborted"])
async def test_a_failed_first_write_poisons_nothing(world: World, how: str) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    prefiller.agent.script = in_turn(Fail(TransferError("broken"), landed=0.5) if "fails" in how else Hold())
    first = await world.open(prefiller, decoder, "x", keys=AB)
    fill(first, 40, 41)
    if "fails" not in how:
        write = await next_held(prefiller.agent)
        if how == "it is cancelled":
            decoder.receiver.cancel("x")
        else:
            first.abort("not needed")
        await first.failed.wait()
        write.land()
    with pytest.raises(AttemptLost):
        await settled(asyncio.create_task(first.finish()))
    await world.proxy.next(wire.KvReleased, "x")
    second = await world.open(prefiller, decoder, "y", keys=AB)
    assert not second.is_present(0)
    assert await push_pages(prefiller, second) == 2 * PAGE_BYTES
    assert decoder.bytes_of(await decoder.read("y")) == [1, 2]
    decoder.receiver.consumed("y")


async def test_shared_pages_that_a_failure_leaves_are_given_to_who_waits_at_once(world: World) -> None:
    """One of two writers is still under way: its own pages stay in quarantine, what it only shared does not."""
    kv = KvLayout((LayerKv(2, 2, 2),), CHUNK, 8, "int64")
    decoder = await world.decoder_ranks(kv, 1, 3)
    one, other = world.prefiller_ranks(kv, 2)
    for prefiller in (one, other):
        prefiller.mute()
    before = [await world.open(prefiller, decoder, "x", keys=AB) for prefiller in (one, other)]
    for prefiller, push in zip((one, other), before, strict=True):
        await push_pages(prefiller, push)
    await decoder.read("x")
    decoder.receiver.consumed("x")
    pushes = [await world.open(prefiller, decoder, "y", 3, keys=[*AB, b""]) for prefiller in (one, other)]
    other.agent.script = hold
    pushes[1].page_filled(2, 2)
    write = await next_held(other.agent)
    waiting = asyncio.create_task(world.open(one, decoder, "next", 2))
    await until(lambda: decoder.pages.num_queued == 1)
    pushes[0].abort("not needed")
    granted = await settled(waiting)
    assert decoder.pages.num_quarantined == 1
    write.land()
    await world.proxy.next(wire.KvReleased, "y")
    granted.abort("not needed")
    await world.proxy.next(wire.KvReleased, "next")


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (named("a", "a"), "same key"),
        (named("a", "b", "c"), "3 keys"),
    ],
)
async def test_keys_that_name_no_pages_are_refused(world: World, keys: Sequence[bytes], why: str) -> None:
    decoder = await world.decoder()
    raw = world.stranger(decoder)
    refusal = await raw.reserve(keys=list(keys))
    assert isinstance(refusal, wire.Refusal)
    assert why in refusal.reason
    assert decoder.pages.get("a") is None
    if len(keys) != 2:
        with pytest.raises(TransferError, match=f"{len(keys)} keys for 2 pages"):
            await world.open(world.prefiller(), decoder, keys=keys)
    elif len(set(keys)) == 1:
        with pytest.raises(ReservationRefused, match="same key"):
            await world.open(world.prefiller(), decoder, keys=keys)


async def test_a_sender_names_all_of_its_pages_or_none(world: World) -> None:
    with pytest.raises(TransferError, match="1 keys for 2 pages"):
        await world.open(world.prefiller(), await world.decoder(), keys=named("a"))


async def test_pages_behind_the_last_key_are_not_shared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender leaves the keys away that do not fit into a message."""
    decoder, prefiller = await world.decoder(8), world.prefiller()
    keys = named(*"abc")
    monkeypatch.setattr(sender, "MAX_KEYS_BYTES", 2 * (len(keys[0]) + 2))
    first = await world.open(prefiller, decoder, "a", num_pages=3, keys=keys)
    assert await push_pages(prefiller, first) == 3 * PAGE_BYTES
    second = await world.open(prefiller, decoder, "b", num_pages=3, keys=keys)
    assert await push_pages(prefiller, second, 10) == PAGE_BYTES
    for attempt, content in (("a", [1, 2, 3]), ("b", [1, 2, 13])):
        assert decoder.bytes_of(await decoder.read(attempt)) == content
        decoder.receiver.consumed(attempt)


async def test_a_prompt_with_more_keys_than_fit_into_a_message_is_granted(world: World) -> None:
    """The receiver's connection would be dropped unread, and the sender would wait out its time."""
    keys = [b"%016d" % number for number in range(59_000)]
    decoder = await world.decoder(70_000)
    push = await world.open(world.prefiller(), decoder, num_pages=len(keys), keys=keys)
    reservation = decoder.pages.get("a")
    assert list(reservation.keys) == keys[: len(reservation.keys)]
    assert 25_000 < len(reservation.keys) < len(keys)
    push.abort("seen")
    await push.wait_ended()


async def test_a_prompt_of_more_pages_than_a_message_can_name_is_refused_at_home(world: World) -> None:
    decoder = await world.decoder()
    with pytest.raises(TransferError, match="100001 pages are more than the 100000 of one attempt; use larger pages"):
        await world.open(world.prefiller(), decoder, num_pages=100_001)


async def test_a_key_that_no_receiver_would_read_is_refused_at_home(world: World) -> None:
    with pytest.raises(TransferError, match="a key of 65 bytes"):
        await world.open(world.prefiller(), await world.decoder(), keys=[b"x" * 65, b""])


async def test_private_pages_may_be_many(world: World) -> None:
    decoder, prefiller = await world.decoder(), world.prefiller()
    for attempt in "xy":
        push = await world.open(prefiller, decoder, attempt, keys=named("", ""))
        assert not push.is_present(0)
        assert await push_pages(prefiller, push) == 2 * PAGE_BYTES
    for attempt in "xy":
        await decoder.read(attempt)
        decoder.receiver.consumed(attempt)
