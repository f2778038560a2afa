"""What a user of the simulation can put right."""

from __future__ import annotations

from transfer.errors import TransferError


class SimulationError(TransferError):
    """The message says what is wrong with which option or file."""


class StuckError(RuntimeError):
    """Everybody waits and no time is left to pass: nothing can ever happen again. In a simulation that is a bug."""
