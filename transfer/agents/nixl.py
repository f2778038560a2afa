"""NIXL behind `TransferAgent`: one agent, one thread, one queue.

Why a thread: NIXL has no blocking wait (completion is polled) and `transfer()` copies in the calling thread, so an
event loop must never call it. The thread sleeps on its queue while nothing is under way: an idle agent costs no CPU.

NIXL's Python class starts its progress thread with a delay of 0 µs, which spins on a whole core. A *receiving* agent
needs progress (without it a sender's write never completes), so its delay is set to `PROGRESS_DELAY_US`: the thread is
woken by events and otherwise sleeps. A *sending* agent is better off without one. Measured on NIXL 1.5.1.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from transfer.agents.base import Region, WriteReceipt
from transfer.errors import PeerLost, TransferError

log = logging.getLogger(__name__)

PROGRESS_DELAY_US = 10_000
POLL_MIN_S = 20e-6
POLL_MAX_S = 1e-3

T = TypeVar("T")


@dataclass(slots=True)
class _Peer:
    """A connected peer: NIXL's name for it, its pages as a prepared descriptor list, and how often it was connected."""

    name: str
    pages: Any
    num_users: int
    is_lost: bool = False


@dataclass(slots=True)
class _Write:
    """A posted write. Its handle is released exactly once, when it is done or the peer is known dead."""

    peer: _Peer
    handle: Any
    num_bytes: int
    started: float
    future: Future[WriteReceipt]


class NixlAgent:
    """A NIXL agent with one registered region. `epoch` must be new for every process start.

    Mutable state, all of it owned by the agent's thread: `_region`, `_registered` (NIXL's word for it), `_local_pages`
    (prepared local descriptors), `_peers`, `_under_way`. Other threads only put jobs on `_jobs`, until `_is_closed`.
    """

    def __init__(self, epoch: str, *, receives: bool, backends: Sequence[str] = ("UCX",)) -> None:
        self._epoch = epoch
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._peers: dict[str, _Peer] = {}
        self._under_way: list[_Write] = []
        self._region: Region | None = None
        self._registered: Any = None
        self._local_pages: Any = None
        self._nixl = _create_agent(epoch, receives, list(backends))
        self._thread = threading.Thread(target=self._run, name=f"nixl-{epoch[:8]}", daemon=True)
        self._is_closed = False
        self._closing = threading.Lock()
        self._thread.start()

    def __repr__(self) -> str:
        return f"<NixlAgent {self._epoch[:8]} peers={len(self._peers)} under_way={len(self._under_way)}>"

    @property
    def epoch(self) -> str:
        return self._epoch

    def register(self, region: Region) -> Future[None]:
        return self._submit(lambda: self._register(region))

    def metadata(self) -> Future[bytes]:
        return self._submit(lambda: bytes(self._nixl.get_agent_metadata()))

    def connect(self, peer: str, metadata: bytes, region: Region) -> Future[None]:
        return self._submit(lambda: self._connect(peer, metadata, region))

    def disconnect(self, peer: str) -> Future[None]:
        return self._submit(lambda: self._disconnect(peer))

    def write(
        self, peer: str, local_pages: Sequence[int], remote_pages: Sequence[int], *, not_after: float
    ) -> Future[WriteReceipt]:
        future: Future[WriteReceipt] = Future()

        def post() -> None:
            if time.monotonic() > not_after:
                raise PeerLost(f"too long since {peer} was last heard; its pages may belong to someone else by now")
            self._post(peer, local_pages, remote_pages, future)

        self._put(post, future)
        return future

    def close(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        self._thread.join(timeout=10)

    # ── from here on: the agent's thread ────────────────────────────────────────────────────────────────────────────

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._put(lambda: future.set_result(job()), future)
        return future

    def _put(self, job: Callable[[], None], future: Future[Any]) -> None:
        """Queue `job`; what it raises goes to `future`."""
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it

        def guarded() -> None:
            try:
                job()
            except Exception as error:  # border to NIXL: everything it raises is the caller's to see
                future.set_exception(error if isinstance(error, TransferError) else _translate(error))

        with self._closing:
            if not self._is_closed:
                self._jobs.put(guarded)
                return
        future.set_exception(TransferError("the NIXL agent is closed"))

    def _run(self) -> None:
        pause = POLL_MIN_S
        while True:
            try:
                job = self._jobs.get(timeout=pause if self._under_way else None)
            except queue.Empty:
                pause = POLL_MIN_S if self._poll() else min(pause * 2, POLL_MAX_S)
                continue
            if job is None:
                break
            job()
            pause = POLL_MIN_S
            self._poll()
        self._tear_down()

    def _poll(self) -> bool:
        """Look at every write under way; True when one finished."""
        before = len(self._under_way)
        self._under_way = [write for write in self._under_way if not self._settle(write)]
        return len(self._under_way) < before

    def _settle(self, write: _Write) -> bool:
        """True when the write is over, one way or the other; its future has then been told."""
        try:
            state = self._nixl.check_xfer_state(write.handle)
        except Exception as error:  # NIXL reports a dead peer by raising
            return self._fail(write, _translate(error))
        if state == "PROC":
            return False
        if state != "DONE":
            return self._fail(write, PeerLost(f"NIXL reports {state} for a write to {write.peer.name}"))
        self._release(write.handle)
        write.future.set_result(WriteReceipt(write.num_bytes, write.started, time.monotonic()))
        return True

    def _fail(self, write: _Write, error: TransferError) -> bool:
        write.peer.is_lost = True
        self._release(write.handle)
        write.future.set_exception(error)
        return True

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # nothing to be done about it, and the thread must go on
            self._nixl.release_xfer_handle(handle)

    def _register(self, region: Region) -> None:
        if self._region is not None:
            raise TransferError("this agent already has a registered region")
        whole = [(region.base_address, region.num_bytes, region.device_id, "")]
        self._registered = self._nixl.register_memory(whole, mem_type=region.memory)
        self._local_pages = self._nixl.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(region), mem_type=region.memory)
        self._region = region

    def _connect(self, peer: str, metadata: bytes, region: Region) -> None:
        known = self._peers.get(peer)
        if known is not None and not known.is_lost:
            known.num_users += 1
            return
        if known is not None:
            self._remove(known)
        name = self._nixl.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else name
        if name != peer:
            self._nixl.remove_remote_agent(name)
            raise PeerLost(f"the metadata of {peer} belongs to agent {name}")
        try:
            pages = self._nixl.prep_xfer_dlist(name, _descriptors(region), mem_type=region.memory)
        except Exception:
            self._nixl.remove_remote_agent(name)
            raise
        self._peers[peer] = _Peer(name, pages, num_users=1 if known is None else known.num_users + 1)

    def _disconnect(self, peer: str) -> None:
        known = self._peers.get(peer)
        if known is None:
            return
        known.num_users -= 1
        if known.num_users == 0:
            del self._peers[peer]
            self._remove(known)

    def _remove(self, known: _Peer) -> None:
        known.is_lost = True
        with contextlib.suppress(Exception):
            known.pages.release()
        with contextlib.suppress(Exception):
            self._nixl.remove_remote_agent(known.name)

    def _post(
        self, peer: str, local_pages: Sequence[int], remote_pages: Sequence[int], future: Future[WriteReceipt]
    ) -> None:
        known = self._peers.get(peer)
        if known is None or known.is_lost:
            raise PeerLost(f"not connected to {peer}")
        if self._region is None or len(local_pages) != len(remote_pages) or not local_pages:
            raise TransferError(f"cannot write {len(local_pages)} local to {len(remote_pages)} remote pages")
        started = time.monotonic()
        handle = self._nixl.make_prepped_xfer(
            "WRITE",
            self._local_pages,
            np.asarray(local_pages, dtype=np.int32),
            known.pages,
            np.asarray(remote_pages, dtype=np.int32),
        )
        try:
            self._nixl.transfer(handle)
        except Exception:
            known.is_lost = True
            self._release(handle)
            raise
        num_bytes = len(local_pages) * self._region.page_bytes
        self._under_way.append(_Write(known, handle, num_bytes, started, future))

    def _tear_down(self) -> None:
        """Let go of the region, so that its memory may be freed: a receiver's is written to until then."""
        for write in self._under_way:
            self._fail(write, PeerLost("the local agent was closed during the write"))
        self._under_way.clear()
        for peer in self._peers.values():
            self._remove(peer)
        self._peers.clear()
        if self._local_pages is not None:
            with contextlib.suppress(Exception):
                self._local_pages.release()
        if self._registered is not None:
            with contextlib.suppress(Exception):
                self._nixl.deregister_memory(self._registered)
        self._nixl = None  # and its progress thread


