"""The search goes breadth first through every state of a world, so that the first violation has the shortest story.
Random walks go beyond it.

The roles are coroutines, which cannot be copied. So a state is the path that leads to it, and a new world walks it
again. Two states are taken for the same where `key` returns the same. Equal states that are taken for different ones
only cost time. The walks do not use `key`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from scripts.dev.check_transfer.fakes import Connection, Sending, installed
from scripts.dev.check_transfer.world import FAR_S, Choice, Plan, World
from transfer import wire

Path = tuple[Choice, ...]


@dataclass
class Result:
    """A `Result` tells what a search of one world found. `depth` counts steps from the start to the farthest state,
    `paths` the worlds that were walked."""

    world: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    paths: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    is_complete: bool = False
    violation: str | None = None
    is_at_rest: bool = False
    """True where the violation was seen when the world came to rest after the last step."""
    trace: list[Choice] = field(default_factory=list)


# ── equal states ────────────────────────────────────────────────────────────────────────────────────────────────────


def key(world: World) -> bytes:
    """Returns bytes that are equal for states from which the same can follow. Times are relative to now, numbers of
    heartbeats to the last."""
    now = world.loop.time()
    receiver = world.receiver
    table = receiver._reservations
    attempts = [
        (
            *(name, one.holding.value, _ago(now, one.expires_at), one.pages, sorted(one.present), one.outcome),
            [(rank, writer.identity, writer.state.value) for rank, writer in one.writers.items()],
        )
        for name, one in sorted(table._attempts.items())
    ]
    pages = (list(table._queue), sorted(table._pool._page_of.items()), list(table._pool._idle))
    heard = sorted((writer, _ago(now, at)) for writer, at in receiver._last_heard.items())
    here = (sorted(receiver._peers), sorted(receiver._tombstones), sorted(receiver._ended), sorted(receiver._waiters))
    steps = sorted((step.func.__name__, repr(step.args)) for step in map(_step, receiver._tasks))
    senders = [_sender(world, sending, now) for sending in world.senders]
    engines = [
        (
            *(one.is_cancelled, one.num_finished, one.reader is None or one.reader.done()),
            [_position(task) for task in one.tasks.values()],
        )
        for one in world.attempts.values()
    ]
    writes = [(number, write.slab, write.pages, write.is_orphaned) for number, write in world._numbered()]
    timers = sorted((_ago(now, due), what) for due, what in world.loop.timers() if due <= now + FAR_S)
    whole = (world.faults_left, world.time_left, attempts, pages, heard, here, steps, senders, engines, writes, timers)
    return blake2b(repr(whole).encode(), digest_size=12).digest()


def _step(task: asyncio.Task[Any]) -> partial[Any]:
    """Returns what a task of the receiver's does when all is delivered."""
    coroutine: Any = task.get_coro()
    step: partial[Any] = coroutine.cr_frame.f_locals["step"]
    return step


def _ago(now: float, at: float) -> float:
    return round(max(at - now, -FAR_S), 3)


def _position(task: asyncio.Task[Any]) -> list[int] | None:
    """Returns the lines where a coroutine and those that it waits for stand; None where the task is done."""
    lines: list[int] = []
    step: Any = task.get_coro()
    if task.done():
        return None
    while hasattr(step, "cr_frame"):
        lines.append(step.cr_frame.f_lineno if step.cr_frame is not None else -1)
        step = step.cr_await
    return lines


def _sender(world: World, sending: Sending, now: float) -> Any:
    up = [[_message(one, payload) for payload in one.up] for one in sending.connections]
    if sending.is_dead:
        return sending.is_told, up
    role = sending.role
    standing = (
        sorted(role._standing._open.items()),
        sorted(
            (name, type(word).__name__, getattr(word, "has_broken", None))
            for (_, name), (_, word) in role._standing._last_words.items()
        ),
    )
    pushes = sorted(
        (
            *(push._request.attempt, push._failure is None, push._is_granted, push._is_wanted, push._result.done()),
            *(push._is_owing, push._session is None),
            *(
                [rank._remote, rank._num_left, rank._under_way, rank.has_broken, len(rank._queue)]
                for rank in push._ranks
            ),
        )
        for push in role._pushes
    )
    return up, standing, pushes, [_session(one, now) for one in sending.connections]


def _session(one: Connection, now: float) -> Any:
    session = one.session
    return (
        *(one.is_over, one.is_cut, session.is_lost, session._welcome.done(), session._ready.done()),
        [(name, _ago(now, ask.sent_at), ask.grant.done()) for name, ask in session._asks.items()],
        *(sorted(session._open), list(session._unconfirmed), session._is_busy.is_set()),
        *(_ago(now, session._heard_sent_at), _ago(now, session._busy_since)),
        [(session._num_heartbeats - n, _ago(now, at), said) for n, (at, said) in session._unanswered.items()],
        [_message(one, payload) for payload in one.down],
    )


