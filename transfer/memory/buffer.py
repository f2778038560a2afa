"""The slab behind the pages: one contiguous tensor, cut into equal pages and their tags. NIXL can register it as one
region."""

from __future__ import annotations

import torch

from transfer.agents.base import TAG_BYTES, Region
from transfer.memory.shared import SharedMemory, as_tensor
from transfer.plan.tags import TAG_SLOTS, slab_bytes


class PagedBuffer:
    """A `PagedBuffer` has `num_pages` pages of `page_bytes` bytes on `device`.

    `pages` is a uint8 tensor of shape ``[num_pages, page_bytes]``; `tags` lie behind it (`transfer.plan.tags`), of
    shape ``[TAG_SLOTS, num_pages, TAG_BYTES]``. With `prefault`, pages and tags are written to once at start, so that
    the first transfer into a page does not pay for the kernel mapping it. With `is_shared` another process can map the
    slab: on a CPU it lies in `memory`. On a GPU `memory` is None, because GPU memory can always be exported.
    """

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        device: torch.device | str = "cpu",
        *,
        prefault: bool = True,
        is_shared: bool = False,
    ) -> None:
        if num_pages < 1 or page_bytes < 1:
            raise ValueError(f"a buffer needs at least one page of one byte, got {num_pages} × {page_bytes}")
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.memory: SharedMemory | None = None
        num_bytes = slab_bytes(num_pages, page_bytes)
        if is_shared and torch.device(device).type == "cpu":
            self.memory = SharedMemory.create("kv-slab", num_bytes)
            slab = as_tensor(self.memory)
        else:
            slab = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if prefault:
            slab.zero_()
        self.pages = slab[: num_pages * page_bytes].view(num_pages, page_bytes)
        self.tags = slab[num_pages * page_bytes :].view(TAG_SLOTS, num_pages, TAG_BYTES)

    def __repr__(self) -> str:
        return f"<PagedBuffer {self.num_pages} × {self.page_bytes} B on {self.pages.device}>"

    @property
    def region(self) -> Region:
        return region_of(self.pages, slab_bytes(self.num_pages, self.page_bytes))


def region_of(slab: torch.Tensor, num_bytes: int) -> Region:
    """Returns the region of the slab that begins with this tensor, as its own process's agent is told of it."""
    return Region(
        base_address=slab.data_ptr(),
        num_bytes=num_bytes,
        device_id=slab.device.index or 0,
        memory="VRAM" if slab.device.type == "cuda" else "DRAM",
    )
