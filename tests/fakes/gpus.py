"""GPUs that are not there: what torch and the CUDA driver are asked, in order and by thread, and what they answer."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from transfer.agents import device as device_module


class FakeGpus:
    """`calls` grows with what was asked: (what, device, "agent" or "caller").

    `current` is the GPU that torch takes where none is named, `can_be_mapped` and `status` what the driver says of
    any address.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 4) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.current = 0
        self.can_be_mapped = True
        self.status = 0
        self.asked: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.note("set_device", device))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.note("synchronize", device))
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(device_module.ctypes, "CDLL", self._library)

    def note(self, what: str, device: object = "") -> None:
        is_agent = threading.current_thread().name.startswith("nixl-")
        self.calls.append((what, str(device), "agent" if is_agent else "caller"))

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        self.note("enter", device)
        yield
        self.note("leave", device)

    def _library(self, name: str) -> Any:
        assert name == "libcuda.so.1"
        return self

    def cuPointerGetAttribute(self, answer: Any, attribute: int, pointer: ctypes.c_uint64) -> int:  # noqa: N802
        assert attribute == 10
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = int(self.can_be_mapped)
        self.asked.append(pointer.value)
        self.note("cuPointerGetAttribute")
        return self.status
