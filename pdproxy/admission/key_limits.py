"""The module limits how many requests and tokens the keys of one name may have per minute, and keeps what each request
of such a key is charged.

What must always hold: a request takes one from its name's requests, and of the tokens nothing where it failed before
its first byte; what it reserved for its prompt is given back or replaced by what it used, once. A violation would be
seen as a level of tokens that does not come back to its limit within a minute without requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from pdproxy.errors import RateLimited

MINUTE_S = 60.0
BYTES_PER_TOKEN = 4
"""The bytes of text that one token stands for, about."""


class Rates(NamedTuple):
    """Rates are the limits of a name, as its file says; None for no limit."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None


class Bucket:
    """A Bucket holds up to `per_min` of something, and gets that much each minute. It starts full, does no I/O, and is
    in debt while more was taken than it held.

    Mutable state: its level, and when that was so on `clock`, in seconds.
    """

    def __init__(self, per_min: float, clock: Callable[[], float]) -> None:
        self.size = max(1.0, per_min)
        """The most that it holds: at least one, or nothing could ever be taken from a small share."""
        self._per_s = per_min / MINUTE_S
        self._clock = clock
        self._level = self.size
        self._measured_at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.size, self._level + max(0.0, now - self._measured_at) * self._per_s)
        self._measured_at = now
        return self._level

    def take(self, amount: float) -> None:
        """Takes the amount, which may be more than there is. Gives it back where it is negative."""
        self._level = min(self.size, self.level - amount)

    def seconds_until(self, level: float) -> float:
        """Returns the seconds until there is as much as `level`, when nothing more is taken; 0 where there is."""
        return max(0.0, (min(level, self.size) - self.level) / self._per_s)

    def headers(self, kind: bytes) -> list[tuple[bytes, bytes]]:
        """Returns the headers by which clients of OpenAI's know the limit, what is left, and when all is there."""
        left = max(0, math.floor(self.level))
        return [
            (b"x-ratelimit-limit-" + kind, b"%d" % self.size),
            (b"x-ratelimit-remaining-" + kind, b"%d" % left),
            (b"x-ratelimit-reset-" + kind, _duration(self.seconds_until(self.size))),
        ]

    def __repr__(self) -> str:
        return f"<Bucket {self.level:.1f} of {self.size:g}>"


