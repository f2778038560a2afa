"""The module says what is asked, and when. All of it is drawn from one seed, and nothing of it depends on who is asked
or how it answers.

A session is what one client asks: one request, or a conversation whose next request follows the last one's answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, count, takewhile

from pdproxy.config.options import Process
from pdproxy.loadtest.arrivals import Pace, arrivals
from pdproxy.loadtest.corpus import Piece
from pdproxy.loadtest.errors import WorkloadError
from pdproxy.loadtest.lengths import Fixed, Independent, Lengths, Sizes, Uniform
from pdproxy.loadtest.record import Setting
from pdproxy.loadtest.traces import BLOCK_TOKENS, TraceRow

KEY_BITS = 60


class Departure(StrEnum):
    """Departure is the phase in which a client leaves that does not wait for its answer."""

    QUEUED = "queued"
    PREFILL = "prefill"
    FIRST_TOKEN = "first_token"
    MID_STREAM = "mid_stream"


# ── what one client asks ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave describes a client that leaves early.

    While it sees nothing it can only aim: `share` of the time that the others' answers take to begin. Once it sees
    something, it leaves at the first piece, or at piece `num_chunks`.
    """

    phase: Departure
    share: float = 0.0
    num_chunks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    pieces: tuple[Piece, ...]
    """Holds the pieces of the prompt; in a conversation, they follow what was said before."""
    prompt_tokens: int
    """Holds the length of the whole prompt in tokens, what was said before included."""
    answer_tokens: int
    is_stream: bool = True
    leave: Leave | None = None
    think_s: float = 0.0
    """Holds the seconds for which the client thinks after the answer before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    first_index: int
    """Holds the number of the session's first request in the workload; the numbers of the others follow."""
    question: int
    group: int | None
    asks: tuple[Ask, ...]


