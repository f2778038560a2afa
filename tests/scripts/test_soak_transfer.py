"""The soak of the transfer: a run of a few seconds with real processes, and whether it would see what it looks for."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

from scripts.dev.soak_transfer.plan import PAGE_BYTES, Fate, SoakOptions, Wish, draw, pattern
from scripts.dev.soak_transfer.queue_watch import WatchedReservations
from scripts.dev.soak_transfer.report import MIN_LOOKS, make_report, problems
from scripts.dev.soak_transfer.run import Findings
from transfer.memory.reservations import Reservation

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "soak_transfer.py"
PATIENCE_S = 60.0


def start(*options: str) -> subprocess.Popen[str]:
    words = [sys.executable, str(SCRIPT), "--prefillers", "4", "--processes", "2", "--pages", "16", *options]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.engine
def test_a_short_run() -> None:
    """Its figures are all that stdout gets."""
    process = start("--minutes", "0.05", "--seed", "7", "--json")
    figures, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    report = json.loads(figures)
    assert (report["seed"], report["is_complete"], report["problems"]) == (7, True, [])
    assert report["granted"] > report["read_right"] > 20
    assert 0 < report["longest_wait_grants"] <= report["bound_grants"]
    assert report["kills"] + report["freezes"] >= 1
    assert report["all_pages_free"] is True


@pytest.mark.engine
def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    process = start("--minutes", "5", "--json", str(tmp_path / "report.json"))
    try:
        while len(children := children_of(process.pid)) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + signal.SIGINT
        assert not [child for child in children if Path(f"/proc/{child}").exists()]
        report = json.loads((tmp_path / "report.json").read_text())
        assert (report["is_complete"], report["all_pages_free"]) == (False, None)
    finally:
        for child in children_of(process.pid) if process.poll() is None else []:
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()


# ── would it see it? ────────────────────────────────────────────────────────────────────────────────────────────────


def wanted(attempt: str, num_pages: int) -> Reservation:
    return Reservation(
        attempt=attempt, num_pages=num_pages, num_tokens=num_pages, expires_at=9.0, notify=None, num_now=num_pages
    )


def full_house() -> WatchedReservations:
    """Four pages: ``a`` has them, ``big`` and then ``small`` wait."""
    watch = WatchedReservations(4)
    for attempt, num_pages in (("a", 4), ("big", 4), ("small", 1)):
        watch.request(wanted(attempt, num_pages), identity=attempt.encode())
        watch.pump()
    return watch


def test_first_come_first_served_is_what_it_sees() -> None:
    watch = full_house()
    for attempt in ("a", "big", "small"):
        watch.withdraw(attempt, "enough")
        watch.writes_ended(attempt)
        watch.pump()
    assert (watch.num_granted, watch.num_overtaken, watch.longest_wait) == (3, 0, 1)


def test_it_sees_who_is_overtaken() -> None:
    watch = full_house()
    watch._queue.move_to_end("big")  # what must not happen
    watch.withdraw("a", "enough")
    watch.writes_ended("a")
    watch.pump()
    assert watch.num_overtaken == 1


def test_one_who_left_the_queue_was_not_overtaken() -> None:
    watch = full_house()
    watch.withdraw("big", "enough")
    watch.withdraw("a", "enough")
    watch.writes_ended("a")
    watch.pump()
    assert (watch.num_overtaken, watch.longest_wait) == (0, 0)


def test_it_sees_that_nothing_moves() -> None:
    now = 0.0
    watch = WatchedReservations(1, clock=lambda: now)
    watch.request(wanted("a", 1), identity=b"a")
    watch.pump()
    now = 5.0
    assert watch.stalled_s() == 0.0, "nobody waits"
    watch.request(wanted("b", 1), identity=b"b")
    watch.pump()
    now = 12.0
    assert watch.stalled_s() == 7.0


def test_an_attempts_name_says_everything_about_it() -> None:
    dice = random.Random(1)
    for serial in range(500):
        wish = draw(dice, f"{serial:032x}", 64)
        assert Wish.parse(wish.attempt) == wish
        assert len(wish.attempt) < 100
        assert 1 <= wish.num_pages <= 64
        assert len(set(filter(None, wish.keys))) == wish.num_shared <= wish.num_pages


def test_pages_of_others_are_told_apart() -> None:
    ours, theirs = (Wish(serial, Fate.COMPLETE, 1, 2, 4) for serial in ("a", "b"))
    assert [ours.word(n) == theirs.word(n) for n in range(4)] == [True, True, False, False]
    assert len({int(ours.word(n)) for n in range(4)} | {int(theirs.word(n)) for n in range(4)}) == 6
    page = pattern() ^ ours.word(3)
    assert (page.nbytes, page.dtype) == (PAGE_BYTES, np.dtype(np.uint64))
    page[100] ^= np.uint64(1)
    assert not (page ^ pattern() == ours.word(3)).all()


GOOD: dict[str, Any] = {
    "is_complete": True,
    "read_wrong": 0,
    "wrong_tags": 0,
    "read_right": 10,
    "overtaken": 0,
    "starved": 0,
    "longest_stall_s": 1.0,
    "queued_share": 1.0,
    "all_pages_free": True,
    "before": {"decoder": {"fds": 10, "threads": 5, "tasks": 2, "rss_mb": 100.0, "tables": {}}},
    "after": {"decoder": {"fds": 11, "threads": 5, "tasks": 2, "rss_mb": 101.0, "tables": {"attempts": 0}}},
}
AFTER = GOOD["after"]["decoder"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"is_complete": False}, "end"),
        ({"read_wrong": 1}, "wrong bytes"),
        ({"wrong_tags": 1}, "another one's bytes"),
        ({"read_right": 0}, "nothing was read"),
        ({"overtaken": 1}, "past"),
        ({"starved": 1}, "never granted"),
        ({"longest_stall_s": 100.0}, "although somebody waited"),
        ({"queued_share": 0.5}, "no soak"),
        ({"all_pages_free": False}, "held"),
        ({"after": {"decoder": AFTER | {"fds": 60}}}, "fds grew from 10 to 60"),
        ({"after": {"decoder": AFTER | {"rss_mb": 600.0}}}, "rss_mb"),
        ({"after": {"decoder": AFTER | {"tables": {"moved": 3}}}}, "3 moved"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_each_fault_is_a_problem(changes: dict[str, Any], word: str) -> None:
    assert problems(GOOD) == []
    (problem,) = problems(GOOD | changes)
    assert word in problem


@pytest.mark.parametrize(("num_looks", "share"), [(MIN_LOOKS - 1, None), (MIN_LOOKS, 0.0)])
def test_a_few_looks_say_nothing_about_the_queue(num_looks: int, share: float | None) -> None:
    options = SoakOptions(duration_s=3.0, seed=1, num_prefillers=1, num_processes=1, num_pages=4, num_at_once=1)
    findings = Findings(options, samples=[{"queued": 0, "held": 0}] * num_looks)
    assert make_report(findings, is_complete=False)["queued_share"] == share
