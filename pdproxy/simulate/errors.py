"""The module names the simulation's errors: those that a user can put right, and being stuck."""

from __future__ import annotations

from transfer.errors import TransferError


class SimulationError(TransferError):
    """SimulationError means that an option or a file is wrong; the message says which, and what is wrong with it."""


class StuckError(RuntimeError):
    """StuckError means that everybody waits and no time is left to pass: nothing can ever happen again. In a simulation
    that is a bug."""
