"""Who takes the pages of an attempt that is larger than the PD buffer, while more of them arrive.

The whole buffer is a window for such an attempt: every page that has arrived is copied out by the intake (an engine's
own KV cache, usually) and may then be written again. The attempt is ready when all of it has passed through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transfer.plan.blocks import PageTable


class Intake(Protocol):
    """Called by the receiver on the event loop's thread; returns at once."""

    def check(self, table: PageTable) -> None:
        """Raises `ReservationRefused` when a prompt like this can never be taken in."""

    def opened(self, attempt: str, table: PageTable) -> None:
        """The attempt has the buffer to itself from now on."""

    def arrived(self, attempt: str, ordinals: range, pages: Sequence[int]) -> None:
        """These pages of the attempt lie in these pages of the buffer, complete.

        Call `Receiver.pages_taken` (with how many have been copied in all, first ones first) as soon as they are
        copied: the sender waits for it.
        """

    def closed(self, attempt: str, reason: str) -> None:
        """The attempt has failed, or nobody came for it: forget what was copied. Not called for one that was taken."""
