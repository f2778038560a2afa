"""How a simulated decoder writes, by the clock and beside a count of every single step."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from pdproxy.simulate.batch import Batch, Sequence
from pdproxy.simulate.loop import run
from pdproxy.simulate.speed import Speed

SPEED = Speed(step_s=1.0, step_sequence_s=0.5)
"""One sequence: 1.5 s a token; two: 2 s; three: 2.5 s."""


class Telling(Sequence):
    """Calls `told` at its end."""

    def __init__(self, num_tokens: int, told: Callable[[], None]) -> None:
        super().__init__(num_tokens)
        self.finished = told  # type: ignore[method-assign]


class Writing:
    """A batch, and when each of its sequences ended. To be made in the loop."""

    def __init__(self, speed: Speed = SPEED) -> None:
        self.loop = asyncio.get_running_loop()
        self.batch = Batch(speed)
        self.ended: dict[str, float] = {}

    def join(self, name: str, num_tokens: int) -> Sequence:
        def finished() -> None:
            self.ended[name] = self.loop.time()

        sequence = Telling(num_tokens, finished)
        self.batch.join(sequence)
        return sequence

    async def until(self, seconds: float) -> None:
        await asyncio.sleep(seconds - self.loop.time())


def test_alone_it_takes_a_step_per_token() -> None:
    async def main() -> None:
        writing = Writing()
        writing.join("a", 10)
        await writing.until(100)
        assert writing.ended == pytest.approx({"a": 15.0})
        assert writing.batch.size == 0

    run(main())


def test_whoever_joins_slows_the_others_down_and_whoever_ends_speeds_them_up() -> None:
    async def main() -> None:
        writing = Writing()
        writing.join("a", 10)
        await writing.until(3.0)  # a has 2 of its 10
        writing.join("b", 4)  # 4 steps of 2 s each: until 11, a has 6
        await writing.until(100)
        assert writing.ended == pytest.approx({"b": 11.0, "a": 17.0})
        assert writing.batch.busy_s == pytest.approx(17.0)
        assert writing.batch.sequence_s == pytest.approx(17.0 + 8.0)

    run(main())


def test_those_of_one_length_end_together_in_the_order_in_which_they_came() -> None:
    async def main() -> None:
        writing = Writing()
        for name in "abc":
            writing.join(name, 4)
        await writing.until(100)
        assert list(writing.ended.items()) == [("a", 10.0), ("b", 10.0), ("c", 10.0)]

    run(main())


def test_who_leaves_is_written_no_more() -> None:
    async def main() -> None:
        writing = Writing()
        leaving = writing.join("leaving", 4)
        writing.join("b", 6)
        await writing.until(4.0)  # both have 2
        assert writing.batch.num_written(leaving) == 2
        writing.batch.leave(leaving)
        writing.batch.leave(leaving)
        assert writing.batch.size == 1
        await writing.until(100)
        assert writing.ended == pytest.approx({"b": 10.0})

    run(main())


def test_held_it_makes_no_step_however_often() -> None:
    async def main() -> None:
        writing = Writing()
        sequence = writing.join("a", 10)
        await writing.until(3.0)
        writing.batch.hold()
        writing.batch.hold()
        await writing.until(10.0)
        writing.batch.go()
        await writing.until(20.0)
        assert writing.batch.num_written(sequence) == 2
        writing.batch.go()
        await writing.until(100)
        assert writing.ended == pytest.approx({"a": 32.0})

    run(main())


def test_it_can_become_slow_and_fast_again() -> None:
    async def main() -> None:
        writing = Writing()
        writing.join("a", 10)
        await writing.until(3.0)
        writing.batch.slowness = 2.0
        await writing.until(9.0)  # two more
        writing.batch.slowness = 1.0
        await writing.until(100)
        assert writing.ended == pytest.approx({"a": 18.0})

    run(main())


def test_one_of_no_tokens_ends_at_once() -> None:
    async def main() -> None:
        writing = Writing()
        writing.join("a", 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert writing.ended == {"a": 0.0}

    run(main())


def test_a_cleared_batch_forgets_everybody() -> None:
    async def main() -> None:
        writing = Writing()
        sequence = writing.join("a", 10)
        writing.batch.hold()
        writing.batch.clear()
        assert (writing.batch.size, sequence.is_in) == (0, False)
        writing.join("b", 2)
        await writing.until(100)
        assert writing.ended == pytest.approx({"b": 3.0})

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_as_a_count_of_every_step(seed: int) -> None:
    """Joins and leaves by chance, beside a count that knows nothing of heaps."""
    dice = random.Random(seed)
    joins = sorted((dice.uniform(0, 200), dice.randint(1, 60)) for _ in range(40))
    leaves = {index: dice.uniform(0, 100) for index in range(40) if dice.random() < 0.3}

    async def main() -> dict[str, float]:
        writing = Writing()
        for index, (at, num_tokens) in enumerate(joins):
            await writing.until(at)
            sequence = writing.join(str(index), num_tokens)
            if index in leaves:
                writing.loop.call_later(leaves[index], writing.batch.leave, sequence)
        await writing.until(10_000)
        return writing.ended

    assert run(main()) == pytest.approx(_counted(joins, leaves), rel=1e-6)


def _counted(joins: list[tuple[float, int]], leaves: dict[int, float]) -> dict[str, float]:
    changes = sorted(
        [(at, 1, index) for index, (at, _) in enumerate(joins)]
        + [(joins[index][0] + after, 0, index) for index, after in leaves.items()]
    )
    left: dict[int, float] = {}
    ended: dict[str, float] = {}
    now = 0.0
    for at, is_join, index in [*changes, (1e6, 0, -1)]:
        while left:
            step_s = SPEED.step_takes(len(left))
            first = min(left.values())
            passes_s = min(first * step_s, at - now)
            left = {one: rest - passes_s / step_s for one, rest in left.items()}
            now += passes_s
            for one in [one for one, rest in left.items() if rest < 1e-9]:
                ended[str(one)] = now
                del left[one]
            if now >= at:
                break
        now = at
        if is_join:
            left[index] = float(joins[index][1])
        else:
            left.pop(index, None)
    return ended


def test_as_a_server_that_all_share_should() -> None:
    """M/G/1 with processor sharing: one that needs x alone stays x/(1 − ρ) on average, whatever the others need."""
    load, num, tokens = 0.6, 30_000, 100
    service_s = 1.0

    async def main() -> float:
        loop, dice, spent, num_ended = asyncio.get_running_loop(), random.Random(3), 0.0, 0
        batch = Batch(Speed(step_s=0.0, step_sequence_s=service_s / tokens))
        for _ in range(num):
            await asyncio.sleep(dice.expovariate(load / service_s))
            came = loop.time()

            def finished(came: float = came) -> None:
                nonlocal spent, num_ended
                spent += loop.time() - came
                num_ended += 1

            batch.join(Telling(tokens, finished))
        await asyncio.sleep(1000.0)
        assert num_ended == num
        return spent / num

    assert run(main()) == pytest.approx(service_s / (1 - load), rel=0.05)
