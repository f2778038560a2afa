"""Simulated decoders with KV caches that are full, and steps that take longer where there is more in them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pdproxy.config.settings import Settings
from pdproxy.loadtest.lengths import Fixed, Independent, Mixed, Uniform
from pdproxy.simulate.batch import Batch, Sequence
from pdproxy.simulate.faults import read_faults
from pdproxy.simulate.gaps import Gaps
from pdproxy.simulate.loop import run
from pdproxy.simulate.simulation import Result, simulate
from pdproxy.simulate.speed import Speed
from pdproxy.simulate.traffic import Traffic
from tests.fakes.simulated import make_plan

TOKENS = 2000
SMALL = msgspec.structs.replace(Speed(), kv_cache_bytes=TOKENS * Speed().kv_token_bytes)


# ── a batch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_takes_longer_where_there_are_more_tokens() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        batch = Batch(Speed(step_s=1.0, step_sequence_s=0.0, step_token_s=0.01))
        short, long = Sequence(1000, num_before=0), Sequence(10, num_before=100)
        batch.join(long)
        batch.join(short)
        assert batch.num_tokens == 100
        await asyncio.sleep(20.0)  # 2 s a step, as long as nobody looks
        assert not long.is_in
        assert batch.num_written(short) == 10
        assert batch.num_tokens == pytest.approx(10)
        began = loop.time()
        await asyncio.sleep(1.1)  # 1 s, and a hundredth for each of the 10 tokens
        assert batch.num_written(short) == 11
        assert loop.time() - began == pytest.approx(1.1)

    run(main())


def test_somebody_leaves_when_there_is_no_room_for_another_token() -> None:
    async def main() -> None:
        left: list[float] = []
        batch: Batch

        def give_way() -> None:
            left.append(asyncio.get_running_loop().time())
            batch.leave(second)

        batch = Batch(Speed(step_s=1.0, step_sequence_s=0.0), max_tokens=30, on_full=give_way)
        first, second = Sequence(20, num_before=10), Sequence(20, num_before=10)
        batch.join(first)
        await asyncio.sleep(2.0)
        batch.join(second)  # 10 + 2 and 10: 4 steps more
        await asyncio.sleep(100.0)
        assert left == pytest.approx([6.0])
        assert (batch.size, first.is_in) == (0, False)

    run(main())


def test_one_that_is_alone_may_have_more_than_there_is() -> None:
    async def main() -> None:
        batch = Batch(Speed(step_s=1.0, step_sequence_s=0.0), max_tokens=30, on_full=lambda: pytest.fail("left"))
        batch.join(only := Sequence(50, num_before=10))
        await asyncio.sleep(51.0)
        assert not only.is_in

    run(main())


def test_the_times_between_tokens_have_the_pauses_in_them() -> None:
    async def main() -> None:
        batch = Batch(Speed(step_s=0.5, step_sequence_s=0.5))
        batch.join(Sequence(100))
        await asyncio.sleep(90.0)
        batch.hold()
        await asyncio.sleep(7.0)
        batch.go()
        await asyncio.sleep(11.0)
        assert batch.gaps.percentile(50.0) == pytest.approx(1.0, rel=0.01)
        assert batch.gaps.percentile(100.0) == pytest.approx(8.0, rel=0.01)

    run(main())


def test_gaps_by_percentile() -> None:
    gaps = Gaps()
    assert gaps.percentile(99.0) is None
    gaps.add(0.010, 98.5)
    gaps.add(0.500, 1.5)
    assert gaps.percentile(98.0) == pytest.approx(0.010, rel=0.01)
    assert gaps.percentile(99.0) == pytest.approx(0.500, rel=0.01)
    gaps.add(0.0, 1e6)
    assert (gaps.percentile(50.0) or 1.0) < 1e-5


# ── a fleet ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def crowded(oversubscribe: float, seed: int = 1, **different: Any) -> Result:
    """A decoder whose KV cache has room for a handful of answers, and two dozen clients."""
    traffic = Traffic(sizes=Independent(Fixed(100), Uniform(50, 400)), clients=24)
    plan = make_plan(prefillers=1, decoders=1, num_requests=300, traffic=traffic, speed=SMALL, seed=seed)
    return simulate(replace(plan, settings=Settings(oversubscribe=oversubscribe), **different))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_answers_give_way_unless_they_wait_for_room(seed: int) -> None:
    crowd, line = crowded(1000.0, seed), crowded(1.0, seed)
    assert crowd.figures.outcomes == line.figures.outcomes == {"done": 300}
    assert crowd.use["given_way"] > 100
    assert line.use["given_way"] == 0
    crowd_p99, line_p99 = (one.use["token_gap_p99_s"]["most"] for one in (crowd, line))
    assert line_p99 < crowd_p99


def test_the_same_seed_gives_the_same() -> None:
    once, twice = (json_of(crowded(1.0)) for _ in range(2))
    assert once == twice


def json_of(result: Result) -> dict[str, Any]:
    return {name: value for name, value in result.as_plain().items() if name != "wall_s"}


def test_a_decoder_with_a_full_cache_may_be_killed() -> None:
    result = crowded(1000.0, faults=tuple(read_faults("3 kill decode-0 for 2; 8 freeze decode-0 for 1")))
    assert result.figures.count == 300
    assert result.use["given_way"] > 0


def test_answers_wait_for_room_behind_several_proxies() -> None:
    result = crowded(1.0, proxies=2)
    assert result.figures.outcomes == {"done": 300}
    assert result.use["given_way"] == 0


LONG_AND_SHORT = msgspec.structs.replace(
    Speed(), step_sequence_s=0.000_02, step_token_s=65e-9, kv_cache_bytes=256 << 30
)
"""What long prompts make of a step counts for themselves: their KV is read for each token."""


def mixed(policy: str) -> float:
    """How many times as long as at the fastest decoder the p99 of the times between two tokens is at the slowest, of
    six that are asked long prompts and short ones."""
    sizes = Independent(Mixed(100, 100_000, 0.2), Uniform(200, 600))
    plan = make_plan(
        prefillers=24,
        decoders=6,
        num_requests=2000,
        num_warmup=200,
        traffic=Traffic(sizes=sizes, rate=8.0),
        speed=LONG_AND_SHORT,
        seed=1,
    )
    result = simulate(replace(plan, settings=Settings(decode_policy=policy)))
    assert result.figures.outcomes == {"done": 1800}
    spread = result.use["token_gap_p99_s"]
    return float(spread["most"] / spread["least"])


def test_long_and_short_prompts_are_spread_so_that_all_decoders_are_equally_fast() -> None:
    assert mixed("least_resident") <= 1.2
    assert mixed("least_slots") > 1.4
