"""Memory that two processes of one machine map. It is the slab that an engine fills and its data plane sends from.

On a CPU it is an anonymous file (``memfd``): it needs no room in ``/dev/shm``, has no name that could be left behind,
and goes with the last process that maps it. On a GPU it is exported through CUDA IPC, the way `torch.multiprocessing`
does it: the process that allocated it must outlive the others' use of it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import NamedTuple

import torch


class SharedMemory:
    """`SharedMemory` is `num_bytes` bytes behind `descriptor`, an open file. The file is closed when nobody refers to
    this object any more. A mapping stays until nobody refers to the mapping."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self._close = weakref.finalize(self, os.close, descriptor)

    def __repr__(self) -> str:
        return f"<SharedMemory {self.num_bytes} bytes>"

    @classmethod
    def create(cls, name: str, num_bytes: int) -> SharedMemory:
        """Makes new memory, zeroed. `name` is what the system shows. Raises `OSError` where no memory is to be had."""
        memory = cls(os.memfd_create(name), num_bytes)
        os.truncate(memory.descriptor, num_bytes)
        return memory

    def map(self) -> memoryview:
        """Returns the bytes, mapped into this process for as long as somebody refers to them."""
        return memoryview(mmap.mmap(self.descriptor, self.num_bytes))


def as_tensor(memory: SharedMemory) -> torch.Tensor:
    """Returns the memory as a uint8 tensor on the CPU, ``[num_bytes]``."""
    return torch.frombuffer(memory.map(), dtype=torch.uint8)


class GpuTicket(NamedTuple):
    """A `GpuTicket` is what another process needs to map GPU memory: the arguments of torch's own CUDA IPC, which are
    plain values."""

    device: int
    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    must_wait_for_event: bool


def export_gpu_memory(tensor: torch.Tensor) -> GpuTicket:
    """Returns what `import_gpu_memory` needs. Raises `RuntimeError` where CUDA cannot export the tensor's memory."""
    return GpuTicket(*tensor.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]


def import_gpu_memory(ticket: GpuTicket) -> torch.Tensor:
    """Returns the memory that another process has exported as a uint8 tensor, ``[num_bytes]``."""
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch notes the mapping in its allocator, which this makes
    storage = torch.UntypedStorage._new_shared_cuda(*ticket)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
