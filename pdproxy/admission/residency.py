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
    another process; how many of its tokens are in memory that it shares with others; how many it had at the last look,
    if it was being written. And, if it counts slice by slice: how many of them are its own, how many more it gets in
    each slice, and how many more altogether.
    """

    __slots__ = (
        "_before",
        "_teller",
        "base",
        "each",
        "has_overrun",
        "is_sliced",
        "left",
        "num_told",
        "room",
        "shared",
        "size",
        "tokens",
        "written",
    )

    def __init__(self, room: Room, tokens: int) -> None:
        self.room = room
        self.tokens = tokens
        self.has_overrun = False
        self.written = 0
        self.num_told = 0
        self.shared = 0
        self.size = 0
        self.is_sliced = False
        self.base = self.each = self.left = 0
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

    def slice_up(self, step: int) -> int:
        """Counts it slice by slice from now on; in each slice every answer gets `step` tokens. Returns the index of the
        slice in which it ends, or `NUM_SLICES` where it ends when the last of them does."""
        self.is_sliced = True
        self.base, self.each, self.left = self.size - self.shared, step * self.room.num, self.tokens - self.size
        return self.left // self.each

    def in_slice(self, number: int) -> int:
        """Returns the most tokens that it has at one time in a slice."""
        return self.base + min(self.left, self.each * (number + 1)) if number <= self.left // self.each else 0


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
        if not stay.is_sliced:
            self._others -= stay.tokens - stay.shared
            self.used -= stay.tokens - stay.shared
        else:
            for number in range(NUM_SLICES):
                self._slices[number] -= stay.in_slice(number)
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
        seen, longest = self._look()
        used = cache.used
        common = 0.0 if used is None or cache.is_queueing or not seen else 1.0 - min(1.0, used / seen)
        known = self._slice(common, self._rounded(max(1, ceil(longest / NUM_SLICES))))
        excess = 0 if used is None else max(0, used - known)
        self.foreign, self._last_excess = min(excess, self._last_excess), excess
        self.used = self._others + max(self._slices) + self.foreign

    def _look(self) -> tuple[int, float]:
        """Looks how far all stays are. Returns the tokens of those that are being written, and how many tokens an
        answer still gets at most, of those that end when it is thought."""
        seen, longest = 0, 0.0
        for stay in self.stays.values():
            written = stay.look()
            size = self._rounded(stay.room.prompt + written)
            if written and (size > stay.tokens or (size == stay.tokens and written < stay.room.most)):
                self._grow(stay)
            stay.size = 0
            if written > 1:  # the first token may be the prefiller's, and the KV still on its way
                stay.size = size
                seen += size
                if not stay.has_overrun:
                    longest = max(longest, (stay.tokens - size) / stay.room.num)
        return seen, longest

    def _grow(self, stay: Stay) -> None:
        growth = max(stay.written, min(stay.written + max(GROWTH_STEP, stay.written // 4), stay.room.most))
        tokens = self._rounded(stay.room.prompt + int(growth))
        self.tokens += tokens - stay.tokens
        stay.tokens = tokens
        stay.has_overrun = True

    def _slice(self, common: float, step: int) -> int:
        """Works out what the stays will have in each slice, in which an answer gets `step` tokens, and of those that
        are being written the share `common` is in memory that they share. Returns the most tokens that all stays can
        have by now. Of an answer that has grown longer than was thought nobody knows when it ends.

        Those that end in the same slice are summed up first: many thousands may be there, while tokens wait.
        """
        known = shared = others = 0
        bases, eaches, lefts = [0] * (NUM_SLICES + 1), [0] * (NUM_SLICES + 1), [0] * (NUM_SLICES + 1)
        for stay in self.stays.values():
            size = stay.size
            stay.shared = int(common * size)
            stay.is_sliced = False
            shared += stay.shared
            known += size + self.block if size else stay.tokens  # what is written may be a block ahead of what was seen
            if size and not stay.has_overrun:
                ends = min(stay.slice_up(step), NUM_SLICES)
                bases[ends] += stay.base
                eaches[ends] += stay.each
                lefts[ends] += stay.left
            else:
                others += stay.tokens - stay.shared
        base = each = 0  # of those that end later than in a slice
        for number in range(NUM_SLICES, -1, -1):
            if number < NUM_SLICES:
                self._slices[number] = base + each * (number + 1) + bases[number] + lefts[number]
            base += bases[number]
            each += eaches[number]
        self.shared, self._others = shared, others
        return known

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless the sums are those of the stays."""
        stays = self.stays.values()
        tokens, shared = sum(stay.tokens for stay in stays), sum(stay.shared for stay in stays)
        if (tokens, shared) != (self.tokens, self.shared) or not 0 <= shared <= tokens:
            raise IntegrityError(f"{self!r} should have {tokens} tokens, of which {shared} are shared")
        sliced = [stay for stay in stays if stay.is_sliced]
        most = max(sum(stay.in_slice(number) for stay in sliced) for number in range(NUM_SLICES))
        used = most + sum(stay.tokens - stay.shared for stay in stays if not stay.is_sliced) + self.foreign
        if used != self.used:
            raise IntegrityError(f"{self!r} counts {self.used} tokens and has {used}")

    def __repr__(self) -> str:
        return f"<Residency: {self.tokens} tokens of {self.capacity}, {self.shared} shared, {self.foreign} foreign>"
