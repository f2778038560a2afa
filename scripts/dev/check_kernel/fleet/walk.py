"""The search itself: stories are made up at random, and one that goes wrong is made as short as it can be.

A fleet of real objects cannot be copied, so a story is told again from its beginning. Events that are impossible by
then are skipped, which lets a story be shortened by leaving events out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scripts.dev.check_kernel.fleet.parts import Loop
from scripts.dev.check_kernel.fleet.world import Event, Plan, World, turning

WEIGHTS = {
    "up": 8.0,
    "down": 8.0,
    "settle": 12.0,
    "ask": 6.0,
    "send": 6.0,
    "arrive": 6.0,
    "ready": 4.0,
    "take": 4.0,
    "first": 3.0,
    "tick": 7.0,
    "follow": 5.0,
    "elect": 5.0,
    "go": 0.7,
    "wake": 0.5,
    "begin": 2.0,
    "look": 0.5,
    "glance": 4.0,
    "told": 4.0,
    "heard": 4.0,
    "errand": 2.0,
    "leave": 0.4,
    "refused": 0.4,
    **dict.fromkeys(("die", "stop", "end", "halt", "restart", "forget"), 0.2),
}
"""The frequency of each event beside others; 0.5 where it is not named."""

BY_FRONT = frozenset({"send", "arrive", "ready", "first", "leave", "refused"})
"""The events that happen to attempts, of which one front's are alike."""


@dataclass
class Result:
    """A `Result` is what was found: how many stories were told, of how many events, and the first one that goes
    wrong."""

    name: str
    num_stories: int = 0
    num_events: int = 0
    wall_s: float = 0.0
    seed: int | None = None
    violation: str | None = None
    story: list[Event] = field(default_factory=list)


def told(plan: Plan, story: Sequence[Event], *, is_calm: bool = True) -> tuple[str | None, list[Event]]:
    """Tells a story, after which it is calm. Returns what went wrong, if anything did, and the events until then."""
    happened: list[Event] = []
    loop = Loop()
    with turning(loop):
        world = World(plan, loop)
        try:
            for event in story:
                if event in world.events():
                    happened.append(event)
                    world.apply(event)
            if is_calm:
                world.calm_down()
        except Exception as error:
            return f"{type(error).__name__}: {error}", happened
    return None, happened


def walk(plan: Plan, seed: int, length: int) -> tuple[str | None, list[Event]]:
    """Goes `length` steps at random. Returns as `told` does."""
    rng, loop = random.Random(seed), Loop()
    happened: list[Event] = []
    mood = _mood(rng)
    with turning(loop):
        world = World(plan, loop)
        try:
            for _ in range(length):
                events = world.events()
                [event] = rng.choices(events, [mood(one) for one in events])
                happened.append(event)
                world.apply(event)
            world.calm_down()
        except Exception as error:
            return f"{type(error).__name__}: {error}", happened
    return None, happened


def _mood(rng: random.Random) -> Callable[[Event], float]:
    """Returns how likely each event is in one walk: kinds of events are rare in one and frequent in another, and so is
    what happens to somebody. What is likely everywhere would never let anybody be very late."""
    kinds: dict[str, float] = {}
    whose: dict[tuple[str, str], float] = {}

    def weight(event: Event) -> float:
        name, who, _ = event
        if name not in kinds:
            kinds[name] = WEIGHTS.get(name, 0.5) * rng.choice((0.1, 0.5, 1.0, 1.0, 3.0))
        key = name, who[:1] if name in BY_FRONT else who
        if key not in whose:
            whose[key] = rng.choice((0.03, 0.3, 1.0, 1.0))
        return kinds[name] * whose[key]

    return weight


def shorten(plan: Plan, story: list[Event]) -> tuple[str | None, list[Event]]:
    """Leaves out of a story that goes wrong what it does without."""
    violation, story = told(plan, story)
    size = max(1, len(story) // 2)
    while size:
        at = 0
        while at < len(story):
            wrong, shorter = told(plan, story[:at] + story[at + size :])
            if wrong is not None and len(shorter) < len(story):
                violation, story = wrong, shorter
            else:
                at += size
        size //= 2
    return violation, story


def search(plan: Plan, *, seed: int, num_walks: int, length: int) -> Result:
    """Goes so many walks, of which each has the next seed, until one goes wrong, and shortens that one."""
    result = Result(plan.name)
    begun = time.monotonic()
    for number in range(num_walks):
        violation, story = walk(plan, seed + number, length)
        result.num_stories += 1
        result.num_events += len(story)
        if violation is not None:
            result.seed = seed + number
            result.violation, result.story = shorten(plan, story)
            break
    result.wall_s = time.monotonic() - begun
    return result
