"""How a simulated engine reads prompts, by the clock."""

from __future__ import annotations

import asyncio
import random

import pytest

from pdproxy.simulate.loop import run
from pdproxy.simulate.prompts import PrefixCache, Prompt, PromptQueue
from pdproxy.simulate.speed import Speed

SPEED = Speed(prefill_s=1.0, prefill_token_s=0.01, prefill_batch_tokens=250)


class Reading:
    """A queue, and when each of its prompts was read. To be made in the loop."""

    def __init__(self, speed: Speed = SPEED) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue = PromptQueue(speed)
        self.read: dict[str, float] = {}

    def add(self, name: str, num_tokens: int, group: int | None = None, num_shared: int = 0) -> Prompt:
        def finished() -> None:
            self.read[name] = self.loop.time()

        prompt = Prompt(num_tokens, finished, group, num_shared)
        self.queue.add(prompt)
        return prompt

    async def until(self, seconds: float) -> None:
        await asyncio.sleep(seconds - self.loop.time())


def test_short_prompts_that_wait_are_read_together_in_order() -> None:
    async def main() -> dict[str, float]:
        reading = Reading()
        for name in "abcd":
            reading.add(name, 100)
        await reading.until(100)
        assert reading.queue.num_read_tokens == 400
        assert reading.queue.busy_s == pytest.approx(2 + 3 + 2)
        return reading.read

    # The first finds nobody; two of the others fit into a batch.
    assert run(main()) == pytest.approx({"a": 2.0, "b": 5.0, "c": 5.0, "d": 7.0})


def test_a_prompt_longer_than_a_batch_is_read_alone() -> None:
    async def main() -> dict[str, float]:
        reading = Reading()
        reading.add("a", 100)
        reading.add("long", 1000)
        reading.add("b", 100)
        await reading.until(100)
        return reading.read

    assert run(main()) == pytest.approx({"a": 2.0, "long": 13.0, "b": 15.0})


def test_what_nobody_wants_is_not_begun_and_not_told() -> None:
    async def main() -> None:
        reading = Reading()
        begun, waiting = reading.add("begun", 100), reading.add("waiting", 100)
        reading.add("last", 100)
        reading.queue.drop(begun)
        reading.queue.drop(waiting)
        assert reading.queue.num_waiting == 1
        await reading.until(100)
        assert reading.read == pytest.approx({"last": 4.0})
        assert reading.queue.num_read_tokens == 200

    run(main())


def test_time_stands_still_while_frozen() -> None:
    async def main() -> None:
        reading = Reading()
        reading.add("a", 100)
        await reading.until(1.5)
        reading.queue.freeze()
        reading.queue.freeze()
        reading.add("b", 100)
        await reading.until(10)
        assert not reading.read
        assert reading.queue.busy_s == pytest.approx(1.5)
        reading.queue.thaw()
        reading.queue.thaw()
        await reading.until(100)
        assert reading.read == pytest.approx({"a": 10.5, "b": 12.5})

    run(main())


def test_who_is_added_to_a_frozen_queue_is_read_afterwards() -> None:
    async def main() -> None:
        reading = Reading()
        reading.queue.freeze()
        reading.add("a", 100)
        await reading.until(10)
        reading.queue.thaw()
        await reading.until(100)
        assert reading.read == pytest.approx({"a": 12.0})

    run(main())


def test_a_straggler_takes_so_many_times_as_long() -> None:
    async def main() -> None:
        reading = Reading()
        reading.queue.slowness = 3.0
        reading.add("a", 100)
        await reading.until(100)
        assert reading.read == pytest.approx({"a": 6.0})

    run(main())


def test_nothing_is_left_of_a_process_that_has_gone() -> None:
    async def main() -> None:
        reading = Reading()
        told: list[bool] = []
        reading.queue = PromptQueue(SPEED, on_busy=told.append)
        reading.add("a", 100)
        reading.add("b", 100)
        await reading.until(1)
        reading.queue.clear()
        await reading.until(100)
        assert not reading.read
        assert told == [True, False]
        reading.add("c", 100)
        await reading.until(200)
        assert reading.read == pytest.approx({"c": 102.0})

    run(main())


def test_a_prefix_that_was_read_before_is_not_read_again() -> None:
    async def main() -> None:
        reading = Reading()
        reading.add("first", 200, group=7, num_shared=150)
        await reading.until(100)
        reading.add("second", 200, group=7, num_shared=150)
        await reading.until(200)
        reading.add("other", 200, group=8, num_shared=150)
        await reading.until(300)
        assert reading.read == pytest.approx({"first": 3.0, "second": 101.5, "other": 203.0})
        assert reading.queue.num_cached_tokens == 150

    run(main())


def test_the_last_token_is_always_read() -> None:
    async def main() -> None:
        reading = Reading()
        reading.add("first", 100, group=1, num_shared=100)
        await reading.until(10)
        reading.add("second", 100, group=1, num_shared=100)
        await reading.until(20)
        assert reading.read["second"] == pytest.approx(11.01)

    run(main())


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    cache = PrefixCache(300)
    assert [cache.take_in(1, 100), cache.take_in(2, 100), cache.take_in(1, 100)] == [0, 0, 100]
    assert cache.take_in(3, 200) == 0  # the second goes
    assert cache.take_in(1, 100) == 100
    assert cache.take_in(2, 100) == 0


def test_as_queues_with_one_server_should() -> None:
    """M/M/1: with arrivals and service both memoryless, a customer spends 1/(μ − λ) in the house on average."""
    arrivals_per_s, service_per_s, num = 0.7, 1.0, 40_000

    async def main() -> float:
        loop, dice, spent = asyncio.get_running_loop(), random.Random(5), 0.0
        queue = PromptQueue(Speed(prefill_s=0.0, prefill_token_s=1e-6, prefill_batch_tokens=1))
        for _ in range(num):
            await asyncio.sleep(dice.expovariate(arrivals_per_s))
            came = loop.time()

            def finished(came: float = came) -> None:
                nonlocal spent
                spent += loop.time() - came

            queue.add(Prompt(round(dice.expovariate(service_per_s) * 1e6), finished))
        await asyncio.sleep(1000.0)
        return spent / num

    assert run(main()) == pytest.approx(1 / (service_per_s - arrivals_per_s), rel=0.06)
