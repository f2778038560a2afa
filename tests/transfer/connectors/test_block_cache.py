"""What a decoder's receiver learns of vLLM's prefix cache, which is in another process, and how long that may take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transfer.connectors.vllm import block_cache
from transfer.connectors.vllm.block_cache import BlockAnswers, BlockCache, publish

KEYS = [b"%032d" % at for at in range(9000)]
SCHEDULER = """
import sys
from transfer.connectors.vllm.block_cache import BlockAnswers, publish

class Pool:
    def get_cached_block(self, key, groups):
        assert groups == [0]
        return True if int(key) < int(sys.argv[2]) else None

publish("engine", Pool())
answers = BlockAnswers("engine", sys.argv[1])
print("here", flush=True)
sys.stdin.readline()
answers.close()
"""
"""vLLM's scheduler, in a process of its own; its cache has the first blocks."""


class Scheduler:
    def __init__(self, path: str, num_cached: int) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", SCHEDULER, path, str(num_cached)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        )
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == b"here\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockCache]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(block_cache, "DEADLINE_S", 2.0)  # this machine has other work
    cache = BlockCache("engine")
    yield cache
    cache.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def start(cache: BlockCache) -> Iterator[Any]:
    schedulers: list[Scheduler] = []

    def start(num_cached: int) -> Scheduler:
        schedulers.append(Scheduler(cache.listen(), num_cached))
        return schedulers[-1]

    yield start
    for one in schedulers:
        one.child.kill()
        one.child.communicate()


@pytest.mark.parametrize("num_cached", [0, 1, 4096, 4097, 8000, 9500])
def test_blocks_in_another_process_are_found_by_their_names(cache: BlockCache, start: Any, num_cached: int) -> None:
    start(num_cached)
    assert cache.pin("an attempt", KEYS) == min(num_cached, len(KEYS))
    assert cache.pin("another", [*KEYS[:5], b"9" * 32, *KEYS[5:]]) == min(num_cached, 5)
    assert cache.pin("a third", []) == 0


def test_the_socket_is_private_and_gone_once_both_have_met(cache: BlockCache, tmp_path: Path, start: Any) -> None:
    path = Path(cache.listen())
    assert path.parent.stat().st_mode & 0o77 == 0
    assert path.parent.parent == tmp_path
    start(1)
    assert list(tmp_path.iterdir()) == []
    assert cache.pin("an attempt", KEYS) == 1


def test_nobody_is_asked_before_the_scheduler_has_come(cache: BlockCache) -> None:
    assert cache.pin("an attempt", KEYS) == 0
    cache.listen()
    began = time.monotonic()
    assert cache.pin("an attempt", KEYS) == 0
    assert time.monotonic() - began < 1


def test_a_scheduler_that_stands_still_costs_one_short_wait_and_late_answers_are_no_answers(
    cache: BlockCache, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(cache, "_clock", lambda: now[0])
    scheduler = start(7)
    assert cache.pin("first", KEYS) == 7
    monkeypatch.setattr(block_cache, "DEADLINE_S", 0.05)
    os.kill(scheduler.child.pid, signal.SIGSTOP)
    os.waitpid(scheduler.child.pid, os.WUNTRACED)  # until it stands
    for _ in range(20):
        began = time.monotonic()
        assert cache.pin("while it stands", KEYS) == 0
        assert time.monotonic() - began < 1
    assert cache._number == 2, "it is asked once, and then left alone"
    monkeypatch.setattr(block_cache, "DEADLINE_S", 2.0)
    os.kill(scheduler.child.pid, signal.SIGCONT)
    now[0] += 10
    assert cache.pin("behind that", KEYS[3:]) == 4, "not the 7 that answer the question before"


def test_a_scheduler_that_is_gone_is_not_asked_again(cache: BlockCache, start: Any) -> None:
    scheduler = start(7)
    assert cache.pin("first", KEYS) == 7
    scheduler.child.kill()
    scheduler.child.wait()
    for _ in range(3):
        assert cache.pin("behind its end", KEYS) == 0
    assert cache._asks is None


def test_a_scheduler_whose_receiver_is_gone_ends_its_thread(cache: BlockCache) -> None:
    answers = BlockAnswers("engine", cache.listen())
    assert cache.pin("an attempt", KEYS) == 0
    cache.close()
    answers._thread.join(5)
    assert not answers._thread.is_alive()
    answers.close()


def test_a_scheduler_that_closes_waits_for_nobody(cache: BlockCache) -> None:
    answers = BlockAnswers("engine", cache.listen())
    began = time.monotonic()
    answers.close()
    assert time.monotonic() - began < 2
    assert not answers._thread.is_alive()
    assert cache.pin("an attempt", KEYS) == 0


def test_a_scheduler_in_the_same_process_is_asked_without_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def get_cached_block(self, key: bytes, groups: list[int]) -> object:
            return key if int(key) < 3 else None

    monkeypatch.setattr(block_cache, "_pools", {})
    publish("engine", Pool())
    assert BlockCache("engine").pin("an attempt", KEYS) == 3
