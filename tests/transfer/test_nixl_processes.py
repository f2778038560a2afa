"""Two and more real processes over real NIXL: what arrives, and what is left when one of them is killed or frozen.

In every receiver, pages that are granted are filled with canaries before their writer is told. Most tests therefore let
an *heir* wait for all pages of the buffer: it gets them in the moment in which the receiver takes them for free, writes
nothing at first, and so whatever a dead or frozen sender still sends there is seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.e2e.cluster import free_ports
from tests.helpers.on_device import IS_GPU, ucx_tls
from tests.helpers.zygote import LIMIT_S, START_LIMIT_S, Child, Zygote

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

pytestmark = pytest.mark.engine

NUM_PAGES = 32
PAGE_BYTES = 1 << 20
HEARTBEAT_S = 0.2
WRITER_TIMEOUT_S = 1.5
PATIENT_S = 20.0
"""Where nobody's silence is tested: on a busy machine it may be long."""
SLACK_S = 1.0
"""What a machine with nothing to spare may add to a deadline."""
TCP = {"UCX_TLS": ucx_tls("tcp"), "UCX_TCP_SNDBUF": "256k", "UCX_TCP_RCVBUF": "256k"}
"""Every byte goes through the receiver's own thread. While that stands still, a write larger than the sockets' buffers
is under way, for certain: a part is on its way, and the rest will only leave if both processes go on."""
NUM_REPETITIONS = 7
ALL = list(range(NUM_PAGES))


class Ends:
    """One receiver and any number of senders."""

    def __init__(self, zygote: Zygote, writer_timeout_s: float = WRITER_TIMEOUT_S, **environment: str) -> None:
        self._zygote = zygote
        self._writer_timeout_s = writer_timeout_s
        self._environment = environment
        self._num_senders = 0
        self.receiver: Child
        self._endpoint: list[Any] = []

    def start(self, num_senders: int, port: int = 0) -> list[Child]:
        """A receiver at `port`, and new senders."""
        asked = self._begin_receiver(port)
        senders = self.add_senders(num_senders)
        self._endpoint = self.receiver.answer(asked, START_LIMIT_S)
        return senders

    def restart(self) -> None:
        """The receiver is killed, and another one listens in its place."""
        self.receiver.kill()
        asked = self._begin_receiver(self._endpoint[1])
        assert self.receiver.answer(asked, START_LIMIT_S) == self._endpoint

    def add_senders(self, count: int) -> list[Child]:
        """Each has bytes of its own."""
        salts = range(self._num_senders, self._num_senders + count)
        self._num_senders += count
        senders = [self._zygote.fork("sender", salt, **self._environment) for salt in salts]
        for sender, started in [(sender, sender.say("start")) for sender in senders]:
            sender.answer(started, START_LIMIT_S)
        return senders

    def _begin_receiver(self, port: int) -> int:
        self.receiver = self._zygote.fork("receiver", port, self._writer_timeout_s, **self._environment)
        return self.receiver.say("start")

    def ask_for_pages(self, sender: Child, attempt: str, num_pages: int, timeout_s: float = 20.0) -> int:
        return sender.say("open", *self._endpoint, attempt, num_pages, timeout_s)

    def open(self, sender: Child, attempt: str, num_pages: int, timeout_s: float = 20.0) -> float:
        return float(sender.answer(self.ask_for_pages(sender, attempt, num_pages, timeout_s)))

    def inherit(self, sender: Child, attempt: str = "heir") -> int:
        """Let `sender` wait for all pages of the buffer."""
        asked = self.ask_for_pages(sender, attempt, NUM_PAGES)
        self.receiver.ask("queued", 1)
        return asked

    def push(self, sender: Child, attempt: str, pages: list[int]) -> None:
        """Send these pages and have them read."""
        self.open(sender, attempt, len(pages))
        self.complete(sender, attempt, pages)

    def complete(self, sender: Child, attempt: str, pages: list[int]) -> None:
        """Write the pages of an open attempt and have them read; what arrives is what was sent."""
        sender.ask("fill", attempt, pages)
        assert sender.ask("finish", attempt)[0] == len(pages) * PAGE_BYTES
        assert self.receiver.ask("read", attempt) == sender.ask("checksum", pages)

    def close(self, *senders: Child) -> None:
        """Nothing is left, and everybody ends by himself."""
        assert self.receiver.ask("free_pages", NUM_PAGES) < LIMIT_S
        for child in (*senders, self.receiver):
            child.close()


