"""The slab behind the pages: one contiguous tensor, cut into equal pages, that NIXL can register as one region."""

from __future__ import annotations

import torch

from transfer.agents.base import Region


class PagedBuffer:
    """`num_pages` pages of `page_bytes` bytes on `device`.

    `pages` is a uint8 tensor of shape ``[num_pages, page_bytes]``. With `prefault` it is written to once at start, so
    that the first transfer into a page does not pay for the kernel mapping it.
    """

    def __init__(
        self, num_pages: int, page_bytes: int, device: torch.device | str = "cpu", *, prefault: bool = True
    ) -> None:
        if num_pages < 1 or page_bytes < 1:
            raise ValueError(f"a buffer needs at least one page of one byte, got {num_pages} × {page_bytes}")
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.pages = torch.empty((num_pages, page_bytes), dtype=torch.uint8, device=device)
        if prefault:
            self.pages.zero_()

    def __repr__(self) -> str:
        return f"<PagedBuffer {self.num_pages} × {self.page_bytes} B on {self.pages.device}>"

    @property
    def region(self) -> Region:
        device = self.pages.device
        return Region(
            base_address=self.pages.data_ptr(),
            num_bytes=self.num_pages * self.page_bytes,
            device_id=device.index or 0,
            memory="VRAM" if device.type == "cuda" else "DRAM",
        )
