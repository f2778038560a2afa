"""An intake takes the pages of an attempt that is larger than the PD buffer, while more of them arrive.

The whole buffer is a window for such an attempt: the intake copies out every page that has arrived (into an engine's
own KV cache, usually), and then the page may be written again. The attempt is ready when all of it has passed through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transfer.plan.blocks import PageTable


class Intake(Protocol):
    """An `Intake` is called by the receiver on the event loop's thread. Its methods return at once."""

    def check(self, table: PageTable) -> None:
        """Raises `ReservationRefused` when a prompt with this page table can never be taken in."""

    def opened(self, attempt: str, table: PageTable) -> None:
        """Hears that the attempt has the buffer to itself from now on."""

    def arrived(self, attempt: str, ordinals: range, pages: Sequence[int]) -> None:
        """Hears that the pages `ordinals` of the attempt are complete, in the pages `pages` of the buffer.

        Call `Receiver.pages_taken` as soon as they are copied, because the sender waits for it. Tell it how many have
        been copied in all, first ones first.
        """

    def closed(self, attempt: str, reason: str) -> None:
        """Forgets what was copied, because the attempt has failed, or nobody came for it. Not called for an attempt
        that was taken."""
