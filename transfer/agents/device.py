"""The device on which an agent's memory lies. It is said once, and made current wherever NIXL works on it.

What must always hold: NIXL is created, and posts, only on threads whose current CUDA device is the agent's own, and
only memory that another process can map is registered. A violation is silent: UCX then gives up its lane between GPUs,
or starts on GPU 0, and the same bytes arrive hundreds of times later; the check in `lane` measures it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from transfer.agents.base import Region
from transfer.errors import TransferError

_IS_LEGACY_CUDA_IPC_CAPABLE = 10
"""The value of ``CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`` in cuda.h."""
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def resolve(device: torch.device | str) -> torch.device:
    """Returns the device that is meant. ``cuda`` without an index means the calling thread's current GPU.

    Raises `TransferError` for a device that is neither ``cpu`` nor a CUDA GPU that torch sees here.
    """
    try:
        meant = torch.device(device)
    except RuntimeError as error:
        raise TransferError(f"{device!r} is no device; KV can lie on cpu, cuda or cuda:N") from error
    if meant.type == "cpu":
        return torch.device("cpu")
    if meant.type != "cuda":
        raise TransferError(f"KV can lie on cpu, cuda or cuda:N, not on {meant}")
    if not torch.cuda.is_available():
        raise TransferError(f"the device is {meant}, but torch {torch.__version__} sees no CUDA GPU here")
    index = torch.cuda.current_device() if meant.index is None else meant.index
    if index >= torch.cuda.device_count():
        raise TransferError(f"the device is {meant}, but torch sees {torch.cuda.device_count()} GPUs here")
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context manager. While it is open, `device` is the calling thread's CUDA device, and its context
    exists. For ``cpu`` it does nothing."""
    return _current_gpu(device) if device.type == "cuda" else contextlib.nullcontext()


def make_current(device: torch.device) -> None:
    """Makes `device` the calling thread's CUDA device for the rest of the thread's life, and creates its context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # before CUDA 12, naming a device does not create its context


def check_region(region: Region, device: torch.device, *, is_imported: bool = False) -> None:
    """Raises `TransferError` unless `region` lies on `device`, in memory that another process can map.

    Memory that this process has imported from another one (`is_imported`) cannot be exported again. It need not be: it
    is only sent from. Call this on a thread on which `device` is current.
    """
    there = f"cuda:{region.device_id}" if region.memory == "VRAM" else "cpu"
    if there != str(device):
        raise TransferError(f"the region lies on {there}, its agent was told {device}: create it with device={there!r}")
    if device.type == "cuda" and not is_imported and not _can_be_mapped(region.base_address):
        raise TransferError(_not_from_cuda_malloc(device))


@contextlib.contextmanager
def _current_gpu(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device):  # leaving it creates no context on the GPU that was current before
        torch.cuda.synchronize(device)
        yield


def _can_be_mapped(address: int) -> bool:
    """Tells whether CUDA can export the memory at `address` to another process. UCX's cuda_ipc needs that."""
    answer = ctypes.c_uint64(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_uint64(address)
        status = driver.cuPointerGetAttribute(ctypes.byref(answer), _IS_LEGACY_CUDA_IPC_CAPABLE, pointer)
    except (OSError, AttributeError) as error:
        raise TransferError(f"the CUDA driver cannot be asked about a region in VRAM: {error}") from error
    if status:
        raise TransferError(f"the CUDA driver does not know the memory at {address:#x} (CUresult {status})")
    return bool(answer.value)


def _not_from_cuda_malloc(device: torch.device) -> str:
    said = [f"{name}={os.environ[name]}" for name in _ALLOCATOR_SETTINGS if os.environ.get(name)]
    return (
        f"the region on {device} was not allocated with cudaMalloc: no other process can map it, so UCX would carry it "
        f"over TCP, hundreds of times slower. torch's allocator is {torch.cuda.get_allocator_backend()!r} with "
        f"{' '.join(said) or 'no setting in the environment'}; start without expandable_segments:True and without "
        f"backend:cudaMallocAsync (in {' or '.join(_ALLOCATOR_SETTINGS)}, or set in the process itself)"
    )
