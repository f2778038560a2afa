"""The errors of a transfer. Each error says who is at fault and whether trying again can help."""

from __future__ import annotations


class TransferError(Exception):
    """The root of every error raised by this package."""


class GeometryError(TransferError):
    """A model config does not tell how large its KV is; the message names the attribute and the way out."""


_WAYS_OUT = {
    "chunk_size": "; give all engines the same option chunk_size: with vLLM, one that divides each of their block sizes"
}
"""The ways out by field, where the name of the field does not say them."""


class HandshakeRefused(TransferError):
    """Two sides cannot exchange KV: `field` differs between them (`ours` here, `theirs` there)."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        text = f"cannot exchange KV: {field} is {ours!r} here and {theirs!r} at the peer"
        super().__init__(text + _WAYS_OUT.get(field, ""))
        self.field = field
        self.ours = ours
        self.theirs = theirs


class ReservationRefused(TransferError):
    """The receiver will not take this attempt: larger than its buffer, unknown, cancelled or out of time."""


class StaleTerm(ReservationRefused):
    """The attempt is of a leader that has been replaced: of `term`, where a higher one has been `heard` of. Nothing was
    begun. A new attempt is to ask whoever leads now."""

    def __init__(self, term: int | str, heard: int | str) -> None:
        self.term, self.heard = int(term), int(heard)
        super().__init__(f"the attempt is of term {self.term}, and a leader of term {self.heard} has been heard of")


class AttemptLost(TransferError):
    """The attempt's KV will never be complete: cancelled, expired, or its writer failed or vanished."""


class PeerLost(TransferError):
    """The peer stopped answering, was restarted, or NIXL reported its death."""


class ReceiverLost(PeerLost, AttemptLost):
    """The decoder's receiver does not answer this sender, or has fallen silent, whatever its HTTP address says."""


class IllegalTransition(TransferError):
    """A step was asked for that the state table does not allow. It is raised before anything has changed."""


class IntegrityError(TransferError):
    """Counted things do not add up. It is a bug in this package, and never the caller's fault."""
