"""Exchanges tell who is at fault where a prefiller's KV does not reach a decoder, though both of them answer.

What must hold: of a pair that cannot exchange KV, the side is blamed that fails with others, too, and not the side that
works with others meanwhile. A violation would be seen as an instance at work that its breaker takes out of the fleet.
"""

from __future__ import annotations

from itertools import count

_turns = count(1)


class Exchanges:
    """Exchanges holds what one instance and its peers have shown since they last failed to exchange KV.

    Mutable state: the peers with which it fails, each with the turn in which that began; the turn in which an exchange
    with any other peer last worked. Turns are numbers that grow. Nothing is noted while all is well.
    """

    __slots__ = ("_failing", "_name", "_worked_at")

    def __init__(self, name: str) -> None:
        self._name = name
        self._failing: dict[str, int] = {}
        self._worked_at = 0

    def worked(self, peer: Exchanges) -> None:
        """Notes that KV could be exchanged with the peer."""
        if self._failing or peer._failing:
            self._failing.pop(peer._name, None)
            peer._failing.pop(self._name, None)
            self._worked_at = peer._worked_at = next(_turns)

    def failed(self, peer: Exchanges) -> tuple[bool, bool]:
        """Notes that no KV could be exchanged with the peer. Returns whether each side, this one first, has worked with
        others since that began."""
        since = self._failing.get(peer._name)
        if since is None:
            self._failing[peer._name] = peer._failing[self._name] = since = next(_turns)
        return self._worked_at > since, peer._worked_at > since

    def forget(self) -> None:
        """Forgets everything: the instance is a new process."""
        self._failing.clear()
        self._worked_at = 0

    def __repr__(self) -> str:
        return f"<Exchanges of {self._name}: {', '.join(self._failing) or 'none'} fail>"
