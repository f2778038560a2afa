"""The memory that travels: filled so that every word of it tells where it comes from, and summed up cheaply."""

from __future__ import annotations

import zlib

import torch

from scripts.dev.bench_transfer.plan import Indexes
from transfer.memory.buffer import PagedBuffer

SAMPLE_BYTES = 509
"""One byte in so many is looked at: a prime, so that the samples lie everywhere in a page."""
ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def fill(slab: PagedBuffer, seed: int) -> None:
    """Every 8 bytes differ from all others of this slab, and from those of a slab with another seed."""
    words = slab.pages.view(torch.int64).view(-1)
    torch.arange(seed, seed + len(words), out=words)
    words.mul_(ODD)
    synchronize(slab)


def checksum(slab: PagedBuffer, pages: Indexes) -> int:
    """Over samples of these pages, in this order."""
    samples = slab.pages[:, ::SAMPLE_BYTES].cpu().numpy()
    return zlib.crc32(samples[pages].tobytes())


def synchronize(slab: PagedBuffer) -> None:
    """Until what this process has asked of the slab's device is done."""
    if slab.pages.is_cuda:
        torch.cuda.synchronize(slab.pages.device)