class KeyOwner:
    """A KeyOwner is whoever has the keys of one `name`, or of a key without one (None). All these keys share its
    limits, of which this process enforces one of `num_parts` equal parts.

    Mutable state: the limits, and the two buckets that go with them.
    """

    def __init__(
        self,
        name: str | None,
        rates: Rates = Rates(),  # noqa: B008 (it cannot change)
        *,
        num_parts: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._num_parts = num_parts
        self._clock = clock
        self.rates = Rates()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.limit(rates)

    def limit(self, rates: Rates) -> None:
        """Sets the limits. Where they stay the same, so does what is left of them."""
        if rates.requests_per_min != self.rates.requests_per_min:
            self._requests = self._bucket(rates.requests_per_min)
        if rates.tokens_per_min != self.rates.tokens_per_min:
            self._tokens = self._bucket(rates.tokens_per_min)
        self.rates = rates

    def _bucket(self, per_min: int | None) -> Bucket | None:
        return None if per_min is None else Bucket(per_min / self._num_parts, self._clock)

    def begin(self) -> Charge:
        """Takes one request, and returns what it will be charged. Raises `RateLimited`, and takes nothing, where the
        requests of this minute are used up, or the tokens are."""
        requests, tokens = self._requests, self._tokens
        if requests is not None and requests.level < 1.0:
            raise self._refusal("requests", requests.seconds_until(1.0), self.rates.requests_per_min)
        if tokens is not None and tokens.level < 1.0:
            raise self._refusal("tokens", tokens.seconds_until(1.0), self.rates.tokens_per_min)
        if requests is not None:
            requests.take(1.0)
        return Charge(self)

    def reserve(self, num_tokens: int, *, is_exact: bool, num_before: int = 0) -> int:
        """Takes the tokens of a prompt. Returns how many were taken. Where they are an upper bound only, which is about
        a token per byte of text, a likely part is taken, and nothing is refused for it.

        `num_before` were taken for earlier prompts of the same body. All of them count as one prompt, or a body of
        several that is refused for the last one would be refused again whenever it comes.

        A prompt larger than this process's part of the limit is let through once that part is whole, and the debt is
        waited out. Raises `RateLimited`, and takes nothing, where there are too few now, or the whole limit is too low.
        """
        tokens, limit = self._tokens, self.rates.tokens_per_min
        if tokens is None or limit is None:
            return 0
        if not is_exact:
            likely = max(0, min(num_tokens // BYTES_PER_TOKEN, math.floor(tokens.level)))
            tokens.take(float(likely))
            return likely
        num_all = num_before + num_tokens
        if num_all > limit:
            what, instead = ("prompts have", "fewer") if num_before else ("prompt has", "a shorter one")
            raise RateLimited(f"the {what} {num_all} tokens, and this key may use {limit} per minute; send {instead}")
        needed = min(float(num_all), tokens.size) - num_before
        if tokens.level < needed:
            raise self._refusal("tokens", tokens.seconds_until(needed), limit)
        tokens.take(float(num_tokens))
        return num_tokens

    def use(self, num_tokens: int) -> None:
        """Takes tokens that were used already, or gives some back where negative."""
        if self._tokens is not None:
            self._tokens.take(float(num_tokens))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers that tell a client of its limits; none where it has none."""
        headers: list[tuple[bytes, bytes]] = []
        if self._requests is not None:
            headers += self._requests.headers(b"requests")
        if self._tokens is not None:
            headers += self._tokens.headers(b"tokens")
        return headers

    def _refusal(self, what: str, wait_s: float, limit: int | None) -> RateLimited:
        return RateLimited(f"this key has used its {limit} {what} per minute; try again later", retry_after_s=wait_s)

    def __repr__(self) -> str:
        return f"<KeyOwner {self.name}: {self._requests}, {self._tokens}>"


class Charge:
    """A Charge is what one request of a client's is charged. The requests that are made of its prompts share it.

    Mutable state: the tokens that are reserved, and those that were used so far.
    """

    __slots__ = ("num_output_tokens", "num_prompt_tokens", "num_reserved", "owner")

    def __init__(self, owner: KeyOwner) -> None:
        self.owner = owner
        self.num_reserved = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0

    def reserve(self, num_tokens: int, *, is_exact: bool) -> None:
        """Reserves the tokens of a prompt, or a part where they are an upper bound. Raises `RateLimited`."""
        self.num_reserved += self.owner.reserve(num_tokens, is_exact=is_exact, num_before=self.num_reserved)

    def note(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Notes what one of its prompts has used."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_output_tokens += num_output_tokens

    def settle(self, *, has_answer: bool) -> None:
        """Replaces what was reserved by what was used, which is nothing without an answer. It is called once, at the
        end."""
        if not has_answer:
            self.num_prompt_tokens = self.num_output_tokens = 0
        num_reserved, self.num_reserved = self.num_reserved, 0
        self.owner.use(self.num_prompt_tokens + self.num_output_tokens - num_reserved)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers that tell the client of its limits as they are now."""
        return self.owner.headers()


def _duration(seconds: float) -> bytes:
    """Returns a duration as OpenAI writes it: ``250ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1.0:
        return b"%dms" % math.ceil(seconds * 1000)
    if seconds < MINUTE_S:
        return f"{math.ceil(seconds * 10) / 10:g}s".encode()
    minutes, rest = divmod(math.ceil(seconds), 60)
    return b"%dm%ds" % (minutes, rest)
