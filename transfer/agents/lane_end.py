"""The receiving end of a lane check: a slab, what should arrive in it, and the agent that others write to."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from transfer.agents.base import Region, TransferAgent, close_agent
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer

T = TypeVar("T")
REGISTER_LIMIT_S = 5.0
"""The time, in seconds, within which an agent must register its slab."""
# An odd factor: modulo 2**64 it maps different words to different words, so a word in a wrong place is seen.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True, slots=True)
class Offer:
    """An `Offer` is what an agent needs in order to write to a receiving end."""

    epoch: str
    metadata: bytes
    region: Region


class LaneEnd(Protocol):
    """A `LaneEnd` is a receiving end, in this process or in another one. Every method raises `TransferError` where the
    end is not there any more."""

    def offer(self) -> Offer:
        """Returns where to write to, once the end is ready."""
        ...

    def clear(self) -> None:
        """Zeroes the slab."""
        ...

    def num_wrong(self) -> int:
        """Returns how many bytes of the slab are not those of `pattern`."""
        ...


class OwnEnd:
    """An `OwnEnd` is a receiving end in this process, over `num_bytes` bytes on `device`. `new_agent(epoch)` makes its
    agent. Use it as a context manager: what it leaves is closed."""

    def __init__(self, num_bytes: int, device: torch.device, new_agent: Callable[[str], TransferAgent]) -> None:
        self._slab = PagedBuffer(1, num_bytes, device)
        self._expected = pattern(self._slab.pages)
        self._agent = new_agent(uuid.uuid4().hex)

    def __enter__(self) -> OwnEnd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        close_agent(self._agent, self._slab)

    def offer(self) -> Offer:
        _registered(self._agent.register(self._slab.region))
        return Offer(self._agent.epoch, _registered(self._agent.metadata()), self._slab.region)

    def clear(self) -> None:
        self._slab.pages.zero_()
        if self._slab.pages.device.type == "cuda":
            torch.cuda.synchronize(self._slab.pages.device)

    def num_wrong(self) -> int:
        return int((self._slab.pages != self._expected).sum())


def pattern(pages: torch.Tensor) -> torch.Tensor:
    """Returns bytes of the shape of `pages`, and on its device, in which no 8 bytes are like any others or zero. The
    number of bytes must be a multiple of 8."""
    words = torch.arange(1, pages.numel() // 8 + 1, dtype=torch.int64, device=pages.device)
    return words.mul_(_ODD).view(torch.uint8).view(pages.shape)


def _registered(future: Future[T]) -> T:
    try:
        return future.result(REGISTER_LIMIT_S)
    except TimeoutError:
        raise TransferError(f"a slab was not registered within {REGISTER_LIMIT_S:g} s") from None
