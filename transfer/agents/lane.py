"""The lane check measures at start how fast two agents of this process write to each other, so that users need not find
out that it is slow.

What must always hold: an engine that serves has seen a write of its own kind of memory arrive byte for byte, and on a
GPU at a tenth or more of what is usual there. Without it a wrong setting shows only as slow, or wrong, answers.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from transfer.agents.base import TransferAgent, close_agent
from transfer.agents.spans import as_spans
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer

log = logging.getLogger(__name__)

T = TypeVar("T")
NUM_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}
"""The bytes of one write, by kind of device. A GPU moves 4 MiB in less time than the call takes, so that a write of 4
MiB would say nothing about the lane."""
MAX_ROUNDS = 3
"""The most rounds that are counted. A round is a write and a copy."""
ENOUGH_S = 0.1
"""The time, in seconds, after which no further round is begun."""
LIMIT_S = 5.0
"""The time, in seconds, within which each step of the check must end."""
USUAL_GB_S = {"cpu": 10.0, "cuda": 200.0}
"""The usual speeds in GB/s: what one thread copies between processes, and what NVLink carries. No more is expected of a
lane."""
MIN_SHARE = 0.1
"""The share of a plain copy's speed, or of the usual one where that is lower, below which a lane counts as slow."""
# An odd factor: modulo 2**64 it maps different words to different words, so a word in a wrong place is seen.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True, slots=True)
class Lane:
    """A `Lane` holds the figures of a loopback write. 1 GB is 1e9 bytes."""

    device: str
    num_bytes: int
    """Counts the bytes of one write. All of them were compared."""
    gb_s: float
    """The speed of the fastest write, in GB/s, from the call to its end."""
    copy_gb_s: float
    """The speed of a plain copy of the same bytes on the same device, in GB/s."""

    @property
    def is_slow(self) -> bool:
        return self.gb_s < MIN_SHARE * min(self.copy_gb_s, USUAL_GB_S[torch.device(self.device).type])


def measure_lane(new_agent: Callable[[str, bool], TransferAgent], device: torch.device) -> Lane:
    """Writes from one slab on `device` to another, between two agents made by `new_agent(epoch, receives)`.

    Returns the speeds. Takes a tenth of a second on a CPU. Call it from a thread that may block. Raises `TransferError`
    when the bytes do not arrive within `LIMIT_S`, or arrive wrong.
    """
    num_bytes = NUM_BYTES[device.type]
    source, target = (PagedBuffer(1, num_bytes, device) for _ in range(2))
    words = source.pages.view(torch.int64).view(-1)
    torch.arange(1, len(words) + 1, out=words)
    words.mul_(_ODD)
    receiver = new_agent(uuid.uuid4().hex, True)
    try:
        sender = new_agent(uuid.uuid4().hex, False)
        try:
            _ended(sender.register(source.region))
            _ended(receiver.register(target.region))
            _ended(sender.connect(receiver.epoch, _ended(receiver.metadata()), target.region))
            return _measure(sender, receiver.epoch, source.pages, target.pages)
        finally:
            close_agent(sender, source)
    finally:
        close_agent(receiver, target)


def check_lane(lane: Lane) -> None:
    """Raises `TransferError` where the lane of a GPU is slow. Where the lane of a CPU is slow, logs a warning."""
    if not lane.is_slow:
        log.info("a write on %s: %.1f GB/s, a plain copy %.1f", lane.device, lane.gb_s, lane.copy_gb_s)
    elif lane.device == "cpu":
        log.warning("%s", _advice(lane))
    else:
        raise TransferError(_advice(lane))


def _measure(sender: TransferAgent, peer: str, source: torch.Tensor, target: torch.Tensor) -> Lane:
    _round(sender, peer, source, target)  # the first one opens the lane, and on a GPU loads what copies
    rounds: list[tuple[float, float]] = []
    ends = time.monotonic() + ENOUGH_S
    while not rounds or (len(rounds) < MAX_ROUNDS and time.monotonic() < ends):  # one at least, however late it is
        rounds.append(_round(sender, peer, source, target))
    gb = source.numel() / 1e9
    write_s, copy_s = min(write_s for write_s, _ in rounds), min(copy_s for _, copy_s in rounds)
    return Lane(str(target.device), source.numel(), gb / write_s, gb / copy_s)


def _round(sender: TransferAgent, peer: str, source: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """Returns the seconds of a write and of a copy. Raises `TransferError` where the write was not right."""
    copy_s = _seconds(lambda: target.copy_(source), target.device)
    target.zero_()
    _synchronize(target.device)
    spans, fence = as_spans([(0, 0, source.numel())]), time.monotonic() + LIMIT_S
    write_s = _seconds(lambda: _ended(sender.write(peer, spans, not_after=lambda: fence)), target.device)
    if not torch.equal(source, target):
        wrong = int((source != target).sum())
        raise TransferError(f"a write of {source.numel()} bytes was reported as done, and {wrong} of them are wrong")
    return write_s, copy_s


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    act()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ended(future: Future[T]) -> T:
    try:
        return future.result(LIMIT_S)
    except TimeoutError:
        raise TransferError(f"a loopback write did not end within {LIMIT_S:g} s; {_ucx_settings()}") from None


def _advice(lane: Lane) -> str:
    words = (
        f"the KV lane is slow: a write of {lane.num_bytes >> 20} MiB on {lane.device} moves {lane.gb_s:.2f} GB/s, a "
        f"plain copy {lane.copy_gb_s:.1f}; {_ucx_settings()}"
    )
    if lane.device == "cpu":
        return f"{words}. UCX_TLS should allow shared memory (tcp,sm,self), and the machine have a core to spare"
    return (
        f"{words}. UCX_TLS must allow cuda_copy and cuda_ipc (or be unset), GPU memory must come from cudaMalloc, and "
        "UCX_PROTO_INFO=y prints which lane UCX takes for `ucp_put* from cuda`"
    )


def _ucx_settings() -> str:
    said = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name in ("UCX_TLS", "UCX_NET_DEVICES")]
    return " ".join(said) or "neither UCX_TLS nor UCX_NET_DEVICES is set"
