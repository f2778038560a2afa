"""The mock's own promises: fates, time, and processes that stand still or die. The rest: `test_agent_contract`."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from tests.helpers.events import Happening
from transfer.agents.base import Region, WriteReceipt
from transfer.agents.mock import (
    Drop,
    Duplicate,
    Fail,
    Fate,
    Hold,
    Land,
    MockAgent,
    MockFabric,
    MockWrite,
    Overtaken,
    in_turn,
)
from transfer.agents.spans import as_spans
from transfer.errors import IllegalTransition, PeerLost, TransferError

SIZE = 64
LIMIT_S = 5.0


def for_ever() -> float:
    return 1e9


class World:
    """A receiver of zeros and a sender of 1, 2, 3 …, connected; `clock_s` is what fences are measured by."""

    def __init__(self) -> None:
        self.clock_s = 100.0
        self.fabric = MockFabric(lambda: self.clock_s)
        self.sender, self.sent = self.agent("sender")
        self.receiver, self.received = self.agent("receiver")
        self.sent[:] = np.arange(1, SIZE + 1)
        self.connect()

    def agent(self, epoch: str) -> tuple[MockAgent, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        slab = np.zeros(SIZE, dtype=np.uint8)
        agent = MockAgent(self.fabric, epoch)
        agent.register(Region(slab.ctypes.data, SIZE)).result(0)
        return agent, slab

    def connect(self) -> None:
        region = self.receiver.region
        assert region is not None
        self.sender.connect("receiver", self.receiver.metadata().result(0), region).result(0)

    def write(self, place: int, size: int = 4, not_after: float = 1e9) -> Future[WriteReceipt]:
        """Bytes `place` and following, to the same place."""
        return self.sender.write("receiver", as_spans([(place, place, size)]), not_after=lambda: not_after)

    def landed(self) -> set[int]:
        """Places whose bytes are there."""
        return {int(place) for place in np.flatnonzero(self.received == self.sent)}


@pytest.fixture
def world() -> World:
    return World()


def places(*starts: int) -> set[int]:
    return {start + i for start in starts for i in range(4)}


# ── fates ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_by_default_a_write_lands_within_the_call(world: World) -> None:
    receipt = world.write(0)
    assert receipt.done()
    assert receipt.result() == WriteReceipt(4, 100.0, 100.0)
    assert world.landed() == places(0)
    assert world.fabric.under_way == []


def test_a_delayed_write_lands_when_time_has_passed(world: World) -> None:
    world.sender.script = in_turn(Land(delay_s=2.0), Land(delay_s=1.0))
    slow, fast = world.write(0), world.write(8)
    world.clock_s += 50  # a slow machine is no reason to land
    world.fabric.advance(0.5)
    assert not slow.done()
    assert not fast.done()
    world.fabric.advance(0.5)
    assert world.landed() == places(8)
    world.sent[0] = 99  # read when it lands, as by a real device
    world.fabric.advance(10.0)
    assert world.landed() == places(0, 8)
    assert world.received[0] == 99
    assert slow.result(0).finished - slow.result(0).started == 52.0


def test_a_dropped_write_is_never_done(world: World) -> None:
    world.sender.script = in_turn(Drop())
    dropped = world.write(0)
    world.write(8).result(0)
    world.fabric.advance(1e6)
    assert not dropped.done()
    assert world.landed() == places(8)
    assert [write.serial for write in world.fabric.under_way] == [1]
    assert "under way" in repr(world.fabric.under_way[0])


def test_a_duplicate_lands_again_over_what_came_later(world: World) -> None:
    world.sender.script = in_turn(Duplicate(again_after_s=3.0))
    world.write(0).result(0)
    world.sent[:4] = 50  # the sender's page holds something else by now
    world.received[:4] = 60  # and so does the receiver's
    world.fabric.advance(2.9)
    assert world.received[:4].tolist() == [60] * 4
    world.fabric.advance(0.1)
    assert world.received[:4].tolist() == [1, 2, 3, 4]


def test_a_write_can_be_overtaken(world: World) -> None:
    order: list[int] = []
    world.sender.script = in_turn(Overtaken(by=2), Land(delay_s=1.0), Land())
    writes = [world.write(place) for place in (0, 8, 16)]
    for number, write in enumerate(writes):
        write.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
    assert world.landed() == places(16)
    world.fabric.advance(1.0)
    assert order == [2, 1, 0]
    assert world.landed() == places(0, 8, 16)


def test_only_writes_of_the_same_pair_overtake(world: World) -> None:
    other, _ = world.agent("other")
    region = world.receiver.region
    assert region is not None
    other.connect("receiver", b"receiver", region).result(0)
    world.sender.script = in_turn(Overtaken())
    write = world.write(0)
    other.write("receiver", as_spans([(8, 8, 4)]), not_after=for_ever).result(0)
    assert not write.done()


@pytest.mark.parametrize(("landed", "expected"), [(0.0, 0), (0.5, 6), (1.0, 12)])
def test_a_failing_write_may_have_landed_in_part(world: World, landed: float, expected: int) -> None:
    world.sender.script = in_turn(Fail(TransferError("broken"), landed=landed))
    write = world.sender.write("receiver", as_spans([(20, 20, 4), (0, 0, 4), (40, 40, 4)]), not_after=for_ever)
    with pytest.raises(TransferError, match="broken"):
        write.result(0)
    assert world.landed() == set([20, 21, 22, 23, 0, 1, 2, 3, 40, 41, 42, 43][:expected])
    world.write(8).result(0)  # the connection is as it was


def test_a_peer_that_is_lost_needs_a_new_connection(world: World) -> None:
    world.sender.script = in_turn(Fail(PeerLost("so it seems"), delay_s=1.0))
    write = world.write(0)
    assert not write.done()
    world.fabric.advance(1.0)
    with pytest.raises(PeerLost, match="so it seems"):
        write.result(0)
    with pytest.raises(PeerLost, match="not connected"):
        world.write(0).result(0)
    world.connect()
    assert world.sender.num_users("receiver") == 2, "the first one is still to be undone"
    world.write(0).result(0)


def test_the_script_sees_what_is_posted(world: World) -> None:
    seen: list[MockWrite] = []

    def script(write: MockWrite) -> Fate:
        seen.append(write)
        return Land()

    world.sender.script = script
    world.write(0, not_after=123.0)
    world.write(SIZE)
    world.write(0, not_after=1.0)
    (write,) = seen
    assert (write.sender, write.peer, write.num_bytes, write.not_after()) == ("sender", "receiver", 4, 123.0)
    assert write.spans.tolist() == [[0, 0, 4]]


# ── step by step ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_held_writes_are_handed_over_in_order(world: World) -> None:
    world.sender.script = lambda write: Hold()
    first = world.sender.next_held()
    given_up = world.sender.next_held()
    assert given_up.cancel()
    second = world.sender.next_held()
    futures = [world.write(place) for place in (0, 8, 16)]
    third = world.sender.next_held()
    assert [held.result(0).spans[0, 0] for held in (first, second, third)] == [0, 8, 16]
    assert not any(future.done() for future in futures)
    third.result(0).land()
    second.result(0).fail(TransferError("no"), landed=0.25)
    assert world.landed() == {8, *places(16)}
    assert futures[2].result(0).num_bytes == 4
    assert isinstance(futures[1].exception(0), TransferError)
    assert world.fabric.under_way == [first.result(0)]


def test_a_write_ends_once(world: World) -> None:
    world.sender.script = lambda write: Hold()
    future = world.write(0)
    write = world.sender.next_held().result(0)
    write.land()
    for again in (write.land, lambda: write.fail(TransferError("no"))):
        with pytest.raises(IllegalTransition):
            again()
    assert future.result(0).num_bytes == 4
    assert "landed" in repr(write)


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_nothing_proceeds_while_one_side_stands_still(world: World, who: str) -> None:
    world.sender.script = in_turn(Land(delay_s=1.0), Hold())
    writes = [world.write(0), world.write(8)]
    world.fabric.freeze(who)
    world.fabric.advance(5.0)
    world.sender.next_held().result(0).land()
    writes.append(world.write(16))
    assert world.landed() == set()
    assert not any(write.done() for write in writes)
    world.fabric.thaw(who)
    assert world.landed() == places(0, 8, 16)
    assert all(write.done() for write in writes)


def test_a_fence_passes_while_the_sender_stands_still(world: World) -> None:
    world.fabric.freeze("sender")
    in_time, late = world.write(0, not_after=110.0), world.write(8, not_after=104.0)
    world.fabric.advance(5.0)
    world.fabric.thaw("sender")
    in_time.result(0)
    with pytest.raises(PeerLost, match="too long"):
        late.result(0)
    assert world.landed() == places(0)


def test_a_posted_write_passes_no_fence(world: World) -> None:
    """It cannot be called back: thawed after its time, it lands all the same. That is what quarantine is for."""
    world.fabric.freeze("receiver")
    write = world.write(0, not_after=101.0)
    world.fabric.advance(5.0)
    world.fabric.thaw("receiver")
    write.result(0)
    assert world.landed() == places(0)


def test_a_killed_receiver_is_lost_to_its_writers(world: World) -> None:
    world.sender.script = in_turn(Land(delay_s=1.0), Drop())
    writes = [world.write(0), world.write(8)]
    world.fabric.kill("receiver")
    for write in (*writes, world.write(16)):
        with pytest.raises(PeerLost):
            write.result(0)
    world.fabric.advance(5.0)
    assert world.landed() == set(), "its memory is not touched any more"
    with pytest.raises(ValueError, match="new epoch"):
        MockAgent(world.fabric, "receiver")
    again, slab = world.agent("receiver, started again")
    assert again.region is not None
    world.sender.connect(again.epoch, again.metadata().result(0), again.region).result(0)
    world.sender.write(again.epoch, as_spans([(0, 0, 4)]), not_after=for_ever).result(0)
    assert slab[:4].tolist() == [1, 2, 3, 4]


def test_what_a_killed_sender_left_behind_lands_only_by_hand(world: World) -> None:
    world.sender.script = in_turn(Land(delay_s=1.0), Hold(), Duplicate(again_after_s=1.0))
    writes = [world.write(0), world.write(8)]
    world.write(16).result(0)
    late = world.sender.next_held().result(0)
    world.fabric.kill("sender")
    for write in writes:
        with pytest.raises(PeerLost):
            write.result(0)
    with pytest.raises(TransferError, match="closed"):
        world.write(24).result(0)
    world.received[:] = 0
    world.fabric.advance(5.0)
    assert world.landed() == set()
    late.land()
    assert world.landed() == places(8), "a late write, which nobody was told of"


def test_what_a_closed_agent_has_posted_may_still_land(world: World) -> None:
    world.sender.script = lambda write: Land(delay_s=1.0)
    write = world.write(0)
    world.sender.close()
    with pytest.raises(PeerLost, match="closed during the write"):
        write.result(0)
    world.fabric.advance(1.0)
    assert world.landed() == places(0)


def test_killed_while_it_waits_for_an_event(world: World) -> None:
    may_go = Happening()
    spans = as_spans([(0, 0, 4)])
    waiting = world.sender.write("receiver", spans, not_after=for_ever, after=may_go)
    world.write(8).result(LIMIT_S)
    world.fabric.kill("sender")
    may_go.set()
    with pytest.raises(TransferError):
        waiting.result(LIMIT_S)
    assert world.landed() == places(8)


def test_device_memory_is_refused() -> None:
    agent = MockAgent(MockFabric(), "a")
    with pytest.raises(TransferError, match="VRAM"):
        agent.register(Region(0, 8, memory="VRAM")).result(0)
