"""A proxy of several processes: real engines, real fronts, and what happens when one of these is killed or replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, running

pytestmark = pytest.mark.engine

LOAD_S = 6.0
NUM_CLIENTS = 8


async def workers_of(house: Cluster) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = (await house.get("proxy", "/status"))["workers"]
    return told


def still_there(pids: set[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def folders_of_the_dead() -> set[Path]:
    """Folders of leaders whose socket nobody listens at any more."""
    found = set()
    for path in Path(tempfile.gettempdir()).glob("pdproxy-*/leader"):
        with socket.socket(socket.AF_UNIX) as one:
            try:
                one.connect(str(path))
            except ConnectionRefusedError:
                found.add(path.parent)
            except OSError:  # it goes in this moment
                continue
    return found


async def until(holds: Callable[[], Any], what: str, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


async def stream(client: httpx.AsyncClient, house: Cluster, prompt: str, num_tokens: int) -> str:
    """One streamed answer. Returns ``ok``, or what became of it."""
    body = {"model": house.model.name, "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    try:
        async with client.stream("POST", f"{house.proxy}/v1/completions", json=body) as answer:
            text = b"".join([piece async for piece in answer.aiter_raw()])
            is_whole = text.endswith(b"data: [DONE]\n\n") and b'"error"' not in text
            return "ok" if answer.status_code == 200 and is_whole else f"{answer.status_code} {text[-200:]!r}"
    except httpx.TransportError as error:
        return type(error).__name__


async def load(house: Cluster, outcomes: Counter[str]) -> None:
    """Clients that keep their connections, for a while."""
    ends_at = time.monotonic() + LOAD_S

    async def one(number: int) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            count = 0
            while time.monotonic() < ends_at:
                count += 1
                outcomes[await stream(client, house, f"client {number}, request {count}", 4 + 16 * (count % 3))] += 1

    await asyncio.gather(*(one(number) for number in range(NUM_CLIENTS)))


async def test_fronts_are_killed_and_replaced_and_nothing_is_lost(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    async with running(tiny_model(), tmp_path, proxy=("--chunk-size", "64", "--workers", "2")) as house:
        before = {worker["pid"] for worker in await workers_of(house)}
        assert len(before) == 2

        # One after the other is replaced, and no client notices.
        outcomes = Counter[str]()
        loading = asyncio.create_task(load(house, outcomes))
        await asyncio.sleep(1.0)
        house.processes["proxy"].signal(signal.SIGHUP)
        await loading
        assert outcomes.keys() == {"ok"}, outcomes

        async def are_new() -> bool:
            serving = {one["pid"] for one in await workers_of(house) if one["state"] == "serving"}
            return len(serving) == 2 and not serving & before

        await until(are_new, "the fronts were not replaced")
        served = outcomes.total()
        assert (await house.get("proxy", "/status"))["totals"] == {"done": served}, "of those that have left as well"

        # One is killed: its clients are cut off, and nobody else.
        victim = next(one["pid"] for one in await workers_of(house) if one["state"] == "serving")
        outcomes = Counter()
        loading = asyncio.create_task(load(house, outcomes))
        await asyncio.sleep(2.0)
        os.kill(victim, signal.SIGKILL)
        await loading
        cut = outcomes.total() - outcomes["ok"]
        assert cut <= NUM_CLIENTS, outcomes
        assert not any(one[:3].isdigit() for one in outcomes), outcomes

        async def are_two() -> bool:
            serving = {one["pid"] for one in await workers_of(house) if one["state"] == "serving"}
            return len(serving) == 2 and victim not in serving

        await until(are_two, "nobody has taken its place")
        await house.settled()
        pids = {worker["pid"] for worker in await workers_of(house)}
    assert not still_there(pids), "a front has outlived its leader"


async def test_a_front_without_a_leader_ends(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    async with running(tiny_model(), tmp_path, proxy=("--chunk-size", "64", "--workers", "2")) as house:
        pids, dead = {worker["pid"] for worker in await workers_of(house)}, folders_of_the_dead()
        async with httpx.AsyncClient(timeout=60) as client:
            running_stream = asyncio.create_task(stream(client, house, "a long answer", 200))
            await asyncio.sleep(0.3)
            house.processes["proxy"].signal(signal.SIGKILL)
            assert await running_stream == "ok", "what runs goes on without the leader"

        async def have_ended() -> bool:
            return not still_there(pids)

        await until(have_ended, "fronts have outlived their leader")
        assert not folders_of_the_dead() - dead, "the leader's folder is left behind"
