"""Offers an agent memory that no other process can map, which it must refuse.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m scripts.dev.check_gpu.refusal DEVICE

prints the refusal and exits 0, or exits 1.
"""

from __future__ import annotations

import sys
import uuid

from transfer.agents.nixl import NixlAgent
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer

NUM_BYTES = 32 << 20
LIMIT_S = 30.0


def main(device: str) -> int:
    slab = PagedBuffer(1, NUM_BYTES, device)
    agent = NixlAgent(uuid.uuid4().hex, receives=True, device=slab.pages.device)
    try:
        agent.register(slab.region).result(LIMIT_S)
    except TransferError as error:
        print(error)
        return 0
    finally:
        agent.close()
    print("memory from an expandable segment was registered")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
