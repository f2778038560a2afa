"""The search goes breadth first through every state of a world, so that the first violation has the shortest story.

States that differ by names alone are counted once. Two that are taken for different although they are not cost time,
and hide nothing.
"""

from __future__ import annotations

import marshal
import pickle
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Any

from pdproxy.admission.account import Lease
from pdproxy.admission.custody import Custody
from scripts.dev.check_kernel.model import DISTURBING, Event, Model
from scripts.dev.check_kernel.rules import is_clean
from scripts.dev.check_kernel.world import NOW, SHAPES, World, letter

Step = tuple[Event, tuple[int, ...]]
"""An event, and the picks that were made in it."""

_CUSTODY = {custody: number for number, custody in enumerate(Custody)}
_PHASES = {
    name: number for number, name in enumerate(("idle", "waiting", "granted", "filling", "replied", "decoding", "over"))
}
_MODES = {name: number for number, name in enumerate(("open", "drained", "down", "tripped", "half", "tried", "gone"))}


@dataclass
class Result:
    """A `Result` is what a search of one world found. `depth` counts the steps from the start to the farthest state."""

    world: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    is_complete: bool = False
    violation: str | None = None
    trace: list[Step] = field(default_factory=list)


def _time(when: float) -> int:
    return 0 if when <= NOW else 2 if when == inf else 1


def _lease_key(lease: Lease | None) -> tuple[int, ...]:
    if lease is None:
        return ()
    way = lease.way
    is_asking = way is not None and way.errand is not None
    custody = _CUSTODY[lease.custody]
    if lease.is_returned:
        return custody, lease.is_busy
    over = 0 if lease.over_at < NOW else _time(lease.over_at) + 1
    return custody, lease.pages, is_asking, _time(lease.next_at), over, lease.is_busy


def key(world: World) -> bytes:
    """Returns bytes that are equal for states from which the same can follow."""
    kernel, requests, processes = world.kernel, world.requests, world.processes
    orders = {demand: number for line in kernel._lines.values() for number, demand in enumerate(line)}
    ages = {demand: number for line in kernel._lines.values() for number, demand in enumerate(line.by_age())}
    numbers = {process.place: number for number, process in enumerate(processes)}
    names = {process.place.name: number for number, process in enumerate(processes)}
    own: list[tuple[Any, ...]] = []
    ties: list[list[tuple[int, int]]] = []
    for request in requests:
        demand = request.demand
        if demand is None:
            own.append(())
            ties.append([])
            continue
        is_written = any(demand.attempt in process.place.residency.stays for process in processes)
        common = (
            *(_PHASES[request.phase], *map(demand.pages_at, SHAPES)),
            *(demand.room.tokens, is_written),
        )
        if demand.is_waiting:
            hints = demand.hints
            own.append(
                (
                    *common,
                    *(orders[demand], ages[demand], demand.priority),
                    *(demand.overtakes, demand.passes, hints.passed),
                    *(demand in kernel._exhausted, demand.tied_until > NOW, hints.goes_on),
                )
            )
            tie = [(1, numbers[place]) for place in demand.saves]
            tie += [(2, names[name]) for name in demand.avoid]
            ties.append(tie + ([(3, names[hints.home])] if hints.home is not None else []))
        else:
            own.append(
                (
                    *common,
                    request.owner_page,
                    request.peer_page,
                    request.is_writer,
                    request.is_refused,
                    request.is_taken,
                    request.is_echoing,
                    request.is_asked,
                    request.owner_ended,
                    request.peer_ended,
                    request.is_due,
                    _lease_key(request.leases[0]),
                    _lease_key(request.leases[1]),
                )
            )
            ties.append([(4, request.owner), (5, request.peer)])
    packed = [marshal.dumps(one, 2) for one in own]
    at: list[list[tuple[bytes, int]]] = [[] for _ in processes]
    for one, tie in zip(packed, ties, strict=True):
        for kind, number in tie:
            at[number].append((one, kind))
    places = []
    for number, process in enumerate(processes):
        place, account = process.place, process.place.account
        inside: tuple[Any, ...] = ()
        if account is not None:
            inside = (account.capacity, account.foreign, account._last_excess, account._num_found, account._inherited)
        state = (
            str(place.shape),
            process.letter,
            letter(place),
            _MODES[process.mode],
            process.is_frozen,
            process.is_known,
            place.is_open,
            place.is_up,
            place.trials if place.trials is not None and (place.is_open or place in kernel._shut_until) else -1,
            place in kernel._shut_until,
            inside,
        )
        places.append((marshal.dumps(state, 2), sorted(at[number]), number))
    places.sort()
    ranks = {entry[2]: rank for rank, entry in enumerate(places)}
    shown = sorted(
        (one, sorted((kind, ranks[number]) for kind, number in tie)) for one, tie in zip(packed, ties, strict=True)
    )
    whole = (world.faults_left, [entry[0] for entry in places], shown)
    return blake2b(marshal.dumps(whole, 2), digest_size=12).digest()


