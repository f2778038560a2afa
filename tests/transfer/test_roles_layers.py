"""What is filled: pages and layers in any order, of several groups, and in which writes they travel."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.fakes.transfer_world import (
    LIMIT_S,
    PAGE_BYTES,
    PATIENT,
    Decoder,
    Prefiller,
    World,
    fill,
    hold,
    new_world,
    next_held,
    settled,
    until,
)
from tests.helpers.events import Broken, Happening
from transfer import wire
from transfer.agents.mock import Land, MockWrite
from transfer.errors import AttemptLost, IllegalTransition, TransferError
from transfer.plan.layout import KvLayout, LayerKv
from transfer.roles import rank_push
from transfer.roles.handshake import Identity
from transfer.roles.push import Push

DEEP = KvLayout((LayerKv(2, 3, 2),) * 4, 2, 8, "int64")
HYBRID = KvLayout((LayerKv(1, 1, 1, "sliding", 5), LayerKv(1, 1, 1), LayerKv(1, 1, 1, "sliding", 5)), 2, 8, "int64")
STATES = KvLayout((LayerKv(1, 1, 1), LayerKv(1, 0, 0, "linear", None, 80), LayerKv(1, 1, 1)), 2, 8, "int64")


async def open_deep(
    world: World, kv: KvLayout, num_tokens: int, attempt: str = "a", num_pages: int = 12
) -> tuple[Decoder, Prefiller, Push]:
    """One decoder, one prefiller with the whole prompt computed, and a push with pages for it."""
    identity = Identity("tiny", kv.of_rank())
    decoder, prefiller = await world.decoder(num_pages, identity=identity), world.prefiller(identity)
    push = await prefiller.sender.open(world.params(decoder, attempt), num_tokens=num_tokens)
    if kv is not STATES:
        prefiller.compute(push.table)
    return decoder, prefiller, push


def count_writes(prefiller: Prefiller) -> list[MockWrite]:
    writes: list[MockWrite] = []

    def note(write: MockWrite) -> Land:
        writes.append(write)
        return Land()

    prefiller.agent.script = note
    return writes


async def check_arrived(decoder: Decoder, push: Push) -> None:
    async with asyncio.timeout(LIMIT_S):
        await push.finish()
    decoder.check_elements(push.table, await decoder.read("a"))
    decoder.receiver.consumed("a")


async def drop(world: World, push: Push) -> None:
    push.abort("not needed")
    await world.proxy.next(wire.KvReleased, "a")


# ── in any order, once ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ["layer by layer", "page by page", "backwards", "two by two", "mixed with pages"])
async def test_layers_in_any_order(world: World, order: str) -> None:
    decoder, _, push = await open_deep(world, DEEP, 6)
    steps = [(ordinal, layer, layer + 1) for layer in range(4) for ordinal in range(3)]
    if order == "page by page":
        steps.sort()
    elif order == "backwards":
        steps.reverse()
    elif order == "two by two":
        steps = [(ordinal, layer, layer + 2) for layer in (2, 0) for ordinal in range(3)]
    elif order == "mixed with pages":
        steps = [(0, 1, 4), (2, 0, 4), (1, 3, 4), (0, 0, 1), (1, 0, 3)]
    for ordinal, first, end in steps[:-1]:
        if (first, end) == (0, 4):
            push.page_filled(ordinal, ordinal)
        else:
            push.layers_filled(ordinal, ordinal, first, end)
        await asyncio.sleep(0)
    finishing = asyncio.create_task(push.finish())
    await until(lambda: push._ranks[0].is_quiet)
    assert not finishing.done(), "one step is missing"
    push.layers_filled(steps[-1][0], steps[-1][0], *steps[-1][1:])
    await settled(finishing)
    await check_arrived(decoder, push)


async def test_a_layer_leaves_as_soon_as_it_is_filled(world: World) -> None:
    decoder, prefiller, push = await open_deep(world, DEEP, 4)
    prefiller.agent.script = hold
    for ordinal in range(2):
        push.layers_filled(ordinal, ordinal, 1, 2)
    write = await next_held(prefiller.agent)
    assert write.num_bytes == 2 * decoder.layout.page_bytes // 4
    write.land()
    prefiller.agent.script = lambda write: Land()
    for ordinal in range(2):
        push.layers_filled(ordinal, ordinal, 0, 1)
        push.layers_filled(ordinal, ordinal, 2, 4)
    await check_arrived(decoder, push)


async def test_what_is_filled_twice_or_is_not_there_changes_nothing(world: World) -> None:
    decoder, _, push = await open_deep(world, DEEP, 6)
    push.layers_filled(1, 1, 1, 3)
    before = push._filled.copy()
    illegal: list[Callable[[], None]] = [
        lambda: push.layers_filled(1, 1, 2, 4),
        lambda: push.page_filled(1, 1),
        lambda: push.pages_filled([0, 1], [0, 1]),  # the first of them had been all right
    ]
    for step in illegal:
        with pytest.raises(IllegalTransition, match="were filled twice"):
            step()
    wrong: list[Callable[[], None]] = [
        lambda: push.layers_filled(0, 0, 2, 2),
        lambda: push.layers_filled(0, 0, 3, 1),
        lambda: push.layers_filled(0, 0, -1, 1),
        lambda: push.layers_filled(0, 0, 3, 5),
        lambda: push.page_filled(3, 0),
        lambda: push.page_filled(-1, 0),
        lambda: push.pages_filled([0, 2], [0]),
        lambda: push.pages_filled([0, 0], [0, 1]),
    ]
    for step in wrong:
        with pytest.raises(TransferError):
            step()
    assert (push._filled == before).all()
    push.pages_filled([], [])
    push.pages_filled(np.array([0, 2]), np.array([0, 2]))  # type: ignore[arg-type]
    push.layers_filled(np.int64(1), 1, 3, 4)  # type: ignore[arg-type]
    push.layers_filled(1, 1, 0, 1)
    with pytest.raises(IllegalTransition):
        push.page_filled(0, 0)
    await check_arrived(decoder, push)


async def test_a_local_page_that_is_not_there_fails_the_push(world: World) -> None:
    _, _, push = await open_deep(world, DEEP, 6)
    push.page_filled(0, 1_000_000)
    with pytest.raises(AttemptLost):
        await settled(asyncio.create_task(push.finish()))
    await world.proxy.next(wire.KvReleased, "a")


# ── several groups ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 11, 12, 13])
@pytest.mark.parametrize("by_layer", [False, True])
async def test_pages_of_several_groups(world: World, num_tokens: int, by_layer: bool) -> None:
    """Of the windowed groups only the tail has pages, and only what has pages travels."""
    decoder, _, push = await open_deep(world, HYBRID, num_tokens, num_pages=20)
    for ordinal, at in reversed(list(enumerate(push.table.pages))):
        if by_layer:
            for layer in range(push.table.groups[at.group].num_layers):
                push.layers_filled(ordinal, ordinal, layer, layer + 1)
        else:
            push.page_filled(ordinal, ordinal)
    num_bytes, _ = await settled(asyncio.create_task(push.finish()))
    assert num_bytes == sum(decoder.layout.groups[at.group].num_bytes for at in push.table.pages)
    await check_arrived(decoder, push)


async def test_pages_of_two_groups_are_not_filled_in_one_call(world: World) -> None:
    _, _, push = await open_deep(world, HYBRID, 12)
    assert len({at.group for at in push.table.pages[-2:]}) == 2
    last = len(push.table) - 1
    with pytest.raises(TransferError, match="one group at a time"):
        push.pages_filled([last - 1, last], [0, 1])
    assert not push._filled.any()
    await drop(world, push)


async def test_a_state_is_filled_page_by_page(world: World) -> None:
    """Its layers mean nothing to its pages."""
    identity = Identity("tiny", STATES.of_rank())
    decoder, prefiller = await world.decoder(8, identity=identity), world.prefiller(identity)
    push = await prefiller.sender.open(world.params(decoder), num_tokens=4)
    state = [o for o, at in enumerate(push.table.pages) if push.table.groups[at.group].kind == "linear"]
    assert len(state) == 2
    with pytest.raises(TransferError, match="1 layers to fill"):
        push.layers_filled(state[0], 0, 1, 2)
    for ordinal in range(len(push.table)):
        push.page_filled(ordinal, ordinal)
    await settled(asyncio.create_task(push.finish()))
    pages = await decoder.read("a")
    size, page_bytes = decoder.layout.groups[-1].num_bytes, decoder.layout.page_bytes
    found = b"".join(decoder.buffer.pages[pages[ordinal]].numpy().tobytes() for ordinal in state)[:size]
    assert found == b"".join(bytes([ordinal + 1]) * page_bytes for ordinal in state)[:size]
    decoder.receiver.consumed("a")


# ── in which writes ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_burst_is_one_write(world: World) -> None:
    decoder, prefiller, push = await open_deep(world, DEEP, 12)
    await asyncio.sleep(0)
    writes = count_writes(prefiller)
    for ordinal in range(6):
        push.page_filled(ordinal, ordinal)
    await check_arrived(decoder, push)
    assert [(write.num_bytes, len(write.spans)) for write in writes] == [(6 * decoder.layout.page_bytes, 1)]


async def test_layers_of_many_pages_are_one_write(world: World) -> None:
    decoder, prefiller, push = await open_deep(world, DEEP, 12)
    await asyncio.sleep(0)
    writes = count_writes(prefiller)
    for layer in range(4):
        for ordinal in range(6):
            push.layers_filled(ordinal, ordinal, layer, layer + 1)
        await until(lambda n=layer: len(writes) == n + 1)  # type: ignore[misc]
    await check_arrived(decoder, push)
    assert len(writes) == 4


async def test_writes_are_of_limited_size_and_few_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prefiller, push = await open_deep(world, DEEP, 20)
    monkeypatch.setattr(rank_push, "MAX_WRITE_BYTES", int(2.5 * decoder.layout.page_bytes))
    prefiller.agent.script = hold
    push.pages_filled(range(7), range(7))
    for ordinal in range(7, 10):
        push.layers_filled(ordinal, ordinal, 0, 3)
        push.layers_filled(ordinal, ordinal, 3, 4)
    sizes = []
    while not push._ranks[0].is_complete:
        await until(lambda: push._ranks[0].is_complete or len(world.fabric.under_way) > 0)
        await asyncio.sleep(0)
        under_way = world.fabric.under_way
        assert len(under_way) <= rank_push.MAX_UNDER_WAY
        sizes.append(under_way[0].num_bytes)
        under_way[0].land()
        await asyncio.sleep(0.001)
    assert max(sizes) <= rank_push.MAX_WRITE_BYTES
    assert sum(sizes) == 10 * decoder.layout.page_bytes
    assert len(sizes) == 5, "and they are not smaller than need be"
    await check_arrived(decoder, push)


async def test_a_gpu_has_the_next_writes_before_it_has_done_the_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_push, "HEAD_START_S", 3600.0)
    decoder, prefiller, push = await open_deep(world, DEEP, 20)
    rank = push._ranks[0]
    rank._slab = msgspec.structs.replace(rank._slab, memory="VRAM")
    monkeypatch.setattr(rank_push, "MAX_WRITE_BYTES", decoder.layout.page_bytes)
    prefiller.agent.script = hold
    push.pages_filled(range(10), range(10))
    await until(lambda: len(world.fabric.under_way) == rank_push.MAX_UNDER_WAY_ON_GPU)
    await asyncio.sleep(0.001)
    assert len(world.fabric.under_way) == rank_push.MAX_UNDER_WAY_ON_GPU, "and no more"
    prefiller.agent.script = lambda write: Land()
    for write in list(world.fabric.under_way):
        write.land()
    await check_arrived(decoder, push)


async def test_a_first_write_is_small_and_none_has_too_many_pages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the pages are: preparing a write takes the longer, the more it has."""
    monkeypatch.setattr(rank_push, "FIRST_WRITE_PAGES", 2)
    monkeypatch.setattr(rank_push, "MAX_WRITE_PAGES", 3)
    decoder, prefiller, push = await open_deep(world, DEEP, 18)
    writes = count_writes(prefiller)
    push.pages_filled(range(9), range(9))
    await check_arrived(decoder, push)
    assert [write.num_bytes // decoder.layout.page_bytes for write in writes] == [2, 3, 3, 1]


async def test_a_page_larger_than_a_write_should_be_travels_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_push, "MAX_WRITE_BYTES", 1)
    decoder, prefiller, push = await open_deep(world, DEEP, 6)
    writes = count_writes(prefiller)
    push.pages_filled(range(3), range(3))
    await check_arrived(decoder, push)
    assert [write.num_bytes for write in writes] == [decoder.layout.page_bytes] * 3


