"""Why a load test could not be made."""

from __future__ import annotations


class LoadTestError(Exception):
    """What was asked for cannot be done; the message says what and why."""


class WorkloadError(LoadTestError):
    """Nobody can ask that."""


class TraceError(LoadTestError):
    """A file is no trace; the message says where in it."""


class TargetError(LoadTestError):
    """The address cannot be asked, or does not answer as it should."""