def _message(one: Connection, payload: bytes) -> Any:
    """Returns the bytes. For a heartbeat and its answer, it returns how many were sent since, instead of the number."""
    if b"Heartbeat" not in payload:
        return payload
    if b"HeartbeatAck" in payload:
        ack = wire.decode_from_receiver(payload)
        assert isinstance(ack, wire.HeartbeatAck)
        return "answer", one.session._num_heartbeats - ack.serial, ack.missing
    beat = wire.decode_from_sender(payload)
    assert isinstance(beat, wire.Heartbeat)
    return "heartbeat", one.session._num_heartbeats - beat.serial, beat.open


# ── orders that do not matter ───────────────────────────────────────────────────────────────────────────────────────


def _where(world: World, choice: Choice) -> str:
    """Returns whose state a step changes: a sender's, or the receiver's. It is empty where it may be everybody's."""
    if choice[0] == "deliver":
        return "r" if choice[2] == "up" else choice[1].partition("/")[0]
    return world.sender_of(choice[1]) if choice[0] == "land" else ""


def _commute(world: World, one: Choice, other: Choice) -> bool:
    """Returns whether the two steps lead to the same state in either order, given that both can be taken first.

    Each step hears a message or lets a write land, in another process than the other step does. It changes what that
    process knows, takes the first of one queue and adds to the ends of others. No queue of the two is the same at the
    same end. Where a session is over it may close, which the receiver can tell; there no steps are taken to commute.
    """
    places = [_where(world, choice) for choice in (one, other)]
    if not all(places) or places[0] == places[1]:
        return False
    return not any(session.is_lost for each in world.senders for session in (c.session for c in each.connections))


# ── searching ───────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def walked(plan: Plan, path: Path = ()) -> Iterator[World]:
    """Returns a new world in which `path` has been walked. It is closed in the end."""
    world = World(plan)
    try:
        for choice in path:
            world.apply(choice)
        yield world
    finally:
        world.close()


def search(plan: Plan) -> Result:
    """Returns the first violation there is, or none. Every new state is also let come to rest.

    Raises `RuntimeError` where the same path has led to two states: then more than the world is compared.
    """
    result = Result(plan.name)
    wall, cpu = time.monotonic(), time.process_time()
    with installed():
        _search(plan, result)
    result.wall_s, result.cpu_s = time.monotonic() - wall, time.process_time() - cpu
    return result


def _search(plan: Plan, result: Result) -> None:
    with walked(plan) as world:
        seen = {start := key(world)}
        frontier: deque[tuple[Path, bytes, list[Choice]]] = deque([((), start, world.choices())])
    result.paths = result.states = 1
    while frontier and result.states < plan.max_states:
        path, state, choices = frontier.popleft()
        if len(path) >= plan.depth:
            break
        with walked(plan, path) as world:
            if key(world) != state:
                raise RuntimeError(f"{plan.name}: the same path has led to two states: {path}")
        for choice in choices:
            result.transitions += 1
            result.paths += 1
            with walked(plan, path) as world:
                before = world.choices()
                told = _try(world.apply, choice) or _try(world.wrong)
                digest = key(world)
                is_new = digest not in seen
                seen.add(digest)
                if told is None and is_new:
                    # Of two steps that commute one order is walked: the other's end is reached by this search, too.
                    after = [
                        one
                        for one in world.choices()
                        if not (one < choice and one in before and _commute(world, one, choice))
                    ]
                    frontier.append(((*path, choice), digest, after))
                    told = _try(world.rest)
                    result.is_at_rest = told is not None
            if told is not None:
                result.violation, result.trace = told, [*path, choice]
                return
            if is_new:
                result.states, result.depth = result.states + 1, len(path) + 1
    result.is_complete = not frontier


def _try(step: Callable[..., str | None], *arguments: Any) -> str | None:
    """Returns what is wrong, as `step` says it or because it raises something; None where nothing is."""
    try:
        return step(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def walk(plan: Plan, num_walks: int, seed: int, num_steps: int = 40) -> Result:
    """Walks random paths, each of which is let come to rest in the end. Stops at the first violation."""
    result = Result(f"walks, {plan.name}", is_complete=True)
    wall, cpu = time.monotonic(), time.process_time()
    chance = random.Random(seed)
    with installed():
        for _ in range(num_walks):
            path: list[Choice] = []
            result.paths += 1
            told = None
            with walked(plan) as world:
                while told is None and len(path) < num_steps and (choices := world.choices()):
                    kinds = sorted({choice[0] for choice in choices})
                    kind = chance.choice([*kinds, *["deliver"] * 3 * ("deliver" in kinds)])
                    path.append(chance.choice([choice for choice in choices if choice[0] == kind]))
                    told = _try(world.apply, path[-1]) or _try(world.wrong)
                if told is None:
                    told = _try(world.rest)
                    result.is_at_rest = told is not None
            result.transitions += len(path)
            result.depth = max(result.depth, len(path))
            if told is not None:
                result.violation, result.trace = told, path
                break
    result.wall_s, result.cpu_s = time.monotonic() - wall, time.process_time() - cpu
    return result
