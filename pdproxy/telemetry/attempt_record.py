"""AttemptRecord is the record of one attempt: how far its request has come, and where its time went.

Cancelling a request does not free its pages: the prefiller may still be writing them. So the request's *phase*, whose
table is in this file, ends when the request does. The *custody* of its pages ends later, on evidence
(`admission.custody`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final

from pdproxy.admission.account import Lease
from pdproxy.admission.custody import Custody
from pdproxy.errors import IllegalTransition
from pdproxy.ids import fresh_id, shown


class Path(StrEnum):
    """Path says which instances serve the request."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"
    """The decoder alone serves the request."""
    PREFILL_ONLY = "prefill_only"
    """The prefiller finished the answer: EOS, stop, or one token wanted."""
    PASSED = "passed"
    """One instance answered the body as it was: there were no legs."""


class Phase(StrEnum):
    """Phase says how far the request has come."""

    QUEUED = "queued"
    PREFILL = "prefill"
    KV_WAIT = "kv_wait"
    DECODE = "decode"
    PASSED = "passed"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDS: Final = frozenset({Phase.DONE, Phase.FAILED, Phase.CANCELLED})
_BROKEN_OFF: Final = frozenset({Phase.FAILED, Phase.CANCELLED})


def _steps(*life: Phase) -> Mapping[Phase, frozenset[Phase]]:
    """Returns the table of a life that passes through the phases in order, and may break off anywhere before its
    end."""
    steps = {phase: _BROKEN_OFF | {following} for phase, following in pairwise(life)}
    return steps | dict.fromkeys(ENDS, frozenset[Phase]())


PHASE_STEPS: Final[Mapping[Path, Mapping[Phase, frozenset[Phase]]]] = {
    Path.DISAGGREGATED: _steps(Phase.QUEUED, Phase.PREFILL, Phase.KV_WAIT, Phase.DECODE, Phase.DONE),
    Path.LOCAL: _steps(Phase.QUEUED, Phase.DECODE, Phase.DONE),
    Path.PREFILL_ONLY: _steps(Phase.QUEUED, Phase.PREFILL, Phase.DONE),
    Path.PASSED: _steps(Phase.QUEUED, Phase.PASSED, Phase.DONE),
}

_STEP_IN: Final = {
    Phase.QUEUED: "slot_wait",
    Phase.PREFILL: "prefill",
    Phase.KV_WAIT: "kv_wait",
    Phase.DECODE: "first_byte",
    Phase.PASSED: "passed",
    **dict.fromkeys(ENDS, ""),
}
"""The name under which the time of each phase is told. ``first_byte`` is followed by ``decode``; an end takes no
time."""

_COMMA: Final = b", "
_DURATION_OF: Final = {
    step: b"%b%b;dur=" % (_COMMA, step.encode()) for step in ("tokenize", *_STEP_IN.values(), "decode")
}
"""The beginning of each step's entry in a ``Server-Timing`` header."""

# Looking up a member in its enum costs more than everything else that is done with it here.
_AT_FIRST: Final = Phase.QUEUED
_STEP_AT_FIRST: Final = _STEP_IN[Phase.QUEUED]
_NO_CUSTODY: Final = Custody.NONE