@pytest.fixture
def new_ends(zygote: Zygote) -> Iterator[Callable[..., Ends]]:
    yield partial(Ends, zygote)
    zygote.reap_all()


@pytest.fixture
def ends(new_ends: Callable[..., Ends]) -> Ends:
    return new_ends()


# ── the way it should go ────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_arrive_and_nothing_runs_hot(ends: Ends) -> None:
    (sender,) = ends.start(1)
    for attempt, pages in (("a", ALL), ("b", [5, 3, 30])):
        ends.push(sender, attempt, pages)
    assert ends.receiver.ask("num_free") == NUM_PAGES
    assert quietest(2.0, sender, ends.receiver) < 0.01, "idle"

    ends.open(sender, "c", 3)
    busiest = quietest(1.0, sender, ends.receiver)
    assert busiest < 0.03, "an attempt is open, nothing is written: heartbeats are all there is"
    assert ends.receiver.ask("num_free") == NUM_PAGES - 3
    sender.ask("abort", "c")
    ends.close(sender)


def quietest(seconds: float, *children: Child) -> float:
    """Cores that the busiest of them uses while they are left alone: the least of up to three looks, because on a busy
    machine a process is charged for what others do to its caches and its interrupts."""
    least = math.inf
    for _ in range(3):
        asked = [(child, child.say("idle", seconds)) for child in children]
        least = min(least, max(child.answer(number) / seconds for child, number in asked))
        if least < 0.01:
            break
    return least


# ── the sender is killed ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(
    IS_GPU, reason="UCX 1.23 ends a receiver whose peer dies in a write that it copies in software: GPU memory over TCP"
)
def test_senders_are_killed_at_every_stage_before_the_receiver_was_told(new_ends: Callable[..., Ends]) -> None:
    """Noticed at once on one machine; nobody has their pages before, and from then on nothing arrives in them, though
    one of them was killed with bytes in the kernel that are delivered afterwards."""
    ends = new_ends(**TCP)
    *victims, heir = ends.start(5)
    ends.push(victims[3], "first", ALL)  # so that there is a connection for bytes to be on their way in
    stages = ("granted", "half written", "written", "under way")
    for victim, attempt in zip(victims, stages, strict=True):
        ends.open(victim, attempt, 8)
    for victim, stage in zip(victims[:3], stages[:3], strict=True):
        bring_to(victim, stage, stage)
    lost = [ends.receiver.say("lost", attempt) for attempt in stages]
    waiting = ends.inherit(heir)
    ends.receiver.freeze()
    bring_to(victims[3], "under way", "under way")
    for victim in victims:
        victim.kill()
    ends.receiver.thaw()
    killed_at = time.monotonic()

    for answer in lost:
        reason, _ = ends.receiver.answer(answer, SLACK_S)
        assert "the prefiller vanished" in reason
    assert heir.answer(waiting) - killed_at < SLACK_S
    assert ends.receiver.ask("num_reused") == NUM_PAGES
    assert ends.receiver.ask("num_changed", "heir") == 0
    ends.complete(heir, "heir", ALL)
    ends.close(heir)


def bring_to(sender: Child, attempt: str, stage: str) -> None:
    """The push, of 8 pages, is at that stage."""
    if stage == "half written":
        sender.ask("fill_half_and_hold", attempt, 0)
    elif stage == "written":
        sender.ask("fill", attempt, ALL[:8])
        sender.ask("written", attempt)
    elif stage == "under way":
        sender.ask("fill", attempt, ALL[:8])
        sender.ask("under_way", 1)


def test_the_canaries_see_a_write_that_lands_late(new_ends: Callable[..., Ends]) -> None:
    """A receiver that uses pages again too early is caught by what the other tests look at."""
    ends = new_ends(**TCP)
    late, heir = ends.start(2)
    ends.push(late, "first", ALL)
    ends.open(late, "a", NUM_PAGES)
    waiting = ends.inherit(heir)
    ends.receiver.freeze()
    late.ask("fill", "a", ALL)
    late.ask("under_way", 1)
    late.freeze()
    ends.receiver.thaw()
    ends.receiver.ask("forget_writers", "a")
    heir.answer(waiting)
    late.thaw()
    ends.receiver.ask("changed", "heir")


