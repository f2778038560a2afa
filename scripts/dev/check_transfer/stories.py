"""The story of a violation tells what happens, step by step, in words."""

from __future__ import annotations

from scripts.dev.check_transfer.fakes import installed
from scripts.dev.check_transfer.search import Result
from scripts.dev.check_transfer.world import Choice, Plan, World
from transfer import wire

_TOLD = {
    "land": "write {0} lands",
    "break": "write {0} is broken off, and its bytes may still land",
    "arrive": "what was left of write {0} is delivered",
    "read": "the decoder takes {0} out of its buffer",
    "cancel": "the decoder cancels {0}",
    "replace": "{0} loses its session, and makes another one",
    "cut": "the connection of {0} breaks for good with all that is in it, and {0} makes another one",
    "kill": "{0} is killed",
    "ended": "somebody says that {0} has ended",
    "time": "time passes",
}
_QUEUED = {"deliver": "{0} hears {1}", "lose": "{1} to {0} is lost", "double": "{0} hears {1}, which will come again"}


def story(plan: Plan, result: Result) -> str:
    """Returns the steps of `result`, numbered, and what is wrong after the last of them. Faults must still be
    planted."""
    lines = []
    with installed():
        world = World(plan)
        for number, choice in enumerate(result.trace, 1):
            told, before = _told(world, choice), _holdings(world)
            try:
                world.apply(choice)
            except Exception as error:
                told += f"; {type(error).__name__}"
            news = [f"{name} is {now}" for name, now in _holdings(world).items() if before[name] != now]
            lines.append(f"{number:3} {'; '.join([told, *news])}")
        world.close()
    if result.is_at_rest:
        lines.append("    nothing more is disturbed: what was said is heard, time passes and writes land")
    return "\n".join([*lines, f"  ⇒ {result.violation}"])


def _told(world: World, choice: Choice) -> str:
    if choice[0] not in _QUEUED:
        at = f" ({world.loop.time():g} s)" if choice[0] == "time" else ""
        return _TOLD[choice[0]].format(*choice[1:]) + at
    name, way = choice[1:]
    payload = world._queue(name, way)[1][0]
    message = wire.decode_from_sender(payload) if way == "up" else wire.decode_from_receiver(payload)
    of = getattr(message, "attempt", "")
    what = f"{type(message).__name__}{f' of {of}' if of else ''}"
    return _QUEUED[choice[0]].format(*(("the receiver", f"{what} from {name}") if way == "up" else (name, what)))


def _holdings(world: World) -> dict[str, str]:
    found = {}
    for name in world.attempts:
        reservation = world.receiver.reservations.get(name)
        found[name] = "not here" if reservation is None else reservation.holding.value
    return found
