"""A violation, told as a story: what happens, step by step, in words."""

from __future__ import annotations

import pickle

from scripts.dev.check_kernel.model import Event, Model
from scripts.dev.check_kernel.search import Result
from scripts.dev.check_kernel.world import World

_OF_REQUEST = {
    "cancel": ("{r} is cancelled",),
    "finish": ("{r} is answered, and its pages come back",),
    "expire": ("{r} has waited long enough",),
    "untie": ("{r} has waited for its home long enough",),
    "send": ("{r} is sent to {p}",),
    "refused": ("{p} refuses the connection of {r}, and is taken as down",),
    "reply": ("{p} replies to {r}", "{p} replies to {r}, whose prompt is a page shorter"),
    "abandon": ("{r} ends early, and leaves its pages to the reaper",),
    "ready": ("the proxy hears that the KV of {r} is at {o}, which may decode now",),
    "write": ("{p} writes the KV of {r} to {o}",),
    "take": ("{o} takes the KV of {r} out of its buffer",),
    "first": ("{r}: the first event of the answer comes",),
    "said": ("{o} says that it has let go of the pages of {r}",),
    "echo": ("{o} says the same of {r} once more",),
    "letgo": ("{o} lets go of the pages of {r}", "{p} lets go of the pages of {r}"),
    "errand": (
        "{o} drops the pages of {r}, as it was asked to",
        "{o} drops the pages of {r}, and its reply is lost",
        "{o} does not do what it was asked to for {r}",
    ),
    "over": ("so much time passes that {o} drops the pages of {r} by itself, if it can",),
    "over_peer": ("so much time passes that {p} drops the pages of {r} by itself, if it can",),
    "stale": ("an old answer of {o} comes in, from before the lease of {r} was over",),
}
_OF_PLACE = {
    "reap": "the reaper does what is due",
    "down": "{at} accepts no connections any more, and is taken as down",
    "up": "{at} answers again, and is opened",
    "look": "{at} answers a look",
    "restart": "{at} is another process now",
    "upgrade": "{at} is a process of the new revision now",
    "freeze": "{at} freezes",
    "thaw": "{at} goes on",
    "drain": "{at} is drained",
    "undrain": "{at} is opened again",
    "remove": "{at} is removed",
    "trip": "the breaker of {at} opens",
    "advance": "the breakers are half open: one attempt may go",
    "trial_ok": "the trial at {at} went well",
    "trial_bad": "the trial at {at} failed",
}


def story(model: Model, result: Result) -> str:
    """Returns the steps of `result`, numbered, and what is wrong after the last of them."""
    world = model.start()
    lines = []
    for number, (event, script) in enumerate(result.trace, 1):
        before = pickle.loads(pickle.dumps(world))
        try:
            model.apply(world, event, script)
        except Exception:
            lines.append(f"{number:3} {_told(model, before, world, event)}")
            break
        lines.append(f"{number:3} {_told(model, before, world, event)}{_news(before, world)}")
    return "\n".join([*lines, f"  ⇒ {result.violation}"])


def _told(model: Model, before: World, after: World, event: Event) -> str:
    name, number, variant = event
    if name == "arrive":
        ask = model.plan.asks[variant]
        peer = f" of an owner and {ask.peer_pages} of a peer" if ask.peer_pages else ""
        manner = f", priority {ask.priority}" if ask.priority else ""
        manner += f", to go on with an answer of revision {ask.goes_on}" if ask.goes_on else ""
        return f"request {'ABCDEF'[number]} asks for {ask.pages} pages{peer}{manner}{', again' if ask.is_retry else ''}"
    if name in _OF_REQUEST:
        request = before.requests[number]
        owner, peer = (before.processes[one].place.name if one >= 0 else "?" for one in (request.owner, request.peer))
        told = _OF_REQUEST[name]
        return told[min(variant, len(told) - 1)].format(r=f"request {'ABCDEF'[number]}", o=owner, p=peer)
    return _OF_PLACE[name].format(at=after.processes[number].place.name)


def _news(before: World, after: World) -> str:
    """Tells which requests wait now, and which may go."""
    news = []
    for number, (old, new) in enumerate(zip(before.requests, after.requests, strict=True)):
        name = f"request {'ABCDEF'[number]}"
        if new.phase == "waiting" and old.phase != "waiting":
            news.append(f"{name} waits")
        elif new.phase == "granted" and old.phase != "granted":
            owner, peer = after.processes[new.owner].place.name, after.processes[new.peer].place.name
            news.append(f"{name} gets {owner} and {peer}")
        elif new.phase == "idle" and old.phase == "waiting":
            news.append(f"{name} leaves")
    return "".join(f"; {one}" for one in news)