def test_what_was_told_complete_outlives_its_sender(ends: Ends) -> None:
    """Nobody can be writing it any more: the sender's death, though noticed, changes nothing."""
    victim, heir = ends.start(2)
    for attempt in ("told", "granted"):
        ends.open(victim, attempt, 8)
    sent = victim.ask("checksum", [7, 1, 4, 2, 0, 3, 5, 6])
    victim.ask("fill", "told", [7, 1, 4, 2, 0, 3, 5, 6])
    victim.ask("finish", "told")
    ends.receiver.ask("ready", "told")
    victim.kill()
    assert ends.receiver.ask("free_pages", NUM_PAGES - 8) < WRITER_TIMEOUT_S + SLACK_S
    waiting = ends.inherit(heir)
    assert ends.receiver.ask("read", "told") == sent
    heir.answer(waiting)
    assert ends.receiver.ask("num_changed", "heir") == 0
    ends.complete(heir, "heir", ALL)
    ends.close(heir)


# ── the receiver is killed ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_receiver_is_killed_in_mid_write_and_restarted_under_its_address(new_ends: Callable[..., Ends]) -> None:
    """Two writes are under way, a third push has only its pages, a fourth waits for some: that one, which has lost
    nothing, gets its pages from the receiver's successor; so does whoever comes later, and after the next death.
    """
    ends = new_ends(**TCP)
    (port,) = free_ports(1)
    (sender,) = ends.start(1, port)
    for attempt in ("a", "b", "c"):
        ends.open(sender, attempt, 8)
    queued = ends.ask_for_pages(sender, "d", 16)
    ends.receiver.ask("queued", 1)
    ends.receiver.freeze()
    sender.ask("fill", "a", ALL[:8])
    sender.ask("fill", "b", ALL[8:16])
    sender.ask("under_way", 2)
    ends.receiver.kill()
    failures = [(sender.say("failed", attempt), sender.say("ended", attempt)) for attempt in ("a", "b", "c")]
    for failed, ended in failures:
        assert sender.answer(failed, WRITER_TIMEOUT_S)
        assert sender.answer(ended) is None, "the local pages are nobody's any more"

    ends.restart()
    sender.answer(queued)
    ends.complete(sender, "d", ALL[16:])
    ends.push(sender, "e", ALL)
    ends.restart()
    ends.push(sender, "f", ALL)
    ends.close(sender)


# ── one of them stands still ────────────────────────────────────────────────────────────────────────────────────────


def test_the_receiver_is_frozen(new_ends: Callable[..., Ends]) -> None:
    """The push ends by its deadline although its write does not. When the receiver goes on, its pages are nobody's
    before that write has ended, long as the writer may seem to have been silent.
    """
    ends = new_ends(**TCP)
    sender, heir = ends.start(2)
    ends.push(sender, "first", ALL)
    ends.open(sender, "a", 8, 1.0)
    ends.receiver.freeze()
    waiting = ends.ask_for_pages(heir, "heir", NUM_PAGES)
    sender.ask("fill", "a", ALL[:8])
    sender.ask("under_way", 1)
    reason, seconds = sender.ask("finish", "a")
    assert "attempt a" in str(reason)
    assert seconds < 1.0 + SLACK_S
    ended = sender.say("ended", "a")
    time.sleep(WRITER_TIMEOUT_S)  # as long as a silent sender would be waited for
    sender.freeze()
    ends.receiver.thaw()
    ends.receiver.ask("queued", 1)
    ends.receiver.ask("quarantined", 8)  # whichever it deals with first, the heir's wish or the end of "a"
    sender.thaw()
    sender.answer(ended, 2 * WRITER_TIMEOUT_S)
    heir.answer(waiting)
    assert ends.receiver.ask("num_changed", "heir") == 0
    ends.complete(heir, "heir", ALL)
    ends.push(sender, "b", [7, 8])
    ends.close(sender, heir)