class AttemptRecord:
    """AttemptRecord is one attempt at serving one request; a retry is a new attempt with a new `id`.

    The counts that come from elsewhere (`num_pages`, `num_kv_bytes`, `transfer_s`) are None until known. `tokenize_s`
    was spent on the request before this attempt; a retry passes None, so that it is counted once. `started` is on
    `clock`, in seconds.

    Engines know the attempt by its `secret`, and so prove with a KV signal that they were told of it. Everybody else
    sees `id`, with which the secret begins: in headers, logs and ``/status``.
    """

    __slots__ = (
        "_clock",
        "_lease",
        "_path",
        "_phase",
        "_seconds",
        "_since",
        "_step",
        "decoder",
        "id",
        "num_kv_bytes",
        "num_pages",
        "num_prompt_tokens",
        "predicted_s",
        "prefiller",
        "request_id",
        "secret",
        "started",
        "tokenize_s",
        "transfer_s",
        "waited_for",
    )

    def __init__(
        self,
        request_id: str,
        *,
        path: Path = Path.DISAGGREGATED,
        prefiller: str | None = None,
        decoder: str | None = None,
        num_prompt_tokens: int | None = None,
        tokenize_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.secret = fresh_id()
        self.id = shown(self.secret)
        self.request_id = request_id
        self.prefiller = prefiller
        self.decoder = decoder
        self.num_prompt_tokens = num_prompt_tokens
        self.tokenize_s = tokenize_s
        self.num_pages: int | None = None
        self.num_kv_bytes: int | None = None
        self.transfer_s: float | None = None
        self.predicted_s: float | None = None
        """The seconds from the grant to the first token, as they were predicted; None where nothing was."""
        self.waited_for: str | None = None
        """The thing of which there was none when it got in line; None where it did not wait."""
        self.started = clock()
        self._clock = clock
        # State: where the request is, on which path; its pages; the step it is in ("" after the end) and since
        # when (seconds on `clock`); seconds of the steps before.
        self._path = path
        self._phase = _AT_FIRST
        self._lease: Lease | None = None
        self._step = _STEP_AT_FIRST
        self._since = self.started
        self._seconds: dict[str, float] = {} if tokenize_s is None else {"tokenize": tokenize_s}

    @property
    def path(self) -> Path:
        return self._path

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def custody(self) -> Custody:
        return _NO_CUSTODY if self._lease is None else self._lease.custody

    @property
    def step(self) -> tuple[str, float]:
        """The present step, named as in `phase_seconds`, and since when on `clock`, in seconds; ``""`` after the
        end."""
        return self._step, self._since

    @property
    def is_over(self) -> bool:
        """Tells whether the request has ended; its pages may not have come back yet."""
        return self._phase in ENDS

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, phase: Phase) -> None:
        """Moves the request into `phase`. Raises `IllegalTransition`, and changes nothing, where its path's table
        forbids it."""
        allowed = PHASE_STEPS[self._path][self._phase]
        if phase not in allowed:
            raise self._illegal("phase", self._phase, phase, allowed)
        self._phase = phase
        self._step_to(_STEP_IN[phase])

    def bind(self, path: Path, prefiller: str | None, decoder: str | None) -> None:
        """Notes which path the attempt takes, and which instances serve it. Raises `IllegalTransition` as `take_path`
        does."""
        self.take_path(path)
        self.prefiller = prefiller
        self.decoder = decoder

    def hold(self, lease: Lease) -> None:
        """Notes that the pages of `lease` are the attempt's own."""
        self._lease = lease
        self.num_pages = lease.pages

    def take_path(self, path: Path) -> None:
        """Changes the request's path. Raises `IllegalTransition` where `path` does not have the present phase, or after
        the end."""
        if self.is_over or self._phase not in PHASE_STEPS[path]:
            ways = frozenset(way for way, steps in PHASE_STEPS.items() if self._phase in steps)
            raise self._illegal("path", self._path, path, frozenset() if self.is_over else ways)
        self._path = path

    def mark_first_byte(self) -> None:
        """Notes that the decode leg's first byte is here. Only the first call counts. Raises `IllegalTransition` before
        `DECODE`."""
        if self._step == "first_byte":
            self._step_to("decode")
        elif "first_byte" not in self._seconds:
            raise self._illegal("first byte", self._phase, Phase.DECODE, frozenset())

    def _step_to(self, step: str) -> None:
        """Ends the time of one step and begins that of the next one."""
        now = self._clock()
        self._seconds[self._step] = now - self._since
        self._step, self._since = step, now

    def _illegal(self, what: str, at: StrEnum, to: StrEnum, allowed: frozenset[Any]) -> IllegalTransition:
        steps = ", ".join(sorted(allowed)) or "nothing"
        return IllegalTransition(
            f"{what}: {at} → {to} is not a step (possible: {steps}); attempt {self.id} "
            f"of request {self.request_id}, path {self._path}, phase {self._phase}, custody {self.custody}"
        )

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def phase_seconds(self) -> dict[str, float]:
        """Returns the seconds per step entered, in order: tokenize, slot_wait, prefill, kv_wait, first_byte, decode.

        ``first_byte`` runs from the handover to the decoder to its first byte, ``decode`` from there to the end. A step
        not yet finished counts up to now.
        """
        if not self._step:
            return self._seconds
        return {**self._seconds, self._step: self._clock() - self._since}

    @property
    def handoff_s(self) -> float | None:
        """The seconds from the prefill leg's end to the decoder's first byte; None where there was no such time."""
        seconds = self._seconds
        if "kv_wait" not in seconds or "first_byte" not in seconds:
            return None
        return seconds["kv_wait"] + seconds["first_byte"]

    @property
    def first_token_s(self) -> float | None:
        """The seconds from the grant to the decoder's first byte; None where none has come."""
        seconds = self._seconds
        if "first_byte" not in seconds:
            return None
        return seconds.get("prefill", 0.0) + seconds.get("kv_wait", 0.0) + seconds["first_byte"]

    def timing_header(self) -> bytes:
        """Returns `phase_seconds` as the value of a ``Server-Timing`` header, in milliseconds."""
        pieces: list[bytes] = []
        for step, step_s in self.phase_seconds().items():
            tenths = int(step_s * 10_000 + 0.5)
            pieces.append(_DURATION_OF[step])
            pieces.append(_TENTHS[tenths] if 0 <= tenths < len(_TENTHS) else b"%.1f" % (step_s * 1000))
        return b"".join(pieces)[len(_COMMA) :]

    def total_seconds(self) -> float:
        """Returns the seconds from the attempt's start to its end, or to now."""
        return (self._clock() if self._step else self._since) - self.started

    def facts(self) -> dict[str, str | int | float]:
        """Returns everything known, flat, for a log line or a trace; what is not known is left out."""
        known: dict[str, str | int | float | None] = {
            "attempt": self.id,
            "request_id": self.request_id,
            "path": self._path.value,
            "phase": self._phase.value,
            "custody": self.custody.value,
            "prefiller": self.prefiller,
            "decoder": self.decoder,
            "waited_for": self.waited_for,
            "predicted_s": self.predicted_s,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_pages": self.num_pages,
            "num_kv_bytes": self.num_kv_bytes,
            "transfer_s": self.transfer_s,
        }
        known |= {f"{step}_s": seconds for step, seconds in self.phase_seconds().items()}
        return {name: value for name, value in known.items() if value is not None}

    def __repr__(self) -> str:
        legs = f"{self.prefiller or '-'} → {self.decoder or '-'}"
        return f"<AttemptRecord {self.id} {self._path}: {self._phase}, pages {self.custody}, {legs}>"


_TENTHS: Final = [b"%d.%d" % divmod(tenths, 10) for tenths in range(1000)]
"""Short times as text, in milliseconds with one decimal. Most steps take no longer than these, and formatting a float
costs as much as sending a header."""
