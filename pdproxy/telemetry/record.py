"""RequestRecord holds what one request did, written once while it runs; metrics, log line, headers and status page read
it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pdproxy.admission.key_limits import Charge
from pdproxy.openai.token_count import TokenCount
from pdproxy.telemetry.attempt_record import AttemptRecord


class Outcome(StrEnum):
    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"
    """The request was answered with a 4xx, by the proxy or by an engine."""
    FAILED = "failed"
    CLIENT_GONE = "client_gone"
    SHUTDOWN = "shutdown"


# Looking up a member in its enum costs more than the comparison.
_RUNNING: Final = Outcome.RUNNING


@dataclass(frozen=True, slots=True)
class Step:
    """Step is a stretch of a request's time: a phase of one attempt, or (`attempt` None) what came before the first."""

    name: str
    started: float
    """Start of the step on the record's clock, in seconds."""
    seconds: float
    attempt: AttemptRecord | None


class RequestRecord:
    """RequestRecord is one client request over all its attempts. `attempt` is the latest attempt.

    Where each prompt of a body is served by itself it has a record of its own, and `prompt` is its index in the body.
    The body's record is not counted then. A canary's is not either: it tells of the fleet, not of its users. Times are
    on `clock`, in seconds.
    """

    __slots__ = (
        "_attempt",
        "_clock",
        "_earlier",
        "_ended",
        "_received",
        "_started_at",
        "charge",
        "endpoint",
        "error",
        "is_counted",
        "key_name",
        "model",
        "num_attempts",
        "outcome",
        "prompt",
        "reason",
        "request_id",
        "started",
        "status",
        "stream",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        endpoint: str,
        *,
        is_counted: bool = True,
        prompt: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = request_id
        self.endpoint = endpoint
        self.is_counted = is_counted
        self.prompt = prompt
        self._clock = clock
        self.started = clock()
        # State: filled in as it becomes known.
        self.key_name: str | None = None
        """The name of the client's API key, where it has one."""
        self.charge: Charge | None = None
        """The charge of the client's key; None where nobody asks for it."""
        self.model: str | None = None
        self.stream = False
        self.reason = ""
        self.num_attempts = 0
        self.outcome = _RUNNING
        self.status: int | None = None
        self.error: str | None = None
        self._received: float | None = None
        self._ended: float | None = None
        self._attempt: AttemptRecord | None = None
        self._earlier: tuple[AttemptRecord, ...] = ()
        self._started_at: float | None = None
        self.tokens = TokenCount(clock)

    def received(self) -> None:
        """Notes that the whole body is there, and understood."""
        self._received = self._clock()

    @property
    def attempt(self) -> AttemptRecord | None:
        return self._attempt

    @attempt.setter
    def attempt(self, attempt: AttemptRecord) -> None:
        """Begins the next attempt."""
        if self._attempt is not None:
            self._earlier += (self._attempt,)
        self._attempt = attempt

    @property
    def attempts(self) -> tuple[AttemptRecord, ...]:
        """Every attempt, in order."""
        return self._earlier if self._attempt is None else (*self._earlier, self._attempt)

    def end(self, outcome: Outcome) -> None:
        """Ends the request with `outcome`. Only the first call counts."""
        if self._ended is None:
            self.outcome = outcome
            self._ended = self._clock()
            self.tokens.settle()

    @property
    def has_answer(self) -> bool:
        """Tells whether an answer was begun, so that an engine has read the prompt."""
        return self.status == 200

    @property
    def path(self) -> str:
        return "none" if self._attempt is None else self._attempt.path

    @property
    def started_at(self) -> float:
        """Start of the request in seconds since 1970. The first reading works it out; later ones return the same
        number."""
        if self._started_at is None:
            self._started_at = time.time() - (self._clock() - self.started)
        return self._started_at

    @property
    def total_s(self) -> float:
        return (self._clock() if self._ended is None else self._ended) - self.started

    @property
    def receive_s(self) -> float:
        """Seconds spent on reading and understanding the body; up to now, or the request's end, where that did not come
        about."""
        return self.total_s if self._received is None else self._received - self.started

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's start to the first event of its answer; None before that."""
        for attempt in self.attempts:
            phases = attempt.phase_seconds()
            if "decode" in phases:
                return attempt.started + attempt.total_seconds() - phases["decode"] - self.started
        return None

    def steps(self) -> Iterator[Step]:
        """Yields the steps of the request's time over all attempts, in order; up to now where the request is not
        over."""
        yield Step("receive", self.started, self.receive_s, None)
        for attempt in self.attempts:
            phases, began = dict(attempt.phase_seconds()), attempt.started
            if attempt.tokenize_s is not None:  # it came before the attempt did
                yield Step("tokenize", began - attempt.tokenize_s, phases.pop("tokenize"), None)
            for name, seconds in phases.items():
                yield Step(name, began, seconds, attempt)
                began += seconds

    def facts(self) -> dict[str, Any]:
        """Returns everything known, flat; what is not known is left out."""
        known: dict[str, Any] = {
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "key_name": self.key_name,
            "model": self.model,
            "stream": self.stream,
            "outcome": self.outcome.value,
            "status": self.status,
            "error": self.error,
            "prompt": self.prompt,
            "reason": self.reason or None,
            "attempts": self.num_attempts,
            "started_at": round(self.started_at, 3),
            "total_s": self.total_s,
            "receive_s": self.receive_s,
            "earlier_s": self._earlier_s,
        }
        known |= {} if self.attempt is None else self.attempt.facts()
        known["num_prompt_tokens"] = self.num_prompt_tokens
        if num_output_tokens := self.num_output_tokens:
            known |= {"num_output_tokens": num_output_tokens, "tokens_by": self.tokens.source}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def num_prompt_tokens(self) -> int | None:
        """The number of the prompt's tokens: as an engine counted them, else as the proxy did for the first attempt. A
        later one may have to read what was shown of the answer, too."""
        if (num_told := self.tokens.num_prompt) is not None:
            return num_told
        first = self._earlier[0] if self._earlier else self._attempt
        return None if first is None else first.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens of the answer, as far as the client was sent it."""
        return self.tokens.num_output if self.has_answer else 0

    @property
    def _earlier_s(self) -> float | None:
        """Seconds spent on the attempts before the latest; None where there were none."""
        if self._attempt is None or not self._earlier:
            return None
        return self._attempt.started - self._earlier[0].started