# ── what can be chosen ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Open means an open loop: sessions begin when they are due, whatever becomes of the others."""

    pace: Pace
    process: Process = "poisson"
    burstiness: float = 1.0
    """Holds the burstiness of Gamma's arrivals: the variance of gaps of mean 1. Poisson's is 1; with a higher value,
    arrivals come in bursts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Closed means a closed loop of `num_clients` clients: each asks, waits for the answer, thinks (for `think_s`
    seconds on average, exponentially distributed), and asks again."""

    num_clients: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Replay asks a trace's requests at the trace's times, `speed` times as fast, with lengths and blocks scaled by
    `scale`."""

    rows: Sequence[TraceRow] = field(repr=False)
    speed: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Prefixes makes every prompt begin with one of `num_groups` texts of `num_tokens`; a prompt that is not longer
    than its text becomes one token longer than it."""

    num_groups: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Conversations gives each session as many turns as `turns` draws; from the second turn on, the client says a
    `message` more, after it has thought."""

    turns: Lengths
    message: Lengths = field(default_factory=lambda: Uniform(16, 64))
    think_s: float = 1.0
    """Holds the mean time to think in seconds; it is exponentially distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborts:
    """Aborts says that clients leave a `share` of all requests early, in one of `phases`, each as likely. Only a
    stream can be left in the phases first_token and mid_stream, so these requests ask for one."""

    share: float
    phases: tuple[Departure, ...] = tuple(Departure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Workload is all that one run asks. It raises `WorkloadError` for what no client can ask."""

    seed: int
    pace: Open | Closed | Replay
    sizes: Sizes = field(default_factory=lambda: Independent(Fixed(256), Fixed(64)))
    num_requests: int | None = None
    duration_s: float | None = None
    """Holds the seconds from the start, the warm-up included, after which nothing is asked."""
    warmup_s: float = 0.0
    """Holds the seconds of the warm-up: what is due within them does not count."""
    stream_share: float = 1.0
    prefixes: Prefixes | None = None
    conversations: Conversations | None = None
    aborts: Aborts | None = None
    edition: int = 0
    """Holds the number of an edition: another edition asks for the same lengths at the same times, in other words."""
    num_questions: int | None = None
    """Holds the number of different sessions; after them, the same ones are asked again. None means that no two are the
    same."""
    max_prompt_tokens: int | None = None
    max_answer_tokens: int | None = None

    def __post_init__(self) -> None:
        for is_right, complaint in self._rules():
            if not is_right:
                raise WorkloadError(complaint)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        for name, what in _LIMITS.items():
            limit = getattr(self, name)
            yield limit is None or limit > 0, f"{what}: {limit}, and it has to be above 0"
        yield 0 <= self.stream_share <= 1, f"a stream share of {self.stream_share:g}: it is between 0 and 1"
        is_limited = self.num_requests is not None or self.duration_s is not None
        yield is_limited or isinstance(self.pace, Replay), "say how many requests, or for how long"
        yield self.warmup_s >= 0, "a warm-up must not be negative"
        yield self.duration_s is None or self.warmup_s < self.duration_s, "the warm-up takes all of the time"
        if self.aborts is not None:
            yield 0 <= self.aborts.share <= 1, f"an abort share of {self.aborts.share:g}: it is between 0 and 1"
            yield bool(self.aborts.phases), "aborts without a phase"
        if self.prefixes is not None:
            least = min(self.prefixes.num_groups, self.prefixes.num_tokens)
            yield least >= 1, "shared prefixes: there has to be a group of them, and a token in each"
        if isinstance(self.pace, Open):
            yield self.pace.burstiness > 0, f"a burstiness of {self.pace.burstiness:g}: it has to be above 0"
        if isinstance(self.pace, Closed):
            yield self.pace.num_clients >= 1 and self.pace.think_s >= 0, "a closed loop needs a client that thinks"
        if isinstance(self.pace, Replay):
            yield self.pace.speed > 0 and self.pace.scale > 0, "speed and scale of a replay have to be above 0"
            others = (self.prefixes, self.conversations, self.num_questions)
            yield all(other is None for other in others), "a trace says itself what is shared, and has no conversations"

    def at_rate(self, rate: float) -> Workload:
        """Returns the same workload at another rate, which it has from the start. Raises `WorkloadError` for a workload
        that has no rate."""
        if not isinstance(self.pace, Open):
            raise WorkloadError("only open-loop arrivals have a rate")
        return replace(self, pace=replace(self.pace, pace=Pace(rate=rate)))

    # ── what it comes to ────────────────────────────────────────────────────────────────────────────────────────────

    def due_times(self) -> Iterator[float]:
        """Yields the times at which sessions begin, in seconds from the start. Raises `WorkloadError` for a closed
        loop, which has none."""
        if isinstance(self.pace, Closed):
            raise WorkloadError("a closed loop's clients ask when they have their answer")
        if isinstance(self.pace, Replay):
            speed = self.pace.speed
            times = iter([row.at_s / speed for row in self.pace.rows])
        else:
            dice = random.Random(f"{self.seed} arrivals")
            times = arrivals(self.pace.process, self.pace.pace, dice, burstiness=self.pace.burstiness)
        end_s = math.inf if self.duration_s is None else self.duration_s
        return takewhile(lambda due_s: due_s < end_s, times)

    def sessions(self) -> Iterator[Session]:
        """Yields the sessions in order, with `num_requests` requests in all."""
        num_left = math.inf if self.num_requests is None else self.num_requests
        index = 0
        for session in self._replayed() if isinstance(self.pace, Replay) else map(self._session, count()):
            asks = session.asks[: None if num_left > len(session.asks) else int(num_left)]
            if not asks:
                return
            yield replace(session, first_index=index, asks=asks)
            num_left -= len(asks)
            index += len(asks)

    def think_times(self, client: int) -> Iterator[float]:
        """Yields the pauses of one client of a closed loop, in seconds."""
        assert isinstance(self.pace, Closed)
        mean_s = self.pace.think_s
        dice = random.Random(f"{self.seed} client {client}")
        return (_exponential(dice, mean_s) for _ in count())

    def settings(self) -> dict[str, Setting]:
        """Returns the settings in words, for people who read what was measured."""
        told: dict[str, Setting] = {"sizes": str(self.sizes), **_pace_settings(self.pace)}
        told |= {name: getattr(self, name) for name in _PLAIN if getattr(self, name) is not None}
        if self.edition:
            told["edition"] = self.edition
        if self.prefixes is not None:
            told |= {"prefix_groups": self.prefixes.num_groups, "prefix_tokens": self.prefixes.num_tokens}
        if self.conversations is not None:
            told |= {"turns": str(self.conversations.turns), "message": str(self.conversations.message)}
            told["turn_think_s"] = self.conversations.think_s
        if self.aborts is not None:
            told |= {"abort_share": self.aborts.share, "abort_phases": ",".join(self.aborts.phases)}
        return told

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _session(self, number: int) -> Session:
        """Returns a session. The question decides what is said, and the session decides how it is asked."""
        question = number % self.num_questions if self.num_questions else number
        dice = random.Random(f"{self.seed} question {question}")
        prompt_tokens, answer_tokens = self._capped(*self.sizes.draw(dice))
        group, pieces = self._prompt(dice, prompt_tokens)
        first = Ask(pieces=pieces, prompt_tokens=_total(pieces), answer_tokens=answer_tokens)
        manner = random.Random(f"{self.seed} manner {number}")
        asks = tuple(self._in_its_manner(ask, manner) for ask in chain([first], self._further(first, dice)))
        return Session(first_index=0, question=question, group=group, asks=asks)

    def _prompt(self, dice: random.Random, num_tokens: int) -> tuple[int | None, tuple[Piece, ...]]:
        own = self._key(dice)
        if self.prefixes is None:
            return None, (Piece(own, num_tokens),)
        group = dice.randrange(self.prefixes.num_groups)
        shared = Piece(self._key(random.Random(f"{self.seed} group {group}")), self.prefixes.num_tokens)
        return group, (shared, Piece(own, max(1, num_tokens - shared.num_tokens)))

    def _key(self, dice: random.Random) -> int:
        return (dice.getrandbits(KEY_BITS) + _spread(self.edition - 1)) % (1 << KEY_BITS)

    def _further(self, first: Ask, dice: random.Random) -> Iterator[Ask]:
        """Yields a conversation's other turns, as long as its prompts may be."""
        if self.conversations is None:
            return
        prompt_tokens, answer_tokens = first.prompt_tokens, first.answer_tokens
        for _ in range(self.conversations.turns.draw(dice) - 1):
            message = Piece(self._key(dice), self.conversations.message.draw(dice))
            prompt_tokens += answer_tokens + message.num_tokens
            if self.max_prompt_tokens is not None and prompt_tokens > self.max_prompt_tokens:
                return
            _, answer_tokens = self._capped(*self.sizes.draw(dice))
            think_s = _exponential(dice, self.conversations.think_s)
            yield Ask(pieces=(message,), prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, think_s=think_s)

    def _replayed(self) -> Iterator[Session]:
        assert isinstance(self.pace, Replay)
        for number, row in enumerate(self.pace.rows):
            scaled = (max(1, round(tokens * self.pace.scale)) for tokens in (row.prompt_tokens, row.answer_tokens))
            prompt_tokens, answer_tokens = self._capped(*scaled)
            dice = random.Random(f"{self.seed} manner {number}")
            pieces = tuple(_blocks(row, prompt_tokens, self.pace.scale, dice.getrandbits(KEY_BITS)))
            ask = Ask(pieces=pieces, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
            yield Session(first_index=0, question=number, group=None, asks=(self._in_its_manner(ask, dice),))

    def _in_its_manner(self, ask: Ask, dice: random.Random) -> Ask:
        """Returns the request with its manner: streamed or not, left early or not. The draws are always the same, so
        that with other shares the rest stays as it is."""
        is_stream = dice.random() < self.stream_share
        mood, share, phase_at, chunk_at = (dice.random() for _ in range(4))
        if self.aborts is None or mood >= self.aborts.share:
            return replace(ask, is_stream=is_stream)
        phase = self.aborts.phases[int(phase_at * len(self.aborts.phases))]
        leave = Leave(phase, share, 2 + int(chunk_at * max(1, ask.answer_tokens - 2)))
        is_eventful = phase in (Departure.FIRST_TOKEN, Departure.MID_STREAM)
        return replace(ask, is_stream=is_stream or is_eventful, leave=leave)

    def _capped(self, prompt_tokens: int, answer_tokens: int) -> tuple[int, int]:
        return (
            min(prompt_tokens, self.max_prompt_tokens or prompt_tokens),
            min(answer_tokens, self.max_answer_tokens or answer_tokens),
        )


_LIMITS = {
    "num_requests": "the number of requests",
    "duration_s": "the duration",
    "num_questions": "the number of questions",
    "max_prompt_tokens": "the most tokens of a prompt",
    "max_answer_tokens": "the most tokens of an answer",
}
_PLAIN = (
    "num_requests", "duration_s", "warmup_s", "stream_share", "num_questions", "max_prompt_tokens", "max_answer_tokens",
)  # fmt: skip


def _pace_settings(pace: Open | Closed | Replay) -> dict[str, Setting]:
    if isinstance(pace, Closed):
        return {"arrivals": "closed", "clients": pace.num_clients, "think_s": pace.think_s}
    if isinstance(pace, Replay):
        return {"arrivals": "trace", "rows": len(pace.rows), "speed": pace.speed, "scale": pace.scale}
    told: dict[str, Setting] = {"arrivals": pace.process, "rate": pace.pace.rate}
    if pace.process == "gamma":
        told["burstiness"] = pace.burstiness
    if pace.pace.ramp_s:
        told |= {"ramp_s": pace.pace.ramp_s, "from_rate": pace.pace.from_rate}
    return told


def _blocks(row: TraceRow, num_tokens: int, scale: float, own: int) -> Iterator[Piece]:
    """Yields the trace's blocks, as far as the prompt goes, and one piece for the rest of it."""
    size = max(1, round(BLOCK_TOKENS * scale))
    for block in row.blocks:
        if num_tokens <= 0:
            return
        yield Piece(_spread(block), min(size, num_tokens))
        num_tokens -= size
    if num_tokens > 0:
        yield Piece(own, num_tokens)


def _spread(block: int) -> int:
    """Returns a key for a block. Blocks are numbered in order, and pieces with keys far from each other differ most."""
    return (block + 1) * 0x9E3779B97F4A7C15 % (1 << KEY_BITS)


def _total(pieces: Sequence[Piece]) -> int:
    return sum(piece.num_tokens for piece in pieces)


def _exponential(dice: random.Random, mean_s: float) -> float:
    return dice.expovariate(1 / mean_s) if mean_s > 0 else 0.0
