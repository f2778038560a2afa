"""The module names the reasons for which a launch ends. Each message is shown to the user as it is and names the way
out."""

from __future__ import annotations

import signal
from collections.abc import Sequence


class LaunchError(Exception):
    """LaunchError is the root of what ends a launch."""


class PreflightError(LaunchError):
    """PreflightError means that something would not have worked; nothing has been started."""


class ProgramDied(LaunchError):
    """ProgramDied means that a program ended that should have gone on; `tail` is the last it printed."""

    def __init__(self, name: str, status: int, tail: Sequence[str]) -> None:
        super().__init__("\n  ".join([f"{name} {describe(status)}; its last lines:", *(tail or ["(none)"])]))
        self.name = name
        self.status = status


class NotReadyInTime(LaunchError):
    """NotReadyInTime means that a program runs but does not say that it is ready; `answer` is what it said when last
    asked."""

    def __init__(self, name: str, timeout_s: float, answer: str, tail: Sequence[str]) -> None:
        what = f"{name} was not ready within {timeout_s:g} s (last answer: {answer}); its last lines:"
        super().__init__("\n  ".join([what, *(tail or ["(none)"])]))
        self.name = name


class NothingServed(LaunchError):
    """NothingServed means that all programs run, but the proxy has not got a request through one of them; `why` is in
    the proxy's words."""

    def __init__(self, name: str, timeout_s: float, why: str) -> None:
        super().__init__(f"no request has gone through {name} within {timeout_s:g} s: {why}")
        self.name = name


class Interrupted(LaunchError):
    """Interrupted means that the user, or whoever sent `signum`, wanted an end. Everything has been stopped."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def describe(status: int) -> str:
    """Returns a process's end in words; negative numbers are signals, as in `subprocess`."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
