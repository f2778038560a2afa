"""The wishes of the prefillers, drawn from dice, and what their bytes must be. It is pure.

An attempt's name says everything about it. So the decoder can tell, without being told, which bytes are right, and what
to do with them.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from transfer.plan.layout import KvLayout
from transfer.roles.handshake import Identity
from transfer.roles.receiver import ReceiverConfig

Words = np.ndarray[Any, np.dtype[np.uint64]]

NUM_LAYERS, HEAD_DIM, CHUNK_SIZE, ELEMENT_BYTES = 4, 64, 16, 2
KV = KvLayout.uniform(
    num_layers=NUM_LAYERS,
    num_kv_heads=1,
    head_dim=HEAD_DIM,
    chunk_size=CHUNK_SIZE,
    dtype="bfloat16",
    element_bytes=ELEMENT_BYTES,
)
IDENTITY = Identity("soak", KV.of_rank())
PAGE_BYTES = IDENTITY.layout.page_bytes
CONFIG = ReceiverConfig(heartbeat_s=0.5, writer_timeout_s=4.0)

NUM_FAMILIES = 6
TIMEOUT_S = 120.0
"""The time limit, in seconds, of an attempt that must not expire. No attempt waits so long unless others overtake it
for ever.
"""
EXPIRY_S = (0.2, 2.0)
"""The least and the most seconds of the time limit of an attempt that may expire."""
STALL_LIMIT_S = EXPIRY_S[1] + CONFIG.writer_timeout_s + 4.0
"""The most seconds without a grant while an attempt waits. Attempts that expire or are killed hold pages for no longer;
the rest is for a busy machine. With a longer pause the decoder is stuck."""


class Fate(StrEnum):
    COMPLETE = "complete"
    ABORT = "abort"
    """The prefiller gives up half way."""
    CANCEL = "cancel"
    """The decoder withdraws it at some moment."""
    EXPIRE = "expire"
    """The prefiller never fills its last page."""
    FORGET = "forget"
    """The prefiller writes all of it, and the decoder does not read it."""


ODDS = {Fate.COMPLETE: 80, Fate.ABORT: 6, Fate.CANCEL: 6, Fate.EXPIRE: 4, Fate.FORGET: 4}
MAY_EXPIRE = (Fate.EXPIRE, Fate.FORGET)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """`SoakOptions` are, field for field, the options in `scripts.dev.soak_transfer.command`."""

    duration_s: float
    seed: int
    num_prefillers: int
    num_processes: int
    num_pages: int
    num_at_once: int


@dataclass(frozen=True, slots=True)
class Wish:
    """A `Wish` is one attempt. Its first `num_shared` pages are the same as those of everybody in its family."""

    serial: str
    fate: Fate
    family: int
    num_shared: int
    num_pages: int

    @property
    def attempt(self) -> str:
        return f"{self.serial}.{self.fate}.{self.family}.{self.num_shared}.{self.num_pages}"

    @classmethod
    def parse(cls, attempt: str) -> Wish:
        serial, fate, family, num_shared, num_pages = attempt.split(".")
        return cls(serial, Fate(fate), int(family), int(num_shared), int(num_pages))

    @property
    def keys(self) -> list[bytes]:
        """The keys, as `Sender.open` wants them."""
        shared = [_digest(f"{self.family}/{ordinal}", 16) for ordinal in range(self.num_shared)]
        return shared + [b""] * (self.num_pages - self.num_shared)

    def word(self, ordinal: int) -> np.uint64:
        """Returns what tells this page from every other that has other bytes."""
        owner = str(self.family) if ordinal < self.num_shared else self.attempt
        return np.uint64(int.from_bytes(_digest(f"{owner}/{ordinal}", 8)))


def draw(dice: random.Random, serial: str, num_pages: int) -> Wish:
    """Draws a wish for a buffer of `num_pages` pages: some want a little, some anything, some all of it."""
    largest = dice.choices((max(1, num_pages // 16), num_pages), (45, 45))[0]
    wanted = num_pages if dice.random() < 0.1 else dice.randint(1, largest)
    fate = dice.choices(list(ODDS), list(ODDS.values()))[0]
    num_shared = dice.randint(1, wanted) if dice.random() < 0.4 else 0
    return Wish(serial, fate, dice.randrange(NUM_FAMILIES), num_shared, wanted)


def pattern() -> Words:
    """Returns one page. XORed with a page's word it is that page."""
    return np.arange(1, PAGE_BYTES // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
