"""A fleet whose engines are upgraded one by one, under load: no request fails, and no new engine is left without any.

A scripted prefiller that is sent to a decoder of another dtype is a bug that the harness reports.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from pdproxy.engines.http.base import EngineBroken
from pdproxy.fleet.instance import Instance
from tests.fakes.fake_engine import WORDS, FakeEngine, error_reply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

NEW = "bfloat16"
NUM_CLIENTS = 4
TEXT = "".join(WORDS)
ORDER = ("prefill-0", "decode-0", "prefill-1", "decode-1")
OPTIONS = {"probe_interval_s": 0.05, "slow_start_s": 0.0}


def two_and_two() -> tuple[list[FakeEngine], list[FakeEngine]]:
    return [FakeEngine("prefill") for _ in range(2)], [FakeEngine("decode") for _ in range(2)]


def engine_of(house: Harness, name: str) -> FakeEngine:
    role, _, number = name.partition("-")
    engine: FakeEngine = (house.prefillers if role == "prefill" else house.decoders)[int(number)]
    return engine


def instance_of(house: Harness, name: str) -> Instance:
    instance = (house.leader or house.proxy).pool.find(name)
    assert instance is not None
    return instance


async def upgrade(house: Harness, name: str) -> None:
    """Drain, replace, resume: as an operator does."""
    instance, engine = instance_of(house, name), engine_of(house, name)
    instance.drain()
    await until(lambda: instance.is_idle)
    engine.restart()
    engine.dtype = NEW
    instance.look_soon()
    await until(lambda: instance.epoch == engine.epoch)  # a real one is down meanwhile, which cannot be overlooked
    instance.resume()
    await until(lambda: instance.is_ready or "of its revision" in instance.why)


class Load:
    """Clients that ask one request after the other, every other one as a stream."""

    def __init__(self, house: Harness) -> None:
        self._house = house
        self._is_over = False
        self.failed: list[str] = []
        self.served: Counter[str] = Counter()

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(NUM_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        while not self._is_over:
            answer = await self._house.post(stream=bool(number % 2), prompt=f"a b c {number}")
            if answer.status != 200 or TEXT not in answer.body.decode() + answer.text():
                self.failed.append(f"{answer.status} {answer.body[:200]!r}")
            for role in ("prefiller", "decoder"):
                self.served[answer.headers.get(f"x-pdproxy-{role}", "nobody")] += 1
            await asyncio.sleep(0)

    async def goes_on(self) -> None:
        """Until every client has been answered several times more."""
        before = self.served.total()
        await until(lambda: self.served.total() > before + 16 * NUM_CLIENTS)


@pytest.mark.parametrize("by_front", [False, True], ids=["alone", "by a front"])
async def test_an_upgrade_one_by_one_under_load(by_front: bool) -> None:
    async with proxy_in_front_of(*two_and_two(), by_front=by_front, **OPTIONS) as house, Load(house) as load:
        for name in ORDER:
            await load.goes_on()
            await upgrade(house, name)
        await until(lambda: all(instance_of(house, name).is_ready for name in ORDER))
        load.served.clear()
        await load.goes_on()
        assert load.failed == []
        assert set(load.served) == set(ORDER), "every new engine serves"
        assert len({instance_of(house, name).revision for name in ORDER}) == 1


async def test_an_old_stream_ends_while_the_old_prefillers_are_gone() -> None:
    prefillers, decoders = two_and_two()
    async with proxy_in_front_of(prefillers, decoders, **OPTIONS) as house:
        for name in ("prefill-0", "decode-0"):
            instance_of(house, name).drain()
        decoders[1].hang_at.add("middle")
        call = house.call(stream=True)
        await decoders[1].reached("middle")
        await upgrade(house, "prefill-0")
        await upgrade(house, "decode-0")
        await until(lambda: instance_of(house, "decode-0").is_ready)
        instance_of(house, "prefill-1").drain()
        for _ in range(4):
            assert (await house.post()).headers["x-pdproxy-decoder"] == "decode-0"
        decoders[1].let_go("middle")
        answer = await call.answer()
        assert answer.headers["x-pdproxy-decoder"] == "decode-1"
        assert (answer.text(), answer.events()[-1]) == (TEXT, "[DONE]")


def of_two_revisions(num_old_decoders: int = 1, **new: object) -> tuple[list[FakeEngine], list[FakeEngine]]:
    """A new pair, the first of either role, and an old prefiller with its decoders. `new` is how the new pair
    differs."""
    prefillers = [FakeEngine("prefill") for _ in range(2)]
    decoders = [FakeEngine("decode") for _ in range(1 + num_old_decoders)]
    for engine in (prefillers[0], decoders[0]):
        for name, value in (new or {"dtype": NEW}).items():
            setattr(engine, name, value)
    return prefillers, decoders


def resume_all_but(house: Harness, name: str) -> None:
    """That one would be asked again itself, where there is no other."""
    for one in (house.leader or house.proxy).pool.instances:
        if one.name == name:
            one.drain()
        else:
            one.resume()


async def test_a_retry_before_the_first_byte_may_go_to_another_revision() -> None:
    prefillers, decoders = of_two_revisions()
    async with proxy_in_front_of(prefillers, decoders) as house:
        decoders[0].fail_at["decode"] = error_reply(500, "broken")
        for stream in (True, False) * 2:
            answer = await house.post(stream=stream)
            assert (answer.status, answer.headers["x-pdproxy-decoder"]) == (200, "decode-1")


@pytest.mark.parametrize(
    ("num_old_decoders", "new", "goes_on_at"),
    [
        (1, {"dtype": NEW}, None),
        (2, {"dtype": NEW}, "decode-2"),
        (1, {"revision": "v2"}, None),
        (1, {"chunk_size": 32}, "decode-0"),
    ],
    ids=["another dtype", "another of its own", "another name", "larger pages"],
)
@pytest.mark.parametrize("by_front", [False, True], ids=["alone", "by a front"])
async def test_a_stream_is_continued_only_by_who_writes_the_same_text(
    num_old_decoders: int, new: dict[str, object], goes_on_at: str | None, by_front: bool
) -> None:
    prefillers, decoders = of_two_revisions(num_old_decoders, **new)
    async with proxy_in_front_of(prefillers, decoders, retries=1, by_front=by_front) as house:
        for name in ("prefill-0", "decode-0", *(["decode-2"] if num_old_decoders > 1 else [])):
            instance_of(house, name).drain()
        decoders[1].hang_at.add("middle")
        call = house.call(stream=True)
        await decoders[1].reached("middle")
        resume_all_but(house, "decode-1")
        await until(lambda: all(one.is_draining is (one.name == "decode-1") for one in house.proxy.pool.instances))
        decoders[1].fail_at["middle"] = EngineBroken("the connection was reset")
        decoders[1].let_go("middle")
        answer = await call.answer()
        assert house.proxy.orchestrator.num_continued == (goes_on_at is not None)
        assert [decoder.generations() != [] for decoder in decoders] == [
            f"decode-{number}" in ("decode-1", goes_on_at) for number in range(len(decoders))
        ]
        if goes_on_at is None:
            assert TEXT.startswith(answer.text())
            assert "error" in answer.events()[-1]
        else:
            assert (answer.text(), answer.events()[-1]) == (TEXT, "[DONE]")


async def test_a_whole_answer_of_which_nobody_saw_anything_starts_over_at_another_revision() -> None:
    prefillers, decoders = of_two_revisions()
    async with proxy_in_front_of(prefillers, decoders, retries=1) as house:
        for name in ("prefill-0", "decode-0"):
            instance_of(house, name).drain()
        decoders[1].hang_at.add("middle")
        call = house.call()
        await decoders[1].reached("middle")
        resume_all_but(house, "decode-1")
        await until(lambda: all(one.is_draining is (one.name == "decode-1") for one in house.proxy.pool.instances))
        decoders[1].fail_at["middle"] = EngineBroken("the connection was reset")
        decoders[1].let_go("middle")
        answer = await call.answer()
        assert (answer.status, answer.headers["x-pdproxy-decoder"]) == (200, "decode-0")
        assert answer.json()["choices"][0]["text"] == TEXT