def test_the_sender_is_frozen(ends: Ends) -> None:
    """Its attempts fail, and its pages are nobody's until it goes on. Then it must not write by what it was once told:
    neither what is filled then, nor what was about to be posted.
    """
    sender, heir = ends.start(2)
    for attempt in ("granted", "half written"):
        ends.open(sender, attempt, NUM_PAGES // 2)
    bring_to(sender, "half written", "half written")
    waiting = ends.inherit(heir)
    lost = ends.receiver.say("lost", "granted")
    sender.freeze()
    reason, seconds = ends.receiver.answer(lost)
    assert "the prefiller vanished" in reason
    assert seconds < WRITER_TIMEOUT_S + SLACK_S
    filled = sender.say("fill", "granted", ALL[: NUM_PAGES // 2])
    going_on = sender.say("go_on")
    assert ends.receiver.ask("num_free") == 0
    sender.thaw()
    sender.answer(filled)
    sender.answer(going_on)
    for attempt in ("granted", "half written"):
        reason, _ = sender.ask("finish", attempt)
        assert f"attempt {attempt}" in str(reason)
        sender.ask("ended", attempt)
    heir.answer(waiting)
    assert ends.receiver.ask("num_changed", "heir") == 0
    ends.complete(heir, "heir", ALL)
    ends.push(sender, "b", [4])
    ends.close(sender, heir)


@pytest.mark.parametrize("end", ["it goes on", "it is killed"])
def test_the_sender_is_frozen_in_the_middle_of_a_write(new_ends: Callable[..., Ends], end: str) -> None:
    """The rest of that write would land wherever it was meant to. So nobody else gets the pages before it has, or
    cannot any more."""
    ends = new_ends(**TCP)
    sender, heir = ends.start(2)
    if end == "it goes on":
        sender.ask("go_on_whatever")
    ends.push(sender, "first", ALL)
    ends.open(sender, "a", NUM_PAGES)
    waiting = ends.inherit(heir)
    lost = ends.receiver.say("lost", "a")
    ends.receiver.freeze()
    sender.ask("fill", "a", ALL)
    sender.ask("under_way", 1)
    sender.freeze()
    ends.receiver.thaw()
    reason, _ = ends.receiver.answer(lost)
    assert "the prefiller vanished" in reason
    time.sleep(WRITER_TIMEOUT_S)  # what is tested is that nothing happens meanwhile
    assert ends.receiver.ask("num_free") == 0
    if end == "it goes on":
        sender.thaw()
        sender.ask("ended", "a")
    else:
        sender.kill()
    heir.answer(waiting)
    assert ends.receiver.ask("num_changed", "heir") == 0
    ends.complete(heir, "heir", ALL)
    if end == "it goes on":
        ends.push(sender, "b", [7, 8])
        ends.close(sender, heir)
    else:
        ends.close(heir)


# ── again and again ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_receiver_does_not_grow_with_every_sender_that_is_killed(ends: Ends) -> None:
    (witness,) = ends.start(1)
    sizes = []
    for number in range(NUM_REPETITIONS):
        (victim,) = ends.add_senders(1)
        attempt = f"bad {number}"
        ends.open(victim, attempt, 8)
        bring_to(victim, attempt, ("granted", "half written", "written")[number % 3])
        victim.kill()
        assert ends.receiver.ask("free_pages", NUM_PAGES) < SLACK_S
        if number in (0, NUM_REPETITIONS - 1):
            ends.push(witness, f"after {number}", ALL)
            sizes.append(size_of(ends.receiver))
    assert sizes[0] == sizes[-1]
    ends.close(witness)


def test_the_sender_does_not_grow_with_every_receiver_that_is_killed(new_ends: Callable[..., Ends]) -> None:
    ends = new_ends(PATIENT_S)
    (port,) = free_ports(1)
    (sender,) = ends.start(1, port)
    sizes = []
    for number in range(NUM_REPETITIONS):
        ends.push(sender, f"good {number}", ALL)
        sizes.append(size_of(sender))
        ends.open(sender, f"bad {number}", 8)
        sender.ask("fill", f"bad {number}", ALL[:4])
        ends.restart()
        sender.ask("ended", f"bad {number}")
    deadline = time.monotonic() + LIMIT_S
    while size_of(sender) > sizes[1]:  # a lost session is closed a heartbeat or two later
        assert time.monotonic() < deadline
        time.sleep(HEARTBEAT_S)
    ends.close(sender)


def size_of(child: Child) -> tuple[int, int]:
    return child.num_fds(), child.num_threads()
