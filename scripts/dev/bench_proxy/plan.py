"""The module says what is measured: scenarios, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KIB = 1 << 10
BESIDE_TOKENS = 128_000
BESIDE_PAUSE_S = 0.5
"""The seconds from the answer to a prompt beside streams to the next one by the same client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Scenario is one kind of load. `requests` are made in each round, by `clients` that each wait for their answer."""

    name: str
    what: str
    clients: int
    requests: int
    tokens: int = 8
    is_stream: bool = False
    token_delay_s: float = 0.0
    is_lockstep: bool = False
    """True where all streams get their tokens at the same moments, as from one engine's steps."""
    is_late: bool = False
    """True where the first token takes a delay too."""
    is_chat: bool = False
    prompt_bytes: int = 64
    spread_s: float = 0.0
    """The seconds over which the clients begin, one after the other."""
    is_held: bool = False
    """True where every client's stream is open at the same time, and then the proxy's memory is looked at."""
    slots: int | None = None
    """The number of requests that are let through to the engines at once; the others wait in the proxy."""
    num_beside: int = 0
    """The number of further clients, which send prompts of `BESIDE_TOKENS` tokens meanwhile. They are not timed
    themselves; the clients beside them are."""
    is_counted: bool = False
    """True where pdproxy counts every prompt's tokens with the model's tokenizer. Peers do what they do."""
    is_warmed: bool = True
    is_ours_alone: bool = False
    """True where the scenario measures pdproxy alone."""
    num_marks: int = 0
    """The number of equal parts of the requests; memory is looked at when each of them has been answered."""
    num_rounds: int | None = None
    """The number of rounds of a scenario for which ``--rounds`` does not decide it."""
    is_standing: bool = False
    """True where the load goes on until it is ended, all clients at once, and is measured for a while in the midst.
    `requests` are those before."""
    num_pairs: int = 1
    """The number of prefillers, and of decoders."""
    num_models: int = 1
    """The number of models, which clients ask for in turns. Each pair serves its share of them, one at least."""
    num_headers: int = 0
    """The number of headers that clients send beside the usual ones."""
    num_blocks: int | None = None
    """The blocks of each engine's KV cache; None means more than are needed."""
    is_slow: bool = False
    """True where clients read a byte a second, after their first token."""
    options: tuple[str, ...] = ()
    """Further options of pdproxy."""

    @property
    def warmup(self) -> int:
        """Returns the number of requests before the first that counts."""
        return max(2 * self.clients, min(200, self.requests)) if self.is_warmed else 0


def _short(clients: int, requests: int) -> Scenario:
    what = f"short answers, not streamed, {clients} at once"
    return Scenario(name=f"short-{clients}", what=what, clients=clients, requests=requests)


def _streams(clients: int, *, is_lockstep: bool, delay_s: float = 0.02, requests: int | None = None) -> Scenario:
    how = "lockstep" if is_lockstep else "staggered"
    return Scenario(
        name=f"{how}-{clients}",
        what=f"{clients} streams of 200 tokens, one every {delay_s * 1e3:g} ms, {how}",
        clients=clients,
        requests=requests or clients,
        tokens=200,
        is_stream=True,
        token_delay_s=delay_s,
        is_lockstep=is_lockstep,
        spread_s=1.0,
    )


def _beside(name: str, num_beside: int, what: str) -> Scenario:
    return Scenario(
        name=name,
        what=f"64 streams of 200 tokens, one every 20 ms, beside {what}, tokens counted exactly",
        clients=64,
        requests=64,
        tokens=200,
        is_stream=True,
        token_delay_s=0.02,
        spread_s=1.0,
        num_beside=num_beside,
        is_counted=True,
    )


def _prompts(kib: int, clients: int, requests: int) -> Scenario:
    return Scenario(
        name=f"prompt-{kib}k-{clients}",
        what=f"prompts of {kib} KiB, not streamed, {clients} at once",
        clients=clients,
        requests=requests,
        prompt_bytes=kib * KIB,
    )


def _held(clients: int) -> Scenario:
    return Scenario(
        name=f"held-{clients}",
        what=f"{clients} open streams, a token a second each: memory",
        clients=clients,
        requests=clients,
        tokens=600,
        is_stream=True,
        token_delay_s=1.0,
        spread_s=clients / 1000,
        is_held=True,
        is_warmed=False,
    )


QUEUE = Scenario(
    name="queue-10000",
    what="10000 requests at once for 64 slots",
    clients=10_000,
    requests=10_000,
    tokens=2,
    is_stream=True,
    token_delay_s=0.01,
    is_late=True,
    prompt_bytes=0,
    slots=64,
    is_warmed=False,
)

CALM = _beside("beside-none", 0, "nothing")
BESIDE = _beside("beside-128k", 2, f"prompts of {BESIDE_TOKENS:,} tokens from 2 more clients")

SOAK = Scenario(
    name="soak-1m",
    what="a million short requests, 32 at once: memory, pdproxy only",
    clients=32,
    requests=1_000_000,
    is_ours_alone=True,
    num_marks=10,
    num_rounds=1,
)

FULL: tuple[Scenario, ...] = (
    _short(1, 4000),
    _short(32, 12_000),
    Scenario(
        name="short-chat-32",
        what="short answers to chats, not streamed, 32 at once",
        clients=32,
        requests=12_000,
        is_chat=True,
    ),
    Scenario(
        name="stream-32",
        what="32 streams of 200 tokens without delay",
        clients=32,
        requests=320,
        tokens=200,
        is_stream=True,
    ),
    _streams(64, is_lockstep=False),
    _streams(512, is_lockstep=False),
    _streams(64, is_lockstep=True),
    _streams(512, is_lockstep=True),
    _streams(256, is_lockstep=False, delay_s=0.005, requests=512),
    _prompts(32, 1, 1000),
    _prompts(32, 4, 2000),
    _prompts(512, 1, 300),
    _prompts(512, 4, 600),
    CALM,
    BESIDE,
    _held(1000),
    _held(5000),
    QUEUE,
)
LONG: tuple[Scenario, ...] = (SOAK,)
"""The scenarios which take minutes each. They run only where they are asked for by their whole names."""
QUICK: tuple[Scenario, ...] = (
    _short(4, 200),
    Scenario(
        name="staggered-16",
        what="16 streams of 20 tokens, one every 5 ms, staggered",
        clients=16,
        requests=32,
        tokens=20,
        is_stream=True,
        token_delay_s=0.005,
        spread_s=0.1,
    ),
)


def pick(scenarios: Sequence[Scenario], names: Sequence[str], more: Sequence[Scenario] = ()) -> tuple[Scenario, ...]:
    """Returns the scenarios that are called so, or whose names begin so, and those of `more` that are called so; all
    `scenarios` where no name is given.

    Raises `ValueError` for a strange name.
    """
    found = [one for one in scenarios if not names or one.name.startswith(tuple(names))]
    found += [one for one in more if one.name in names]
    for name in names:
        if not any(one.name.startswith(name) for one in found):
            known = ", ".join(one.name for one in (*scenarios, *more))
            raise ValueError(f"no scenario is called {name!r}; there are {known}")
    return tuple(found)
