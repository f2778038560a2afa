"""Why a benchmark, or a part of it, could not be made."""

from __future__ import annotations


class BenchError(Exception):
    """A helper or a target failed, or did what it should not; the message says which and what."""