@pytest.mark.parametrize("lands", [True, False])
async def test_nothing_is_posted_after_an_abort(world: World, monkeypatch: pytest.MonkeyPatch, lands: bool) -> None:
    monkeypatch.setattr(rank_push, "MAX_WRITE_BYTES", PAGE_BYTES)
    decoder, prefiller = await world.decoder(8), world.prefiller()
    posted: list[MockWrite] = []

    def note(write: MockWrite) -> Any:
        posted.append(write)
        return hold(write)

    prefiller.agent.script = note
    push = await world.open(prefiller, decoder, num_pages=8)
    fill(push, *range(6))
    await until(lambda: len(posted) == 2)
    fill(push, 6)
    push.abort("not needed")
    fill(push, 7)  # whoever computes has not heard of it yet
    for write in list(posted):
        if lands:
            write.land()
        else:
            write.fail(TransferError("late"))
    await push.wait_ended()
    assert push.failure == "not needed"
    await world.proxy.next(wire.KvReleased, "a")
    assert len(posted) == 2


async def test_an_abort_while_a_page_is_about_to_be_asked_for(world: World) -> None:
    """Where pages are granted one by one: the asker has not run yet, and must not ask for a push that is over."""
    decoder = await world.decoder(4, config=replace(PATIENT, whole_requests=False))
    prefiller = world.prefiller()
    push = await world.open(prefiller, decoder, num_pages=2)
    fill(push, 0, 1)
    push.abort("not needed")
    await push.wait_ended()
    await world.proxy.next(wire.KvReleased, "a")
    await until(lambda: not prefiller.sender._tasks)
    assert not any(session._open for session in prefiller.sender._sessions.values())


