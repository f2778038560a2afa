"""The module counts the tokens whose KV is in an engine's own KV cache while it writes their answers, or will be there.

What should hold: an engine that writes answers never has to give one of them up half-way because its KV cache is full
(vLLM calls that preemption: the prompt is prefilled once more, on the decoder). It would be seen in the engine's own
count of preemptions, and as answers that come to a halt.

These numbers are estimates, unlike those of an `Account`: nobody knows how long an answer will be, and prompts that
begin alike share memory. A wrong number costs time, never a right answer, because the engine guards this memory itself.
So no proof is asked for: an attempt's tokens count from the grant until the attempt has no use for the place any more.

Answers that are being written all get a token per step, and those that end first leave their memory to the others. So
what they need together is not the sum of what each will have in its end, but the most that they will have at one time.
That is what counts. For it the time from a look at the engine until all of them end is cut into a few slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf
from typing import Final, Protocol

from pdproxy.admission.room import KvCache, Room
from pdproxy.errors import IntegrityError

GROWTH_STEP: Final = 64
"""The least number of tokens that an answer gets which has grown longer than was thought."""
NUM_SLICES: Final = 8
"""The number of slices into which the time is cut until all answers under way have ended."""


class Written(Protocol):
    """`Written` tells how many tokens of an answer were seen so far."""

    num_shown: int


class Stay:
    """A `Stay` is one attempt at one place.

    Mutable state: the tokens that it will have in its end, by what is thought now of its answer's length, and whether
    that was longer than was thought at first; those written so far, who tells them, and how many of them were told to
    another process; how many of its tokens are in memory that it shares with others; what it has at most in each slice,
    if it is being written.
    """

    __slots__ = ("_before", "_teller", "has_overrun", "in_slices", "num_told", "room", "shared", "tokens", "written")

    def __init__(self, room: Room, tokens: int) -> None:
        self.room = room
        self.tokens = tokens
        self.has_overrun = False
        self.written = 0
        self.num_told = 0
        self.shared = 0
        self.in_slices: list[int] | None = None
        self._teller: Written | None = None
        self._before = 0

    def follow(self, teller: Written) -> None:
        """Takes what is written from now on from `teller`."""
        self._teller = teller
        self._before = teller.num_shown

    def look(self) -> int:
        """Returns the tokens of the answer that were seen so far."""
        if self._teller is not None:
            self.written = max(self.written, self._teller.num_shown - self._before)
        return self.written


class Residency:
    """`Residency` sums up the stays of a place whose KV cache has room for `capacity` tokens; None where nobody knows.
    Then nothing waits for room there.

    Mutable state: the capacity, and the tokens per block of that memory; the stays by attempt, with the sums of their
    tokens and of what they share; what those who are being written have together in each slice, and what the others
    will have; the tokens that the engine says are in use and nobody here knows of, and how many these were at the look
    before; all of it that counts.
    """

    __slots__ = (
        "_last_excess",
        "_others",
        "_slices",
        "block",
        "capacity",
        "foreign",
        "limit",
        "oversubscribe",
        "shared",
        "stays",
        "tokens",
        "used",
    )

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.oversubscribe = 1.0
        """The share of the capacity that may be promised: above 1 where engines may run out of memory."""
        self.limit: float = inf
        self.block = 1
        self.stays: dict[str, Stay] = {}
        self.tokens = 0
        self.shared = 0
        self.foreign = 0
        self._last_excess = 0
        self._slices = [0] * NUM_SLICES
        self._others = 0
        self.used = 0
        """The tokens that are in use or promised, all in all: the most that there will be at one time."""

    def fits(self, tokens: int) -> bool:
        """Tells whether there is room for so many more tokens. An attempt that is larger than the whole memory may have
        it alone."""
        return self.limit == inf or self.used + self._rounded(tokens) <= self.limit or not self.stays

    @property
    def room(self) -> float:
        """Returns the most tokens for which there may be room."""
        return inf if self.limit == inf or not self.stays else (self.limit - self.used) // self.block * self.block

    def fits_beside(self, tokens: int, others: int) -> bool:
        """Tells whether there is room for so many more tokens, and still for `others` afterwards."""
        return self.used + self._rounded(tokens) + self._rounded(others) <= self.limit

    def excess(self, tokens: int) -> float:
        """Returns which share of the memory must become free before there is room for so many more tokens."""
        return 0.0 if self.fits(tokens) else (self.used + tokens - self.limit) / self.limit

    # ── who is there ────────────────────────────────────────────────────────────────────────────────────────────────

    def enter(self, attempt: str, room: Room) -> None:
        """Counts an attempt from now on."""
        if attempt in self.stays:
            self.leave(attempt)
        stay = self.stays[attempt] = Stay(room, self._rounded(room.tokens))
        self.tokens += stay.tokens
        self._others += stay.tokens
        self.used += stay.tokens

    def leave(self, attempt: str) -> bool:
        """Counts an attempt no longer. Returns False, and changes nothing, where it was not counted."""
        stay = self.stays.pop(attempt, None)
        if stay is None:
            return False
        self.tokens -= stay.tokens
        self.shared -= stay.shared
        if stay.in_slices is None:
            self._others -= stay.tokens - stay.shared
        else:
            self._slices = [all_of_them - one for all_of_them, one in zip(self._slices, stay.in_slices, strict=True)]
        self.used = self._others + max(self._slices) + self.foreign
        return True

    def follow(self, attempt: str, teller: Written) -> None:
        """Takes from `teller` how much of an attempt's answer is written. Does nothing where it is not counted."""
        if (stay := self.stays.get(attempt)) is not None:
            stay.follow(teller)

    def told(self, written: Mapping[str, int]) -> None:
        """Takes from another process how many tokens it has seen of answers, by attempt."""
        for attempt, num_tokens in written.items():
            if (stay := self.stays.get(attempt)) is not None:
                stay.written = max(stay.written, num_tokens)

    def news(self) -> dict[str, int]:
        """Returns for another process, by attempt, how many tokens were seen of answers that have grown since the last
        call."""
        news = {attempt: stay for attempt, stay in self.stays.items() if stay.look() > stay.num_told}
        for stay in news.values():
            stay.num_told = stay.written
        return {attempt: stay.written for attempt, stay in news.items()}

    def begin_anew(self) -> None:
        """Forgets what was told to the other process, because another one takes its place."""
        for stay in self.stays.values():
            stay.num_told = 0

    def clear(self) -> None:
        """Forgets all, because the process that had it has ended."""
        self.stays.clear()
        self.tokens = self.shared = self.foreign = self._last_excess = self._others = self.used = 0
        self._slices = [0] * NUM_SLICES

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block

    # ── what the engine says ────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, cache: KvCache) -> None:
        """Takes the engine's own numbers.

        Answers that have grown longer than was thought get more room. Where the engine has less in use than the stays
        that it has begun would take, they share memory, each its part of the difference. Where it has more in use than
        all stays can have by now, the rest is somebody else's, as long as two looks in a row find it.
        """
        self.capacity, self.block = cache.tokens, max(1, cache.block)
        self.limit = inf if cache.tokens is None else cache.tokens * self.oversubscribe
        begun = self._look()
        seen, used = sum(begun.values()), cache.used
        parts = 1.0 if used is None or cache.is_queueing or not seen else min(1.0, used / seen)
        for stay, size in begun.items():
            stay.shared = int((1.0 - parts) * size)
        self.shared = sum(stay.shared for stay in begun)
        self._slice(begun)
        if used is None:
            excess = 0
        else:  # what is written may be a block ahead of what was seen
            known = sum(size + self.block for size in begun.values())
            known += sum(stay.tokens for stay in self.stays.values() if stay not in begun)
            excess = max(0, used - known)
        self.foreign, self._last_excess = min(excess, self._last_excess), excess
        self.used = self._others + max(self._slices) + self.foreign

    def _look(self) -> dict[Stay, int]:
        """Returns the stays that are being written, with the tokens that each has so far."""
        begun: dict[Stay, int] = {}
        for stay in self.stays.values():
            stay.shared = 0
            written = stay.look()
            size = self._rounded(stay.room.prompt + written)
            if written and (size > stay.tokens or (size == stay.tokens and written < stay.room.most)):
                self._grow(stay)
            if written > 1:  # the first token may be the prefiller's, and the KV still on its way
                begun[stay] = size
        return begun

    def _grow(self, stay: Stay) -> None:
        growth = max(stay.written, min(stay.written + max(GROWTH_STEP, stay.written // 4), stay.room.most))
        tokens = self._rounded(stay.room.prompt + int(growth))
        self.tokens += tokens - stay.tokens
        stay.tokens = tokens
        stay.has_overrun = True

    def _slice(self, begun: Mapping[Stay, int]) -> None:
        """Works out what the stays will have in each slice. Of an answer that has grown longer than was thought nobody
        knows when it ends."""
        for stay in self.stays.values():
            stay.in_slices = None
        ending = {stay: size for stay, size in begun.items() if not stay.has_overrun}
        longest = max(((stay.tokens - size) / stay.room.num for stay, size in ending.items()), default=0.0)
        step = self._rounded(max(1, ceil(longest / NUM_SLICES)))  # in tokens of one answer
        slices = [0] * NUM_SLICES
        for stay, size in ending.items():
            left, base, each = stay.tokens - size, size - stay.shared, step * stay.room.num
            stay.in_slices = own = [0] * NUM_SLICES
            for number in range(min(NUM_SLICES, left // each + 1)):
                own[number] = one = base + min(left, each * (number + 1))
                slices[number] += one
        self._slices = slices
        self._others = sum(stay.tokens - stay.shared for stay in self.stays.values() if stay.in_slices is None)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless the sums are those of the stays."""
        stays = self.stays.values()
        tokens, shared = sum(stay.tokens for stay in stays), sum(stay.shared for stay in stays)
        if (tokens, shared) != (self.tokens, self.shared) or not 0 <= shared <= tokens:
            raise IntegrityError(f"{self!r} should have {tokens} tokens, of which {shared} are shared")
        sliced = [stay.in_slices for stay in stays if stay.in_slices is not None]
        most = max(sum(own[number] for own in sliced) for number in range(NUM_SLICES))
        used = most + sum(stay.tokens - stay.shared for stay in stays if stay.in_slices is None) + self.foreign
        if used != self.used:
            raise IntegrityError(f"{self!r} counts {self.used} tokens and has {used}")

    def __repr__(self) -> str:
        return f"<Residency: {self.tokens} tokens of {self.capacity}, {self.shared} shared, {self.foreign} foreign>"
