"""What goes between the ranks of one engine: steps in order, sums of equal bits, and the end of one that ends all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from transfer.engine.api import RankLost
from transfer.engine.ranks import link as links
from transfer.engine.ranks.leader import OtherRanks
from transfer.engine.ranks.link import Link, sum_over
from transfer.engine.ranks.messages import CopyIn, Feed, LetGo, Reuse

pytestmark = pytest.mark.engine

STEPS = [
    Feed([[3, None, 3], [0]], 5, [7, 8]),
    Feed([[1]], 0, [9], "a", 2),
    Reuse("a", [4]),
    CopyIn("a", 1, []),
    LetGo("a"),
]


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    ours, theirs = Link.pair(1)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_steps_come_in_order_and_end_with_the_process(pair: tuple[Link, Link]) -> None:
    ours, theirs = pair
    for step in STEPS:
        ours.send_step(step)
    assert [theirs.next_step() for _ in STEPS] == STEPS
    ours.close()
    assert theirs.next_step() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_rank_gets_the_same_bits(dtype: torch.dtype) -> None:
    """Also of numbers whose sum depends on the order in which they are added."""
    pairs = [Link.pair(index) for index in (1, 2)]
    torch.manual_seed(3)
    parts = [(torch.randn(1, 700, 130) * 10.0**power).to(dtype) for power in (0, 3, -2)]
    ends = [[ours for ours, _ in pairs], *([theirs] for _, theirs in pairs)]
    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(sum_over, ends, parts))
    wide = torch.promote_types(dtype, torch.float32)
    expected = (parts[0].to(wide) + parts[1].to(wide) + parts[2].to(wide)).to(dtype)
    for total in sums:
        assert total.dtype == dtype
        assert torch.equal(total, expected)
    for one in (link for pair in pairs for link in pair):
        one.close()


def test_a_rank_that_ends_in_the_middle_of_a_sum(pair: tuple[Link, Link]) -> None:
    ours, theirs = pair
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sum_over, [ours], torch.ones(3))
        theirs.close()
        with pytest.raises(RankLost, match="rank 1 of this engine is lost in the middle of a step"):
            waiting.result(timeout=5)


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_is_silent_in_the_middle_of_a_sum(
    index: int, pair: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "TIMEOUT_S", 0.05)
    with pytest.raises(RankLost, match=f"rank {1 - index} .* it was silent for"):
        sum_over([pair[index]], torch.ones(3))


def test_a_step_that_fails_is_the_end_of_all_where_there_are_others(pair: tuple[Link, Link]) -> None:
    def fail() -> None:
        raise ArithmeticError("no")

    with pytest.raises(RankLost, match="rank 0 of this engine failed in a step: ArithmeticError"):
        OtherRanks([pair[0]]).do(LetGo("a"), fail)
    assert pair[1].next_step() == LetGo("a")
    with pytest.raises(ArithmeticError, match="no"):
        OtherRanks().do(LetGo("a"), fail)


def test_breaking_off_wakes_a_thread_that_waits(pair: tuple[Link, Link]) -> None:
    ours, theirs = pair
    told: list[object] = []
    thread = threading.Thread(target=lambda: told.append(theirs.next_step()))
    thread.start()
    theirs.break_off()
    thread.join(timeout=5)
    assert told == [None]
    with pytest.raises(RankLost):
        ours.send_step(LetGo("a"))
