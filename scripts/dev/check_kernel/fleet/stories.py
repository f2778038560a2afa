"""A story of a fleet that goes wrong, told in words."""

from __future__ import annotations

from scripts.dev.check_kernel.fleet.walk import Result
from scripts.dev.check_kernel.fleet.world import Event, Plan

_WORDS = {
    "ask": "front {who} gets a request, which takes {how} pages",
    "send": "{who} looks at the clock, and its prefill leg is sent",
    "refused": "the leg of {who} reaches nobody",
    "arrive": "the leg of {who} arrives, and the decoder makes room",
    "ready": "the KV of {who} is there, and the decoder is asked to read it",
    "take": "{who} reads the KV of {how}, and lets go of its pages",
    "first": "the front sees the answer of {who} begin",
    "leave": "the client of {who} goes",
    "die": "front {who} ends",
    "begin": "another front {who} begins",
    "stop": "front {who} stands still",
    "go": "front {who} goes on",
    "follow": "front {who} begins a session with the newest leader",
    "up": "one message of session {who} reaches the leader",
    "down": "one message of session {who} reaches the front",
    "settle": "all that was said is heard",
    "end": "leader {who} ends",
    "halt": "leader {who} stands still",
    "wake": "leader {who} goes on",
    "glance": "leader {who} looks at {how}, which answers at once",
    "look": "leader {who} begins to look at {how}",
    "told": "{how} says to leader {who} how much is in use",
    "heard": "leader {who} hears what {how} has said",
    "errand": "leader {who} has an engine drop what nobody wants",
    "unanswered": "leader {who} has an engine drop what nobody wants, and does not hear that it did",
    "restart": "{who} is another process now",
    "forget": "the store forgets who leads",
    "elect": "another leads from now on",
    "tick": "half a lease passes",
}


def _told(event: Event) -> str:
    name, who, how = event
    words = _WORDS[name].format(who=who, how=how)
    if name == "leave" and how:
        return (
            f"{words}; its pages come back {'by an errand' if how == 'errand' else 'when the lease of the engine ends'}"
        )
    return words


def story(plan: Plan, result: Result) -> str:
    """Returns what has happened, numbered, and what is wrong then. What comes before the numbers always happens."""
    before = []
    for words in plan.prelude.split(","):
        if words:
            name, who, how, *_ = (*words.split(), "", "")
            before.append(f"    {_told((name, who, how))}")
    lines = [f"{number:3} {_told(event)}" for number, event in enumerate(result.story, 1)]
    return "\n".join([*before, *lines, f"  ⇒ {result.violation} (seed {result.seed})"])
