"""Policies that send what belongs together to the same instance, so that its caches are worth something.

Rendezvous hashing: every instance draws a number from (key, its name), the highest draw has the key. Nothing is
remembered, so several proxies agree without talking; when an instance goes, only its keys move, each to the second
highest draw; when one comes, it takes about 1/n of the keys and nothing else changes. The draws are scaled so that a
weight w gets w of a full share, and a weight that rises only ever brings keys, none away from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import ceil, log

from pdproxy.fleet.base import Candidate, Policy, RoutingHints

BYTES_PER_TOKEN = 4
"""A usual token's length in text, where only text is there to be cut into chunks."""


def draw(key: bytes, candidate: Candidate) -> float:
    """Higher is better; the same in every process. `key` is of at most 64 bytes."""
    digest = blake2b(candidate.name.encode(), key=key, digest_size=8).digest()
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52  # 0 < uniform < 1, exactly representable
    return -candidate.weight / log(uniform)


def rendezvous(key: bytes, candidates: Sequence[Candidate]) -> Candidate:
    """The one of `candidates` that has `key`."""
    return max(candidates, key=lambda candidate: (draw(key, candidate), candidate.name))


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


class SessionAffinity:
    """A session stays where it is; a request without one goes by `fallback`. Implements `base.Policy`."""

    def __init__(self, fallback: Policy) -> None:
        self._fallback = fallback

    def pick(self, candidates: Sequence[Candidate], hints: RoutingHints) -> Candidate:
        if not hints.session:
            return self._fallback.pick(candidates, hints)
        return rendezvous(_digest(hints.session.encode("utf-8", "surrogatepass")), candidates)


class PrefixAffinity:
    """Prompts that begin alike go to the same instance, as long as that has no more than its part of the load.

    The key is made of the prompt's first `num_chunks` chunks of `chunk_size` tokens, of its whole chunks where it is
    shorter; a prompt of less than one chunk shares nothing and goes by `fallback`. A small `num_chunks` keeps a growing
    conversation in place from early on; a larger one tells prompts apart that share only a preamble.

    Bounded load: an instance takes no more than `load_factor` times its (weighted) part of all load, this request
    included, rounded up; beyond that the next highest draw has the key. There is always one below its bound. `load`
    counts requests. Implements `base.Policy`.
    """

    def __init__(
        self,
        fallback: Policy,
        *,
        chunk_size: int,
        num_chunks: int,
        load_factor: float,
        load: Callable[[Candidate], int],
    ) -> None:
        if chunk_size < 1 or num_chunks < 1 or load_factor < 1.0:
            raise ValueError(f"chunk_size {chunk_size}, num_chunks {num_chunks}, load_factor {load_factor}: below 1")
        self._fallback = fallback
        self._chunk_size = chunk_size
        self._num_chunks = num_chunks
        self._load_factor = load_factor
        self._load = load

    def pick(self, candidates: Sequence[Candidate], hints: RoutingHints) -> Candidate:
        key = self.key(hints.prompt)
        if key is None:
            return self._fallback.pick(candidates, hints)
        return rendezvous(key, self._within_bounds(candidates))

    def key(self, prompt: Sequence[int] | str | bytes | None) -> bytes | None:
        """Equal for prompts that begin alike; None where there is no whole chunk."""
        if prompt is None:
            return None
        chunk = self._chunk_size
        if isinstance(prompt, str):
            prompt = prompt[: chunk * BYTES_PER_TOKEN * self._num_chunks].encode("utf-8", "surrogatepass")
        if isinstance(prompt, bytes):
            chunk *= BYTES_PER_TOKEN
        num_chunks = min(self._num_chunks, len(prompt) // chunk)
        if num_chunks == 0:
            return None
        start = prompt[: num_chunks * chunk]
        return _digest(start if isinstance(start, bytes) else str(list(start)).encode())

    def _within_bounds(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        total_weight = sum(candidate.weight for candidate in candidates)
        if total_weight <= 0.0:
            return candidates
        allowed = self._load_factor * (sum(map(self._load, candidates)) + 1) / total_weight
        return [c for c in candidates if self._load(c) < ceil(allowed * c.weight)]
