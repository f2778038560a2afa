"""The device on which the transfer's tests put their pages: the CPU, or what ``PDPROXY_TEST_DEVICE`` says.

`scripts/check_gpu` sets it. Importing this imports no torch.
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("PDPROXY_TEST_DEVICE", "cpu")
IS_GPU = DEVICE != "cpu"


def ucx_tls(transports: str) -> str:
    """``UCX_TLS`` for these transports between two processes, and what a GPU needs besides.

    Where shared memory is not among them, the lane between GPUs is not either: it needs no answer from the peer.
    """
    if not IS_GPU:
        return transports
    return transports + (",cuda_copy,cuda_ipc" if "sm" in transports.split(",") else ",cuda_copy")
