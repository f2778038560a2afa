"""The fabric of the mock agents of one test. It knows which of them are there, which stand still, and what lands
when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from transfer.agents.base import Region
from transfer.agents.fates import Drop, Duplicate, Fail, Fate, Hold, Land, Overtaken
from transfer.agents.mock_write import MockWrite, put
from transfer.errors import PeerLost


class Resident(Protocol):
    """A `Resident` is an agent as the fabric sees it. The fabric calls it under its lock."""

    @property
    def epoch(self) -> str: ...

    @property
    def region(self) -> Region | None: ...

    def hold(self, write: MockWrite) -> None:
        """Keeps the write for the caller of `next_held`."""

    def go_on(self) -> None:
        """Goes on with its jobs, because the process does not stand still any more."""

    def end(self, reason: str) -> None:
        """Ends the agent, because the process is gone."""


class MockFabric:
    """A `MockFabric` connects the agents of one test, and keeps the test's time.

    Fences are measured by `clock`; `advance` adds to it. Delays are measured by `advance` alone, so nothing lands
    because a test was slow.

    Mutable state, under `lock`: `agents` (the living, by epoch), `frozen`, `elapsed_s`, `_epochs` (all there ever
    were), `_num_posted`, `_posted` (writes, until they are seen to be over), `_overtaken` (writes, each with the number
    of others that must still land before it), `_scheduled` (actions that happen when `elapsed_s` has got there),
    `_stalled` (actions that wait for a thaw).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.lock = threading.RLock()
        self.agents: dict[str, Resident] = {}
        self.frozen: set[str] = set()
        self.elapsed_s = 0.0
        """The seconds that were advanced so far."""
        self._epochs: set[str] = set()
        self._num_posted = 0
        self._posted: list[MockWrite] = []
        self._overtaken: list[tuple[MockWrite, int]] = []
        self._scheduled: list[tuple[float, MockWrite, Callable[[], None]]] = []
        self._stalled: list[tuple[MockWrite, Callable[[], None]]] = []

    def __repr__(self) -> str:
        return f"<MockFabric {len(self.agents)} agents, {len(self.under_way)} writes under way>"

    @property
    def under_way(self) -> list[MockWrite]:
        """The writes that are posted and not over, the oldest first. Dropped ones stay here as long as both sides
        live."""
        with self.lock:
            self._posted = [write for write in self._posted if not write.is_over]
            return list(self._posted)

    def now(self) -> float:
        return self._clock() + self.elapsed_s

    def advance(self, seconds: float) -> None:
        """Lets time pass. The actions that are due until then happen, in order."""
        with self.lock:
            end = self.elapsed_s + seconds
            while due := [entry for entry in self._scheduled if entry[0] <= end]:
                entry = min(due, key=lambda entry: entry[0])
                self._scheduled.remove(entry)
                self.elapsed_s = entry[0]
                self.settle(entry[1], entry[2])
            self.elapsed_s = end

    def freeze(self, epoch: str) -> None:
        """Lets this process stand still. Calls to its agent wait, and so do all writes to and from it."""
        with self.lock:
            self.frozen.add(epoch)

    def thaw(self, epoch: str) -> None:
        """Lets the process go on where it stood. Calls that came meanwhile are carried out now, and their fences may
        have passed."""
        with self.lock:
            self.frozen.discard(epoch)
            stalled, self._stalled = self._stalled, []
            for write, action in stalled:
                self.settle(write, action)
            if epoch in self.agents:
                self.agents[epoch].go_on()

    def kill(self, epoch: str) -> None:
        """Lets this process die. Of its own writes nothing more lands by itself, and writes to it raise `PeerLost`."""
        with self.lock:
            self._scheduled = [entry for entry in self._scheduled if entry[1].sender != epoch]
            self._stalled = [entry for entry in self._stalled if entry[0].sender != epoch]
            self._overtaken = [entry for entry in self._overtaken if entry[0].sender != epoch]
            if epoch in self.agents:
                self.agents[epoch].end("was killed")

    # ── for the agents and their writes ─────────────────────────────────────────────────────────────────────────────

    def join(self, agent: Resident) -> None:
        with self.lock:
            if agent.epoch in self._epochs:
                raise ValueError(f"there was an agent {agent.epoch!r} already; a restart has a new epoch")
            self._epochs.add(agent.epoch)
            self.agents[agent.epoch] = agent

    def leave(self, epoch: str, reason: str) -> None:
        """Removes the agent: writes from and to it fail. Those of its own actions that are scheduled may still land."""
        self.agents.pop(epoch, None)
        self.frozen.discard(epoch)
        for write in self.under_way:
            if write.sender == epoch:
                _lose(write, PeerLost(f"the local agent {reason} during the write"))
            elif write.peer == epoch:
                _lose(write, PeerLost(f"{epoch} {reason}"))

    def next_serial(self) -> int:
        self._num_posted += 1
        return self._num_posted

    def post(self, write: MockWrite, fate: Fate) -> None:
        self._posted.append(write)
        match fate:
            case Land(delay_s):
                self._later(delay_s, write, write.arrive)
            case Fail(error, landed, delay_s):
                self._later(delay_s, write, lambda: write.break_off(error, landed))
            case Duplicate(again_after_s):
                self.settle(write, lambda: self._land_twice(write, again_after_s))
            case Overtaken(by):
                self._overtaken.append((write, by))
            case Hold():
                self.agents[write.sender].hold(write)
            case Drop():
                pass

    def settle(self, write: MockWrite, action: Callable[[], None]) -> None:
        """Does the action now or later. See `mock_write.FabricView`."""
        with self.lock:
            if {write.sender, write.peer} & self.frozen:
                self._stalled.append((write, action))
            elif write.peer not in self.agents:
                _lose(write, PeerLost(f"{write.peer} has died"))
            else:
                action()

    def note_landed(self, write: MockWrite) -> None:
        """Counts this write for those which it was to overtake, and lets those land that have waited for enough."""
        waiting = [(other, by - _is_behind(other, write)) for other, by in self._overtaken]
        self._overtaken = [(other, by) for other, by in waiting if by > 0]
        for other, by in waiting:
            if by <= 0:
                self.settle(other, other.arrive)

    def _later(self, delay_s: float, write: MockWrite, action: Callable[[], None]) -> None:
        if delay_s > 0:
            self._scheduled.append((self.elapsed_s + delay_s, write, action))
        else:
            self.settle(write, action)

    def _land_twice(self, write: MockWrite, again_after_s: float) -> None:
        carried = write.carried()
        self._scheduled.append((self.elapsed_s + again_after_s, write, lambda: put(carried)))
        write.arrive()


def _lose(write: MockWrite, error: PeerLost) -> None:
    write.connection.note(error)
    if not write.is_over:
        write.future.set_exception(error)


def _is_behind(write: MockWrite, later: MockWrite) -> bool:
    return write.serial < later.serial and (write.sender, write.peer) == (later.sender, later.peer)
