"""The outcome of a step, and the errors with which it ends early."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]


class StepFailed(Exception):
    """The step found something wrong; the message says what."""


class StepSkipped(Exception):
    """The step says nothing about this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """The findings of a step that passed: a line for people, and plain values for the JSON file."""

    line: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one step. `line` is the reason where it failed or was skipped."""

    name: str
    status: Status
    seconds: float
    line: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name:<18} {self.status:<8} {self.seconds:6.1f} s  {self.line}"
