"""The module names the reason for which a benchmark, or a part of it, could not be made."""

from __future__ import annotations


class BenchError(Exception):
    """BenchError means that a helper or a target failed, or did what it should not; the message says which and what."""
