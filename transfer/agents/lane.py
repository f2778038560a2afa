"""The lane check measures at start how fast an agent of this process writes to another one, so that users need not find
out that it is slow.

What must always hold: an engine that serves has seen a write of its own kind of memory arrive byte for byte, and on a
GPU at a tenth or more of what is usual there, through the lane that its KV takes. A violation shows only as slow, or
wrong, answers.

On a GPU the other agent is in a process of its own: UCX's cuda_ipc reaches other processes only, and between two agents
of one process it copies in software, at 0.45 GB/s on an H100 (measured).
"""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch

from transfer.agents.base import TransferAgent, close_agent
from transfer.agents.lane_end import LaneEnd, OwnEnd, pattern
from transfer.agents.lane_process import EndProcess
from transfer.agents.nixl_options import NixlOptions
from transfer.agents.spans import as_spans
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer

log = logging.getLogger(__name__)

T = TypeVar("T")
NUM_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}
"""The bytes of one write, by kind of device. A GPU moves 4 MiB in less time than the call takes, so that a write of 4
MiB would say nothing about the lane."""
NUM_ROUNDS = 3
"""The rounds that are counted, or more where the lane seems slow. A round is a write and a copy."""
ENOUGH_S = {"cpu": 0.1, "cuda": 1.0}
"""The time, in seconds, after which no further round is begun, by kind of device. Other processes may have the GPU for
milliseconds, and a lane that seems slow there ends the engine."""
LIMIT_S = 5.0
"""The time, in seconds, within which each step of the check must end."""
USUAL_GB_S = {"cpu": 10.0, "cuda": 200.0}
"""The usual speeds in GB/s: what one thread copies between processes, and what NVLink carries. No more is expected of a
lane."""
MIN_SHARE = 0.1
"""The share of a plain copy's speed, or of the usual one where that is lower, below which a lane counts as slow."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A `Lane` holds the figures of the lane check. 1 GB is 1e9 bytes."""

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


def measure_lane(
    new_agent: Callable[[str, bool], TransferAgent], device: torch.device, options: NixlOptions | None = None
) -> Lane:
    """Writes from one slab on `device` to another, between two agents.

    `new_agent(epoch, receives)` makes this process's agents: both on a CPU; on a GPU the sending one, and the other one
    is a NIXL agent with these options.

    Returns the speeds. Takes a tenth of a second on a CPU, and on a GPU some seconds, for the other process to start.
    Call it from a thread that may block. Raises `TransferError` when the bytes do not arrive within `LIMIT_S`, or
    arrive wrong, or the other process does not start.
    """
    with _receiving_end(new_agent, device, options or NixlOptions()) as end:
        return measure_lane_to(end, new_agent, device)


def measure_lane_to(end: LaneEnd, new_agent: Callable[[str, bool], TransferAgent], device: torch.device) -> Lane:
    """Does what `measure_lane` does, to a receiving end that is there already."""
    source = PagedBuffer(1, NUM_BYTES[device.type], device)
    source.pages.copy_(pattern(source.pages))
    sender = new_agent(uuid.uuid4().hex, False)
    try:
        _ended(sender.register(source.region))
        offer = end.offer()
        _ended(sender.connect(offer.epoch, offer.metadata, offer.region))
        return _measure(sender, offer.epoch, source.pages, end)
    finally:
        close_agent(sender, source)


def _receiving_end(
    new_agent: Callable[[str, bool], TransferAgent], device: torch.device, options: NixlOptions
) -> AbstractContextManager[LaneEnd]:
    num_bytes = NUM_BYTES[device.type]
    if device.type == "cuda":
        return EndProcess(num_bytes, device, options)
    return OwnEnd(num_bytes, device, lambda epoch: new_agent(epoch, True))


def check_lane(lane: Lane) -> None:
    """Raises `TransferError` where the lane of a GPU is slow. Where the lane of a CPU is slow, logs a warning."""
    if not lane.is_slow:
        log.info("a write on %s: %.1f GB/s, a plain copy %.1f", lane.device, lane.gb_s, lane.copy_gb_s)
    elif lane.device == "cpu":
        log.warning("%s", _advice(lane))
    else:
        raise TransferError(_advice(lane))


def _measure(sender: TransferAgent, peer: str, source: torch.Tensor, end: LaneEnd) -> Lane:
    copy = torch.zeros_like(source)
    _round(sender, peer, source, copy, end)  # the first one opens the lane, and on a GPU loads what copies
    write_s = copy_s = math.inf
    num_rounds, ends = 0, time.monotonic() + ENOUGH_S[source.device.type]
    while True:  # one round at least, however late it is
        wrote_s, copied_s = _round(sender, peer, source, copy, end)
        write_s, copy_s, num_rounds = min(write_s, wrote_s), min(copy_s, copied_s), num_rounds + 1
        gb = source.numel() / 1e9
        lane = Lane(str(source.device), source.numel(), gb / write_s, gb / copy_s)
        if time.monotonic() >= ends or (num_rounds >= NUM_ROUNDS and not lane.is_slow):
            return lane


def _round(
    sender: TransferAgent, peer: str, source: torch.Tensor, copy: torch.Tensor, end: LaneEnd
) -> tuple[float, float]:
    """Returns the seconds of a write and of a copy. Raises `TransferError` where the write was not right."""
    copy_s = _seconds(lambda: copy.copy_(source), source.device)
    end.clear()
    spans, fence = as_spans([(0, 0, source.numel())]), time.monotonic() + LIMIT_S
    write_s = _seconds(lambda: _ended(sender.write(peer, spans, not_after=lambda: fence)), source.device)
    if wrong := end.num_wrong():
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
        raise TransferError(f"a write of the lane check did not end within {LIMIT_S:g} s; {_ucx_settings()}") from None


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
