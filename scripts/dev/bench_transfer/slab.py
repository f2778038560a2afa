"""The memory that travels. It is filled so that every word of it tells where it comes from, and summed up cheaply."""

from __future__ import annotations

import zlib

import torch

from scripts.dev.bench_transfer.plan import Indexes
from transfer.memory.buffer import PagedBuffer

SAMPLE_BYTES = 509
"""The distance, in bytes, of the bytes that are looked at. It is a prime, so that the samples lie everywhere in a
page."""
ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def fill(slab: PagedBuffer, seed: int) -> None:
    """Fills the slab. Every 8 bytes differ from all others of this slab, and from those of a slab with another seed."""
    words = slab.pages.view(torch.int64).view(-1)
    torch.arange(seed, seed + len(words), out=words)
    words.mul_(ODD)
    synchronize(slab)


def checksum(slab: PagedBuffer, pages: Indexes) -> int:
    """Returns a checksum over samples of these pages, in this order."""
    samples = slab.pages[:, ::SAMPLE_BYTES].cpu().numpy()
    return zlib.crc32(samples[pages].tobytes())


def synchronize(slab: PagedBuffer) -> None:
    """Waits until everything that this process has asked of the slab's device is done."""
    if slab.pages.is_cuda:
        torch.cuda.synchronize(slab.pages.device)