def steps(model: Model, blob: bytes, event: Event) -> list[tuple[tuple[int, ...], World | Exception]]:
    """Returns every outcome of `event`, by the picks made in it."""
    found: list[tuple[tuple[int, ...], World | Exception]] = []
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        script = scripts.pop()
        world: World = pickle.loads(blob)
        try:
            widths = model.apply(world, event, script)
        except Exception as error:
            found.append((script, error))
            widths = world.kernel._chooser.widths  # type: ignore[attr-defined]
        else:
            found.append((script, world))
        for place in range(len(script), len(widths)):
            padding = (0,) * (place - len(script))
            scripts += [(*script, *padding, pick) for pick in range(1, widths[place])]
    return found


def search(model: Model, *, max_states: int = 10**7, max_depth: int = 10**6) -> Result:
    """Returns the first violation there is, or none. It is also one if something that is held never comes back."""
    result = Result(model.plan.name)
    wall, cpu = time.monotonic(), time.process_time()
    start = model.start()
    seen = {key(start): 0}
    parents, depths = array("l", [-1]), array("h", [0])
    via: list[Step] = [(("", 0, 0), ())]
    backwards: tuple[array[int], array[int]] = (array("l"), array("l"))
    clean = [0]
    kept: dict[Step, Step] = {}
    frontier: deque[tuple[int, bytes]] = deque([(0, pickle.dumps(start, 5))])
    bad = -1
    while frontier and bad < 0 and len(seen) < max_states:
        number, blob = frontier.popleft()
        if depths[number] >= max_depth:
            break
        for event in list(model.events(pickle.loads(blob))):
            for script, after in steps(model, blob, event):
                result.transitions += 1
                if isinstance(after, Exception):
                    result.violation = f"{type(after).__name__}: {after}"
                    result.trace = [(event, script)]
                    bad = number
                    break
                digest = key(after)
                known = seen.get(digest)
                if known is None:
                    known = seen[digest] = len(parents)
                    parents.append(number)
                    depths.append(depths[number] + 1)
                    via.append(kept.setdefault((event, script), (event, script)))
                    if is_clean(after):
                        clean.append(known)
                    frontier.append((known, pickle.dumps(after, 5)))
                if event[0] not in DISTURBING and known != number:
                    backwards[0].append(known)
                    backwards[1].append(number)
            if bad >= 0:
                break
    result.is_complete = bad < 0 and not frontier
    if result.is_complete:
        bad = _never_clean(len(parents), clean, backwards)
        if bad >= 0:
            result.violation = "Violation: something stays held for ever, or somebody waits for ever"
    last = result.trace
    path = []
    while bad > 0:
        path.append(via[bad])
        bad = parents[bad]
    result.trace = [*reversed(path), *last]
    result.states, result.depth = len(parents), max(depths)
    result.wall_s, result.cpu_s = time.monotonic() - wall, time.process_time() - cpu
    return result


def _never_clean(num_states: int, clean: list[int], backwards: tuple[array[int], array[int]]) -> int:
    """Returns the first state from which what happens anyway leads to no state without anything held; -1: none."""
    before: dict[int, list[int]] = {}
    for after, state in zip(*backwards, strict=True):
        before.setdefault(after, []).append(state)
    reaches = bytearray(num_states)
    left = list(clean)
    for state in clean:
        reaches[state] = 1
    while left:
        for state in before.get(left.pop(), ()):
            if not reaches[state]:
                reaches[state] = 1
                left.append(state)
    return reaches.find(0)
