"""Bare NIXL is the limit to compare with: descriptors prepared by hand, a transfer, a poll, and nothing else.

Agents are created as ours are (no spinning progress thread), so that the difference is what we put around NIXL. There
is no control channel, no custody and no event loop here; the sender polls as fast as it can.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from typing import Any

import numpy as np

from scripts.dev.bench_transfer.plan import Indexes
from transfer.agents.device import make_current
from transfer.agents.nixl_options import NixlOptions
from transfer.agents.nixl_setup import create_agent
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer

PATIENCE_S = 30.0

Int32s = np.ndarray[Any, np.dtype[np.int32]]
Descriptors = np.ndarray[Any, np.dtype[np.uint64]]


class BareEnd:
    """A `BareEnd` is a NIXL agent over a slab that somebody else owns."""

    def __init__(self, slab: PagedBuffer, *, receives: bool) -> None:
        self._slab = slab
        device = slab.pages.device
        make_current(device)  # this thread posts, too
        self._nixl = create_agent(uuid.uuid4().hex, receives=receives, options=NixlOptions(), device=device)
        region = slab.region
        rows = [(region.base_address, slab.num_pages * slab.page_bytes, region.device_id, "")]
        self._registered = self._nixl.register_memory(rows, mem_type=region.memory)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the process ends anyway, or registers anew
            self._nixl.deregister_memory(self._registered)
        self._nixl = None


class BareReceiver(BareEnd):
    def __init__(self, slab: PagedBuffer) -> None:
        super().__init__(slab, receives=True)

    def facts(self) -> dict[str, Any]:
        """Returns what `BareSender` needs, as JSON."""
        region = self._slab.region
        metadata = bytes(self._nixl.get_agent_metadata()).hex()
        return {
            "metadata": metadata,
            "base_address": region.base_address,
            "device_id": region.device_id,
            "num_pages": self._slab.num_pages,
        }


class BareSender(BareEnd):
    """A `BareSender` writes into one receiver whose slab is cut like ours.

    Mutable state: `_steps`, the index pairs of the next transfers, in the order in which they are posted.
    """

    def __init__(self, slab: PagedBuffer, facts: dict[str, Any], num_layers: int) -> None:
        super().__init__(slab, receives=False)
        self._num_layers = num_layers
        self._steps: list[tuple[Any, Any, Int32s, Int32s]] = []
        peer = self._nixl.add_remote_agent(bytes.fromhex(facts["metadata"]))
        name = peer.decode() if isinstance(peer, bytes) else peer
        region = slab.region
        self._lists = {
            parts: (
                self._prepared("NIXL_INIT_AGENT", region.base_address, region.device_id, slab.num_pages, parts),
                self._prepared(name, facts["base_address"], facts["device_id"], facts["num_pages"], parts),
            )
            for parts in {1, num_layers}
        }

    def prepare(self, local_pages: Indexes, remote_pages: Indexes, *, by_layer: bool) -> None:
        """Takes what `push` is to move. It moves whole pages, or layer by layer over all of them."""
        parts = self._num_layers if by_layer else 1
        self._steps = [
            (
                *self._lists[parts],
                (local_pages * parts + part).astype(np.int32),
                (remote_pages * parts + part).astype(np.int32),
            )
            for part in range(parts)
        ]

    def push(self) -> None:
        """Posts every transfer, then polls until the last of them is done. Raises `TransferError` after
        `PATIENCE_S`."""
        deadline = time.monotonic() + PATIENCE_S
        handles = []
        for local, remote, ours, theirs in self._steps:
            handles.append(self._nixl.make_prepped_xfer("WRITE", local, ours, remote, theirs))
            self._nixl.transfer(handles[-1])
        for handle in handles:
            self._wait(handle, deadline)
            self._nixl.release_xfer_handle(handle)

    def _wait(self, handle: Any, deadline: float) -> None:
        while (state := self._nixl.check_xfer_state(handle)) == "PROC":
            if time.monotonic() > deadline:
                raise TransferError(f"bare NIXL did not finish within {PATIENCE_S} s")
            os.sched_yield()  # where there are fewer cores than pollers, the receiver must get one
        if state != "DONE":
            raise TransferError(f"bare NIXL reports {state}")

    def _prepared(self, agent: str, base_address: int, device_id: int, num_pages: int, parts: int) -> Any:
        rows = descriptors(base_address, device_id, num_pages * parts, self._slab.page_bytes // parts)
        return self._nixl.prep_xfer_dlist(agent, rows, mem_type=self._slab.region.memory)

    def close(self) -> None:
        for pair in self._lists.values():
            for prepared in pair:
                with contextlib.suppress(Exception):
                    prepared.release()
        super().close()


def descriptors(base_address: int, device_id: int, count: int, num_bytes: int) -> Descriptors:
    """Returns N×3 (address, length, device) rows, 64 bit throughout."""
    rows = np.empty((count, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(base_address) + np.arange(count, dtype=np.uint64) * np.uint64(num_bytes)
    rows[:, 1] = num_bytes
    rows[:, 2] = device_id
    return rows