# ── when the bytes may be read ──────────────────────────────────────────────────────────────────────────────────────


async def test_bytes_move_after_their_event(world: World) -> None:
    """What is there when `after` has happened is what arrives. Pages that need not wait for it arrive long before."""
    decoder, prefiller, push = await open_deep(world, DEEP, 6)
    prefiller.compute(push.table)
    prefiller.slab.pages[0] = 0
    is_computed = Happening(then=lambda: prefiller.compute(push.table))
    push.layers_filled(0, 0, 0, 4, after=is_computed)
    push.pages_filled([1, 2], [1, 2])
    await until(lambda: sum(receipt.num_bytes for receipt in push._ranks[0].receipts) == 2 * decoder.layout.page_bytes)
    assert is_computed.num_asked > 0
    is_computed.set()
    await check_arrived(decoder, push)


async def test_what_waits_for_the_same_event_travels_together(world: World) -> None:
    decoder, prefiller, push = await open_deep(world, DEEP, 12)
    await asyncio.sleep(0)
    writes = count_writes(prefiller)
    order: list[str] = []
    one, other = Happening(then=lambda: order.append("one")), Happening(then=lambda: order.append("other"))
    for ordinal in range(2):
        push.page_filled(ordinal, ordinal, after=one)
    for ordinal in range(2, 4):
        push.page_filled(ordinal, ordinal, after=other)
    push.pages_filled([4, 5], [4, 5])
    one.set()
    await until(lambda: order == ["one"])
    other.set()
    await check_arrived(decoder, push)
    assert order == ["one", "other"]
    assert [write.num_bytes // decoder.layout.page_bytes for write in writes] == [2, 2, 2]


async def test_what_has_happened_travels_together_whatever_it_waited_for(world: World) -> None:
    """A sender that lags behind makes one write of what has been computed meanwhile."""
    decoder, prefiller, push = await open_deep(world, DEEP, 12)
    prefiller.compute(push.table)
    await asyncio.sleep(0)
    writes = count_writes(prefiller)
    events = [Happening() for _ in range(len(push.table))]
    for ordinal, event in enumerate(events):
        event.set()
        push.page_filled(ordinal, ordinal, after=event)
    await check_arrived(decoder, push)
    assert len(writes) == 1


async def test_what_has_happened_overtakes_what_waits(world: World) -> None:
    """Of one push, too: the page whose event comes last is sent last."""
    decoder, prefiller, push = await open_deep(world, DEEP, 12)
    prefiller.compute(push.table)
    await asyncio.sleep(0)
    late, come = Happening(), Happening()
    come.set()
    push.page_filled(0, 0, after=late)
    push.pages_filled(range(1, len(push.table)), range(1, len(push.table)), after=come)
    num_others = len(push.table) - 1
    await until(lambda: sum(r.num_bytes for r in push._ranks[0].receipts) == num_others * decoder.layout.page_bytes)
    late.set()
    await check_arrived(decoder, push)


async def test_an_event_that_fails_fails_the_push(world: World) -> None:
    decoder, _, push = await open_deep(world, DEEP, 4)
    push.page_filled(0, 0, after=Broken())
    with pytest.raises(AttemptLost, match="device lost"):
        await settled(asyncio.create_task(push.finish()))
    await world.proxy.next(wire.KvReleased, "a")
    assert decoder.pages.num_free == 12


async def test_what_cannot_be_asked_is_no_event(world: World) -> None:
    decoder, prefiller, push = await open_deep(world, DEEP, 4)
    prefiller.compute(push.table)
    wait: Any = threading.Event().wait
    with pytest.raises(TransferError, match="asked whether it has happened"):
        push.page_filled(0, 0, after=wait)
    push.pages_filled([0, 1], [0, 1])
    await check_arrived(decoder, push)


async def test_an_event_that_never_comes_does_not_keep_the_sender_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing does not wait for it, and the decoder gets its pages back when told that it ended."""
    monkeypatch.setattr("transfer.roles.sender.CLOSE_TIMEOUT_S", 0.1)
    decoder, prefiller, push = await open_deep(world, DEEP, 4)
    comes = Happening()
    push.page_filled(0, 0, after=comes)
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    started = loop.time()
    await prefiller.sender.aclose()
    assert loop.time() - started < 1.0
    comes.set()
    await until(lambda: push._ranks[0].is_quiet)
    decoder.receiver.sender_ended(prefiller.agent.epoch)
    await world.proxy.next(wire.KvReleased, "a")


# ── and when nobody listens any more ────────────────────────────────────────────────────────────────────────────────


def test_a_write_that_ends_after_its_loop_disturbs_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.roles.sender.CLOSE_TIMEOUT_S", 0.1)
    held: list[MockWrite] = []

    async def scenario() -> None:
        async with new_world() as world:
            decoder, prefiller = await world.decoder(), world.prefiller()
            prefiller.agent.script = hold
            push = await world.open(prefiller, decoder)
            fill(push, 0, 1)
            held.append(await next_held(prefiller.agent))
            await prefiller.sender.aclose()
            await push.wait_ended()
            decoder.receiver.sender_ended(prefiller.agent.epoch)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(scenario())
        held[0].land()
    assert held[0].future.done()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_write_that_ends_after_the_sender_disturbs_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.roles.sender.CLOSE_TIMEOUT_S", 0.1)
    decoder, prefiller = await world.decoder(), world.prefiller()
    prefiller.agent.script = hold
    push = await world.open(prefiller, decoder)
    fill(push, 0, 1)
    write = await next_held(prefiller.agent)
    await prefiller.sender.aclose()
    write.land()
    await until(lambda: push._ranks[0].is_quiet)
    decoder.receiver.sender_ended(prefiller.agent.epoch)
    await world.proxy.next(wire.KvReleased, "a")


def test_pages_held_for_a_window_stay_in_order() -> None:
    """Layers of one page that were held become one again; other pages' do not get between them."""
    layers = [rank_push.FilledLayers(0, first, first + 1, [7], [3]) for first in range(3)]
    assert all(later.deepens(earlier) for earlier, later in pairwise(layers))
    assert not layers[2].deepens(layers[0])
    assert not rank_push.FilledLayers(0, 1, 2, [8], [3]).deepens(layers[0])
    assert not rank_push.FilledLayers(0, 1, 2, [7], [4]).deepens(layers[0])
    assert not rank_push.FilledLayers(0, 1, 2, [7], [3], after=Happening()).deepens(layers[0])