def _descriptors(region: Region) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """N×3 (address, length, device) rows, 64 bit throughout: 32-bit products overflow beyond 4 GiB."""
    rows = np.empty((region.num_pages, 3), dtype=np.uint64)
    rows[:, 0] = region.base_address + np.arange(region.num_pages, dtype=np.uint64) * np.uint64(region.page_bytes)
    rows[:, 1] = region.page_bytes
    rows[:, 2] = region.device_id
    return rows


def _translate(error: Exception) -> TransferError:
    """NIXL's exceptions as ours. Whatever NIXL says about a transfer, that peer is not to be trusted any further."""
    return PeerLost(f"{type(error).__name__}: {error}")


def _create_agent(epoch: str, receives: bool, backends: list[str]) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

    config = nixl_agent_config(
        enable_prog_thread=receives,
        backends=backends,
        sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    with _sleeping_progress_thread():
        return nixl_agent(epoch, config)


@contextlib.contextmanager
def _sleeping_progress_thread() -> Iterator[None]:
    """While open, agents are created with a progress delay of `PROGRESS_DELAY_US` instead of 0.

    `nixl_agent_config` has no field for it, but the binding's config object does; the Python class writes 0 into it,
    and a subclass that keeps our value is swapped in for the moment. A binding without the attribute is left alone.
    """
    import nixl._bindings as bindings

    original = bindings.nixlAgentConfig
    if not hasattr(original, "pthrDelay"):
        log.warning("this NIXL release cannot set its progress delay: an idle receiver will use a whole core")
        yield
        return

    class Patient(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Patient
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original
