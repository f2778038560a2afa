"""The module names the reason for which a measurement or a soak, or a part of it, could not be made."""

from __future__ import annotations


class BenchError(Exception):
    """BenchError means that a process failed, or did what it should not; the message says which and what."""
