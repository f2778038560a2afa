"""A prefiller whose data plane is a process of its own: its answers, and what is lost when that process dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

from tests.fakes.engine_pair import CHUNK, Pair, engine_pairs, new_job
from tests.fakes.transfer_world import until
from transfer.dataplane.own_process import OwnProcess
from transfer.errors import TransferError
from transfer.trust import new_key

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


def home_of(pair: Pair) -> OwnProcess:
    assert pair.prefiller._plane is not None
    home = pair.prefiller._plane._backend
    assert isinstance(home, OwnProcess)
    return home


async def test_answers_are_as_from_a_thread_before_and_after_it_has_died(folder: Path) -> None:
    """Also in the middle of a request, which fails; the engine lives, and its cache with it."""
    key = new_key()
    prefill = {"data_plane": "process", "fleet_key": key, "layers_per_write": 1}
    async with engine_pairs() as make:
        pair: Pair = await make(folder, prefill=prefill, fleet_key=key)
        job = new_job(5 * CHUNK)
        assert await pair.answer(job) == pair.expected(job)
        home = home_of(pair)
        pid = home.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that the push cannot end before the process does
        leg = await begun(pair)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TransferError, match="status -9"):
            await leg
        await until(lambda: home.num_lives == 2)
        assert pair.prefiller.fault() is None
        for each in (new_job(3 * CHUNK, seed=1), job):
            assert await pair.answer(each) == pair.expected(each)


async def begun(pair: Pair) -> asyncio.Future[object]:
    """A request that the prefiller has begun, and that waits for pages."""
    task: asyncio.Future[object] = asyncio.ensure_future(pair.prefill(new_job(4 * CHUNK, seed=2)))
    await until(lambda: bool(pair.prefiller._plane._pushes))  # type: ignore[union-attr]
    return task
