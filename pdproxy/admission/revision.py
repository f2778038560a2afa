"""A `Revision` is what an instance must have in common with its counterpart, so that one can read the other's KV.

While a fleet is upgraded, instances of one model differ: those of the old revision and those of the new one serve side
by side, each with counterparts that it fits.

What must hold: an attempt's two places fit each other, and an answer that was begun by one revision is continued only
by places that write the same text. A violation would be seen as KV that means nothing to its reader, or as an answer
that goes on with tokens of another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

CARRIAGE: Final = frozenset(
    {"chunk_size", "block_size", "page_size", "fleet_key", "transfer_backend", "allocation_policy"}
)
"""The terms that say how KV is cut and carried. All others may change what is written."""
NAME: Final = "revision"
"""The term that holds the name which an operator gives; it is empty where there is none."""

MAX_KNOWN: Final = 1024
"""The most revisions that are kept to be the same object wherever they are told."""
_LABEL_BYTES: Final = 4


class Revision:
    """A `Revision` holds `terms`: names and values of what two places must have alike, as far as both tell it."""

    __slots__ = ("_hash", "terms", "text_terms")

    def __init__(self, terms: Mapping[str, str] | None = None) -> None:
        self.terms = dict(terms or {})
        self.text_terms: tuple[tuple[str, str], ...] = tuple(
            sorted((name, value) for name, value in self.terms.items() if name not in CARRIAGE)
        )
        """The terms that must be the same where an answer is continued, all of them, in a fixed order."""
        self._hash = hash(frozenset(self.terms.items()))

    def fits(self, other: Revision) -> bool:
        """Tells whether nothing is known that speaks against a pair of the two."""
        return self is other or self.difference(other) is None

    def difference(self, other: Revision) -> str | None:
        """Returns the name of the first term that both tell and that differs; None where there is none."""
        theirs = other.terms
        for name, value in self.terms.items():
            if theirs.get(name, value) != value:
                return name
        return None

    @property
    def label(self) -> str:
        """The operator's name; where there is none, a short digest of all terms."""
        told = "\n".join(f"{name}={value}" for name, value in sorted(self.terms.items()))
        return self.terms.get(NAME) or blake2b(told.encode(), digest_size=_LABEL_BYTES).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Revision) and self.terms == other.terms)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"<Revision {self.terms}>"


_KNOWN: Final[dict[Revision, Revision]] = {}


def same(revision: Revision) -> Revision:
    """Returns the one object that stands for all revisions with these terms: places of a large fleet are told apart by
    it time and again, and the same object is told at a glance."""
    if len(_KNOWN) >= MAX_KNOWN:
        _KNOWN.clear()
    return _KNOWN.setdefault(revision, revision)


ANY: Final = Revision()
"""The revision of a place that has told nothing yet. It fits every other."""
