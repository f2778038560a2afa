"""The module names the reasons for which a load test cannot be made."""

from __future__ import annotations


class LoadTestError(Exception):
    """LoadTestError means that what was asked for cannot be done; the message says what and why."""


class WorkloadError(LoadTestError):
    """WorkloadError means that no client can ask such a workload."""


class TraceError(LoadTestError):
    """TraceError means that a file is no trace; the message says where in it."""


class TargetError(LoadTestError):
    """TargetError means that the address cannot be asked, or does not answer as it should."""
