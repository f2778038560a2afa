"""Affinity policies send requests that belong together to the same instance, so that its caches are worth something.

They use rendezvous hashing: every instance draws a number from (key, its name), and the highest draw has the key.
Nothing is remembered, so several proxies agree without talking. When an instance goes, only its keys move, each to the
second highest draw. When one comes, it takes about 1/n of the keys and nothing else changes. The draws are scaled so
that a weight w gets w of a full share. A weight that rises only ever brings keys to its instance, and takes none away
from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import ceil, inf, log
from typing import Any

from pdproxy.fleet.routing.candidate import C, Candidate, RoutingHints
from pdproxy.fleet.routing.candidates import CandidateSet, Policy

BYTES_PER_TOKEN = 4
"""The usual length of a token in bytes of text. It is used where a prompt's ids are not known and its text is cut into
chunks."""
MAX_HOMES = 4096
"""Number of keys of one lineup whose instance is remembered, so that it need not be drawn again."""


def draw(key: bytes, candidate: Candidate) -> float:
    """Returns the candidate's draw for `key`; higher is better. It is the same in every process. `key` has at most 64
    bytes."""
    digest = blake2b(candidate.name.encode(), key=key, digest_size=8).digest()
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52  # 0 < uniform < 1, exactly representable
    return -candidate.weight / log(uniform)


def rendezvous(key: bytes, candidates: Sequence[C]) -> C:
    """Returns the one of `candidates` that has `key`; O(n)."""
    return max(candidates, key=lambda candidate: (draw(key, candidate), candidate.name))


def home(key: bytes, lineup: CandidateSet[C]) -> C:
    """Returns the one of `lineup` that has `key`. While all weights are full it stays the same, and is looked up."""
    if lineup.rising and lineup.weights():  # which looks again at who is rising still
        return rendezvous(key, lineup.members)
    homes = lineup.homes
    found = homes.get(key)
    if found is None:
        if len(homes) >= MAX_HOMES:
            homes.clear()
        found = homes[key] = rendezvous(key, lineup.members)
    return found


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


class SessionAffinity:
    """SessionAffinity keeps a session where it is; a request without one goes by `fallback`. Implements
    `candidates.Policy`."""

    uses_hints = True
    ties = True

    def __init__(self, fallback: Policy) -> None:
        self._fallback = fallback

    def pick(self, lineup: CandidateSet[C], hints: RoutingHints) -> C:
        if not hints.session:
            return self._fallback.pick(lineup, hints)
        return home(_digest(hints.session.encode("utf-8", "surrogatepass")), lineup)

    def key(self, prompt: Any) -> bytes | None:
        """Returns None: what a prompt says makes no difference."""
        return None

    def home(self, lineup: CandidateSet[C], hints: RoutingHints) -> C | None:
        """Returns the instance that has the session; None for a request without one."""
        return self.pick(lineup, hints) if hints.session else None


class PrefixAffinity:
    """PrefixAffinity sends prompts that begin alike to one instance, as long as that has no more than its part of the
    load.

    The key is made of the prompt's first `num_chunks` chunks of `chunk_size` tokens. A shorter prompt gives the whole
    chunks that it has; a prompt of less than one chunk shares nothing and goes by `fallback`. A small `num_chunks`
    keeps a growing conversation in place from early on; a larger one tells prompts apart that share only a preamble.

    The load is bounded: an instance takes no more than `load_factor` times its (weighted) part of all load, this
    request included, rounded up. Beyond that the next highest draw has the key. There is always one below its bound.
    The load is the number of legs under way, which are added up for each pick. Implements `candidates.Policy`.
    """

    uses_hints = True
    ties = False

    def __init__(self, fallback: Policy, *, chunk_size: int, num_chunks: int, load_factor: float) -> None:
        if chunk_size < 1 or num_chunks < 1 or load_factor < 1.0:
            raise ValueError(f"chunk_size {chunk_size}, num_chunks {num_chunks}, load_factor {load_factor}: below 1")
        self._fallback = fallback
        self._chunk_size = chunk_size
        self._num_chunks = num_chunks
        self._load_factor = load_factor

    def pick(self, lineup: CandidateSet[C], hints: RoutingHints) -> C:
        key = hints.key or self.key(hints.prompt)
        if key is None:
            return self._fallback.pick(lineup, hints)
        has_key, bound = home(key, lineup), self._bound(lineup)
        if _is_below(bound, has_key):
            return has_key
        return rendezvous(key, [member for member in lineup.members if _is_below(bound, member)])

    def home(self, lineup: CandidateSet[C], hints: RoutingHints) -> C | None:
        """Returns None: any instance will do, because the load is bounded anyway."""
        return None

    def key(self, prompt: Any) -> bytes | None:
        """Returns a key that is equal for prompts that begin alike; None where there is no whole chunk."""
        if prompt is None:
            return None
        chunk = self._chunk_size
        if isinstance(prompt, str):
            prompt = prompt[: chunk * BYTES_PER_TOKEN * self._num_chunks].encode("utf-8", "surrogatepass")
        is_text = isinstance(prompt, (bytes, memoryview))
        if is_text:
            chunk *= BYTES_PER_TOKEN
        num_chunks = min(self._num_chunks, len(prompt) // chunk)
        if num_chunks == 0:
            return None
        start = prompt[: num_chunks * chunk]
        return _digest(bytes(start) if is_text else str(list(start)).encode())

    def _bound(self, lineup: CandidateSet[C]) -> float:
        """Returns how many legs an instance of full weight may have when it gets this request; a lighter one may have
        its part of them."""
        total_weight = lineup.total_weight
        num_legs = sum([member.num_legs for member in lineup.members])
        return self._load_factor * (num_legs + 1) / total_weight if total_weight > 0.0 else inf


def _is_below(bound: float, candidate: Candidate) -> bool:
    return bound == inf or candidate.num_legs < ceil(bound * candidate.weight)
