"""Memory on the device that is tested (see `on_device`), for tests that look at every byte of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.helpers.on_device import DEVICE, IS_GPU
from transfer.agents.base import Region
from transfer.memory.buffer import PagedBuffer


def synchronize() -> None:
    """Until what this process has asked of the device is done."""
    if IS_GPU:
        torch.cuda.synchronize(DEVICE)


class Slab:
    """`num_bytes` bytes on the device, zero at first, indexed like an array of uint8.

    What is read is a copy. What is written is there when the assignment returns.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer = PagedBuffer(1, num_bytes, DEVICE)
        self._bytes = self._buffer.pages.view(-1)
        synchronize()

    @property
    def region(self) -> Region:
        """Without the tags that a slab has behind its pages."""
        return replace(self._buffer.region, num_bytes=len(self._bytes))

    def __getitem__(self, at: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._bytes[at].cpu().numpy().copy()

    def __setitem__(self, at: Any, value: Any) -> None:
        self._bytes[at] = torch.as_tensor(value, dtype=torch.uint8)
        synchronize()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self[:]
